"""What was measured for each case of a recipe, over its seeds, and how two such values compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stratafl.base.statistics import mean_std
from stratafl.metrics.evaluation import rounds_to
from stratafl.paper.recipes.base import Case, Options, Recipe
from stratafl.paper.reproduce.stored_runs import RunCurve, StoredRuns

WINDOW = 0.1
"""The share of the rounds, the last ones, that a final accuracy is the mean of: one round is a
throw of the dice."""
DEAD = "diverged"
"""What is said of a line all of whose runs are."""


@dataclass(frozen=True)
class Value:
    """A mean over seeds; `beyond` says that the true one is larger, such as rounds to a target not
    reached by all."""

    mean: float
    deviation: float | None = None
    """None for fewer than two."""
    beyond: bool = False
    diverged: str = ""
    """How many of the seeds count as nothing, since their runs had diverged by then."""

    @staticmethod
    def of(values: Sequence[float], beyond: bool = False) -> Value:
        """The mean and deviation over seeds, where NaN counts as 0: a model without scores gets
        nothing right."""
        dead = sum(map(math.isnan, values))
        known = [0.0 if math.isnan(value) else value for value in values]
        told = "" if not dead else DEAD if dead == len(values) else f"{dead} of {len(values)} diverged"
        return Value(*mean_std(known), beyond, told)

    def text(self, digits: int = 1, unit: str = "") -> str:
        """The number as the paper writes it: ">T" where the target was not reached within T
        rounds."""
        if self.diverged == DEAD:
            return DEAD
        return self._number(digits, unit) + (f" ({self.diverged})" if self.diverged else "")

    def _number(self, digits: int, unit: str) -> str:
        if self.beyond:
            return f">{self.mean:.{digits}f}".removesuffix(".0") + unit
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}{unit}"


def less(a: Value | None, b: Value | None) -> bool | None:
    """Whether a is below b; None where that cannot be told."""
    if a is None or b is None or (a.beyond and b.beyond):
        return None
    if a.beyond:
        return False if a.mean >= b.mean else None
    if b.beyond:
        return True if a.mean <= b.mean else None
    return a.mean < b.mean


def times(base: Value | None, value: Value | None) -> Value | None:
    """How many times larger the base is; None where not even a bound is known."""
    if base is None or value is None or value.beyond or value.mean == 0:
        return None
    return Value(base.mean / value.mean, beyond=base.beyond)


@dataclass(frozen=True)
class Measured:
    """One line of a panel: a curve for each seed there is."""

    case: Case
    curves: tuple[RunCurve, ...]

    @property
    def complete(self) -> int:
        return sum(curve.complete for curve in self.curves)

    @property
    def last(self) -> int:
        """The last round all its curves have."""
        return min((curve.rounds[-1] for curve in self.curves), default=0)

    def accuracy(self, until: int) -> Value | None:
        """The mean over the last tenth of the rounds up to this one; NaN for a run that has
        diverged there."""
        finals = []
        for curve in self.curves:
            seen = zip(curve.rounds, curve.accuracy, strict=True)
            within = [accuracy for round, accuracy in seen if (1 - WINDOW) * until < round <= until]
            if within:
                finals.append(math.nan if math.isnan(within[-1]) else statistics.fmean(_known(within)))
        return Value.of(finals) if finals else None

    def best(self, until: int) -> Value | None:
        """The highest accuracy of any round up to this one."""
        finals = [
            max(_known(a for round, a in zip(curve.rounds, curve.accuracy, strict=True) if round <= until), default=0.0)
            for curve in self.curves
            if curve.rounds[0] <= until
        ]
        return Value.of(finals) if finals else None

    def unrest(self, until: int) -> float | None:
        """How far the accuracy jumps from round to round, on average over the second half of the
        rounds; None where it is not known in all of them."""
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
    """The numbers from the least to the most, as a text."""
    found = sorted(counts)
    return " to ".join(str(each) for each in dict.fromkeys((found[0], found[-1])))


def extra_models(ours: Measured, plain: Measured, e: int) -> float:
    """How many models more a client exchanges in a round; HFedAvg's are e up and e down."""
    last, base = ours.curves[0].last_sent, plain.curves[0].last_sent
    return (last - base) / (base / (2 * e))


