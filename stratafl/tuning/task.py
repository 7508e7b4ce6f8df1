"""Tuning task: a search space around an experiment, the cost to minimise, a target, and networks.

Values of the space lie on a grid, so that a repeated setting is the same run. Without a [tune]
table the grid is the neighbourhood of the given experiment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.files import cannot_read, read_json
from stratafl.base.validation import check_choice, check_number, name_and_params, repeated
from stratafl.core.schedule import SyncSchedule
from stratafl.experiment import legacy
from stratafl.experiment.algorithm import participation_of, sync_schedule, topology_of
from stratafl.experiment.experiment import SECTIONS, TUNE, Experiment
from stratafl.experiment.loading import import_plugins
from stratafl.experiment.sections import Method
from stratafl.experiment.toml import check_plain, put
from stratafl.metrics.objective import Goal
from stratafl.network.specification import Network
from stratafl.runs.format import config_digest, flat_config, slug
from stratafl.runs.provenance import essence

WIDE, NARROW = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0)
"""Neighbours on the grid, as multiples of the experiment's value."""
METHODS = ("hfedavg", "mtgc")
"""Methods that are searched besides the experiment's own."""
KEYS = ("periods", "participation", "lr", "batch", "method", "effort", "defaults")
PERIODS = "periods."
SHORT_NAMES = {"participation": "schedule.participation", "lr": "client.lr", "batch": "client.batch_size"}
TOP_LEVEL = ("rounds", "loss")
"""Options outside the sections that can be searched."""

GridPoint = tuple[int, ...]
"""Index of the chosen value of each dimension."""


