"""Independent model of the time line as an event simulation (SimPy): every node is a process that
waits, sends and receives.

It shares no code with `network.timeline`, and simulates one round at a time.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import simpy

from stratafl.base.topology import Topology


@dataclass
class Link:
    up: float
    down: float
    latency: float
    overhead_s: float
    overhead_bytes: float


@dataclass
class Parent:
    pipe_up: float
    pipe_down: float
    merge: float
    merge_per_child: float


@dataclass
class Script:
    """Global round with one stage per group round: periods, participants and the bytes of every
    message."""

    tree: Topology
    rounds: list[int]
    """Number of rounds of each edge level in one of the level above; entry 0 is unused, entry 1 is
    1."""
    active: dict[tuple[int, int], np.ndarray]
    """Participants by edge level and the number of its round."""
    down: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
    """Number and bytes of the messages to each node, likewise."""
    up: dict[tuple[int, int], np.ndarray]
    """Bytes of the message that each node sends, likewise."""
    link: dict[tuple[int, int], Link]
    """Links by level and node."""
    jitter: dict[tuple[int, int, int, str], float]
    """Jitter by level, node, round of the level and direction."""
    parent: dict[tuple[int, int], Parent]
    compute: dict[tuple[int, int], float]
    """Seconds of pauses and computing by leaf and round of its level."""
    away: dict[tuple[int, int], float] = field(default_factory=dict)
    wait: dict[int, tuple[float | None, int | float | None]] = field(default_factory=dict)
    """Deadline and number of children by edge level; other levels wait for all."""


class Pipe:
    """Link that transfers share fairly; all rates change whenever one begins or ends."""

    def __init__(self, env: simpy.Environment, capacity: float):
        self.env, self.capacity = env, capacity
        self.flows: list[list] = []
        self.since = 0.0
        self.wake = env.event()
        env.process(self._run())

    def send(self, size: float, link: float):
        done = self.env.event()
        if size <= 0:
            done.succeed()
            return done
        self._advance()
        self.flows.append([size, link, 0.0, done])
        self._poke()
        return done

    def cancel(self, done) -> None:
        self._advance()
        self.flows = [flow for flow in self.flows if flow[3] is not done]
        self._poke()

    def _poke(self) -> None:
        if not self.wake.triggered:
            self.wake.succeed()

    def _advance(self) -> None:
        for flow in self.flows:
            flow[0] -= flow[2] * (self.env.now - self.since)
        self.since = self.env.now

    def _share(self) -> None:
        """Set max-min fair rates: the narrowest link is served first."""
        left, waiting = self.capacity, sorted(self.flows, key=lambda flow: flow[1])
        while waiting:
            flow = waiting.pop(0)
            flow[2] = min(flow[1], left / (len(waiting) + 1))
            left -= flow[2]

    def _run(self):
        while True:
            self._share()
            pause = min((flow[0] / flow[2] for flow in self.flows), default=None)
            self.wake = self.env.event()
            first = [flow for flow in self.flows if pause is not None and flow[0] / flow[2] <= pause]
            if pause is None:
                yield self.wake
                self._advance()
                continue
            timer = self.env.timeout(max(pause, 0.0))
            yield timer | self.wake
            self._advance()
            over = [f for f in self.flows if f[0] <= 1e-9 * f[2] * max(pause, 1e-9) or (timer.processed and f in first)]
            for flow in over:
                self.flows.remove(flow)
                flow[3].succeed()


class World:
    def __init__(self, script: Script):
        self.script, self.env = script, simpy.Environment()
        self.came: dict[tuple[int, int], set[int]] = {}
        self.up = {key: Pipe(self.env, node.pipe_up) for key, node in script.parent.items()}
        self.down = {key: Pipe(self.env, node.pipe_down) for key, node in script.parent.items()}

    def seconds(self) -> float:
        finish = self.env.process(self.meet(0, 0, 0, 1))
        self.env.run(finish)
        return float(self.env.now)

    def children(self, level: int, node: int) -> list[int]:
        return [int(child) for child in np.flatnonzero(self.script.tree.parents[level + 1] == node)]

    def meet(self, level: int, node: int, first: int, times: int):
        """Hold a number of a parent's rounds, from round `first` of its children's level."""
        below = level + 1
        for round in range(first, first + times):
            who = [child for child in self.children(level, node) if self.script.active[below, round][child]]
            visits = {child: self.env.process(self.visit(below, child, node, round)) for child in who}
            try:
                heard = yield from self.hear(below, visits)
            finally:
                for visit in visits.values():
                    if visit.is_alive:
                        visit.interrupt()
            self.came.setdefault((below, round), set()).update(heard)
            parent = self.script.parent[level, node]
            yield self.env.timeout(parent.merge + parent.merge_per_child * len(heard))

    def hear(self, level: int, visits: dict):
        """Wait for children as the level's policy says; returns those that arrived."""
        deadline, first = self.script.wait.get(level, (None, None))
        enough = len(visits)
        if isinstance(first, float):
            enough = max(1, round(first * enough))
        elif first is not None:
            enough = min(first, enough)
        is_over = self.env.timeout(1e12 if deadline is None else deadline)
        heard: list[int] = []
        while len(heard) < enough and not (heard and is_over.processed):
            left = [visit for child, visit in visits.items() if child not in heard]
            yield self.env.any_of(left if is_over.processed else [*left, is_over])
            heard += [child for child, visit in visits.items() if visit.processed and child not in heard]
        return heard

    def carry(self, pipe: Pipe, size: float, link: float):
        done = pipe.send(size, link)
        try:
            yield done
        except simpy.Interrupt:
            pipe.cancel(done)
            raise

    def deliver(self, level: int, node: int, parent: int, round: int):
        (count, size), link = (values[node] for values in self.script.down[level, round]), self.script.link[level, node]
        yield self.env.timeout(self.script.away.get((node, round), 0.0) if level == self.script.tree.depth else 0.0)
        if count:
            yield self.env.timeout(count * link.overhead_s)
            yield from self.carry(self.down[level - 1, parent], size + count * link.overhead_bytes, link.down)
            yield self.env.timeout(link.latency + self.script.jitter[level, node, round, "down"])

    def drop(self, steps):
        """Run the steps until they end or are interrupted."""
        with contextlib.suppress(simpy.Interrupt):
            yield from steps

    def visit(self, level: int, node: int, parent: int, round: int):
        yield from self.drop(self.work(level, node, parent, round))

    def work(self, level: int, node: int, parent: int, round: int):
        yield from self.deliver(level, node, parent, round)
        if level == self.script.tree.depth:
            yield self.env.timeout(self.script.compute[node, round])
        else:
            times = self.script.rounds[level + 1]
            yield from self.meet(level, node, round * times, times)
        link = self.script.link[level, node]
        yield self.env.timeout(link.overhead_s)
        yield from self.carry(
            self.up[level - 1, parent], self.script.up[level, round][node] + link.overhead_bytes, link.up
        )
        yield self.env.timeout(link.latency + self.script.jitter[level, node, round, "up"])
