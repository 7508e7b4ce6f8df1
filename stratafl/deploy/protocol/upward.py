"""A child's side of the edge to its parent: its rule's state, its correction, and what it must still be told.

Rows have one row. A report's new state counts only once the parent said that the report did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stratafl.deploy.job import Job
from stratafl.deploy.messages import Answer, Begin, Parcel, Report
from stratafl.errors import InvalidInput
from stratafl.rule import Edge, Rows


@dataclass
class Sent:
    """The last report: what it told of, and the state it leads to if it counts."""

    step: int
    state: Rows
    model: Tensor


@dataclass
class Above:
    """What a child keeps of the edge to its parent."""

    begun: int | None = None
    """The step of the last round it began."""
    state: Rows | None = None
    start: Parcel | None = None
    """What the parent last gave."""
    above: Tensor | None = None
    """The corrections from the parent to the root, added up."""
    correction: Tensor | None = None
    sent: Sent | None = None


class Upward:
    def __init__(self, job: Job, level: int, now: Above | None = None):
        self._job, self._level, self._rule = job, level, job.rules[level - 1]
        self.now = now or Above()

    def answer(self, answer: Answer) -> None:
        """The last report counted; one that was answered before changes nothing."""
        if self.now.sent is None or self.now.sent.step != answer.step:
            return
        assert self.now.start is not None
        x_1P = self.now.sent.model
        start_1P, self.now.start = self.now.start.model, answer.parcel
        self.now.state = self.now.sent.state
        if self._rule.down is not None:
            edge = Edge(start_1P, self.now.correction, self._column(answer.rate), answer.parcel.model)
            self.now.state = self._rule.down(self.now.state, x_1P, edge)
        self.now.sent = None
        self._correct()

    def begin(self, begin: Begin) -> None:
        """A new round: what was last sent counts or is forgotten, and what came from above is taken over."""
        if self.now.sent is not None and begin.heard == self.now.sent.step:
            self.now.state = self.now.sent.state
        self.now.sent = None
        if begin.parcel is not None:
            self.now.start = begin.parcel
        if self.now.start is None:
            raise InvalidInput("begin", begin.step, "the first round must come with a model")
        if self.now.state is None:
            self.now.state = self._rule.init(self.now.start.model)
        since = self.now.begun or 0
        if self._rule.relay is not None:
            for _ in range(self._job.restarts(self._level, since, begin.step)):
                self.now.state = self._rule.relay(self.now.state)
        if begin.above is not None:
            self.now.above = begin.above
        self.now.begun = begin.step
        self._correct()

    def report(self, x_1P: Tensor, b_1B: Tensor, rate: float) -> Report:
        """What to bring to the meeting."""
        assert self.now.begun is not None and self.now.start is not None and self.now.state is not None
        step = self.now.begun + self._job.every[self._level]
        edge = Edge(self.now.start.model, self.now.correction, self._column(rate))
        state, message = self._rule.up(self.now.state, x_1P, edge)
        self.now.sent = Sent(step, state, x_1P)
        return Report(step, rate, message, b_1B)

    @property
    def path(self) -> Tensor | None:
        """The sum of the corrections from this node to the root."""
        parts = [part for part in (self.now.above, self.now.correction) if part is not None]
        return torch.cat(parts).sum(dim=0, keepdim=True) if parts else None

    def _correct(self) -> None:
        assert self.now.state is not None and self.now.start is not None
        self.now.correction = self._rule.correction(self.now.state, self.now.start.note)

    def _column(self, rate: float) -> Tensor:
        return torch.full((1, 1), rate, dtype=self._job.dtype)
