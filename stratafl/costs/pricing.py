"""Costs of groups of runs on networks, as rows, CSV and columns of text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.files import csv_text
from stratafl.base.statistics import MeanStd
from stratafl.base.validation import check_number
from stratafl.costs.costs import CumulativeCost, PriceableRun, PriceBatch, RunCosts
from stratafl.costs.workload import named_networks, resolved
from stratafl.metrics.objective import GoalLike
from stratafl.network.specification import LARGEST, Network, NetworkLike
from stratafl.network.timeline import AGGREGATE, COMPUTE, DOWNLOAD, OFFLINE, PARTS, SUBTREE, UPLOAD, WAIT, Part
from stratafl.runs import StoredRun
from stratafl.runs.curves import (
    ABSENT,
    Curve,
    CurveAxis,
    Points,
    Target,
    first_round,
    mean_std_if_complete,
    plain_number,
    targets_of,
)
from stratafl.runs.groups import RunGroup, RunsLike, given_runs, group_runs, select_metric

ALL_ROUNDS = "all rounds"


@dataclass(frozen=True)
class Milestone:
    """Cost of a group of runs up to a target, or of all its rounds."""

    until: str
    """Name of the end, such as "accuracy 75 %"."""
    runs: int
    reached: int
    """Number of runs that reached it; unless all did, there are no numbers."""
    rounds: MeanStd | None
    seconds: MeanStd | None
    joules: MeanStd | None
    money: MeanStd | None
    bytes: tuple[MeanStd, ...]
    """Bytes over the links of each edge level, root's first."""
    parts: dict[Part, float]
    """Seconds by activity and edge level, mean over the runs."""


@dataclass(frozen=True)
class GroupCosts:
    """Costs of runs that differ in their seed only, on one network."""

    setting: str
    network: str
    about: str
    currency: str
    levels: tuple[str, ...]
    """Names of the edge levels, root's first."""
    milestones: tuple[Milestone, ...]
    """Targets in the order given, then all rounds."""
    notes: tuple[str, ...] = ()

    def at(self, until: str) -> Milestone:
        """Milestone of a given name."""
        return next(milestone for milestone in self.milestones if milestone.until == until)


def cost(
    runs: RunsLike = "runs",
    network: NetworkLike | Sequence[NetworkLike] = (),
    target: GoalLike | Sequence[GoalLike] = (),
    *,
    flops_per_sample: float | None = None,
) -> list[GroupCosts]:
    """Compute what stored runs cost on networks; their learning does not depend on these.

    A run that cannot be priced is left out with a warning, unless there is no other.

    runs: run folders, folders of runs, archives, or what `read_run` returned.
    network: the name of a preset, a TOML file, a table or a `Network`; or a list of them; "own" is
        the one in whose virtual time the runs went on.
    target: values of metrics, such as 0.75, "accuracy>=0.75" or "loss<=0.3"; what it took to get
        there is priced besides all rounds.
    flops_per_sample: operations of training on one sample, instead of those that were counted when
        a run was set up, which of some models they cannot be.
    """
    if flops_per_sample is not None:
        check_number("flops_per_sample", flops_per_sample, above=0, at_most=LARGEST)
    stored = given_runs(runs)[0]
    names = [network] if isinstance(network, str | Path | Mapping | Network) else list(network)
    if not names:
        raise InvalidInput("network", None, "must be given: a preset, the path of a .toml file, or tables")
    chosen, batch = resolved(named_networks(names, "network"), stored, "network"), PriceBatch(flops_per_sample)
    targets = [target] if isinstance(target, float | int | str | Mapping) else list(target)
    costs = priced(group_runs(stored), chosen, batch, targets, "target")
    for line in batch.problems:
        warnings.warn(line, stacklevel=2)
    return costs


def price(
    runs: RunsLike,
    networks: NetworkLike | Sequence[NetworkLike],
    targets: Sequence[str | float] = (),
    flops_per_sample: float | None = None,
) -> list[GroupCosts]:
    """Former name of `stratafl.cost`."""
    warnings.warn("stratafl.price is now stratafl.cost", DeprecationWarning, stacklevel=2)
    return cost(runs, networks, targets, flops_per_sample=flops_per_sample)


def priced(
    groups: Sequence[RunGroup],
    networks: Sequence[Network],
    batch: PriceBatch,
    targets: Sequence[GoalLike] = (),
    field: str = "--target",
) -> list[GroupCosts]:
    """Price groups of runs on networks, all groups of a network together.

    Runs that cannot be priced are left out, and are in the problems of the batch.
    """
    goals = targets_of(targets, *select_metric(groups), field)
    loaded = [[batch.load(run) for run in group.runs] for group in groups]
    group_costs = []
    for network in networks:
        for group, runs in zip(groups, loaded, strict=True):
            results = [
                _Priced(run, curve, costs)
                for run, curve in zip(runs, group.curves, strict=True)
                if run is not None and (costs := batch.cost_on(run, network)) is not None
            ]
            if results:
                group_costs.append(_group_costs(group, network, results, goals))
    if not group_costs:
        raise next(iter(batch.problems.values()))
    return group_costs


