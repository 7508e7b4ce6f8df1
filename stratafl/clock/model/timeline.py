"""The time line of a global round, from the moment at which the root may hand out its model to the
moment at which it has merged a new one.

A round is a sequence of stages; each begins some edge levels, trains, and lets some edge levels
meet. In a stage, with times counted from the beginning of the round:

    down      A parent sends to all children that are to get something as soon as it is ready: the
              root at 0, or since its last meeting; an aggregator, since its own parent's message
              came. A leaf that is away gets its own when it is back. A message takes the sender's
              overhead, then the transfer over the child's link and its fair share of the parent's
              pipe (`sharing`), then latency and jitter. What goes to children that do not take part
              now, such as an answer to their last report, yields the pipe to those that do.
    compute   A leaf that has the model pauses, and makes its steps: steps x seconds per step x
              slowdown, as often as its work is lost, and once more.
    up        It sends its report, in the same way. A parent merges when the last child that takes
              part has been heard, and if it meets its own parent at the same time, it reports next.

Nobody waits for anybody but its own parent and its own children, so groups of a level go their ways
until they meet above. Everything that a child is to get between two of its rounds goes down as one
transfer, when its next round begins; what is still owed after the last meeting of a run takes no
time. Directions do not disturb each other.

Where a round's time goes: a parent's round lasts as long for each child that takes part, which is
what its messages, its own work and its waiting for the slowest add up to. So with every child that
takes part as one of n, the parts of all levels add up to the round's time, exactly.

Shape suffixes: R rounds side by side, N nodes of a level, M nodes of the level above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stratafl.base.tree import Tree
from stratafl.clock.model.placed import Edges, PlacedNetwork
from stratafl.clock.model.sharing import finished

AWAY, COMPUTE, DOWN, UP, WAIT, MERGE = PARTS = ("away", "compute", "down", "up", "wait", "merge")
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
    """By level that begins: who takes part (R x N)."""
    down: dict[int, Messages]
    """By level that begins."""
    up: dict[int, Messages]
    """By level that meets."""
    counter: dict[int, np.ndarray]
    """By level: the number of its round in the run (R), from which what varies is drawn."""
    steps_N: np.ndarray
    """Of each leaf."""


@dataclass(frozen=True, eq=False)
class Spent:
    """What global rounds took, each by itself (R)."""

    seconds: np.ndarray
    parts: dict[Part, np.ndarray]
    """Seconds by what they went into; they add up to all."""
    joules: np.ndarray


class Interval(NamedTuple):
    """What one kind of thing did on a level, for a picture of the time line."""

    what: str
    level: int
    begin_RN: np.ndarray
    end_RN: np.ndarray
    who_RN: np.ndarray


Observer = Callable[[Interval], None]


@dataclass(eq=False)
class _Sums:
    """What is added up in the course of a round."""

    rounds: int
    watch: Observer | None
    parts: dict[Part, np.ndarray] = field(default_factory=dict)
    joules_R: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.joules_R = np.zeros(self.rounds)

    def part(self, what: str, level: int, weight_RN: np.ndarray, seconds_RN: np.ndarray) -> None:
        spent_R = (weight_RN * seconds_RN).sum(axis=1)
        self.parts[what, level] = self.parts.get((what, level), np.zeros(self.rounds)) + spent_R

    def see(self, what: str, level: int, begin_RN: np.ndarray, end_RN: np.ndarray, who_RN: np.ndarray) -> None:
        if self.watch is not None:
            self.watch(Interval(what, level, begin_RN, end_RN, who_RN))


class Clock:
    """A network on a tree, ready to say how long rounds take."""

    def __init__(self, placed: PlacedNetwork):
        self.placed, self.tree = placed, placed.tree
        self._families = [Families(self.tree, level) for level in range(1, self.tree.depth + 1)]

    def spent(self, stages: Sequence[Stage], rounds: int, watch: Observer | None = None) -> Spent:
        """What so many global rounds take that have these stages."""
        tree, sums = self.tree, _Sums(rounds, watch)
        ready: dict[int, np.ndarray] = {0: np.zeros((rounds, 1))}
        weight: dict[int, np.ndarray] = {0: np.ones((rounds, 1))}
        for stage in stages:
            for level in range(stage.begin, tree.depth + 1):
                parent_N, active_RN = tree.parents[level], stage.active[level]
                count_RM = self._families[level - 1].sum(active_RN.astype(np.float64))
                each_RM = weight[level - 1] / np.maximum(count_RM, 1)
                weight[level] = each_RM[:, parent_N] * active_RN
                ready[level] = self._down(stage, level, ready[level - 1], weight[level], sums)
            done = self._compute(stage, ready[tree.depth], weight[tree.depth], sums)
            for level in range(tree.depth, stage.end - 1, -1):
                done = self._up(stage, level, done, weight, sums)
            ready[stage.end - 1] = done
        return Spent(ready[0][:, 0], sums.parts, sums.joules_R)

    def _down(self, stage: Stage, level: int, ready_RM: np.ndarray, weight_RN: np.ndarray, sums: _Sums) -> np.ndarray:
        """When each child has what its parent gave; who gets nothing has it already."""
        edges, families = self.placed.edge(level), self._families[level - 1]
        messages, active_RN = stage.down[level], stage.active[level]
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
        sums.see(DOWN, level, told_RN + away_RN, got_RN, active_RN & there_RN)
        return got_RN

    def _away(self, counter_R: np.ndarray) -> np.ndarray:
        """How long leaves are away that are asked to take part."""
        devices, seed = self.placed.devices, self.placed.seed
        if (devices.availability_N == 1).all():
            return np.zeros((1, 1))
        is_away_RN = devices.chances[0].each(seed, counter_R) >= devices.availability_N
        return is_away_RN * devices.away.each(seed, counter_R)

    def _compute(self, stage: Stage, ready_RN: np.ndarray, weight_RN: np.ndarray, sums: _Sums) -> np.ndarray:
        """When each leaf has made its steps."""
        devices, seed, level = self.placed.devices, self.placed.seed, self.tree.depth
        counter_R, active_RN = stage.counter[level], stage.active[level]
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
        sums.joules_R += (work_RN * active_RN * devices.watts_N).sum(axis=1)
        sums.see(COMPUTE, level, ready_RN + pause_RN, ready_RN + pause_RN + work_RN, active_RN)
        return ready_RN + pause_RN + work_RN

    def _up(
        self, stage: Stage, level: int, done_RN: np.ndarray, weight: dict[int, np.ndarray], sums: _Sums
    ) -> np.ndarray:
        """When each parent has merged what came; one to whom nobody comes has nothing to do."""
        edges, families = self.placed.edge(level), self._families[level - 1]
        messages, parent_N = stage.up[level], self.tree.parents[level]
        there_RN = messages.count_RN > 0
        begin_RN = done_RN + messages.count_RN * edges.overhead_s_N
        size_RN = messages.bytes_RN + messages.count_RN * edges.overhead_bytes_N
        sent_RN = families.transfer(begin_RN, size_RN, edges.up_N, edges.pipe_up_M, there_RN)
        delay_RN = edges.latency_N + edges.jitter.each(self.placed.seed, 2 * stage.counter[level] + 1)
        heard_RN = np.where(there_RN, sent_RN + delay_RN, -np.inf)
        last_RM, count_RM = families.max(heard_RN), families.sum(there_RN.astype(np.float64))
        last_RM = np.where(count_RM > 0, last_RM, 0.0)
        merge_RM = np.where(count_RM > 0, edges.merge_s_M + count_RM * edges.merge_s_per_child_M, 0.0)
        got_RN = np.where(there_RN, heard_RN, done_RN)
        last_RN = last_RM[:, parent_N]
        sums.part(UP, level, weight[level], got_RN - done_RN)
        sums.part(WAIT, level, weight[level], np.where(there_RN, last_RN - got_RN, 0.0))
        sums.part(MERGE, level, weight[level - 1], merge_RM)
        sums.joules_R += ((sent_RN - begin_RN) * there_RN * edges.up_watts_N).sum(axis=1)
        sums.joules_R += (merge_RM * edges.merge_watts_M).sum(axis=1)
        sums.see(UP, level, done_RN, got_RN, there_RN)
        sums.see(WAIT, level, got_RN, last_RN, there_RN)
        sums.see(MERGE, level, last_RM, last_RM + merge_RM, count_RM > 0)
        return last_RM + merge_RM


class Families:
    """The children of each parent of a level, who are neighbours."""

    def __init__(self, tree: Tree, level: int):
        counts_M = tree.children(level - 1)
        self._starts_M = np.cumsum(counts_M) - counts_M
        self._parents, self._most = len(counts_M), int(counts_M.max())
        self._is_even = bool((counts_M == self._most).all())
        self._place_N = tree.parents[level] * self._most + np.arange(len(tree.parents[level]))
        self._place_N -= self._starts_M[tree.parents[level]]

    def sum(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_even:
            return values_RN.reshape(len(values_RN), self._parents, self._most).sum(axis=2)
        return np.add.reduceat(values_RN, self._starts_M, axis=1)

    def max(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_even:
            return values_RN.reshape(len(values_RN), self._parents, self._most).max(axis=2)
        return np.maximum.reduceat(values_RN, self._starts_M, axis=1)

    def transfer(
        self, begin_RN: np.ndarray, size_RN: np.ndarray, link_N: np.ndarray, pipe_M: np.ndarray, there_RN: np.ndarray
    ) -> np.ndarray:
        """When transfers end; where none is, its own beginning."""
        if np.isinf(pipe_M).all():
            return np.where(there_RN, begin_RN + size_RN / link_N, begin_RN)
        rounds = len(there_RN)
        link_RN = np.broadcast_to(link_N, there_RN.shape)
        padded = [self._padded(values, fill) for values, fill in
                  ((begin_RN, 0.0), (size_RN, 0.0), (link_RN, 1.0), (there_RN, False))]  # fmt: skip
        begin, size, link, there = padded
        ends = finished(begin, size, link, np.tile(pipe_M, rounds), there)
        return ends.reshape(rounds, -1)[:, self._place_N]

    def _padded(self, values_RN: np.ndarray, fill: float | bool) -> np.ndarray:
        padded = np.full((len(values_RN), self._parents * self._most), fill, dtype=values_RN.dtype)
        padded[:, self._place_N] = values_RN
        return padded.reshape(-1, self._most)


def wire_bytes(edges: Edges, messages: Messages) -> np.ndarray:
    """All bytes that go over a level's links, with the protocol's, per round."""
    return np.asarray((messages.bytes_RN + messages.count_RN * edges.overhead_bytes_N).sum(axis=1))
