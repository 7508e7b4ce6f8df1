"""`stratafl.tune`: a search from a config, as a function and as the command calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, as_arguments
from stratafl.base.units import parse_duration
from stratafl.base.validation import check_choice, check_integer, check_number
from stratafl.experiment.experiment import TUNE, Experiment
from stratafl.experiment.toml import read_tables
from stratafl.metrics.objective import GoalLike, parse_goal
from stratafl.network.specification import Network, NetworkLike
from stratafl.network.specification import network as named_network
from stratafl.runs.format import slug
from stratafl.tuning.output import write
from stratafl.tuning.result import TuningResult, search_and_repeat
from stratafl.tuning.task import COSTS, Cost, TuningTask, space_of


def tune(
    config: Experiment | str | Path,
    network: NetworkLike | Sequence[NetworkLike],
    target: GoalLike,
    *,
    minimize: Cost = "seconds",
    budget: Mapping[Cost, float] | None = None,
    trials: int = 20,
    seeds: int = 3,
    search_space: Mapping[str, Any] | str | Path | None = None,
    time_limit: float | str | None = None,
    out: str | Path | None = None,
    keep_stale: bool = False,
) -> TuningResult:
    """Find the setting that reaches a target at the least cost on a network, by training.

    The result and the runs are kept in a folder; the same call continues from there. It needs
    Optuna: pip install 'stratafl[plan]'.

    config: an experiment, or a TOML file, whose [tune] table says what is searched.
    network: a preset, a TOML file or a table; or a list of them, each with a choice of its own.
    target: a metric and its value, such as 0.75, "accuracy>=0.75" or "loss<=0.3".
    minimize: the cost: seconds, bytes, joules or money.
    budget: the most that getting to the target may cost, such as {"bytes": 1e9}.
    trials: settings to try, besides the config as given.
    seeds: seeds of each of the best settings.
    search_space: a [tune] table, or a TOML file with one, instead of the config's.
    time_limit: when to stop, in seconds or as "30m".
    out: the folder; plans/ and the config's name unless given.
    keep_stale: use also runs whose source files have changed since.
    """
    with as_arguments():
        seconds = parse_duration("--time-limit", time_limit) if isinstance(time_limit, str) else time_limit
        if seconds is not None:
            check_number("--time-limit", seconds, above=0)
        tables: dict[str, Any] = {}
        if not isinstance(config, Experiment):
            tables, name = read_tables(Path(config)), Path(config).stem
            config = Experiment.from_table(tables)
        else:
            name = config.method.name or "experiment"
        given = tables.get(TUNE) if search_space is None else search_space
        networks = [network] if isinstance(network, str | Path | Mapping | Network) else network
        task = task_of(
            config, given, networks, target, minimise=minimize, budgets=dict(budget or {}), trials=trials, seeds=seeds
        )
        folder = default_folder(name) if out is None else Path(out)
        result = search_and_repeat(task, folder, seconds=seconds, keep_stale=keep_stale, say=_silent, show=_silent)
        write(result, folder)
    if result.interrupted is not None:
        raise result.interrupted
    return result


def task_of(
    experiment: Experiment,
    space: Mapping[str, Any] | str | Path | None,
    networks: Sequence[NetworkLike],
    target: GoalLike | None,
    *,
    minimise: Cost,
    budgets: Mapping[Cost, float],
    trials: int,
    seeds: int,
) -> TuningTask:
    """Task of a search; whatever cannot be searched is rejected."""
    if not networks:
        raise InvalidInput("--network", None, "must be given: a preset (see `stratafl list networks`) or a .toml file")
    if target is None:
        raise InvalidInput("--target", None, "must be given, such as 'accuracy>=0.75'")
    check_choice("--minimize", minimise, COSTS)
    for kind, limit in budgets.items():
        check_number("--budget", limit, above=0)
        check_choice("--budget", kind, COSTS)
    goal, chosen = parse_goal("--target", target), [named_network(each) for each in networks]
    check_integer("--trials", trials, at_least=1, at_most=10_000)
    check_integer("--seeds", seeds, at_least=1, at_most=1000)
    if isinstance(space, str | Path):
        file, space = Path(space), read_tables(Path(space)).get(TUNE)
        if space is None:
            raise InvalidInput("--search-space", file, "has no [tune] table")
    if space is not None and not isinstance(space, Mapping):
        raise InvalidInput(TUNE, space, "must be a table")
    options = {"minimise": minimise, "budgets": dict(budgets), "seeds": seeds, "trials": trials}
    return TuningTask.of(experiment, space_of(experiment, space), chosen, goal, **options)


def default_folder(name: str) -> Path:
    """Folder of the search around a config."""
    return Path("plans") / slug(name)


def _silent(*events: object) -> None:
    """Say nothing: the result has it all."""