class _Priced(NamedTuple):
    """Run of a group on a network."""

    run: PriceableRun
    curve: Curve
    costs: RunCosts


def _group_costs(group: RunGroup, network: Network, runs: Sequence[_Priced], targets: Sequence[Target]) -> GroupCosts:
    costs = [priced_run.costs for priced_run in runs]
    milestones = []
    for metric, goal in targets:
        ends = [first_round(priced_run.curve, goal) for priced_run in runs]
        milestones.append(_milestone(f"{metric.name} {metric.goal_text(goal.value)}", costs, ends))
    milestones.append(_milestone(ALL_ROUNDS, costs, [len(priced_run.run.run.rounds) for priced_run in runs]))
    return GroupCosts(
        setting=group.label,
        network=network.name,
        about=network.about,
        currency=network.currency,
        levels=costs[0].levels,
        milestones=tuple(milestones),
        notes=tuple(dict.fromkeys(note for priced_run in runs for note in priced_run.run.recovered.notes)),
    )


def _milestone(until: str, runs: Sequence[RunCosts], ends: Sequence[int | None]) -> Milestone:
    totals = [None if end is None else run.up_to_round(end) for run, end in zip(runs, ends, strict=True)]
    reached = [total for total in totals if total is not None]
    if len(reached) < len(totals):
        return Milestone(until, len(totals), len(reached), None, None, None, None, (), {})

    def over(value: Callable[[CumulativeCost], float]) -> MeanStd:
        mean_std = mean_std_if_complete([value(total) for total in reached])
        assert mean_std is not None
        return mean_std

    return Milestone(
        until=until,
        runs=len(totals),
        reached=len(reached),
        rounds=over(lambda total: float(total.round)),
        seconds=over(lambda total: total.seconds),
        joules=over(lambda total: total.joules),
        money=over(lambda total: total.money),
        bytes=tuple(over(lambda total, level=level: total.bytes[level]) for level in range(len(reached[0].bytes))),  # type: ignore[misc]
        parts={part: over(lambda total, part=part: total.parts[part]).mean for part in reached[0].parts},  # type: ignore[misc]
    )


# -- for other programs ----------------------------------------------------------------------------


def as_rows(groups: Sequence[GroupCosts]) -> list[dict[str, Any]]:
    """Flat tables, one per group, network and milestone, with all digits."""
    rows = []
    for group in groups:
        for milestone in group.milestones:
            row: dict[str, Any] = {
                "setting": group.setting,
                "network": group.network,
                "until": milestone.until,
                "runs": milestone.runs,
                "reached": milestone.reached,
                "currency": group.currency,
            }
            for name in ("rounds", "seconds", "joules", "money"):
                row[name], row[f"{name}_std"] = getattr(milestone, name) or (None, None)
            for level, value in enumerate(milestone.bytes, 1):
                row[f"bytes_{level}"], row[f"bytes_{level}_std"] = value
            for kind in PARTS:
                levels = sorted(level for part, level in milestone.parts if part == kind)
                row |= {f"{kind}_{level}_s": milestone.parts[kind, level] for level in levels}
            rows.append(row)
    return rows


def as_csv(groups: Sequence[GroupCosts]) -> str:
    """Format the rows as a CSV file."""
    return csv_text(as_rows(groups))


TIME = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
ENERGY = (("J", 1.0), ("kJ", 1e3), ("MJ", 1e6), ("GJ", 1e9))
BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
READABLE = 2.0
"""Smallest value of the largest number in the unit that is chosen."""

SENDING, WAITING, MERGING, OWN_ROUNDS = "sending", "waiting", "merging", "own rounds"
PART_TITLES = {DOWNLOAD: SENDING, UPLOAD: SENDING, WAIT: WAITING, AGGREGATE: MERGING, SUBTREE: OWN_ROUNDS}


@dataclass(frozen=True)
class Unit:
    """Unit of the numbers of a column."""

    name: str
    factor: float

    @staticmethod
    def of(units: Sequence[tuple[str, float]], values: Iterable[float]) -> Unit:
        largest = max(values, default=0.0)
        fitting = [(name, factor) for name, factor in units if largest >= READABLE * factor]
        return Unit(*(fitting[-1] if fitting else units[0]))

    def text(self, value: MeanStd | None) -> str:
        """Format a value as "3.21 ± 0.05", with three digits of the mean."""
        if value is None:
            return ABSENT
        mean = value.mean / self.factor
        digits = min(6, max(0, 2 - math.floor(math.log10(abs(mean))))) if mean else 0
        deviation = "" if value.deviation is None else f" ± {value.deviation / self.factor:,.{digits}f}"
        return f"{mean:,.{digits}f}{deviation}"


NO_UNIT = Unit("", 1.0)


@dataclass(frozen=True)
class TextColumn:
    """Column of a table of texts."""

    title: str
    cells: list[str]


