"""Measured values of the cases of a series over seeds, and comparisons of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from papers.harness.runs import RunCurve, StoredRuns
from papers.harness.series import Case, Options, Panel, Series
from stratafl.base.statistics import mean_std
from stratafl.metrics.evaluation import rounds_to

WINDOW = 0.1
"""Final accuracy is averaged over this last share of the rounds, as single rounds are noisy."""
DIVERGED = "diverged"
"""Text for a value all of whose runs diverged."""


@dataclass(frozen=True)
class Value:
    """Mean over seeds.

    With `beyond` it is a lower bound, for example rounds to a target that some runs did not reach.
    """

    mean: float
    deviation: float | None = None
    """Standard deviation of the sample; None for fewer than two seeds."""
    beyond: bool = False
    diverged: str = ""
    """Text that says how many seeds had diverged and count as 0."""

    @staticmethod
    def of(values: Sequence[float], beyond: bool = False) -> Value:
        """Mean and deviation over seeds; NaN counts as 0, as a diverged model predicts nothing."""
        dead = sum(map(math.isnan, values))
        known = [0.0 if math.isnan(value) else value for value in values]
        told = "" if not dead else DIVERGED if dead == len(values) else f"{dead} of {len(values)} diverged"
        return Value(*mean_std(known), beyond, told)

    def text(self, digits: int = 1, unit: str = "") -> str:
        """Format as in the paper: ">T" where the target was not reached within T rounds."""
        if self.diverged == DIVERGED:
            return DIVERGED
        return self._number(digits, unit) + (f" ({self.diverged})" if self.diverged else "")

    def _number(self, digits: int, unit: str) -> str:
        if self.beyond:
            return f">{self.mean:.{digits}f}".removesuffix(".0") + unit
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}{unit}"


def is_below(a: Value | None, b: Value | None) -> bool | None:
    """Whether a is below b; None where that cannot be told."""
    if a is None or b is None or (a.beyond and b.beyond):
        return None
    if a.beyond:
        return False if a.mean >= b.mean else None
    if b.beyond:
        return True if a.mean <= b.mean else None
    return a.mean < b.mean


def ratio(base: Value | None, value: Value | None) -> Value | None:
    """Ratio of the base to the value, maybe a bound; None where not even a bound is known."""
    if base is None or value is None or value.beyond or value.mean == 0:
        return None
    return Value(base.mean / value.mean, beyond=base.beyond)


@dataclass(frozen=True)
class MeasuredLine:
    """Learning curves of one line of a panel, one per stored seed."""

    case: Case
    curves: tuple[RunCurve, ...]

    @property
    def complete(self) -> int:
        return sum(curve.complete for curve in self.curves)

    @property
    def last(self) -> int:
        """Last round that all curves have."""
        return min((curve.rounds[-1] for curve in self.curves), default=0)

    def accuracy(self, until: int) -> Value | None:
        """Mean accuracy over the last tenth of the rounds up to a round; NaN for a diverged run."""
        finals = []
        for curve in self.curves:
            seen = zip(curve.rounds, curve.accuracy, strict=True)
            within = [accuracy for round, accuracy in seen if (1 - WINDOW) * until < round <= until]
            if within:
                finals.append(math.nan if math.isnan(within[-1]) else statistics.fmean(_known(within)))
        return Value.of(finals) if finals else None

    def best(self, until: int) -> Value | None:
        """Highest accuracy of all rounds up to a round."""
        finals = [
            max(_known(a for round, a in zip(curve.rounds, curve.accuracy, strict=True) if round <= until), default=0.0)
            for curve in self.curves
            if curve.rounds[0] <= until
        ]
        return Value.of(finals) if finals else None

    def round_to_round_change(self, until: int) -> float | None:
        """Mean absolute change of the accuracy between rounds of the second half; None if any round
        of it has no accuracy."""
        jumps = [
            abs(b - a)
            for curve in self.curves
            for r, a, b in zip(curve.rounds[1:], curve.accuracy, curve.accuracy[1:], strict=False)
            if until / 2 < r <= until
        ]
        return statistics.fmean(jumps) if jumps and not any(map(math.isnan, jumps)) else None

    def reach(self, target: float) -> Value | None:
        """Rounds to a test accuracy."""
        return self._to(target, [curve.rounds for curve in self.curves])

    def seconds_to(self, target: float) -> Value | None:
        return self._to(target, [curve.seconds for curve in self.curves])

    def seconds_for(self, rounds: int) -> Value | None:
        """Time for so many rounds, which all its curves must have."""
        if not self.curves or any(rounds not in curve.rounds for curve in self.curves):
            return None
        return Value.of([curve.seconds[curve.rounds.index(rounds)] for curve in self.curves])

    def _to(self, target: float, scales: Sequence[Sequence[float]]) -> Value | None:
        values, beyond = [], False
        for curve, along in zip(self.curves, scales, strict=True):
            first = rounds_to(target, range(len(curve.rounds)), curve.accuracy)
            beyond |= first is None
            values.append(along[-1 if first is None else first])
        return Value.of(values, beyond) if values else None

    def at_cost(self, sent: float) -> float | None:
        """The accuracy when a client has sent and received so many bytes, between two rounds on the
        line that joins
        them: rounds of one method are larger than another's. None before the first is over."""
        if not self.curves or any(sent < curve.sent[0] for curve in self.curves):
            return None
        return Value.of([float(np.interp(sent, curve.sent, curve.accuracy)) for curve in self.curves]).mean


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def span(counts: Iterable[int]) -> str:
    """Format the smallest and largest of the counts, such as "1 to 3"."""
    found = sorted(counts)
    return " to ".join(str(each) for each in dict.fromkeys((found[0], found[-1])))


