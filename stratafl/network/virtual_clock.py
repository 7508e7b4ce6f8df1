"""The virtual time of a run as it goes on: who is in time, and how long a round takes.

All of it is a function of the network, the policies, the schedule, the seed and the number of the
round, and of nothing that is learnt. So a run asks before it trains, and one that goes on from a
checkpoint hears the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stratafl.core.participation import Draw, Participation
from stratafl.federation.state import LatePolicy
from stratafl.metrics.records import ClockedRound, RoundResult
from stratafl.network.instance import NetworkInstance
from stratafl.network.replay import Workload, WorkloadReplay
from stratafl.network.timeline import NetworkTimeline


@dataclass(frozen=True, eq=False)
class _RoundTiming:
    """One global round on the clock."""

    seconds: float
    total: float
    """With all rounds before it."""
    present: Mapping[tuple[int, int], np.ndarray]
    """By level and the number of its round in the run: who takes part."""
    late: tuple[str, ...]
    heard: Mapping[tuple[int, int], np.ndarray]
    """Likewise, where late work counts: whose reports are merged."""


class VirtualClock:
    """Tells a run who is in time, round by round."""

    def __init__(self, story: Workload, placed: NetworkInstance):
        self.story, self.placed = story, placed
        self.facts: dict[str, Any] = {"network": placed.network.as_tables()}
        """What its time depends on besides the run's workload, as plain data."""
        self._replay, self._round = self._beginning(), -1
        self._hour = _START

    def participation(self) -> tuple[Participation, ...]:
        """Those that are drawn, of whom those that are late are left out; root first."""
        if not self.story.waits_by_time:
            return self.story.participation
        return (self._present,) * self.story.tree.depth

    def later(self) -> dict[int, LatePolicy]:
        """The edge levels at which late work counts."""
        counting = [(level, each.staleness) for level, each in enumerate(self.story.wait, 1) if each.counts_late]
        return {
            level: LatePolicy(reporting=partial(self._heard, level), staleness_exponent=staleness)
            for level, staleness in counting
        }

    def record(self, result: RoundResult) -> ClockedRound:
        """A round's result with its time."""
        hour = self._at(result.round - 1)
        return ClockedRound(**vars(result), clock_seconds=hour.seconds, clock_total=hour.total, late=hour.late)

    def _present(self, draw: Draw) -> np.ndarray:
        return self._at(self._global(draw.level, draw.round)).present[draw.level, draw.round]

    def _heard(self, level: int, number: int) -> np.ndarray:
        return self._at(self._global(level, number)).heard[level, number]

    def _global(self, level: int, number: int) -> int:
        """The global round in which a level has its round of this number, counted from 0."""
        return number // int(self.story.schedule.meetings[level])

    def _at(self, round: int) -> _RoundTiming:
        """A global round, counted from 0; those before it are gone through, too, since what a child
        is sent depends on the last time that it came."""
        if round < self._round:
            self._replay, self._round, self._hour = self._beginning(), -1, _START
        while self._round < round:
            self._hour, self._round = self._next(), self._round + 1
        return self._hour

    def _beginning(self) -> WorkloadReplay:
        return WorkloadReplay(self.story, NetworkTimeline(self.placed, self.story.wait))

    def _next(self) -> _RoundTiming:
        row, tree = self._replay.round(), self.story.tree
        assert row.spent is not None, "a clock was there"
        seconds = float(row.spent.seconds[0])
        total = self._hour.total + seconds
        if not self.story.waits_by_time:
            return _RoundTiming(seconds, total, {}, (), {})
        present = row.take_part(self.story)
        late: list[str] = []
        for level, number in sorted(present, key=lambda at: (-at[0], at[1])):
            # below a node that is late itself nobody is missed
            missed_N = row.asked[level, number] & ~row.came[level, number]
            if level > 1:
                above = number * self.story.schedule.meetings[level - 1] // self.story.schedule.meetings[level]
                missed_N = missed_N & present[level - 1, int(above)][tree.parents[level]]
            late += tree.named(level, missed_N)
        heard = {at: came_N for at, came_N in row.came.items() if self.story.counts_late(at[0])}
        return _RoundTiming(seconds, total, present, tuple(late), heard)


_START = _RoundTiming(0.0, 0.0, {}, (), {})
