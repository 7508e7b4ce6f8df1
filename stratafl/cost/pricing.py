"""Costs of groups of runs on networks, as rows, CSV and columns of text."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.statistics import OverSeeds
from stratafl.base.validation import check_number
from stratafl.cost.costs import CumulativeCost, PriceableRun, PriceBatch, RunCosts
from stratafl.cost.workload import named_networks, resolved
from stratafl.network.specification import LARGEST, Network
from stratafl.network.timeline import AWAY, COMPUTE, DOWN, MERGE, PARTS, UP, WAIT, WORK, Part
from stratafl.runs import StoredRun
from stratafl.runs.curves import (
    ABSENT,
    Curve,
    Points,
    Target,
    first_round,
    mean_std_if_complete,
    plain_number,
    targets_of,
)
from stratafl.runs.groups import RunGroup, collect_runs, group_runs, select_metric

ALL = "all rounds"


@dataclass(frozen=True)
class Milestone:
    """What it took a setting to get somewhere: to a target, or through all its rounds."""

    until: str
    """What the run goes on until, such as "accuracy 75 %"."""
    runs: int
    reached: int
    """How many of the runs got there; unless all did, there are no numbers."""
    rounds: OverSeeds | None
    seconds: OverSeeds | None
    joules: OverSeeds | None
    money: OverSeeds | None
    bytes: tuple[OverSeeds, ...]
    """Over the links of each edge level, root's first."""
    parts: dict[Part, float]
    """Seconds by what they went into and on which edge level, mean over the runs."""


@dataclass(frozen=True)
class GroupCosts:
    """Runs that differ in their seed only, on one network."""

    setting: str
    network: str
    about: str
    currency: str
    levels: tuple[str, ...]
    """What the edge levels are called there, root's first."""
    milestones: tuple[Milestone, ...]
    """Targets in the order given, then all rounds."""
    notes: tuple[str, ...] = ()

    def at(self, until: str) -> Milestone:
        """The one of this name."""
        return next(each for each in self.milestones if each.until == until)


def price(
    runs: str | Path | Sequence[str | Path | StoredRun],
    networks: str | Path | Network | Sequence[str | Path | Network],
    targets: Sequence[str | float] = (),
    flops_per_sample: float | None = None,
) -> list[GroupCosts]:
    """Price stored runs under networks, afterwards: their learning does not depend on these.

    A run that cannot be priced is left out with a warning, unless there is no other.

    runs: run folders, folders of runs, or what `read_run` returned.
    networks: names of presets, paths of TOML files, or `Network` objects; "own" is the one in whose
        virtual time the runs went on.
    targets: values of metrics, such as 0.75, "accuracy=0.75" or "loss <= 0.3"; what it took to get
        there is priced besides all rounds.
    flops_per_sample: operations of training on one sample, instead of those that were counted when
        a run was set up, which of some models they cannot be.
    """
    if flops_per_sample is not None:
        check_number("flops_per_sample", flops_per_sample, above=0, at_most=LARGEST)
    places = [runs] if isinstance(runs, str | Path) else list(runs)
    stored = [each for each in places if isinstance(each, StoredRun)]
    found, _ = collect_runs([Path(each) for each in places if not isinstance(each, StoredRun)])
    if not stored and not found:
        raise InvalidInput("runs", [str(place) for place in places], "no runs in it that can be read")
    given = [networks] if isinstance(networks, str | Path | Network) else list(networks)
    named, known = named_networks(given, "networks"), [*stored, *found]
    chosen, pricing = resolved(named, known, "networks"), PriceBatch(flops_per_sample)
    settled = priced(group_runs(known), chosen, pricing, targets, "targets")
    for line in pricing.problems:
        warnings.warn(line, stacklevel=2)
    return settled


def priced(
    compared: Sequence[RunGroup],
    networks: Sequence[Network],
    pricing: PriceBatch,
    targets: Sequence[str | float] = (),
    field: str = "--target",
) -> list[GroupCosts]:
    """Settings under networks, all settings of a network together; what cannot be priced is left
    out, and in `pricing`."""
    goals = targets_of(targets, *select_metric(compared), field)
    ready = [[pricing.ready(run) for run in setting.runs] for setting in compared]
    found = [
        _setting(setting, network, on_it, goals)
        for network in networks
        for setting, runs in zip(compared, ready, strict=True)
        if (on_it := _on(network, setting, runs, pricing))
    ]
    if not found:
        raise next(iter(pricing.problems.values()))
    return found


class _Priced(NamedTuple):
    """A run of a setting on a network."""

    run: PriceableRun
    curve: Curve
    costs: RunCosts


def _on(network: Network, setting: RunGroup, runs: Sequence[PriceableRun | None], pricing: PriceBatch) -> list[_Priced]:
    """Those of a setting's runs that can be priced there."""
    tried = [
        (run, curve, pricing.on(run, network))
        for run, curve in zip(runs, setting.curves, strict=True)
        if run is not None
    ]
    return [_Priced(run, curve, costs) for run, curve, costs in tried if costs is not None]