@dataclass(frozen=True)
class SearchDimension:
    """Key with its possible values, and the index of the experiment's own value, if it is among
    them."""

    name: str
    values: tuple[Any, ...]
    baseline: int | None

    @property
    def is_ordered(self) -> bool:
        """Whether neighbouring indices have neighbouring values."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @property
    def labels(self) -> list[str]:
        return [_label(value) for value in self.values]


@dataclass(frozen=True, eq=False)
class Space:
    """Settings around an experiment."""

    experiment: Experiment
    axes: tuple[SearchDimension, ...]
    effort: float = 1.0
    """Local steps of a trial, as a multiple of the experiment's."""

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def baseline(self) -> GridPoint | None:
        """Grid point of the given experiment, if it is one of the settings."""
        places = [axis.baseline for axis in self.axes]
        if self.effort != 1 or any(place is None for place in places):
            return None
        return tuple(place for place in places if place is not None)

    @cached_property
    def schedule(self) -> SyncSchedule:
        """Schedule of the given experiment."""
        return _schedule(self.experiment)

    def experiment_of(self, setting: GridPoint) -> Experiment:
        """Experiment of a setting.

        It has as many local steps in all as the given experiment, times the effort, so that longer
        periods have fewer rounds.
        """
        tables = self.experiment.to_table()
        periods = list(self.schedule.periods)
        for axis, place in zip(self.axes, setting, strict=True):
            value = axis.values[place]
            if axis.name.startswith(PERIODS):
                periods[int(axis.name.removeprefix(PERIODS)) - 1] = value
            elif place != axis.baseline:
                if axis.name == "participation":
                    above = participation_of(self.experiment, len(periods))[:-1]
                    value = [*("all" if share is None else share for share in above), value]
                put(tables, SHORT_NAMES.get(axis.name, axis.name).split("."), value)
        if periods != list(self.schedule.periods):
            tables["schedule"]["periods"] = periods
        SyncSchedule.of(periods, len(periods))
        ratio = self.effort * math.prod(self.schedule.periods) / math.prod(periods)
        if ratio != 1:
            tables["rounds"] = _scaled(tables["rounds"], ratio, math.ceil)
            decay = tables["client"]["lr_schedule"]
            if isinstance(decay, dict) and "every" in decay:
                decay["every"] = _scaled(decay["every"], ratio, round)
        return Experiment.from_table(tables)

    def label(self, setting: GridPoint) -> str:
        """Label of a setting, such as "mtgc 5x10 lr 0.2"."""
        parts: list[str] = []
        periods = [str(period) for period in self.schedule.periods]
        for axis, place in zip(self.axes, setting, strict=True):
            text = axis.labels[place]
            if axis.name.startswith(PERIODS):
                periods[int(axis.name.removeprefix(PERIODS)) - 1] = text
            elif axis.name == "method":
                parts.insert(0, text)
            else:
                parts.append(f"{axis.name} {text}")
        if any(axis.name.startswith(PERIODS) for axis in self.axes):
            parts.insert(1 if any(axis.name == "method" for axis in self.axes) else 0, "x".join(periods))
        return " ".join(parts)

    def values_of(self, setting: GridPoint) -> dict[str, Any]:
        """Values of a setting by the names of their dimensions."""
        return {axis.name: axis.values[place] for axis, place in zip(self.axes, setting, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        return {"axes": {axis.name: list(axis.values) for axis in self.axes}, "effort": self.effort}


def space_of(experiment: Experiment, table: Mapping[str, Any] | None = None) -> Space:
    """Create the space that a [tune] table describes; keys that it does not name have the
    neighbourhood of the experiment's values."""
    tables = dict(table or {})
    check_plain(tables, TUNE)
    import_plugins(experiment.plugins)
    effort = check_number("tune.effort", tables.pop("effort", 1.0), above=0)
    defaults = tables.pop("defaults", True)
    if not isinstance(defaults, bool):
        raise InvalidInput("tune.defaults", defaults, "must be true or false")
    neighborhood = _neighborhood(experiment)
    axes = (
        {name: SearchDimension(name, values, values.index(value)) for name, (value, values) in neighborhood.items()}
        if defaults
        else {}
    )
    for name, values, value in _table_axes(experiment, tables, neighborhood):
        axes[name] = SearchDimension(name, values, values.index(value) if value in values else None)
    # with one value there is nothing to choose, unless it is not the experiment's own
    chosen = [axis for axis in axes.values() if len(axis.values) > 1 or axis.baseline is None]
    space = Space(experiment, tuple(sorted(chosen, key=lambda axis: axis.name != "method")), effort)
    if space.size < 2:
        raise InvalidInput(TUNE, table or {}, "leaves nothing to choose: give a key at least two values")
    _check(space)
    return space


def _neighborhood(experiment: Experiment) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Value of each key in the experiment, and its neighbours."""
    neighborhood: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    method = _method_table(experiment.method)
    neighborhood["method"] = method, (method, *({"name": name} for name in METHODS if name != method.get("name")))
    periods = _schedule(experiment).periods
    for level, period in enumerate(periods, 1):
        neighborhood[f"{PERIODS}{level}"] = period, neighbors(period, WIDE, lambda value: max(1, round(value)))
    participation = participation_of(experiment, len(periods))[-1]
    if participation is None or isinstance(participation, str | float):
        share = participation if isinstance(participation, float) else 1.0
        neighborhood["participation"] = share, tuple(sorted({share, 0.5, 1.0}))
    lr, batch = experiment.client.lr, experiment.client.batch_size
    neighborhood["lr"] = lr, neighbors(lr, WIDE, lambda value: float(f"{value:.6g}"))
    if isinstance(batch, int):
        neighborhood["batch"] = batch, neighbors(batch, NARROW, lambda value: max(1, round(value)))
    return neighborhood


def neighbors(value: float, factors: Iterable[float], rounded: Callable[[float], Any]) -> tuple[Any, ...]:
    """A value and its products with the factors, in order."""
    return tuple(sorted({value, *(rounded(value * factor) for factor in factors if factor != 1)}))


def _table_axes(
    experiment: Experiment, tables: Mapping[str, Any], neighborhood: Mapping[str, tuple[Any, Any]]
) -> Iterable[tuple[str, tuple[Any, ...], Any]]:
    """Dimensions that a [tune] table describes: name, values, and the experiment's own value."""
    for key, values in flat_config(tables).items():
        if key == "periods":
            levels = len([name for name in neighborhood if name.startswith(PERIODS)])
            if not isinstance(values, list) or len(values) != levels:
                allowed = f"must have a list of values per edge level, root first, {levels} of them"
                raise InvalidInput("tune.periods", values, allowed)
            for level, level_values in enumerate(values, 1):
                name = f"{PERIODS}{level}"
                yield name, _values("tune.periods", level_values), neighborhood[name][0]
        elif key == "method":
            yield key, tuple(map(_as_method, _values("tune.method", values))), neighborhood["method"][0]
        elif key in neighborhood:
            yield key, _values(f"tune.{key}", values), neighborhood[key][0]
        elif key in SHORT_NAMES or key in TOP_LEVEL or ("." in key and key.partition(".")[0] in SECTIONS):
            yield key, _values(f"tune.{key}", values), _value_at(experiment, SHORT_NAMES.get(key, key))
        else:
            raise unknown_name("tune key", key, KEYS)


def _values(field: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise InvalidInput(field, values, "must be a list of values")
    labels = [json.dumps(value, sort_keys=True) for value in values]
    if len(set(labels)) < len(labels):
        raise InvalidInput(field, values, "has a value twice")
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return tuple(sorted(values) if numbers else values)


def _as_method(method: Any) -> dict[str, Any]:
    if isinstance(method, Mapping) and "rules" in method:
        return dict(method)
    name, params = name_and_params("tune.method", method)
    return {"name": name, **params}


def _method_table(method: Method) -> dict[str, Any]:
    """The method as a table of a name and parameters, or of rules."""
    return {"rules": list(method.rules)} if method.rules is not None else {"name": method.name, **method.params}


def _value_at(experiment: Experiment, path: str) -> Any:
    """Value of an option by its dotted key; parameters of model and method may stand in their
    section."""
    value: Any = experiment.to_table()
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value[key] if key in value else value.get("params", {}).get(key)
    return value


def _scaled(rounds: int, ratio: float, rounded: Callable[[float], int]) -> int:
    return max(1, rounded(rounds * ratio))


def _check(space: Space) -> None:
    """Reject values that cannot be used, before anything is trained."""
    first = space.baseline or (0,) * len(space.axes)
    for index, axis in enumerate(space.axes):
        for value in range(len(axis.values)):
            space.experiment_of((*first[:index], value, *first[index + 1 :])).check()


def _schedule(experiment: Experiment) -> SyncSchedule:
    return sync_schedule(experiment.schedule, topology_of(experiment))


def _label(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        parameters = "".join(f" {key}={_label(entry)}" for key, entry in value.items() if key != "name")
        return f"{value['name']}{parameters}"
    if isinstance(value, Mapping) and isinstance(value.get("rules"), Sequence):
        return "/".join(map(_label, value["rules"]))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


Cost = Literal["seconds", "bytes", "joules", "money"]
COSTS: tuple[Cost, ...] = get_args(Cost)
FILE = "question.json"


@dataclass(frozen=True, eq=False)
class TuningTask:
    """Space, networks, target and cost of one search."""

    experiment: Experiment
    """Given experiment, which stops at the target."""
    space: Space
    networks: tuple[Network, ...]
    target: Goal
    minimise: Cost
    budgets: Mapping[Cost, float] = field(default_factory=dict)
    """Maximum costs up to the target."""
    seeds: int = 3
    """Number of seeds with which the best settings are run."""
    trials: int = 20

    @staticmethod
    def of(
        experiment: Experiment, space: Space, networks: Sequence[Network], target: Goal, **options: Any
    ) -> TuningTask:
        """Create a task whose runs all end at the target."""
        name = repeated(slug(network.name) for network in networks)
        if name is not None:
            raise InvalidInput("--network", name, "two networks of this name: give each once, and names of their own")
        stop = {target.metric: target.value} if not target.sign else f"{target.metric} {target.sign} {target.value!r}"
        stopping = experiment.replace({"evaluation.stop_when": stop})
        return TuningTask(stopping, replace(space, experiment=stopping), tuple(networks), target, **options)

    @property
    def seed_list(self) -> list[int]:
        """Seed of the search, then the seeds of the repetitions."""
        return [self.experiment.seed + offset for offset in range(self.seeds)]

    def as_dict(self) -> dict[str, Any]:
        """Description that must be equal to continue a search; a network may be added."""
        return {
            "config": self.experiment.to_table(),
            "space": self.space.as_dict(),
            "target": str(self.target),
            "minimise": self.minimise,
            "budgets": dict(self.budgets),
            # digests of their tables, which leave out quantities that have their defaults
            "networks": {network.name: config_digest(network.as_tables()) for network in self.networks},
        }

    def check(self, folder: Path) -> dict[str, Any]:
        """Compare with the task stored in a folder, which another task must not use; returns the
        description to store."""
        description: dict[str, Any] = json.loads(json.dumps(self.as_dict()))
        path = folder / FILE
        if not path.exists():
            return description
        before = read_json(path)
        if not isinstance(before, dict) or not isinstance(before.get("networks"), dict):
            raise cannot_read(path, "not the task of a search")
        if isinstance(before.get("config"), dict):
            before["config"] = legacy.current(before["config"])
        # networks may be added, as the runs are there already
        added = {name: digest for name, digest in description["networks"].items() if name not in before["networks"]}
        networks = {**before["networks"], **description["networks"]}
        before["networks"] = {**before["networks"], **added}
        description["networks"] = networks
        changed = [key for key in description if _decisive(before.get(key)) != _decisive(description[key])]
        if changed:
            reason = (
                f"holds a search with another {' and '.join(changed)}: give what it was begun with, or another folder"
            )
            raise InvalidInput("--out", folder, reason)
        return description


def _decisive(value: object) -> object:
    """Copy tables without entries that decide nothing, such as file paths; return other values as
    they are."""
    return json.loads(json.dumps(essence(value))) if isinstance(value, dict) else value


def budgets_of(texts: Sequence[str]) -> dict[Cost, float]:
    """Read budgets such as "seconds=3600", each cost at most once."""
    budgets: dict[Cost, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        cost = check_choice("--budget", name.strip(), COSTS)
        try:
            limit = float(value)
        except ValueError:
            raise InvalidInput("--budget", text, "must look like seconds=3600") from None
        if cost in budgets:
            raise InvalidInput("--budget", text, f"{cost} has a budget already")
        budgets[cost] = check_number("--budget", limit, above=0)
    return budgets
