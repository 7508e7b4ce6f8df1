"""A stored run as curves, and several runs as their mean and spread. What is not a finite number is a gap (None)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stratafl.divergence import diverged, measured
from stratafl.store import StoredRun

Points = list[float | None]
AXES = {"rounds": "global rounds", "steps": "local steps per client", "bytes": "bytes per client", "seconds": "seconds"}
"""What a curve can be drawn against, and how that reads on an axis."""
DIGITS = 7
"""Significant ones kept: what a picture or a table can show, at half the size."""


@dataclass(frozen=True)
class Curve:
    """One point per global round: what it is drawn against, and values by name.

    Names are those of metrics ("accuracy"), and "drift.LEVEL.QUANTITY" for diagnostics.
    """

    x: dict[str, Points]
    y: dict[str, Points]
    spread: dict[str, Points]
    """Standard deviation over the runs of a mean; empty for one run."""
    diverged: int | None = None
    """The round from which on the test loss is not finite: the curves of the metrics end before it."""

    def known(self, name: str) -> list[tuple[float, float]]:
        """(round, value) wherever there is a value."""
        rounds, values = self.x["rounds"], self.y.get(name, [])
        return [(r, v) for r, v in zip(rounds, values, strict=False) if r is not None and v is not None]

    def last(self, name: str) -> float | None:
        """The final value; None where the run diverged, however far it had come before."""
        if self.diverged is not None:
            return None
        return next((value for value in reversed(self.y.get(name, [])) if value is not None), None)


def curve_of(run: StoredRun) -> Curve:
    records = run.rounds
    seconds = accumulate(number(record.get("seconds")) or 0.0 for record in records)
    x: dict[str, Points] = {
        "rounds": [float(record["round"]) for record in records],
        "steps": [number(record.get("steps")) for record in records],
        "bytes": [number(record.get("bytes_per_client")) for record in records],
        "seconds": [number(total) for total in seconds],
    }
    columns: dict[str, Points] = {}
    for place, record in enumerate(records):
        for name, value in _values(record):
            columns.setdefault(name, [None] * len(records))[place] = value
    return Curve(x, columns, {}, diverged(records))


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several runs, over the rounds that all of them have reached, until the first of them diverged.

    The standard deviation is that of the population, as in the paper's tables.
    """
    if len(curves) == 1:
        return curves[0]
    rounds = min(len(curve.x["rounds"]) for curve in curves)
    names = [name for name in curves[0].y if all(name in curve.y for curve in curves)]

    def over(values: Callable[[Curve], Points], reduce: Callable[[list[float]], float]) -> Points:
        result: Points = []
        for place in range(rounds):
            here = [value for curve in curves if (value := values(curve)[place]) is not None]
            result.append(number(reduce(here)) if len(here) == len(curves) else None)
        return result

    return Curve(
        {axis: over(lambda curve: curve.x[axis], statistics.fmean) for axis in AXES},
        {name: over(lambda curve: curve.y[name], statistics.fmean) for name in names},
        {name: over(lambda curve: curve.y[name], statistics.pstdev) for name in names},
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


def _values(record: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in measured(record).items():
        yield name, number(value)
    for level, quantities in _table(record.get("drift")).items():
        for name, value in _table(quantities).items():
            yield f"drift.{level}.{name}", number(value)


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
