"""A value of a metric to get to: where a run may stop, and what its rounds are counted to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratafl.base.errors import InvalidInput, number
from stratafl.core.objective.metric import ACCURACY, USUAL, Directions

GoalLike = float | str | Mapping[str, float]
"""An accuracy, "loss <= 0.1", or a table of metrics and values."""
_TEXT = re.compile(r"\s*([^<>=]*[^<>=\s])\s*(>=|<=)\s*([^<>=\s]+)\s*")


@dataclass(frozen=True)
class Goal:
    """A metric, at least or at most this."""

    metric: str
    value: float
    sign: str = ""
    """">=" or "<="; empty for whichever way is better for the metric."""

    def towards(self, better: Mapping[str, str]) -> Goal:
        """The goal with its sign, also of what older runs did not say; of what nobody knows, more
        is better."""
        way = {**USUAL, **better}.get(self.metric, "higher")
        return self if self.sign else replace(self, sign="<=" if way == "lower" else ">=")

    def reached(self, value: float | None) -> bool:
        """Whether a value is as good as that; one that is no number, or not there, never is."""
        if value is None:
            return False
        return value <= self.value if self.sign == "<=" else value >= self.value

    def first(self, rounds: Iterable[int], values: Iterable[float]) -> int | None:
        """The first round whose value is as good as that, None if there is none."""
        return next((r for r, value in zip(rounds, values, strict=True) if self.reached(value)), None)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign or 'to'} {self.value:g}"


def accuracy_of(field: str, value: Any) -> Goal:
    """A test accuracy, above 0 and at most 1."""
    return Goal(ACCURACY, number(field, value, above=0, at_most=1), ">=")


def goals_of(field: str, given: Any) -> tuple[Goal, ...]:
    """What a user gave: all of them are to be reached."""
    if isinstance(given, str):
        found = _TEXT.fullmatch(given)
        if found is None:
            raise InvalidInput(field, given, 'must look like "loss <= 0.1" or "accuracy >= 0.8"')
        try:
            value = float(found[3])
        except ValueError:
            raise InvalidInput(field, given, f"{found[3]!r} is no number") from None
        return (Goal(found[1], number(field, value), found[2]),)
    if isinstance(given, Mapping) and given:
        return tuple(Goal(str(name), number(f"{field}.{name}", value)) for name, value in given.items())
    if isinstance(given, int | float) and not isinstance(given, bool):
        return (accuracy_of(field, given),)
    allowed = 'must be a table of metrics and values, such as { accuracy = 0.8 }, or a text: "loss <= 0.1"'
    raise InvalidInput(field, given, allowed)


def one_goal(field: str, given: Any) -> Goal:
    """A single goal."""
    goals = goals_of(field, given)
    if len(goals) > 1:
        raise InvalidInput(field, given, "must be one metric and its value")
    return goals[0]


def goal_from(field: str, text: str) -> Goal:
    """A single one from a command line, where also a number is a text."""
    try:
        return one_goal(field, float(text))
    except ValueError as problem:
        if isinstance(problem, InvalidInput):
            raise
        return one_goal(field, text)


def measurable(field: str, given: Any, goals: tuple[Goal, ...], better: Directions) -> tuple[Goal, ...]:
    """The goals with their signs, if everything in them is measured."""
    for goal in goals:
        if goal.metric not in better:
            known = f"measured are {', '.join(better)}" if better else "there is no test data"
            raise InvalidInput(field, given, f"{goal.metric!r} is not measured; {known}")
    return tuple(goal.towards(better) for goal in goals)
