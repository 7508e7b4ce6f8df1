"""What a run was measured by: metrics, which way they are better, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from stratafl.base.errors import InvalidInput, listed
from stratafl.base.statistics import OverSeeds
from stratafl.metrics.metrics import Better
from stratafl.metrics.objective import Goal, GoalLike, default_metric, one_goal, rank
from stratafl.report.curves import Curve, is_metric
from stratafl.runs import StoredRun

LOWER = ("loss", "error", "perplexity", "mse", "mae", "rmse", "distance")
"""Words in the names of metrics that are the better the lower they are."""
ABSENT = "—"
MINUS = "−"


@dataclass(frozen=True)
class Measure:
    """A metric and how it is shown."""

    name: str
    title: str
    """The title above a chart and in a table."""
    better: Better
    percent: bool
    digits: int | None
    """Decimals in a table; None for powers of ten."""

    @property
    def unit(self) -> str:
        return "%" if self.percent else ""

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def scaled(self, value: OverSeeds) -> OverSeeds:
        """A value in the unit of the tables: a share in per cent."""
        factor = 100.0 if self.percent else 1.0
        return OverSeeds(factor * value.mean, None if value.deviation is None else factor * value.deviation)

    def goal(self, value: float) -> Goal:
        """A value of it to get to, in the direction in which it is better."""
        return Goal(self.name, value, "<=" if self.better == "lower" else ">=")

    def goal_text(self, target: float) -> str:
        return f"{100 * target:.6g} %" if self.percent else f"{target:.6g}"


def measures(runs: Sequence[StoredRun], curves: Sequence[Curve]) -> list[Measure]:
    """Every metric of these runs: accuracy first, the loss last."""
    values: dict[str, list[float]] = {}
    for curve in curves:
        for name, points in curve.y.items():
            if is_metric(name):
                values.setdefault(name, []).extend(value for value in points if value is not None)
    order = sorted(values, key=rank)
    return [_measure(name, values[name], _direction(name, runs)) for name in order]


class Target(NamedTuple):
    """A value of a metric that runs are held against."""

    measure: Measure
    goal: Goal
    """With its sign."""

    @property
    def is_usual(self) -> bool:
        """Whether it lies in the direction in which the metric is better."""
        return self.goal == self.measure.goal(self.goal.value)


def targets_of(
    given: Iterable[GoalLike | Goal], metrics: Sequence[Measure], judged: Measure | None, field: str
) -> list[Target]:
    """Targets in any of the forms a user may give; a number alone is a value of the metric that
    settings are judged by."""
    known = {each.name: each for each in metrics}
    default = default_metric(known) if judged is None else judged.name
    found = []
    for each in given:
        goal = each if isinstance(each, Goal) else one_goal(field, each, default)
        if goal.metric not in known:
            raise InvalidInput(field, each, f"these runs have {listed(list(known))}")
        measure = known[goal.metric]
        found.append(Target(measure, goal.towards({measure.name: measure.better})))
    return found


def chief(found: Sequence[Measure]) -> Measure | None:
    """What settings are judged by unless somebody asks for another."""
    return found[0] if found else None


def number_text(value: OverSeeds | None, digits: int | None) -> str:
    """ "0.912 ± 0.003", or the mean alone where there is one run."""
    if value is None:
        return ABSENT
    mean = _written(value.mean, digits)
    return mean if value.deviation is None else f"{mean} ± {_written(value.deviation, digits)}"


def _written(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}".replace("-", MINUS)
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}".replace("-", MINUS)


def _measure(name: str, values: Sequence[float], better: Better) -> Measure:
    percent = name == "accuracy"
    title = {"accuracy": "Test accuracy", "loss": "Test loss"}.get(name, name)
    return Measure(name, title, better, percent, 1 if percent else _digits(values))


def _digits(values: Sequence[float]) -> int | None:
    """Decimals that show three or four digits of the usual value."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 3
    usual = math.floor(math.log10(sizes[len(sizes) // 2]))
    return None if usual > 5 or usual < -3 else max(0, 3 - usual if usual > 0 else 3 - min(usual + 1, 0))


def _direction(name: str, runs: Sequence[StoredRun]) -> Better:
    for run in runs:
        for way in get_args(Better):
            if run.better.get(name) == way:
                return way
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return "lower" if any(word in LOWER for word in words) else "higher"
