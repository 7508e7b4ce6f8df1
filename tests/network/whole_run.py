"""Independent model of a whole run on a network as events: every node acts by itself, and its costs
are recorded as they arise.

It follows docs/clock.md and docs/how-to/waiting.md, for runs that average, whose every message is
one model. Nodes are pairs of a level and a number.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]
Act = Callable[[], None]


@dataclass
class Terms:
    """Properties of a run that decide its time and costs."""

    children: dict[Place, list[Place]]
    meetings: list[int]
    """Rounds of a parent within one of its own, by its level; 1 for the root."""
    rounds: int
    wait: dict[int, dict[str, Any]]
    """Policy by edge level: deadline, first and late, as in a config; empty for all."""
    drawn: Callable[[Place, int, list[Place]], list[Place]]
    """Selection of a parent's children for a round, given the children at work."""
    fixed: Callable[[Place, str], float]
    """Quantity of a node by its key in a network file; also its local steps."""
    anew: Callable[[Place, str, int], float]
    """Quantity sampled for a round: jitter up or down, pause_s, away_s, slowdown, tries."""
    size: int
    """Bytes of a model."""


class Agenda:
    """Queue of future events."""

    def __init__(self) -> None:
        self.now, self._order = 0.0, itertools.count()
        self._heap: list[tuple[float, int, int, list[Act]]] = []

    def after(self, seconds: float, act: Act, last: bool = False) -> list[Act]:
        """Schedule an event. last: after all others at the same time. Clearing the returned entry
        cancels it."""
        entry = [act]
        heapq.heappush(self._heap, (self.now + seconds, int(last), next(self._order), entry))
        return entry

    def pass_time(self) -> None:
        while self._heap:
            when, _, _, entry = heapq.heappop(self._heap)
            if entry:
                self.now = max(self.now, when)
                entry[0]()


@dataclass(eq=False)
class Transfer:
    left: float
    link: float
    done: Act
    began: float
    rate: float = 0.0


class Pipe:
    """Shared link: the transfers get new fair rates, in bytes per second, whenever one begins or
    ends."""

    def __init__(self, agenda: Agenda, capacity: float):
        self.agenda, self.capacity, self.since = agenda, capacity, 0.0
        self.under_way: list[Transfer] = []
        self.next: list[Act] = []

    def begin(self, transfer: Transfer) -> Transfer:
        self._advance()
        self.under_way.append(transfer)
        self._share()
        return transfer

    def drop(self, transfer: Transfer) -> None:
        self._advance()
        self.under_way.remove(transfer)
        self._share()

    def _advance(self) -> None:
        for active in self.under_way:
            active.left -= active.rate * (self.agenda.now - self.since)
        self.since = self.agenda.now

    def _share(self) -> None:
        left, ordered = self.capacity, sorted(self.under_way, key=lambda active: active.link)
        for position, active in enumerate(ordered):
            active.rate = min(active.link, left / (len(ordered) - position))
            left -= active.rate
        self.next.clear()
        if ordered:
            first = min(ordered, key=lambda active: active.left / active.rate)
            self.next = self.agenda.after(max(first.left / first.rate, 0.0), lambda: self._end(first))

    def _end(self, transfer: Transfer) -> None:
        self._advance()
        over = [active for active in self.under_way if active is transfer or active.left <= 1e-12 * active.rate]
        self.under_way = [active for active in self.under_way if active not in over]
        self._share()
        for active in over:
            active.done()


