"""Costs as people read them: a unit for each column, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratafl.base.statistics import OverSeeds
from stratafl.clock.model.timeline import AWAY, COMPUTE, DOWN, MERGE, UP, WAIT, WORK
from stratafl.report.costs.pricing import Milestone, PricedSetting
from stratafl.runs.curves import ABSENT

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
        """ "3.21 ± 0.05", with three digits of the mean."""
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


def cost_columns(found: Sequence[PricedSetting]) -> list[Column]:
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


def grouped(milestone: Milestone, levels: Sequence[str]) -> dict[str, float]:
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


def part_columns(found: Sequence[PricedSetting]) -> list[Column]:
    """Where the time of all rounds goes, in per cent."""
    spent = [grouped(each.milestones[-1], each.levels) for each in found]
    columns = [Column("setting", [each.setting for each in found])]
    for title in dict.fromkeys(title for each in spent for title in each):
        shares = [100 * each.get(title, 0.0) / (sum(each.values()) or 1.0) for each in spent]
        if any(share >= 0.05 for share in shares):
            columns.append(Column(title, [f"{share:.1f}" for share in shares]))
    return columns
