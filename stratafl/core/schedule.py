"""Synchronisation schedule: local steps between two synchronisations of each edge level."""

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
    """Local steps, followed by a synchronisation of one or more edge levels."""

    steps: int
    top_level: int
    """Highest edge level that synchronises; all levels below it do so, too."""


@dataclass(frozen=True)
class SyncSchedule:
    """Period of each edge level in units of the level below, root first.

    `SyncSchedule((30, 20))` is E = 30 and H = 20 of the MTGC paper: a group aggregates every 20
    local steps, and the root every 30 group rounds.
    """

    periods: tuple[int, ...]

    @staticmethod
    def of(periods: Sequence[int], depth: int) -> SyncSchedule:
        """Make a schedule from the periods of all edge levels, root first."""
        periods, depth = plain(periods), check_integer("depth", depth, at_least=1)
        if not isinstance(periods, Sequence) or len(periods) != depth:
            raise InvalidInput("schedule.periods", periods, f"needs one number per edge level, {depth} of them")
        checked = tuple(check_integer("schedule.periods", period, at_least=1) for period in periods)
        if math.prod(checked) > MOST_STEPS:
            raise InvalidInput(
                "schedule.periods", list(periods), f"at most {MOST_STEPS:,} local steps in a global round"
            )
        return SyncSchedule(checked)

    @staticmethod
    def of_steps(steps: Sequence[int], depth: int) -> SyncSchedule:
        """Make a schedule from the MTGC paper's list P: edge level m synchronises every P_m local
        steps, root first."""
        steps, depth = plain(steps), check_integer("depth", depth, at_least=1)
        if not isinstance(steps, Sequence) or len(steps) != depth:
            raise InvalidInput("steps_per_sync", steps, f"needs one number per edge level, {depth} of them")
        steps = [check_integer("steps_per_sync", period, at_least=1, at_most=MOST_STEPS) for period in steps]
        pairs = list(zip(steps, [*steps[1:], 1], strict=True))
        if any(above % below for above, below in pairs):
            raise InvalidInput("steps_per_sync", steps, "each must be a whole number that divides the one before it")
        return SyncSchedule.of([above // below for above, below in pairs], depth)

    @property
    def steps(self) -> tuple[int, ...]:
        """The MTGC paper's list P: local steps between two synchronisations of each edge level."""
        return tuple(math.prod(self.periods[level:]) for level in range(len(self.periods)))

    @property
    def meetings(self) -> np.ndarray:
        """Number of synchronisations of each edge level in a global round, indexed by level."""
        return np.array([0, *(self.steps[0] // every for every in self.steps)])

    def events(self) -> Iterator[SyncEvent]:
        """The synchronisations of one global round."""
        return map(self.event, range(self.meetings[-1]))

    def event(self, number: int) -> SyncEvent:
        """A synchronisation of the global round, counted from 0."""
        periods = self.steps
        done = (number + 1) * periods[-1]
        return SyncEvent(periods[-1], next(level for level, period in enumerate(periods, 1) if done % period == 0))


MOST_DRAWN = 1 << 30
"""Largest number of sample indices (8 GB) that an engine of all clients at once draws for the steps
until the next synchronisation."""


def check_levels(field: str, levels: Sequence[int], depth: int) -> list[int]:
    """Check a list of levels of a tree."""
    levels = plain(levels)
    if not isinstance(levels, Sequence) or isinstance(levels, str | bytes):
        raise InvalidInput(field, levels, "must be a list of levels")
    return [check_integer(field, level, at_least=0, at_most=depth) for level in levels]


def check_drawn(schedule: SyncSchedule, clients: float, largest: int, batch: int | None, passes: bool = False) -> str:
    """Reason why the batches of a period are too many for an engine that draws those of all clients
    at once; an empty text if they are not.

    largest: number of samples of the largest client. passes: whether the clients' period counts
    passes over their data instead of steps.
    """
    steps, size = schedule.periods[-1], largest if batch is None else min(batch, largest)
    steps *= steps_per_epoch(largest, batch) if passes else 1
    if clients * steps * size <= MOST_DRAWN:
        return ""
    drawn = f"{steps:,} steps of {round(clients):,} clients with batches of {size:,}"
    return f"at most {MOST_DRAWN:,} samples between two synchronisations, not {drawn}; the loop engine has no limit"
