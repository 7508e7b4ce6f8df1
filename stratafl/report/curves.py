"""A stored run as curves, and several runs as their mean and spread. What is not a finite number is
a gap (None)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stratafl.base.statistics import over_seeds
from stratafl.metrics.records import diverged, measured
from stratafl.runs import StoredRun

Points = list[float | None]
AXES = {"rounds": "global rounds", "steps": "local steps per client", "bytes": "bytes per client", "seconds": "seconds"}
"""What a curve can be drawn against, and how that reads on an axis."""
DIGITS = 7
"""Significant ones kept: what a picture or a table can show, at half the size."""


@dataclass(frozen=True)
class Curve:
    """One point per global round: what it is drawn against, and values by name.

    Names are those of metrics ("accuracy"), "drift.LEVEL.QUANTITY" for diagnostics, and
    "nodes.LEVEL.SUMMARY.METRIC" for a level whose nodes were evaluated.
    """

    x: dict[str, Points]
    y: dict[str, Points]
    spread: dict[str, Points]
    """Standard deviation over the runs of a mean; empty for one run."""
    diverged: int | None = None
    """The round from which on the test loss is not finite: the curves of the metrics end before
    it."""

    def known(self, name: str) -> list[tuple[float, float]]:
        """(round, value) wherever there is a value."""
        rounds, values = self.x["rounds"], self.y.get(name, [])
        return [(r, v) for r, v in zip(rounds, values, strict=False) if r is not None and v is not None]

    def last(self, name: str) -> float | None:
        """The final value; None where the run diverged, however far it had come before."""
        if self.diverged is not None:
            return None
        return next((value for value in reversed(self.y.get(name, [])) if value is not None), None)


def curve_of(run: StoredRun, further: Mapping[str, Points] | None = None) -> Curve:
    """further: axes that the run has besides its own, a value per round."""
    records = run.rounds
    seconds = accumulate(number(record.get("seconds")) or 0.0 for record in records)
    x: dict[str, Points] = {
        "rounds": [float(record["round"]) for record in records],
        "steps": [number(record.get("steps")) for record in records],
        "bytes": [number(record.get("bytes_per_client")) for record in records],
        "seconds": [number(total) for total in seconds],
        **(further or {}),
    }
    columns: dict[str, Points] = {}
    levels = levels_of(run.tree)
    for place, record in enumerate(records):
        for name, value in _values(record, levels):
            columns.setdefault(name, [None] * len(records))[place] = value
    return Curve(x, columns, {}, diverged(records))


def levels_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """The level of each node of a stored tree, by its name; empty where the tree is broken."""
    levels = tree.get("levels")
    named = [level.get("names") for level in levels if isinstance(level, dict)] if isinstance(levels, list) else []
    return {str(name): level for level, names in enumerate(named) if isinstance(names, list) for name in names}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several runs, over the rounds that all of them have reached, until the first of
    them diverged."""
    if len(curves) == 1:
        return curves[0]
    rounds = min(len(curve.x["rounds"]) for curve in curves)
    names = [name for name in curves[0].y if all(name in curve.y for curve in curves)]

    def over(lines: Sequence[Points]) -> tuple[Points, Points]:
        """Mean and deviation of each round, where all runs have a value."""
        means: Points = []
        deviations: Points = []
        for values in zip(*(line[:rounds] for line in lines), strict=True):
            known = [value for value in values if value is not None]
            mean, deviation = over_seeds(known) if len(known) == len(values) else (None, None)
            means.append(number(mean))
            deviations.append(number(deviation))
        return means, deviations

    x = {axis: over([curve.x[axis] for curve in curves])[0] for axis in curves[0].x}
    y = {name: over([curve.y[name] for curve in curves]) for name in names}
    return Curve(
        x,
        {name: means for name, (means, _) in y.items()},
        {name: deviations for name, (_, deviations) in y.items()},
        min((curve.diverged for curve in curves if curve.diverged is not None), default=None),
    )


def number(value: object) -> float | None:
    """A finite number, shortened to what can be seen; None for anything else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        short = float(f"{value:.{DIGITS}g}")
    except OverflowError:
        return None
    return short if math.isfinite(short) else None


def is_metric(name: str) -> bool:
    """Whether a curve's name is that of a metric of the root."""
    return not name.startswith(("drift.", "nodes."))


def _values(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    for name, value in measured(record).items():
        yield name, number(value)
    for level, quantities in _table(record.get("drift")).items():
        for name, value in _table(quantities).items():
            yield f"drift.{level}.{name}", number(value)
    yield from _over_nodes(record, levels)


def _over_nodes(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    """Mean, lowest, highest and deviation over the nodes of each level that has several; nothing
    where one of them is no number."""
    values: dict[tuple[int, str], Points] = {}
    for node, metrics in _table(record.get("nodes")).items():
        for name, value in _table(metrics).items():
            if node in levels:
                values.setdefault((levels[node], name), []).append(number(value))
    for (level, name), column in values.items():
        known = [value for value in column if value is not None]
        if len(column) > 1 and len(known) == len(column):
            # all nodes there are, and not a few of many: the deviation of a population
            summaries = {"mean": statistics.fmean(known), "lowest": min(known), "highest": max(known)}
            for word, value in (summaries | {"spread": statistics.pstdev(known)}).items():
                yield f"nodes.{level}.{word}.{name}", number(value)


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
