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
    """">=" or "<="; empty for the metric's own direction."""

    def with_direction(self, better: Mapping[str, str]) -> Goal:
        """The goal with its sign; a metric of unknown direction is better the higher it is."""
        direction = {**DEFAULT_DIRECTIONS, **better}.get(self.metric, "higher")
        return self if self.sign else replace(self, sign="<=" if direction == "lower" else ">=")

    def is_reached(self, value: float | None) -> bool:
        """Whether a value reaches the goal; NaN and None never do."""
        if value is None:
            return False
        return value <= self.value if self.sign == "<=" else value >= self.value

    def first_round(self, rounds: Iterable[int], values: Iterable[float]) -> int | None:
        """The first round whose value reaches the goal, or None."""
        return next((r for r, value in zip(rounds, values, strict=True) if self.is_reached(value)), None)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign or 'to'} {self.value:g}"


def accuracy_of(field: str, value: Any) -> Goal:
    """A test accuracy, above 0 and at most 1."""
    return _checked(field, ACCURACY, value, ">=")


def parse_goals(field: str, given: Any, default: str = ACCURACY) -> tuple[Goal, ...]:
    """Goals from any of the forms of `GoalLike`; all of them are to be reached. default: the metric
    of a number alone."""
    if isinstance(given, str):
        return (_read(field, given, default),)
    if isinstance(given, Mapping) and given:
        return tuple(_checked(f"{field}.{name}", str(name), value) for name, value in given.items())
    if isinstance(given, int | float) and not isinstance(given, bool):
        return (_alone(field, given, default),)
    raise InvalidInput(field, given, f"must look like {EXAMPLES}, or be a table such as {{ accuracy = 0.8 }}")


def parse_goal(field: str, given: Any, default: str = ACCURACY) -> Goal:
    """A single goal."""
    goals = parse_goals(field, given, default)
    if len(goals) > 1:
        raise InvalidInput(field, given, "must be one metric and its value")
    return goals[0]


def default_metric(measured: Iterable[str]) -> str:
    """The metric that runs are compared by unless another is named: the accuracy, or else the first
    of the others by name, or else the loss."""
    return min(measured, key=rank, default=ACCURACY)


def rank(metric: str) -> tuple[bool, bool, str]:
    """Sort key of metrics: the accuracy first, the loss last."""
    return metric != ACCURACY, metric == LOSS, metric


def _read(field: str, text: str, default: str) -> Goal:
    match = _TEXT.fullmatch(text)
    try:
        value = float(text if match is None else match[3])
    except ValueError:
        raise InvalidInput(field, text, f"must look like {EXAMPLES}") from None
    if match is None:
        return _alone(field, value, default)
    return _checked(field, match[1], value, "" if match[2] == "=" else match[2])


def _alone(field: str, value: float, default: str) -> Goal:
    return accuracy_of(field, value) if default == ACCURACY else _checked(field, default, value)


def _checked(field: str, metric: str, value: Any, sign: str = "") -> Goal:
    """A goal whose value its metric can have."""
    is_share = metric == ACCURACY
    return Goal(
        metric, check_number(field, value, above=0, at_most=1) if is_share else check_number(field, value), sign
    )


def check_goals_measured(field: str, given: Any, goals: tuple[Goal, ...], better: Directions) -> tuple[Goal, ...]:
    """The goals with their signs; raise where a metric is not measured."""
    for goal in goals:
        if goal.metric not in better:
            known = f"measured are {', '.join(better)}" if better else "there is no test data"
            raise InvalidInput(field, given, f"{goal.metric!r} is not measured; {known}")
    return tuple(goal.with_direction(better) for goal in goals)


@dataclass(frozen=True, eq=False)
class Objective:
    """Loss, further metrics and goals of a run."""

    loss: Loss
    metrics: tuple[Metric, ...] = ()
    better: dict[str, Better] = field(default_factory=dict)
    """Direction of every measured metric; empty where there is no test data."""
    goals: tuple[Goal, ...] = ()
    """A run ends after the first evaluated round that reaches all of them; empty for all
    rounds."""


def stopping(stop_at: Any, stop_when: Any) -> tuple[str, Any, tuple[Goal, ...]]:
    """Goals of a run with the name and value of their argument; their metrics need not be
    measured."""
    if stop_at is not None and stop_when is not None:
        raise InvalidInput("stop_when", stop_when, "give either stop_at, an accuracy, or stop_when")
    if stop_when is not None:
        return "stop_when", stop_when, parse_goals("stop_when", stop_when)
    return "stop_at", stop_at, () if stop_at is None else (accuracy_of("stop_at", stop_at),)


def stops_at(stop_at: Any, stop_when: Any, better: dict[str, Better]) -> tuple[Goal, ...]:
    """The goals, if everything in them is measured."""
    return check_goals_measured(*stopping(stop_at, stop_when), better)
