"""Time line of a global round: download, compute, upload, wait, aggregate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stratafl.network.instance import NetworkInstance
from stratafl.network.links import SiblingGroups
from stratafl.network.waiting import WAIT_FOR_ALL, WaitPolicy, close_round


class Phase(NamedTuple):
    """A part of a child's way, which ends at these times."""

    what: str
    end_RN: np.ndarray


class PendingReport(NamedTuple):
    """What a child sends in the end."""

    begin_RN: np.ndarray
    bytes_RN: np.ndarray
    delay_RN: np.ndarray
    """Between the last byte's sending and its arrival."""
    full_RN: np.ndarray
    """Whether there is a model in it."""


@dataclass(eq=False)
class InFlightWork:
    """Of all nodes of a level; only those of which `is_RN` is true mean anything."""

    is_RN: np.ndarray
    whats: tuple[str, ...]
    bounds_FRN: np.ndarray
    """When each phase begins; the last entry is when the report was ready."""
    report: PendingReport

    @staticmethod
    def begun(
        before: InFlightWork | None,
        who_RN: np.ndarray,
        told_RN: np.ndarray,
        phases: Sequence[Phase],
        report: PendingReport,
    ) -> InFlightWork:
        """With those in the mask at the beginning of their way."""
        shape = who_RN.shape
        whats = tuple(phase.what for phase in phases)
        bounds = np.stack([np.broadcast_to(each, shape) for each in (told_RN, *(phase.end_RN for phase in phases))])
        new = PendingReport(*(np.broadcast_to(each, shape).copy() for each in report))
        if before is None:
            return InFlightWork(who_RN.copy(), whats, bounds, new)
        mixed = PendingReport(*(np.where(who_RN, one, other) for one, other in zip(new, before.report, strict=True)))
        return InFlightWork(before.is_RN | who_RN, whats, np.where(who_RN, bounds, before.bounds_FRN), mixed)

    def spans(self, heard_RN: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """What each does from when to when, until its report is heard; the way up comes last."""
        own = [(what, self.bounds_FRN[n], self.bounds_FRN[n + 1]) for n, what in enumerate(self.whats)]
        return [*own, ("up", self.bounds_FRN[-1], heard_RN)]

    def merged(self, came_RN: np.ndarray, left_RN: np.ndarray, sent_RN: np.ndarray, closed_RN: np.ndarray) -> None:
        """Without those that were heard; the others' transfers go on with what is left of them, and
        are over where nothing is."""
        begin_RN = np.where(left_RN > 0, np.maximum(self.report.begin_RN, closed_RN), sent_RN)
        self.is_RN = self.is_RN & ~came_RN
        self.report = self.report._replace(begin_RN=begin_RN, bytes_RN=left_RN)


AWAY, COMPUTE, DOWN, UP, WAIT, MERGE, WORK = PARTS = ("away", "compute", "down", "up", "wait", "merge", "work")

Part = tuple[str, int]
"""What time goes into, and on which edge level; the leaves' for away and compute."""


class Messages(NamedTuple):
    """What goes over one edge level in one direction in a stage."""

    count_RN: np.ndarray
    bytes_RN: np.ndarray
    """Without what the protocol adds."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a global round, of several rounds at once."""

    begin: int
    """Edge levels from this to the leaves' begin a round of theirs."""
    end: int
    """Edge levels from the leaves' up to this one meet after it."""
    active: dict[int, np.ndarray]
    """By level that begins: who takes part (R x N), and is heard in time."""
    down: dict[int, Messages]
    """By level that begins."""
    up: dict[int, Messages]
    """By level that meets."""
    counter: dict[int, np.ndarray]
    """By level: the number of its round in the run (R), from which what varies is drawn."""
    steps_N: np.ndarray
    """Of each leaf."""
    asked: dict[int, np.ndarray] | None = None
    """By level that begins: who was asked and works, also in vain, where anybody can be late."""

    def working(self, level: int) -> np.ndarray:
        """Who works on a level, whether it counts or not."""
        return self.active[level] if self.asked is None else self.asked[level]


@dataclass(frozen=True, eq=False)
class RoundCosts:
    """What global rounds took, each by itself (R)."""

    seconds: np.ndarray
    parts: dict[Part, np.ndarray]
    """Seconds by what they went into; they add up to all."""
    joules: np.ndarray


class Activity(NamedTuple):
    """What one kind of thing did on a level, for a picture of the time line."""

    what: str
    level: int
    begin_RN: np.ndarray
    end_RN: np.ndarray
    who_RN: np.ndarray


ActivityCallback = Callable[[Activity], None]


@dataclass(eq=False)
class _Sums:
    """What is added up in the course of a round."""

    rounds: int
    watch: ActivityCallback | None
    parts: dict[Part, np.ndarray] = field(default_factory=dict)
    joules_R: np.ndarray = field(init=False)
    work_RN: np.ndarray = field(init=False)
    """Seconds for which each leaf computes in the stage under way."""

    def __post_init__(self) -> None:
        self.joules_R = np.zeros(self.rounds)

    def part(self, what: str, level: int, weight_RN: np.ndarray, seconds_RN: np.ndarray) -> None:
        spent_R = (weight_RN * seconds_RN).sum(axis=1)
        self.parts[what, level] = self.parts.get((what, level), np.zeros(self.rounds)) + spent_R

    def see(self, what: str, level: int, begin_RN: np.ndarray, end_RN: np.ndarray, who_RN: np.ndarray) -> None:
        if self.watch is not None:
            self.watch(Activity(what, level, begin_RN, end_RN, who_RN))


class TimelineState:
    """Where global rounds stand that are gone through stage by stage."""

    def __init__(self, rounds: int, watch: ActivityCallback | None = None):
        self.sums = _Sums(rounds, watch)
        self.ready: dict[int, np.ndarray] = {0: np.zeros((rounds, 1))}
        """By level: since when each node has what it hands out or works on."""
        self.opened: dict[int, np.ndarray] = {}
        """By edge level: when the parents' meetings opened."""
        self.weight: dict[int, np.ndarray] = {0: np.ones((rounds, 1))}
        self.open: dict[int, np.ndarray] = {0: np.ones((rounds, 1), dtype=bool)}
        """By level: who works, and holds meetings."""
        self.phases: dict[int, list[Phase]] = {}
        """By edge level: what those do that begin, until they report."""
        self.flights: dict[int, InFlightWork] = {}
        """By edge level at which late work counts."""
        self.closed: dict[int, np.ndarray] = {}
        """Likewise, when the parents' last meetings closed."""

    def begin_round(self, watch: ActivityCallback | None = None) -> float:
        """Forget what the rounds before came to; the time at which this one begins."""
        self.sums = _Sums(1, watch)
        return float(self.seconds_R[0])

    @property
    def seconds_R(self) -> np.ndarray:
        """Since the beginning, once the root has met."""
        return self.ready[0][:, 0]


class NetworkTimeline:
    """A network on a tree, ready to say how long rounds take."""

    def __init__(self, placed: NetworkInstance, wait: Sequence[WaitPolicy] = ()):
        """wait: whom parents wait for, per edge level, root first; all unless given."""
        self.placed, self.tree = placed, placed.tree
        self.wait = tuple(wait) or (WAIT_FOR_ALL,) * placed.tree.depth
        self._families = [SiblingGroups(self.tree, level) for level in range(1, self.tree.depth + 1)]

    def spent(self, stages: Sequence[Stage], rounds: int, watch: ActivityCallback | None = None) -> RoundCosts:
        """What so many global rounds take that have these stages."""
        walk = TimelineState(rounds, watch)
        for stage in stages:
            self.advance(walk, stage)
        return RoundCosts(walk.seconds_R, walk.sums.parts, walk.sums.joules_R)

    def advance(self, walk: TimelineState, stage: Stage) -> dict[int, np.ndarray]:
        """Go through a stage; by level that met, who was heard in time (R x N)."""
        tree, ready, weight, sums = self.tree, walk.ready, walk.weight, walk.sums
        for level in range(stage.begin, tree.depth + 1):
            families, active_RN = self._families[level - 1], stage.active[level]
            count_RM = families.sum(active_RN.astype(np.float64))
            weight[level] = families.spread(weight[level - 1] / np.maximum(count_RM, 1)) * active_RN
            if self.wait[level - 1].counts_late:
                # counted when its meetings close, for whoever is under way then
                weight[level] = np.zeros_like(weight[level])
            walk.opened[level], walk.open[level] = ready[level - 1], stage.working(level)
            ready[level], walk.phases[level] = self._down(stage, level, ready[level - 1], weight[level], sums)
        done, phases = self._compute(stage, ready[tree.depth], weight[tree.depth], sums)
        walk.phases[tree.depth] += phases
        came = {}
        for level in range(tree.depth, stage.end - 1, -1):
            up = self._up_later if self.wait[level - 1].counts_late else self._up
            came[level], done = up(stage, level, done, walk)
        ready[stage.end - 1] = done
        return came

    def _down(
        self, stage: Stage, level: int, ready_RM: np.ndarray, weight_RN: np.ndarray, sums: _Sums
    ) -> tuple[np.ndarray, list[Phase]]:
        """When each child has what its parent gave; who gets nothing has it already."""
        edges, families = self.placed.edge(level), self._families[level - 1]
        messages, active_RN = stage.down[level], stage.working(level)
        told_RN = ready_RM[:, self.tree.parents[level]]
        away_RN = self._away(stage.counter[level]) if level == self.tree.depth else np.zeros((1, 1))
        there_RN = messages.count_RN > 0
        begin_RN = told_RN + away_RN + messages.count_RN * edges.overhead_s_N
        size_RN = messages.bytes_RN + messages.count_RN * edges.overhead_bytes_N
        # who does not take part is nobody's hurry, and gets what the pipe has to spare
        sent_RN = families.transfer(begin_RN, size_RN, edges.down_N, edges.pipe_down_M, there_RN & active_RN)
        sent_RN = np.where(there_RN & ~active_RN, begin_RN + size_RN / edges.down_N, sent_RN)
        delay_RN = edges.latency_N + edges.jitter.each(self.placed.seed, 2 * stage.counter[level])
        got_RN = np.where(there_RN, sent_RN + delay_RN, told_RN + away_RN)
        sums.part(DOWN, level, weight_RN, got_RN - told_RN - away_RN)
        if level == self.tree.depth:
            sums.part(AWAY, level, weight_RN, np.broadcast_to(away_RN, told_RN.shape))
        sums.joules_R += ((sent_RN - begin_RN) * there_RN * edges.down_watts_N).sum(axis=1)
        sums.see(AWAY, level, told_RN, told_RN + away_RN, active_RN & (away_RN > 0))
        sums.see(DOWN, level, told_RN + away_RN, got_RN, active_RN & there_RN)
        return got_RN, [Phase(AWAY, told_RN + away_RN), Phase(DOWN, got_RN)]

    def _away(self, counter_R: np.ndarray) -> np.ndarray:
        """How long leaves are away that are asked to take part."""
        devices, seed = self.placed.devices, self.placed.seed
        if (devices.availability_N == 1).all():
            return np.zeros((1, 1))
        is_away_RN = devices.chances[0].each(seed, counter_R) >= devices.availability_N
        return is_away_RN * devices.away.each(seed, counter_R)

    def _compute(
        self, stage: Stage, ready_RN: np.ndarray, weight_RN: np.ndarray, sums: _Sums
    ) -> tuple[np.ndarray, list[Phase]]:
        """When each leaf has made its steps."""
        devices, seed, level = self.placed.devices, self.placed.seed, self.tree.depth
        counter_R, active_RN = stage.counter[level], stage.working(level)
        pause_RN = devices.pause.each(seed, counter_R)
        work_RN = stage.steps_N * devices.step_s_N * devices.slowdown.each(seed, counter_R)
        if (devices.dropout_N > 0).any():
            # lost k times with the probability dropout^k
            chance_RN = np.maximum(devices.chances[1].each(seed, counter_R), np.finfo(np.float64).tiny)
            lost_N = np.where(devices.dropout_N > 0, devices.dropout_N, 0.5)
            times_RN = np.floor(np.log(chance_RN) / np.log(lost_N)) * (devices.dropout_N > 0)
            work_RN = work_RN * (1 + times_RN)
        sums.part(AWAY, level, weight_RN, pause_RN)
        sums.part(COMPUTE, level, weight_RN, work_RN)
        sums.work_RN = work_RN * active_RN
        sums.joules_R += (sums.work_RN * devices.watts_N).sum(axis=1)
        begin_RN, end_RN = ready_RN + pause_RN, ready_RN + pause_RN + work_RN
        sums.see(AWAY, level, ready_RN, begin_RN, active_RN & (pause_RN > 0))
        sums.see(COMPUTE, level, begin_RN, end_RN, active_RN)
        return end_RN, [Phase(AWAY, begin_RN), Phase(COMPUTE, end_RN)]

    def _up(self, stage: Stage, level: int, done_RN: np.ndarray, walk: TimelineState) -> tuple[np.ndarray, np.ndarray]:
        """Who came in time, and when each parent has merged that; one to whom nobody comes has
        nothing to do."""
        edges, families = self.placed.edge(level), self._families[level - 1]
        messages, weight, sums = stage.up[level], walk.weight, walk.sums
        there_RN = messages.count_RN > 0
        begin_RN = done_RN + messages.count_RN * edges.overhead_s_N
        size_RN = messages.bytes_RN + messages.count_RN * edges.overhead_bytes_N
        sent_RN = families.transfer(begin_RN, size_RN, edges.up_N, edges.pipe_up_M, there_RN)
        delay_RN = edges.latency_N + edges.jitter.each(self.placed.seed, 2 * stage.counter[level] + 1)
        policy = self.wait[level - 1]
        full_RN, heard_RN = messages.bytes_RN > 0, sent_RN + delay_RN
        came_RN, count_RM, last_RM = close_round(policy, families, heard_RN, there_RN, full_RN, walk.opened[level])
        merge_RM = np.where(count_RM > 0, edges.merge_s_M + count_RM * edges.merge_s_per_child_M, 0.0)
        got_RN = np.where(there_RN, heard_RN, done_RN)
        last_RN = families.spread(last_RM)
        if not policy.is_all:
            # who is late stops when the meeting closes
            got_RN, sent_RN = (np.where(there_RN, np.minimum(each, last_RN), each) for each in (got_RN, sent_RN))
            before_RN = done_RN
            done_RN, begin_RN = np.minimum(done_RN, got_RN), np.minimum(begin_RN, sent_RN)
            if level == self.tree.depth:
                unmade_RN = np.minimum(sums.work_RN, before_RN - done_RN) * there_RN
                sums.joules_R -= (unmade_RN * self.placed.devices.watts_N).sum(axis=1)
        sums.part(UP, level, weight[level], got_RN - done_RN)
        sums.part(WAIT, level, weight[level], np.where(came_RN, last_RN - got_RN, 0.0))
        sums.part(MERGE, level, weight[level - 1], merge_RM)
        sums.joules_R += ((sent_RN - begin_RN) * there_RN * edges.up_watts_N).sum(axis=1)
        sums.joules_R += (merge_RM * edges.merge_watts_M).sum(axis=1)
        sums.see(UP, level, done_RN, got_RN, there_RN)
        sums.see(WAIT, level, got_RN, last_RN, came_RN)
        sums.see(MERGE, level, last_RM, last_RM + merge_RM, count_RM > 0)
        return came_RN, last_RM + merge_RM

    def _up_later(
        self, stage: Stage, level: int, done_RN: np.ndarray, walk: TimelineState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Likewise where late work counts: who of all that are under way was heard."""
        edges, families, sums = self.placed.edge(level), self._families[level - 1], walk.sums
        messages, opened_RM = stage.up[level], walk.opened[level]
        phases = walk.phases[level] if level == self.tree.depth else [*walk.phases[level], Phase(WORK, done_RN)]
        delay_RN = edges.latency_N + edges.jitter.each(self.placed.seed, 2 * stage.counter[level] + 1)
        new = PendingReport(
            done_RN + messages.count_RN * edges.overhead_s_N,
            messages.bytes_RN + messages.count_RN * edges.overhead_bytes_N,
            delay_RN,
            messages.bytes_RN > 0,
        )
        began_RN, told_RN = walk.open[level], families.spread(opened_RM)
        flights = InFlightWork.begun(walk.flights.get(level), began_RN, told_RN, phases, new)
        walk.flights[level], report = flights, flights.report
        pipes = report.begin_RN, report.bytes_RN, edges.up_N, edges.pipe_up_M, flights.is_RN
        sent_RN = families.transfer(*pipes)
        heard_RN, asked_RN = sent_RN + report.delay_RN, flights.is_RN & families.spread(walk.open[level - 1])
        policy, full_RN = self.wait[level - 1], report.full_RN
        came_RN, count_RM, last_RM = close_round(policy, families, heard_RN, asked_RN, full_RN, opened_RM)
        merge_RM = np.where(count_RM > 0, edges.merge_s_M + count_RM * edges.merge_s_per_child_M, 0.0)

        last_RN = families.spread(last_RM)
        weight_RN = families.spread(walk.weight[level - 1] / np.maximum(families.sum(asked_RN.astype(float)), 1))
        for what, begin_RN, end_RN in [*flights.spans(heard_RN), (WAIT, heard_RN, last_RN)]:
            begin_RN, end_RN = np.maximum(begin_RN, told_RN), np.minimum(end_RN, last_RN)
            long_RN = asked_RN & (end_RN > begin_RN)
            sums.part(what, level, weight_RN, np.where(long_RN, end_RN - begin_RN, 0.0))
        self._see_way_up(level, walk, heard_RN, last_RN, asked_RN)
        sums.part(MERGE, level, walk.weight[level - 1], merge_RM)
        sending_RN = np.maximum(np.minimum(sent_RN, last_RN) - report.begin_RN, 0.0) * asked_RN
        sums.joules_R += (sending_RN * edges.up_watts_N).sum(axis=1) + (merge_RM * edges.merge_watts_M).sum(axis=1)
        sums.see(MERGE, level, last_RM, last_RM + merge_RM, count_RM > 0)
        # a parent that holds no meeting leaves everything as it is
        until_RM = np.where(families.sum(asked_RN.astype(float)) > 0, last_RM, -np.inf)
        flights.merged(came_RN, families.left(*pipes, until_RM), sent_RN, families.spread(until_RM))
        walk.closed[level] = np.maximum(walk.closed.get(level, opened_RM), until_RM)
        return came_RN, last_RM + merge_RM

    def _see_way_up(
        self, level: int, walk: TimelineState, heard_RN: np.ndarray, end_RN: np.ndarray, who_RN: np.ndarray
    ) -> None:
        """What has not been seen of reports on their way, and of waiting with them, up to a moment;
        also while their parent is busy above."""
        since_RM = walk.closed.get(level, walk.opened[level])
        ready_RN, since_RN = walk.flights[level].bounds_FRN[-1], self._families[level - 1].spread(since_RM)
        for what, begin_RN, until_RN in ((UP, ready_RN, heard_RN), (WAIT, heard_RN, end_RN)):
            begin_RN, until_RN = np.maximum(begin_RN, since_RN), np.minimum(until_RN, end_RN)
            walk.sums.see(what, level, begin_RN, until_RN, who_RN & (until_RN > begin_RN))

    def see_rest(self, walk: TimelineState) -> None:
        """What children are up to whose parents have closed their meetings of the round."""
        for level, flights in walk.flights.items():
            edges, report = self.placed.edge(level), flights.report
            pipes = report.begin_RN, report.bytes_RN, edges.up_N, edges.pipe_up_M, flights.is_RN
            heard_RN = self._families[level - 1].transfer(*pipes) + report.delay_RN
            self._see_way_up(level, walk, heard_RN, np.full_like(heard_RN, walk.seconds_R[0]), flights.is_RN)