def _setting(setting: RunGroup, network: Network, runs: Sequence[_Priced], targets: Sequence[Target]) -> GroupCosts:
    each = [priced_run.costs for priced_run in runs]
    made = []
    for measure, goal in targets:
        ends = [first_round(priced_run.curve, goal) for priced_run in runs]
        made.append(_milestone(f"{measure.name} {measure.goal_text(goal.value)}", each, ends))
    made.append(_milestone(ALL, each, [len(priced_run.run.run.rounds) for priced_run in runs]))
    return GroupCosts(
        setting=setting.label,
        network=network.name,
        about=network.about,
        currency=network.currency,
        levels=each[0].levels,
        milestones=tuple(made),
        notes=tuple(dict.fromkeys(note for priced_run in runs for note in priced_run.run.recovered.notes)),
    )


def _milestone(until: str, runs: Sequence[RunCosts], ends: Sequence[int | None]) -> Milestone:
    totals = [None if end is None else run.until(end) for run, end in zip(runs, ends, strict=True)]
    there = [total for total in totals if total is not None]
    if len(there) < len(totals):
        return Milestone(until, len(totals), len(there), None, None, None, None, (), {})

    def over(value: Callable[[CumulativeCost], float]) -> OverSeeds:
        found = mean_std_if_complete([value(total) for total in there])
        assert found is not None
        return found

    return Milestone(
        until=until,
        runs=len(totals),
        reached=len(there),
        rounds=over(lambda total: float(total.round)),
        seconds=over(lambda total: total.seconds),
        joules=over(lambda total: total.joules),
        money=over(lambda total: total.money),
        bytes=tuple(over(lambda total, level=level: total.bytes[level]) for level in range(len(there[0].bytes))),  # type: ignore[misc]
        parts={part: over(lambda total, part=part: total.parts[part]).mean for part in there[0].parts},  # type: ignore[misc]
    )


# -- for other programs ----------------------------------------------------------------------------


def as_rows(found: Sequence[GroupCosts]) -> list[dict[str, Any]]:
    """One flat table per setting, network and milestone, every number in full."""
    return [_row(each, milestone) for each in found for milestone in each.milestones]


def _row(priced_setting: GroupCosts, milestone: Milestone) -> dict[str, Any]:
    row: dict[str, Any] = {
        "setting": priced_setting.setting,
        "network": priced_setting.network,
        "until": milestone.until,
        "runs": milestone.runs,
        "reached": milestone.reached,
        "currency": priced_setting.currency,
    }
    for name in ("rounds", "seconds", "joules", "money"):
        value = getattr(milestone, name)
        row[name], row[f"{name}_std"] = (None, None) if value is None else value
    for level, value in enumerate(milestone.bytes, 1):
        row[f"bytes_{level}"], row[f"bytes_{level}_std"] = value
    for what in PARTS:
        levels = sorted(level for name, level in milestone.parts if name == what)
        row |= {f"{what}_{level}_s": milestone.parts[what, level] for level in levels}
    return row


def as_csv(found: Sequence[GroupCosts]) -> str:
    """The same as a CSV file."""
    rows = as_rows(found)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()


TIME = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))

ENERGY = (("J", 1.0), ("kJ", 1e3), ("MJ", 1e6), ("GJ", 1e9))

BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))

READABLE = 2.0
"""A unit is taken where the largest value has at least so many of it."""

SENDING, WAITING, MERGING, OWN_ROUNDS = "sending", "waiting", "merging", "own rounds"

GROUPS = {DOWN: SENDING, UP: SENDING, WAIT: WAITING, MERGE: MERGING, WORK: OWN_ROUNDS}


@dataclass(frozen=True)
class Unit:
    """What a column's numbers are in."""

    name: str
    factor: float

    @staticmethod
    def of(units: Sequence[tuple[str, float]], values: Iterable[float]) -> Unit:
        largest = max(values, default=0.0)
        fitting = [(name, factor) for name, factor in units if largest >= READABLE * factor]
        return Unit(*(fitting[-1] if fitting else units[0]))

    def text(self, value: OverSeeds | None) -> str:
        """Text such as "3.21 ± 0.05", with three digits of the mean."""
        if value is None:
            return ABSENT
        mean = value.mean / self.factor
        digits = min(6, max(0, 2 - math.floor(math.log10(abs(mean))))) if mean else 0
        deviation = "" if value.deviation is None else f" ± {value.deviation / self.factor:,.{digits}f}"
        return f"{mean:,.{digits}f}{deviation}"


PLAIN = Unit("", 1.0)


@dataclass(frozen=True)
class Column:
    """A title and a text per row."""

    title: str
    cells: list[str]


