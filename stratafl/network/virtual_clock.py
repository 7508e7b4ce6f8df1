"""Virtual clock of a running simulation: which updates arrive in time, and how long each round
takes.

All of it is a function of the network, the waiting policies, the schedule, the seed and the number
of the round, and of nothing that is learnt. So it is computed before a round is trained, one round
at a time, and a run that continues from a checkpoint gets the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stratafl.core.participation import Participation, ParticipationContext
from stratafl.federation.state import LatePolicy
from stratafl.metrics.records import ClockedRound, RoundResult
from stratafl.network.instance import NetworkInstance
from stratafl.network.replay import Workload, WorkloadReplay
from stratafl.network.timeline import NetworkTimeline


@dataclass(frozen=True, eq=False)
class _RoundTiming:
    """Virtual time of one global round."""

    seconds: float
    total: float
    """Seconds including all rounds before."""
    participants: Mapping[tuple[int, int], np.ndarray]
    """Mask of a level's nodes that take part, by level and number of its round in the run."""
    late: tuple[str, ...]
    """Names of the nodes that were selected and did not arrive in time."""
    aggregated: Mapping[tuple[int, int], np.ndarray]
    """Mask of nodes whose updates are aggregated, with the same keys, only at levels that apply
    late updates."""


class VirtualClock:
    """Decides which nodes take part in a simulated run, and adds virtual times to its records."""

    def __init__(self, workload: Workload, instance: NetworkInstance):
        self.workload, self.instance = workload, instance
        self.facts: dict[str, Any] = {"network": instance.network.as_tables()}
        """Its network as plain data, which the run's description stores."""
        self._replay, self._round = self._new_replay(), -1
        self._timing = _INITIAL

    def participation(self) -> tuple[Participation, ...]:
        """Participation of each edge level, root first. A late node takes part only where its level
        applies late updates."""
        if not self.workload.has_waiting_policy:
            return self.workload.participation
        return (self._participants,) * self.workload.tree.depth

    def late_update_policies(self) -> dict[int, LatePolicy]:
        """Policies of the edge levels that apply late updates."""
        return {
            level: LatePolicy(reporting=partial(self._aggregated, level), staleness_exponent=policy.staleness)
            for level, policy in enumerate(self.workload.wait, 1)
            if policy.applies_late_updates
        }

    def record(self, result: RoundResult) -> ClockedRound:
        """Add the virtual time to a round's result."""
        timing = self._timing_of(result.round - 1)
        return ClockedRound(**vars(result), clock_seconds=timing.seconds, clock_total=timing.total, late=timing.late)

    def _participants(self, draw: ParticipationContext) -> np.ndarray:
        return self._timing_of(self._global_round(draw.level, draw.round)).participants[draw.level, draw.round]

    def _aggregated(self, level: int, number: int) -> np.ndarray:
        return self._timing_of(self._global_round(level, number)).aggregated[level, number]

    def _global_round(self, level: int, number: int) -> int:
        """Global round, counted from 0, in which a level has its round of this number."""
        return number // int(self.workload.schedule.meetings[level])

    def _timing_of(self, round: int) -> _RoundTiming:
        """Timing of a global round, counted from 0.

        The rounds before it are replayed, too: the messages to a child depend on when it took part
        last.
        """
        if round < self._round:
            self._replay, self._round, self._timing = self._new_replay(), -1, _INITIAL
        while self._round < round:
            self._timing, self._round = self._next(), self._round + 1
        return self._timing

    def _new_replay(self) -> WorkloadReplay:
        return WorkloadReplay(self.workload, NetworkTimeline(self.instance, self.workload.wait))

    def _next(self) -> _RoundTiming:
        replayed, tree = self._replay.next_round(), self.workload.tree
        assert replayed.costs is not None, "a time line was given"
        seconds = float(replayed.costs.seconds[0])
        total = self._timing.total + seconds
        if not self.workload.has_waiting_policy:
            return _RoundTiming(seconds, total, {}, (), {})
        participants, syncs_per_round = replayed.participants(self.workload), self.workload.schedule.meetings
        late: list[str] = []
        for level, number in sorted(participants, key=lambda key: (-key[0], key[1])):
            late_N = replayed.selected[level, number] & ~replayed.arrived[level, number]
            if level > 1:
                # below a node that is late itself, no other node is reported as late
                above = number * syncs_per_round[level - 1] // syncs_per_round[level]
                late_N = late_N & participants[level - 1, int(above)][tree.parents[level]]
            late += tree.owned_names(level, late_N)
        applies_late_updates = self.workload.applies_late_updates
        aggregated = {key: arrived_N for key, arrived_N in replayed.arrived.items() if applies_late_updates(key[0])}
        return _RoundTiming(seconds, total, participants, tuple(late), aggregated)


_INITIAL = _RoundTiming(0.0, 0.0, {}, (), {})
