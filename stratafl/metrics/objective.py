"""Loss, metrics and goals of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_number
from stratafl.core.losses import Loss
from stratafl.metrics.metrics import ACCURACY, DEFAULT_DIRECTIONS, LOSS, Better, Directions, Metric

GoalLike = float | str | Mapping[str, float]
"""A value of the default metric (0.8, "0.8"), "accuracy=0.8", "loss <= 0.1", or a table of metrics
and values."""

_TEXT = re.compile(r"\s*([^<>=]*[^<>=\s])\s*(>=|<=|=)\s*([^<>=\s]+)\s*")

EXAMPLES = '0.8, "accuracy=0.8" or "loss <= 0.1"'


@dataclass(frozen=True)
class Goal:
    """A metric and the value it is to reach."""

    metric: str
    value: float
    sign: str = ""
    """">=" or "<="; empty for the metric's own direction, until `with_direction` fills it in."""

    def with_direction(self, better: Mapping[str, str]) -> Goal:
        """The goal with its sign filled in; unknown metrics are better the higher they are."""
        direction = {**DEFAULT_DIRECTIONS, **better}.get(self.metric, "higher")
        return self if self.sign else replace(self, sign="<=" if direction == "lower" else ">=")

    def is_reached(self, value: float | None) -> bool:
        """Whether a value reaches the goal; NaN and None never do. No sign counts as ">="."""
        if value is None:
            return False
        return value <= self.value if self.sign == "<=" else value >= self.value

    def first_round(self, rounds: Iterable[int], values: Iterable[float]) -> int | None:
        """The first round whose value reaches the goal, or None."""
        return next((r for r, value in zip(rounds, values, strict=True) if self.is_reached(value)), None)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign or 'to'} {self.value:g}"


def parse_goals(field: str, value: Any, default: str = ACCURACY) -> tuple[Goal, ...]:
    """Parse goals in any of the forms of `GoalLike`; all of them are to be reached.

    default: the metric of a number alone.
    """
    if isinstance(value, str):
        return (_parse_text(field, value, default),)
    if isinstance(value, Mapping) and value:
        return tuple(_goal(f"{field}.{name}", str(name), number) for name, number in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (_goal_of_number(field, value, default),)
    raise InvalidInput(field, value, f"must look like {EXAMPLES}, or be a table such as {{ accuracy = 0.8 }}")


def parse_goal(field: str, value: Any, default: str = ACCURACY) -> Goal:
    """Parse a single goal."""
    goals = parse_goals(field, value, default)
    if len(goals) > 1:
        raise InvalidInput(field, value, "must be one metric and its value")
    return goals[0]


def default_metric(measured: Iterable[str]) -> str:
    """Metric that runs are compared by unless another is named: the accuracy, or else the first of
    the others by name, or else the loss."""
    return min(measured, key=rank, default=ACCURACY)


def rank(metric: str) -> tuple[bool, bool, str]:
    """Sort key of metrics: the accuracy first, the loss last."""
    return metric != ACCURACY, metric == LOSS, metric


def _parse_text(field: str, text: str, default: str) -> Goal:
    match = _TEXT.fullmatch(text)
    try:
        value = float(text if match is None else match[3])
    except ValueError:
        raise InvalidInput(field, text, f"must look like {EXAMPLES}") from None
    if match is None:
        return _goal_of_number(field, value, default)
    return _goal(field, match[1], value, "" if match[2] == "=" else match[2])


def _goal_of_number(field: str, value: float, metric: str) -> Goal:
    return _goal(field, metric, value, ">=" if metric == ACCURACY else "")


def _goal(field: str, metric: str, value: Any, sign: str = "") -> Goal:
    """Check that the metric can have the value, and make a goal of both."""
    above, at_most = (0, 1) if metric == ACCURACY else (None, None)
    return Goal(metric, check_number(field, value, above=above, at_most=at_most), sign)


@dataclass(frozen=True, eq=False)
class Objective:
    """Loss, further metrics and goals of a run."""

    loss: Loss
    metrics: tuple[Metric, ...] = ()
    better: dict[str, Better] = field(default_factory=dict)
    """Direction of every measured metric; empty where there is no test data."""
    goals: tuple[Goal, ...] = ()
    """A run ends after the first evaluated round that reaches all of them; if empty, it
    has all its rounds."""


def parse_stop_goals(stop_when: Any, better: Directions | None = None) -> tuple[Goal, ...]:
    """Goals that end a run.

    better: directions of all measured metrics, where they are known already: goals then get their
        signs, and a metric that is not measured is an error.
    """
    if stop_when is None:
        return ()
    field = "evaluation.stop_when"
    goals = parse_goals(field, stop_when)
    if better is None:
        return goals
    for goal in goals:
        if goal.metric not in better:
            measured = f"measured are {', '.join(better)}" if better else "there is no test data"
            raise InvalidInput(field, stop_when, f"{goal.metric!r} is not measured; {measured}")
    return tuple(goal.with_direction(better) for goal in goals)