class Results:
    """Measured values of all cases of a series; panels and lines are in its order."""

    def __init__(self, series: Series, options: Options, measured: Iterable[MeasuredLine]):
        self.series, self.options = series, options
        self.measured = {(m.case.panel, m.case.line): m for m in measured}
        self.panels = list(dict.fromkeys(panel for panel, _ in self.measured))

    @property
    def target(self) -> float | None:
        return self.series.goal(self.options.scale)

    @property
    def divided_by(self) -> list[str]:
        """Partitions that make nodes differ; some series have their own instead of the option's."""
        levels = [level for m in self.measured.values() for level in m.case.config.data.partition]
        return [name for name in dict.fromkeys(level["name"] for level in levels) if name != "iid"]

    def lines(self, panel: Panel) -> list[str]:
        return [line for each, line in self.measured if each == panel]

    def data(self, panel: Panel) -> str:
        """Data set of a panel."""
        return self.measured[panel, self.lines(panel)[0]].case.config.data.name

    def method(self, panel: Panel, line: str) -> str:
        """Method of a line, whose name may be that of another setting, such as E and H."""
        return str(self.measured[panel, line].case.config.method["name"])

    def get(self, panel: Panel, line: str) -> MeasuredLine | None:
        found = self.measured.get((panel, line))
        return found if found is not None and found.curves else None

    @property
    def comparable(self) -> bool:
        """Whether any panel has two measured lines, or all of its lines."""
        found = [[self.get(panel, line) is not None for line in self.lines(panel)] for panel in self.panels]
        return any(sum(lines) >= min(2, len(lines)) for lines in found)

    def seen(self, panel: Panel) -> bool:
        """Whether any line of the panel was measured."""
        return any(self.get(panel, line) for line in self.lines(panel))

    def until(self, *panels: Panel) -> int:
        """Last round that all measured lines of these panels have."""
        found = [self.get(panel, line) for panel in panels for line in self.lines(panel)]
        return min((m.last for m in found if m is not None), default=0)

    def limit(self, panel: Panel) -> int:
        """Last round that the series asks for."""
        return max(self.measured[panel, line].case.config.run.rounds for line in self.lines(panel))

    def unfinished(self, panel: Panel) -> str:
        """How far the panel's lines have come, where that is not the end; runs to a target have no
        other end."""
        until, limit = self.until(panel), self.limit(panel)
        return f"round {until} of {limit}" if self.target is None and 0 < until < limit else ""

    def accuracy(self, panel: Panel, line: str, beside: Sequence[Panel] = ()) -> Value | None:
        """The accuracy of a line at the last round that all lines of the panel have, and those of
        panels it is held beside: the same round for all."""
        found = self.get(panel, line)
        return None if found is None else found.accuracy(self.until(panel, *beside))

    def reach(self, panel: Panel, line: str) -> Value | None:
        found = self.get(panel, line)
        return None if found is None or self.target is None else found.reach(self.target)


def measure(series: Series, cases: Sequence[Case], options: Options, seeds: int, stored: StoredRuns) -> Results:
    """Collect the stored runs of the cases of a series."""
    measured = []
    for case in cases:
        curves = [stored.curve(case.seeded(number)) for number in range(seeds)]
        measured.append(MeasuredLine(case, tuple(curve for curve in curves if curve is not None)))
    return Results(series, options, measured)