def cost_columns(groups: Sequence[GroupCosts]) -> list[TextColumn]:
    """Columns of the costs on one network: a row per group and milestone."""
    rows = [(group, milestone) for group in groups for milestone in group.milestones]
    columns = [
        TextColumn("setting", [group.setting for group, _ in rows]),
        TextColumn("until", [milestone.until for _, milestone in rows]),
        TextColumn("rounds", [_rounds_text(milestone) for _, milestone in rows]),
    ]

    def add(title: str, values: Sequence[MeanStd | None], units: Sequence[tuple[str, float]]) -> None:
        means = [value.mean for value in values if value is not None]
        if any(means):
            unit = Unit.of(units, means)
            columns.append(TextColumn(f"{title}, {unit.name}" if unit.name else title, list(map(unit.text, values))))

    add("time", [milestone.seconds for _, milestone in rows], TIME)
    add("energy", [milestone.joules for _, milestone in rows], ENERGY)
    names = groups[0].levels
    for level in range(len(names)):
        sent = [milestone.bytes[level] if milestone.bytes else None for _, milestone in rows]
        title = names[level] if names.count(names[level]) == 1 else f"{names[level]} (level {level + 1})"
        add(title, sent, BYTES)
    add(groups[0].currency or "money", [milestone.money for _, milestone in rows], (("", 1.0),))
    return columns


def _rounds_text(milestone: Milestone) -> str:
    if milestone.rounds is None:
        return f"{milestone.reached} of {milestone.runs} runs" if milestone.runs > 1 else "never"
    return NO_UNIT.text(milestone.rounds) if milestone.rounds.deviation else f"{milestone.rounds.mean:.0f}"


def time_breakdown(milestone: Milestone, levels: Sequence[str]) -> dict[str, float]:
    """Seconds by activity, level by level from the root: sending is both directions; offline times
    and pauses are together."""
    seconds = {
        title: sum((value for (kind, _), value in milestone.parts.items() if kind == part), 0.0)
        for title, part in (("computing", COMPUTE), ("away", OFFLINE))
    }
    for level in range(1, len(levels) + 1):
        name = levels[level - 1] if levels.count(levels[level - 1]) == 1 else f"{levels[level - 1]} (level {level})"
        for (kind, part_level), value in milestone.parts.items():
            if part_level == level and kind in PART_TITLES:
                title = f"{PART_TITLES[kind]}, {name}"
                seconds[title] = seconds.get(title, 0.0) + value
    return seconds


def part_columns(groups: Sequence[GroupCosts]) -> list[TextColumn]:
    """Columns of the shares of time by activity, in per cent."""
    seconds = [time_breakdown(group.milestones[-1], group.levels) for group in groups]
    columns = [TextColumn("setting", [group.setting for group in groups])]
    for title in dict.fromkeys(title for parts in seconds for title in parts):
        shares = [100 * parts.get(title, 0.0) / (sum(parts.values()) or 1.0) for parts in seconds]
        if any(share >= 0.05 for share in shares):
            columns.append(TextColumn(title, [f"{share:.1f}" for share in shares]))
    return columns


SECONDS, COST = "seconds on ", "cost on "
"""Beginnings of the names of these axes; the network's name follows."""


@dataclass(frozen=True)
class CostAxes:
    """Axes of curves on networks."""

    axes: dict[str, CurveAxis] = field(default_factory=dict)
    points: dict[Path, dict[str, Points]] = field(default_factory=dict)
    """Values per round by run and axis; None where a run cannot be priced."""
    priced: dict[Path, list[tuple[PriceableRun, Network]]] = field(default_factory=dict)
    """Runs with each network on which they can be priced."""
    notes: tuple[str, ...] = ()
    """Runs that cannot be priced, and why."""


def network_axes(runs: Sequence[StoredRun], networks: Sequence[Network], batch: PriceBatch | None = None) -> CostAxes:
    """Compute the axes of these networks for the runs.

    batch: holds the results; it may reuse those of an earlier batch.
    """
    axes: dict[str, CurveAxis] = {}
    points: dict[Path, dict[str, Points]] = {run.path: {} for run in runs}
    priced_runs: dict[Path, list[tuple[PriceableRun, Network]]] = {}
    batch = PriceBatch() if batch is None else batch
    loaded = [batch.load(run) for run in runs if run.rounds] if networks else []
    for network in networks:
        seconds, cost = f"{SECONDS}{network.name}", f"{COST}{network.name}"
        axes[seconds] = CurveAxis(seconds, "seconds")
        for run in filter(None, loaded):
            costs = batch.cost_on(run, network)
            if costs is None:
                continue
            priced_runs.setdefault(run.run.path, []).append((run, network))
            points[run.run.path][seconds] = _points(costs.seconds_R)
            if costs.money_R.any():
                axes[cost] = CurveAxis(f"{cost} ({network.currency})" if network.currency else cost, "money")
                points[run.run.path][cost] = _points(costs.money_R)
    return CostAxes(axes, points, priced_runs, tuple(batch.problems))


def _points(values_R: np.ndarray) -> Points:
    """Cumulative values up to the end of each round."""
    return [plain_number(float(value)) for value in np.cumsum(values_R)]