class Results:
    """A recipe's cases with what was measured; panels and lines in the recipe's order."""

    def __init__(self, recipe: Recipe, options: Options, measured: Iterable[Measured]):
        self.recipe, self.options = recipe, options
        self.measured = {(m.case.panel, m.case.line): m for m in measured}
        self.panels = list(dict.fromkeys(panel for panel, _ in self.measured))

    @property
    def target(self) -> float | None:
        return self.recipe.goal(self.options.scale)

    @property
    def divided_by(self) -> list[str]:
        """The partitions that make nodes differ: not every recipe has the one asked for."""
        levels = [level for m in self.measured.values() for level in m.case.config.data.partition]
        return [name for name in dict.fromkeys(level["name"] for level in levels) if name != "iid"]

    def lines(self, panel: tuple[str, ...]) -> list[str]:
        return [line for each, line in self.measured if each == panel]

    def data(self, panel: tuple[str, ...]) -> str:
        """The data set that the panel's lines were trained on."""
        return self.measured[panel, self.lines(panel)[0]].case.config.data.name

    def method(self, panel: tuple[str, ...], line: str) -> str:
        """What a line was trained with; its name may say something else, such as E and H."""
        return str(self.measured[panel, line].case.config.method["name"])

    def get(self, panel: tuple[str, ...], line: str) -> Measured | None:
        found = self.measured.get((panel, line))
        return found if found is not None and found.curves else None

    @property
    def comparable(self) -> bool:
        """Whether any panel has two lines to compare, or all it is to have: another recipe's run
        alone says nothing."""
        found = [[self.get(panel, line) is not None for line in self.lines(panel)] for panel in self.panels]
        return any(sum(lines) >= min(2, len(lines)) for lines in found)

    def seen(self, panel: tuple[str, ...]) -> bool:
        """Whether any line of the panel was measured."""
        return any(self.get(panel, line) for line in self.lines(panel))

    def until(self, *panels: tuple[str, ...]) -> int:
        """The last round that every line of these panels has, of those that were measured at
        all."""
        found = [self.get(panel, line) for panel in panels for line in self.lines(panel)]
        return min((m.last for m in found if m is not None), default=0)

    def limit(self, panel: tuple[str, ...]) -> int:
        """The last round that the recipe asks for."""
        return max(self.measured[panel, line].case.config.run.rounds for line in self.lines(panel))

    def unfinished(self, panel: tuple[str, ...]) -> str:
        """How far the panel's lines have come, where that is not the end; runs to a target have no
        other end."""
        until, limit = self.until(panel), self.limit(panel)
        return f"round {until} of {limit}" if self.target is None and 0 < until < limit else ""

    def accuracy(self, panel: tuple[str, ...], line: str, beside: Sequence[tuple[str, ...]] = ()) -> Value | None:
        """The accuracy of a line at the last round that all lines of the panel have, and those of
        panels it is held beside: the same round for all."""
        found = self.get(panel, line)
        return None if found is None else found.accuracy(self.until(panel, *beside))

    def reach(self, panel: tuple[str, ...], line: str) -> Value | None:
        found = self.get(panel, line)
        return None if found is None or self.target is None else found.reach(self.target)


def measure(recipe: Recipe, cases: Sequence[Case], options: Options, seeds: int, stored: StoredRuns) -> Results:
    """What the stored runs say about the cases of a recipe."""
    measured = []
    for case in cases:
        curves = [stored.curve(case.seeded(number)) for number in range(seeds)]
        measured.append(Measured(case, tuple(curve for curve in curves if curve is not None)))
    return Results(recipe, options, measured)
