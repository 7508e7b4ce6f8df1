"""Everything that a run is after, as what measures it needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.core.objective.goal import Goal, accuracy_of, goals_of, measurable
from stratafl.core.objective.losses import Loss
from stratafl.core.objective.metric import Better, Metric


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss, what is measured besides it, and where a run may stop."""

    loss: Loss
    metrics: tuple[Metric, ...] = ()
    better: dict[str, Better] = field(default_factory=dict)
    """Which way everything that is measured is better; empty where there is no test data."""
    goals: tuple[Goal, ...] = ()
    """A run ends after the first evaluated round that reaches all of them; empty to do all
    rounds."""


def stopping(stop_at: Any, stop_when: Any) -> tuple[str, Any, tuple[Goal, ...]]:
    """What a run is to stop at: which argument says so, what it says, and the goals, whose metrics
    need not be measured."""
    if stop_at is not None and stop_when is not None:
        raise InvalidInput("stop_when", stop_when, "give either stop_at, an accuracy, or stop_when")
    if stop_when is not None:
        return "stop_when", stop_when, goals_of("stop_when", stop_when)
    return "stop_at", stop_at, () if stop_at is None else (accuracy_of("stop_at", stop_at),)


def stops_at(stop_at: Any, stop_when: Any, better: dict[str, Better]) -> tuple[Goal, ...]:
    """The goals, if everything in them is measured."""
    return measurable(*stopping(stop_at, stop_when), better)
