"""When the levels of a tree synchronise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_integer, plain
from stratafl.data.batches import steps_per_epoch

MOST_STEPS = 1_000_000
"""Largest number of local steps in a global round."""


class SyncEvent(NamedTuple):
    """Steps to train, and the topmost edge level to synchronise then with all below it."""

    steps: int
    top_level: int


@dataclass(frozen=True)
class Schedule:
    """How often each edge level synchronises, in units of the level below, root first.

    `Schedule((30, 20))` is the paper's E = 30, H = 20: a group averages every 20 steps, the root
    every 30 group rounds.
    """

    periods: tuple[int, ...]

    @staticmethod
    def of(periods: Sequence[int], depth: int, epochs: int | None = None) -> Schedule:
        """Make a schedule of the periods of all edge levels, root first. With `epochs`, the lowest
        level's period is that many passes over a client's data, and the periods are those of the
        others."""
        periods, depth = plain(periods), check_integer("depth", depth, at_least=1)
        if epochs is not None:
            if not isinstance(periods, Sequence) or len(periods) != depth - 1:
                wanted = f"with epochs, needs one number per edge level but the lowest, {depth - 1} of them"
                raise InvalidInput("periods", periods, wanted)
            periods = [*periods, epochs]
        if not isinstance(periods, Sequence) or len(periods) != depth:
            raise InvalidInput("periods", periods, f"needs one number per edge level, {depth} of them")
        whole_periods = tuple(check_integer("periods", period, at_least=1) for period in periods)
        if math.prod(whole_periods) > MOST_STEPS:
            raise InvalidInput("periods", list(periods), f"at most {MOST_STEPS:,} local steps in a global round")
        return Schedule(whole_periods)

    @staticmethod
    def of_steps(steps: Sequence[int], depth: int) -> Schedule:
        """Make a schedule of the paper's P list: level m synchronises every P_m local steps, root
        first."""
        wanted = "each must be a whole number that divides the one before it"
        steps, depth = plain(steps), check_integer("depth", depth, at_least=1)
        if not isinstance(steps, Sequence) or len(steps) != depth:
            raise InvalidInput("steps_per_sync", steps, f"needs one number per edge level, {depth} of them")
        steps = [check_integer("steps_per_sync", period, at_least=1, at_most=MOST_STEPS) for period in steps]
        ratios = []
        for above, below in zip(steps, [*steps[1:], 1], strict=True):
            if above % below:
                raise InvalidInput("steps_per_sync", steps, wanted)
            ratios.append(above // below)
        return Schedule.of(ratios, depth)

    @property
    def steps(self) -> tuple[int, ...]:
        """The paper's P list: local steps between two synchronisations of each edge level."""
        return tuple(math.prod(self.periods[level:]) for level in range(len(self.periods)))

    @property
    def meetings(self) -> np.ndarray:
        """Number of synchronisations of each edge level in a global round, indexed by level."""
        return np.array([0, *(self.steps[0] // every for every in self.steps)])

    def events(self) -> Iterator[SyncEvent]:
        """The synchronisations of one global round."""
        return map(self.event, range(self.meetings[-1]))

    def event(self, number: int) -> SyncEvent:
        """One of these synchronisations, counted from 0."""
        every = self.steps
        done = (number + 1) * every[-1]
        return SyncEvent(every[-1], next(level for level, period in enumerate(every, 1) if done % period == 0))


MOST_DRAWN = 1 << 30
"""Largest number of sample indices that an engine of all clients at once holds until the next
synchronisation: 8 GB."""


def check_levels(field: str, given: Sequence[int], depth: int) -> list[int]:
    """Check a list of levels of a tree."""
    given = plain(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInput(field, given, "must be a list of levels")
    return [check_integer(field, level, at_least=0, at_most=depth) for level in given]


def check_drawn(schedule: Schedule, clients: float, largest: int, batch: int | None, passes: bool = False) -> str:
    """Why a period's batches cannot be held by an engine that draws those of all clients in one go,
    if they cannot. `passes`: over a client's data, in the place of steps."""
    steps, places = schedule.periods[-1], largest if batch is None else min(batch, largest)
    steps *= steps_per_epoch(largest, batch) if passes else 1
    if clients * steps * places <= MOST_DRAWN:
        return ""
    each = f"{steps:,} steps of {round(clients):,} clients with batches of {places:,}"
    return f"at most {MOST_DRAWN:,} samples between two meetings, not {each}; the loop engine has no such limit"
