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
"""Last share of the rounds over which final accuracy is averaged, as single rounds are noisy."""
DIVERGED = "diverged"
"""Text for a value if all runs diverged."""


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
    """Text with the number of seeds that diverged and count as 0."""

    @staticmethod
    def of(values: Sequence[float], beyond: bool = False) -> Value:
        """Mean and deviation over seeds; NaN counts as 0, as a diverged model predicts nothing."""
        diverged = sum(map(math.isnan, values))
        finite = [0.0 if math.isnan(value) else value for value in values]
        note = "" if not diverged else DIVERGED if diverged == len(values) else f"{diverged} of {len(values)} diverged"
        return Value(*mean_std(finite), beyond, note)

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
    """Whether a is below b; None if that cannot be decided."""
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
        """Mean absolute change of the accuracy from round to round, in the second half of the run.

        It is None if any of these rounds has no accuracy.
        """
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
        """Time for a number of rounds; None unless all curves have them."""
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
        """Mean accuracy when a client has sent and received `sent` bytes.

        It is interpolated linearly between rounds, since the rounds of methods differ in size, and
        None before the end of the first round.
        """
        if not self.curves or any(sent < curve.sent[0] for curve in self.curves):
            return None
        return Value.of([float(np.interp(sent, curve.sent, curve.accuracy)) for curve in self.curves]).mean


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def span(counts: Iterable[int]) -> str:
    """Format the smallest and largest of the counts, such as "1 to 3"."""
    ordered = sorted(counts)
    return " to ".join(str(count) for count in dict.fromkeys((ordered[0], ordered[-1])))


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
        """Partitions that are not i.i.d.; some series have their own instead of the option's."""
        levels = [level for m in self.measured.values() for level in m.case.experiment.data.partition]
        return [name for name in dict.fromkeys(level["name"] for level in levels) if name != "iid"]

    def lines(self, panel: Panel) -> list[str]:
        return [line for other, line in self.measured if other == panel]

    def data(self, panel: Panel) -> str:
        """Data set of a panel."""
        return self.measured[panel, self.lines(panel)[0]].case.experiment.data.source

    def method(self, panel: Panel, line: str) -> str:
        """Method of a line, whose name may be that of another setting, such as E and H."""
        return str(self.measured[panel, line].case.experiment.method.name)

    def get(self, panel: Panel, line: str) -> MeasuredLine | None:
        line_curves = self.measured.get((panel, line))
        return line_curves if line_curves is not None and line_curves.curves else None

    @property
    def comparable(self) -> bool:
        """Whether any panel has two measured lines, or all of its lines."""
        measured = [[self.get(panel, line) is not None for line in self.lines(panel)] for panel in self.panels]
        return any(sum(lines) >= min(2, len(lines)) for lines in measured)

    def seen(self, panel: Panel) -> bool:
        """Whether any line of the panel was measured."""
        return any(self.get(panel, line) for line in self.lines(panel))

    def until(self, *panels: Panel) -> int:
        """Last round that all measured lines of these panels have."""
        measured = [self.get(panel, line) for panel in panels for line in self.lines(panel)]
        return min((m.last for m in measured if m is not None), default=0)

    def limit(self, panel: Panel) -> int:
        """Last round that the series asks for."""
        return max(self.measured[panel, line].case.experiment.rounds for line in self.lines(panel))

    def unfinished(self, panel: Panel) -> str:
        """Progress of a panel that has not reached its last round, or "".

        It is "" for runs that stop at a target, too.
        """
        until, limit = self.until(panel), self.limit(panel)
        return f"round {until} of {limit}" if self.target is None and 0 < until < limit else ""

    def accuracy(self, panel: Panel, line: str, beside: Sequence[Panel] = ()) -> Value | None:
        """Accuracy of a line at the last round that all lines of the panel have.

        With `beside` it is the last round that all lines of these panels have, too.
        """
        measured = self.get(panel, line)
        return None if measured is None else measured.accuracy(self.until(panel, *beside))

    def reach(self, panel: Panel, line: str) -> Value | None:
        measured = self.get(panel, line)
        return None if measured is None or self.target is None else measured.reach(self.target)


def measure(series: Series, cases: Sequence[Case], options: Options, seeds: int, stored: StoredRuns) -> Results:
    """Collect the stored runs of the cases of a series."""
    measured = []
    for case in cases:
        curves = [stored.curve(case.seeded(number)) for number in range(seeds)]
        measured.append(MeasuredLine(case, tuple(curve for curve in curves if curve is not None)))
    return Results(series, options, measured)