@dataclass
class Spent:
    joules: float = 0.0
    sent: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Number of messages by edge level and direction."""
    ends: list[float] = field(default_factory=list)
    """End times of global rounds."""
    late: dict[int, list[Place]] = field(default_factory=dict)
    """Late nodes by global round."""
    reports: list[tuple[Parent, float, float, float]] = field(default_factory=list)
    """Updates at asynchronous levels: parent, start, end and power."""


class Message:
    """Message on its way over the link between a node and its parent."""

    def __init__(self, node: Node, way: str, pipe: Pipe, there: Act):
        self.node, self.way, self.pipe, self.there, self.round = node, way, pipe, there, node.round
        self.transfer: Transfer | None = None
        self.entry = node.run.agenda.after(self._fixed("overhead_s"), self._go)

    def _fixed(self, key: str) -> float:
        return self.node.run.terms.fixed(self.node.place, key)

    def _go(self) -> None:
        size, link = self.node.run.terms.size + self._fixed("overhead_bytes"), self._fixed(f"{self.way}_mbit_s")
        self.transfer = self.pipe.begin(Transfer(size, link * 125_000, self._sent, self.node.run.agenda.now))

    def _sent(self) -> None:
        run, node = self.node.run, self.node
        self._spend()
        passing = self._fixed("latency_s") + run.terms.anew(node.place, f"jitter {self.way}", self.round)
        self.entry = run.agenda.after(passing, self.there)

    def _spend(self) -> None:
        run, transfer = self.node.run, self.transfer
        assert transfer is not None
        watts, self.transfer = self._fixed(f"{self.way}_watts"), None
        if self.way == "up" and run.counts_late(self.node.place[0]):
            run.spent.reports.append((self.node.parent, transfer.began, run.agenda.now, watts))
        else:
            run.spent.joules += watts * (run.agenda.now - transfer.began)

    def stop(self) -> None:
        if self.transfer is not None:
            self.pipe.drop(self.transfer)
            self._spend()
        self.entry.clear()


class Node:
    """Node below the root, with a link to its parent."""

    def __init__(self, run: Run, place: Place, parent: Parent | None):
        self.run, self.place = run, place
        self.parent: Parent = parent  # type: ignore[assignment]  # the root has no link
        self.round, self.is_alone = 0, False
        self.missed: list[Place] = []
        """Late nodes below it in its round."""
        self.report: Message | None = None

    def begin(self, round: int, pipe: Pipe) -> None:
        """Begin the round with this number of its parent's level."""
        self.round = round
        self.run.spent.sent[self.place[0], "down"] += 1

        def send() -> None:
            Message(self, "down", pipe, got)

        def got() -> None:
            # a model goes out in full, also to one that is told to stop meanwhile
            if self.is_alone or (self.round == round and self in self.parent.at_work):
                self.work()

        away = self.run.terms.anew(self.place, "away_s", round) if self.run.is_leaf(self.place) else 0.0
        self.run.agenda.after(away, send)

    def work(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def send_report(self) -> None:
        if not self.is_alone:
            self.report = Message(self, "up", self.parent.up, lambda: self.parent.hear(self))


class Leaf(Node):
    def __init__(self, run: Run, place: Place, parent: Parent):
        super().__init__(run, place, parent)
        self.entry: list[Act] = []
        self.computes_since: float | None = None

    def work(self) -> None:
        self.entry = self.run.agenda.after(self.run.terms.anew(self.place, "pause_s", self.round), self._compute)

    def _compute(self) -> None:
        fixed, anew = self.run.terms.fixed, self.run.terms.anew
        self.computes_since = self.run.agenda.now
        step = fixed(self.place, "step_s") * anew(self.place, "slowdown", self.round)
        seconds = fixed(self.place, "steps") * step * anew(self.place, "tries", self.round)
        self.entry = self.run.agenda.after(seconds, self._computed)

    def _computed(self) -> None:
        self._spend()
        self.send_report()

    def _spend(self) -> None:
        if self.computes_since is not None:
            seconds = self.run.agenda.now - self.computes_since
            self.run.spent.joules += self.run.terms.fixed(self.place, "watts") * seconds
            self.computes_since = None

    def stop(self) -> None:
        self.entry.clear()
        self._spend()
        if self.report is not None:
            self.report.stop()


class Parent(Node):
    def __init__(self, run: Run, place: Place, parent: Parent | None):
        super().__init__(run, place, parent)
        self.level = place[0]
        self.children = {child: run.node(child, self) for child in run.terms.children[place]}
        self.up = Pipe(run.agenda, run.terms.fixed(place, "pipe_up_mbit_s") * 125_000)
        self.wait = run.terms.wait[self.level + 1]
        self.at_work: list[Node] = []
        self.heard: list[tuple[float, Place, Node]] = []
        self.is_open, self.is_overdue, self.closed_at = False, False, 0.0
        self.deadline: list[Act] = []

    def work(self) -> None:
        self.left = self.run.terms.meetings[self.level]
        self._open()

    def _open(self) -> None:
        terms, agenda = self.run.terms, self.run.agenda
        of_round = terms.meetings[self.level]
        number = self.round * of_round + of_round - self.left
        drawn = terms.drawn(self.place, number, [worker.place for worker in self.at_work])
        self.begun = [self.children[child] for child in drawn]
        self.at_work = self.at_work + self.begun
        self.is_open, self.is_overdue = True, False
        pipe = Pipe(agenda, terms.fixed(self.place, "pipe_down_mbit_s") * 125_000)
        for child in self.begun:
            child.begin(number, pipe)
        if "deadline" in self.wait:
            self.deadline = agenda.after(self.wait["deadline"], self._overdue, last=True)
        self._look()

    def _overdue(self) -> None:
        self.is_overdue = True
        self._look()

    def hear(self, child: Node) -> None:
        self.heard.append((self.run.agenda.now, child.place, child))
        self.run.agenda.after(0.0, self._look)

    def _look(self) -> None:
        first, count = self.wait.get("first"), len(self.at_work)
        enough = count if first is None else max(1, round(first * count)) if isinstance(first, float) else first
        if self.is_open and (len(self.heard) >= min(enough, count) or (self.is_overdue and self.heard)):
            self._close(count if first is None else min(enough, count))

    def _close(self, most: int) -> None:
        run, self.is_open, self.closed_at = self.run, False, self.run.agenda.now
        self.deadline.clear()
        self.heard.sort(key=lambda update: update[:2])
        merged = [child for _, _, child in self.heard[:most]]
        self.heard = self.heard[most:]
        run.spent.sent[self.level + 1, "up"] += len(merged)
        self.missed += [child.place for child in self.begun if child not in merged]
        late, self.at_work = [child for child in self.at_work if child not in merged], []
        if run.counts_late(self.level + 1):
            self.at_work = late
        else:
            self.heard = []
            for child in late:
                child.stop()
            for child in merged:
                self.missed += child.missed
                child.missed = []
        fixed = run.terms.fixed
        seconds = fixed(self.place, "merge_s") + fixed(self.place, "merge_s_per_child") * len(merged)
        run.spent.joules += fixed(self.place, "merge_watts") * seconds
        run.agenda.after(seconds, self._merged)

    def _merged(self) -> None:
        self.left -= 1
        if self.left:
            self._open()
        elif self.level == 0:
            self.run.end_round()
        else:
            if self.run.counts_late(self.level):
                self.run.note(self)
            self.send_report()

    def stop(self) -> None:
        """Stop the work; what has begun still costs, for no one, and a new node takes its place."""
        self.is_alone = True
        if self.report is not None:
            self.report.stop()
        self.parent.children[self.place] = self.run.node(self.place, self.parent)


class Run:
    """Whole run."""

    def __init__(self, terms: Terms):
        self.terms, self.agenda, self.spent = terms, Agenda(), Spent()
        self.root = Parent(self, (0, 0), None)
        self.root.work()
        self.agenda.pass_time()
        for parent, began, ended, watts in self.spent.reports:
            self.spent.joules += watts * max(0.0, min(ended, parent.closed_at) - began)

    def node(self, place: Place, parent: Parent) -> Node:
        return Leaf(self, place, parent) if self.is_leaf(place) else Parent(self, place, parent)

    def is_leaf(self, place: Place) -> bool:
        return place not in self.terms.children

    def counts_late(self, level: int) -> bool:
        return self.terms.wait[level].get("late") == "counts"

    def note(self, parent: Parent) -> None:
        """Record the late nodes below a node in the global round in which its own round began."""
        round = parent.round
        for count in self.terms.meetings[1 : parent.level]:
            round //= count
        self.spent.late.setdefault(round, []).extend(parent.missed)
        parent.missed = []

    def end_round(self) -> None:
        self.note(self.root)
        self.spent.ends.append(self.agenda.now)
        self.root.round += 1
        if self.root.round < self.terms.rounds:
            self.root.work()
