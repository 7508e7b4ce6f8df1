"""Files of a tuning result: its data, a table of its runs, the chosen settings and a figure."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from stratafl.base.files import atomic_write, csv_text, write_json
from stratafl.base.plotting import BLUE, FAINT, INK, QUIET, VERMILION, save, style
from stratafl.base.statistics import MeanStd
from stratafl.costs.pricing import BYTES, ENERGY, TIME, Unit
from stratafl.runs.format import slug
from stratafl.tuning.result import NetworkResult, TuningCandidate, TuningResult, frontier_segments
from stratafl.tuning.task import COSTS
from stratafl.tuning.trials import TuningTrial, cost_in, cumulative_cost_R

PLAN, TRIALS = "plan.json", "trials.csv"
"""The whole result, and a table of its runs."""


def write(result: TuningResult, folder: Path) -> list[Path]:
    """Write all files except the figure (see `plot_frontiers`); returns their paths."""
    paths = [folder / PLAN, folder / TRIALS]
    write_json(paths[0], as_dict(result))
    with atomic_write(paths[1], sync=False) as file:
        file.write(as_csv(result).encode())
    for network_result in result.network_results:
        if network_result.choice is not None:
            path = folder / best_name(network_result)
            with atomic_write(path, sync=False) as file:
                file.write(_best_config(result, network_result).encode())
            paths.append(path)
    return paths


def best_name(network_result: NetworkResult) -> str:
    """File name of the config for a network."""
    return f"best-{slug(network_result.network)}.toml"


def as_dict(result: TuningResult) -> dict[str, Any]:
    """Return the whole result as plain data."""
    task, search = result.task, result.search
    return {
        "target": {"metric": task.target.metric, "value": task.target.value, "sign": result.baseline.goal.sign},
        "minimise": task.minimise,
        "budgets": dict(task.budgets),
        "space": {**task.space.as_dict(), "size": task.space.size},
        "trials": task.trials,
        "tried": search.count,
        "outcomes": outcomes(result),
        "seeds": task.seed_list,
        "complete": result.is_complete,
        "networks": [_network_result(result, network_result) for network_result in result.network_results],
        "runs": trial_rows(result),
    }


def outcomes(result: TuningResult) -> dict[str, int]:
    """Number of settings by outcome; the given config counts, too, also where it lies outside the
    space."""
    trials = list(result.search.trials.values())
    if result.search.space.baseline is None:
        trials.append(result.baseline)
    return dict(Counter(trial.outcome for trial in trials))


def gain(result: TuningResult, network_result: NetworkResult) -> float | None:
    """Ratio of the costs of the given config and the choice; None if either did not reach the
    target."""
    if network_result.choice is None:
        return None
    best = network_result.choice.mean_cost(network_result.network, result.task.minimise)
    baseline = network_result.baseline.mean_cost(network_result.network, result.task.minimise)
    return None if best is None or baseline is None else baseline.mean / best.mean


def trial_rows(result: TuningResult) -> list[dict[str, Any]]:
    """Flat rows, one per run and network: costs up to the target, or of all rounds if it was not
    reached."""
    rows: list[dict[str, Any]] = []
    for number, (label, seed, trial) in enumerate(result.all_trials):
        for network in result.task.networks:
            total = trial.total(network.name)
            rows.append({
                "trial": number, "setting": label, "seed": seed, "network": network.name, "outcome": trial.outcome,
                "rounds": None if total is None else total.round, "best": trial.best,
                **{kind: None if total is None else cost_in(total, kind) for kind in COSTS},
                "run": "" if trial.run is None else trial.run.path.name, "reason": trial.reason,
            })  # fmt: skip
    return rows


def as_csv(result: TuningResult) -> str:
    """Format the rows as a CSV file."""
    return csv_text(trial_rows(result))


def _network_result(result: TuningResult, network_result: NetworkResult) -> dict[str, Any]:
    return {
        "network": network_result.network,
        "choice": None if network_result.choice is None else _candidate(result, network_result, network_result.choice),
        "config": None if network_result.choice is None else best_name(network_result),
        "gain": gain(result, network_result),
        "baseline": _candidate(result, network_result, network_result.baseline),
        "candidates": [_candidate(result, network_result, candidate) for candidate in network_result.candidates],
        "frontier": [vars(point) for point in network_result.frontier],
        "pareto": [vars(point) for point in frontier_segments(network_result.frontier)],
    }


def _candidate(result: TuningResult, network_result: NetworkResult, candidate: TuningCandidate) -> dict[str, Any]:
    space = result.search.space
    return {
        "setting": candidate.label,
        "values": {} if candidate.setting is None else space.values_of(candidate.setting),
        "is_baseline": candidate.is_baseline,
        "runs": [None if run.run is None else run.run.path.name for run in candidate.runs],
        "reached": candidate.reached(network_result.network, result.task),
        "rounds": _mean_std(candidate.rounds()),
        **{kind: _mean_std(candidate.mean_cost(network_result.network, kind)) for kind in COSTS},
        "per_seed": [
            cost_in(total, result.task.minimise) if total is not None else None
            for total in (run.total(network_result.network) for run in candidate.runs)
        ],
    }


def _mean_std(value: MeanStd | None) -> dict[str, float | None] | None:
    return None if value is None else value._asdict()


# -- the chosen config -----------------------------------------------------------------------------


def _best_config(result: TuningResult, network_result: NetworkResult) -> str:
    choice, task = network_result.choice, result.task
    assert choice is not None
    space, setting = result.search.space, choice.setting
    experiment = task.experiment if setting is None or setting == space.baseline else space.experiment_of(setting)
    about = (
        f"# Chosen on {network_result.network}: {choice.label}\n"
        f"# least {task.minimise} to {result.baseline.goal} of {len(result.search.trials)} settings tried,"
        f" {len(choice.runs)} seeds; it stops there\n"
    )
    return about + experiment.to_toml()


# -- the figure ------------------------------------------------------------------------------------

MAX_PANELS_PER_ROW = 3
UNITS = {"seconds": TIME, "bytes": BYTES, "joules": ENERGY}
TITLES = {"seconds": "time", "bytes": "bytes sent", "joules": "energy", "money": "money"}


def unit_of(result: TuningResult, network: str, values: list[float]) -> Unit:
    """Unit in which to show these values of the minimised cost on a network."""
    kind = result.task.minimise
    currency = next(other.currency for other in result.task.networks if other.name == network)
    return Unit.of(UNITS[kind], values) if kind in UNITS else Unit(currency or "money", 1.0)


def plot_frontiers(result: TuningResult, *paths: Path) -> None:
    """Write the figure of the frontiers as files of any format."""
    count = len(result.network_results)
    columns = min(count, MAX_PANELS_PER_ROW)
    rows = math.ceil(count / columns)
    with style() as plt:
        for path in paths:
            size = (max(4.6, 3.4 * columns), 3.1 * rows + 0.55)
            figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
            for axes, network_result in zip(panels.flat, result.network_results, strict=False):
                _panel(axes, result, network_result)
            for axes in list(panels.flat)[count:]:
                axes.set_visible(False)
            handles, labels = panels[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
            save(figure, path)


def _panel(axes: Any, result: TuningResult, network_result: NetworkResult) -> None:
    goal, network = result.baseline.goal, network_result.network
    trials = [trial for setting, trial in result.search.trials.items() if setting != result.search.space.baseline]
    totals = [trial.cost(network, result.task.minimise) for trial in (*trials, result.baseline) if trial.costs]
    unit = unit_of(result, network, totals)

    def draw_curve(trial: TuningTrial, colour: str, width: float, label: str | None) -> None:
        costs = cumulative_cost_R(trial.costs[network], result.task.minimise) / unit.factor
        rounds, values = [round - 1 for round, _ in trial.curve], [value for _, value in trial.curve]
        marker = "." if len(rounds) == 1 else None
        axes.plot(costs[rounds], values, color=colour, linewidth=width, marker=marker, markersize=3, label=label)

    for number, trial in enumerate(trial for trial in trials if trial.curve):
        draw_curve(trial, FAINT, 0.8, "other settings" if number == 0 else None)
    draw_curve(result.baseline, BLUE, 1.4, "as given")
    axes.step(
        [point.cost / unit.factor for point in network_result.frontier],
        [point.value for point in network_result.frontier],
        where="post", color=INK, linewidth=1.4, label="frontier",
    )  # fmt: skip
    for candidate, colour, name in (
        (network_result.baseline, BLUE, None),
        (network_result.choice, VERMILION, "choice"),
    ):
        cost = None if candidate is None else candidate.mean_cost(network, result.task.minimise)
        if cost is not None:
            error = None
            if cost.deviation:
                name = name and f"{name}, ± over seeds"
                error = [[min(cost.deviation, 0.95 * cost.mean) / unit.factor], [cost.deviation / unit.factor]]
            axes.errorbar(
                [cost.mean / unit.factor], [goal.value],
                xerr=error, fmt="D", color=colour, markersize=4, capsize=2, linewidth=1, label=name, zorder=5,
            )  # fmt: skip
    axes.axhline(goal.value, color=QUIET, linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    _ticks(axes.xaxis)
    axes.set(xlabel=f"{TITLES[result.task.minimise]}, {unit.name}", ylabel=goal.metric)
    label = "" if network_result.choice is None else f"\n{network_result.choice.label}"
    axes.set_title(f"{network}{label}", loc="left", fontsize=7)


def _ticks(axis: Any) -> None:
    """Set plain numbers as ticks, also for less than a power of ten."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