def cost_columns(found: Sequence[GroupCosts]) -> list[Column]:
    """What settings cost on one network: a row per setting and milestone."""
    rows = [(each, milestone) for each in found for milestone in each.milestones]
    columns = [
        Column("setting", [each.setting for each, _ in rows]),
        Column("until", [milestone.until for _, milestone in rows]),
        Column("rounds", [_rounds(milestone) for _, milestone in rows]),
    ]

    def add(title: str, values: Sequence[OverSeeds | None], units: Sequence[tuple[str, float]]) -> None:
        known = [value.mean for value in values if value is not None]
        if any(known):
            unit = Unit.of(units, known)
            columns.append(Column(f"{title}, {unit.name}" if unit.name else title, list(map(unit.text, values))))

    add("time", [milestone.seconds for _, milestone in rows], TIME)
    add("energy", [milestone.joules for _, milestone in rows], ENERGY)
    names = found[0].levels
    for level in reversed(range(len(names))):
        sent = [milestone.bytes[level] if milestone.bytes else None for _, milestone in rows]
        title = names[level] if names.count(names[level]) == 1 else f"{names[level]} (level {level + 1})"
        add(title, sent, BYTES)
    add(found[0].currency or "money", [milestone.money for _, milestone in rows], (("", 1.0),))
    return columns


def _rounds(milestone: Milestone) -> str:
    if milestone.rounds is None:
        return f"{milestone.reached} of {milestone.runs} runs" if milestone.runs > 1 else "never"
    return PLAIN.text(milestone.rounds) if milestone.rounds.deviation else f"{milestone.rounds.mean:.0f}"


def time_breakdown(milestone: Milestone, levels: Sequence[str]) -> dict[str, float]:
    """Seconds by what they went into: sending is both ways; absences and pauses are together."""
    spent = {"computing": 0.0, "away": 0.0}
    spent["computing"] = sum(value for (what, _), value in milestone.parts.items() if what == COMPUTE)
    spent["away"] = sum(value for (what, _), value in milestone.parts.items() if what == AWAY)
    for level in reversed(range(1, len(levels) + 1)):
        name = levels[level - 1] if levels.count(levels[level - 1]) == 1 else f"{levels[level - 1]} (level {level})"
        for (what, at), value in milestone.parts.items():
            if at == level and what in GROUPS:
                title = f"{GROUPS[what]}, {name}"
                spent[title] = spent.get(title, 0.0) + value
    return spent


def part_columns(found: Sequence[GroupCosts]) -> list[Column]:
    """Where the time of all rounds goes, in per cent."""
    spent = [time_breakdown(each.milestones[-1], each.levels) for each in found]
    columns = [Column("setting", [each.setting for each in found])]
    for title in dict.fromkeys(title for each in spent for title in each):
        shares = [100 * each.get(title, 0.0) / (sum(each.values()) or 1.0) for each in spent]
        if any(share >= 0.05 for share in shares):
            columns.append(Column(title, [f"{share:.1f}" for share in shares]))
    return columns


SECONDS, COST = "seconds on ", "cost on "
"""How the names of such axes begin; the network's name follows. The page knows them, too."""


@dataclass(frozen=True)
class CostAxes:
    """Axes that curves have besides their own."""

    titles: dict[str, str] = field(default_factory=dict)
    """The titles of axes by their names."""
    points: dict[Path, dict[str, Points]] = field(default_factory=dict)
    """A value per round and axis, by run; gaps where a run cannot be priced."""
    priced: dict[Path, list[tuple[PriceableRun, Network]]] = field(default_factory=dict)
    """A run on each network on which it can be priced."""
    notes: tuple[str, ...] = ()
    """Which runs cannot be, and why."""


def network_axes(runs: Sequence[StoredRun], networks: Sequence[Network], pricing: PriceBatch | None = None) -> CostAxes:
    """The axes of these networks, and the runs on them. pricing: a new one, which may have been
    given the results of another."""
    titles: dict[str, str] = {}
    points: dict[Path, dict[str, Points]] = {run.path: {} for run in runs}
    on: dict[Path, list[tuple[PriceableRun, Network]]] = {}
    pricing = PriceBatch() if pricing is None else pricing
    ready = [pricing.ready(run) for run in runs if run.rounds] if networks else []
    for network in networks:
        seconds, cost = f"{SECONDS}{network.name}", f"{COST}{network.name}"
        titles[seconds] = seconds
        for each in ready:
            costs = None if each is None else pricing.on(each, network)
            if each is None or costs is None:
                continue
            on.setdefault(each.run.path, []).append((each, network))
            points[each.run.path][seconds] = _points(costs.seconds_R)
            if costs.money_R.any():
                titles[cost] = f"{cost} ({network.currency})" if network.currency else cost
                points[each.run.path][cost] = _points(costs.money_R)
    for run in runs:
        for axis in titles:
            points[run.path].setdefault(axis, [None] * len(run.rounds))
    return CostAxes(titles, points, on, tuple(pricing.problems))


def _points(each_R: np.ndarray) -> Points:
    """Up to the end of each round."""
    return [plain_number(float(value)) for value in np.cumsum(each_R)]
