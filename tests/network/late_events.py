"""Independent model of late updates: every node is a process of an event simulation (SimPy) that
trains on least squares, so time and learning proceed together.

It shares no code with the virtual clock or the federation, and implements the definitions of
docs/clock.md. Links have a latency, an overhead and a bandwidth of their own; updates share the
parent's link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import simpy

from tests.network.events import Pipe
from tests.problems import LeastSquares


@dataclass
class Child:
    """State of one edge to a parent."""

    z: np.ndarray
    """MTGC's correction."""
    used: np.ndarray | None = None
    """Correction that the work in progress uses."""
    start: np.ndarray | None = None
    since: int = 0
    rate: float = 0.0
    model: np.ndarray | None = None
    is_busy: bool = False


@dataclass
class Parent:
    meetings: int = 0
    arrivals: list[int] = field(default_factory=list)
    """Children whose updates arrived and are not aggregated, in order of arrival."""
    wake: simpy.Event | None = None


class LateWorld:
    """Simulation of a tree whose levels wait for the first `buffers[level]` children and apply late
    updates; None for a level that waits for all."""

    def __init__(
        self,
        problem: LeastSquares,
        periods: list[int],
        buffers: list[int | None],
        corrects: bool,
        restart: str,
        staleness: float,
        lr: float,
        seconds: Callable[[int], float],
        delay: Callable[[int, int], float],
        size: Callable[[int], float],
        link: float,
        pipe: float,
    ):
        """seconds: compute time of a leaf; delay: latency of a message by level and node; size:
        bytes of an update by level, sent over links of this rate and the shared link of the
        parent."""
        self.problem, self.tree, self.periods, self.buffers = problem, problem.tree, periods, buffers
        self.corrects, self.restart, self.staleness, self.lr = corrects, restart, staleness, lr
        self.seconds, self.delay, self.size, self.link = seconds, delay, size, link
        self.env = simpy.Environment()
        self.children = {
            (level, node): Child(np.zeros_like(problem.x0))
            for level in range(1, self.tree.depth + 1)
            for node in range(self.tree.sizes[level])
        }
        self.parents = {(lv, node): Parent() for lv in range(self.tree.depth) for node in range(self.tree.sizes[lv])}
        self.pipes = {key: Pipe(self.env, pipe) for key in self.parents}

    def run(self, rounds: int) -> list[tuple[float, np.ndarray]]:
        """Time and root model at the end of each global round."""
        results: list[tuple[float, np.ndarray]] = []

        def root():
            model = self.problem.x0
            for _ in range(rounds):
                model, _ = yield from self.meeting(0, 0, model, np.zeros_like(model), is_last=False)
                results.append((self.env.now, model))

        self.env.run(self.env.process(root()))
        return results

    def below(self, level: int, node: int) -> list[int]:
        return [int(child) for child in np.flatnonzero(self.tree.parents[level + 1] == node)]

    def meeting(self, level: int, node: int, model: np.ndarray, version: np.ndarray, is_last: bool):
        """Hold a round: start free children, wait, aggregate; returns the new model and the sum of
        the learning rates by which it moved.

        known: corrections of all edges above, as they came with the node's model. is_last: the node
        reports next, and a newer model will come.
        """
        parent, below = self.parents[level, node], self.below(level, node)
        for child in below:
            state = self.children[level + 1, child]
            if not state.is_busy:
                state.is_busy, state.start, state.since, state.used = True, model, parent.meetings, state.z.copy()
                self.env.process(self.visit(level + 1, child, node, model, version + state.used))
        enough = self.buffers[level]
        enough = len(below) if enough is None else min(enough, len(below))
        while len(parent.arrivals) < enough:
            parent.wake = self.env.event()
            yield parent.wake
        came, parent.arrivals = parent.arrivals[:enough], parent.arrivals[enough:]
        came.sort()
        states = [self.children[level + 1, child] for child in came]
        weights = np.array([self.tree.weights[level + 1][child] for child in came])
        weights = weights / weights.sum()
        ages = np.array([parent.meetings - state.since for state in states])
        counts = (1.0 + ages) ** -self.staleness
        moves = [state.model - state.start for state in states]
        merged = model + sum(w * c * move for w, c, move in zip(weights, counts, moves, strict=True))
        if self.corrects and not (is_last and self.restart == "zero"):
            # as if each had used the correction that it has, at the siblings' mean rate
            rate = sum(w * state.rate for w, state in zip(weights, states, strict=True))
            moves = [move + rate * (state.used - state.z) for move, state in zip(moves, states, strict=True)]
            mean = sum(w * move for w, move in zip(weights, moves, strict=True))
            for state, move in zip(states, moves, strict=True):
                state.z = state.z + (move - mean) / rate
        moved = sum(w * c * state.rate for w, c, state in zip(weights, counts, states, strict=True))
        for state in states:
            state.is_busy = False
        parent.meetings += 1
        if self.restart == "zero" and not is_last:
            self.forget(level, node)
        return merged, moved

    def forget(self, level: int, node: int) -> None:
        """Reset the corrections below a node that sends its model down, but not below nodes at
        work."""
        for child in self.below(level, node) if level + 1 < self.tree.depth else ():
            if not self.children[level + 1, child].is_busy:
                for child_number in self.below(level + 1, child):
                    self.children[level + 2, child_number].z = np.zeros_like(self.problem.x0)
                self.forget(level + 1, child)

    def visit(self, level: int, node: int, parent: int, model: np.ndarray, version: np.ndarray):
        state = self.children[level, node]
        yield self.env.timeout(self.delay(level, node))
        if level == self.tree.depth:
            yield self.env.timeout(self.seconds(node))
            for _ in range(self.periods[-1]):
                model = model - self.lr * (self.problem.gradient(node, model) + version)
            state.model, state.rate = model, self.periods[-1] * self.lr
        else:
            rate = 0.0
            for number in range(self.periods[level - 1]):
                is_last = number == self.periods[level - 1] - 1
                model, moved = yield from self.meeting(level, node, model, version, is_last)
                rate += moved
            state.model, state.rate = model, rate
        yield self.pipes[level - 1, parent].send(self.size(level), self.link)
        yield self.env.timeout(self.delay(level, node))
        above = self.parents[level - 1, parent]
        above.arrivals.append(node)
        if above.wake is not None and not above.wake.triggered:
            above.wake.succeed()
