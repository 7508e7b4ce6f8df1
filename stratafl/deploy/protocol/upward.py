"""A child's side of the edge to its parent: its rule's state, its correction, and what it must
still be told.

Rows have one row. A report's new state counts only once the parent said that the report did.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.core.channel import BUFFERS
from stratafl.core.rule import Edge, Rows, SgdPath
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import Answer, Begin, Parcel, Report
from stratafl.federation import sync


@dataclass
class Sent:
    """The last report: what it told of, and the state it leads to if it counts."""

    step: int
    state: Rows
    model: Tensor
    """The model as the parent knows it."""
    channel: Rows = field(default_factory=dict)
    """The channel's memory, which counts if the report does."""
    optimiser: Rows = field(default_factory=dict)
    """What a leaf's optimiser keeps, which counts if the report does."""
    path: Tensor | None = None
    """The path as the parent knows it, where nodes have one."""


@dataclass
class Above:
    """What a child keeps of the edge to its parent."""

    begun: int | None = None
    """The step of the last round it began."""
    born: int | None = None
    """The step of the round with which its state began."""
    state: Rows | None = None
    start: Parcel | None = None
    """What the parent last gave."""
    above: Tensor | None = None
    """The corrections from the parent to the root, added up."""
    correction: Tensor | None = None
    sent: Sent | None = None
    channel: Rows | None = None
    """The memory of the channel to the parent."""
    optimiser: Rows = field(default_factory=dict)
    """The state of a leaf's optimiser, where it is kept, and what of the model stays with it (see
    `federation.local_parameters`)."""


class Upward:
    """What a child does at the edge to its parent, on the state `Above`."""

    def __init__(self, job: Job, level: int, number: int, now: Above | None = None):
        self._job, self._level, self._edge = job, level, job.edge(level)
        self._number = number
        self.now = now or Above()

    def answer(self, answer: Answer) -> None:
        """The last report counted; one that was answered before changes nothing."""
        if self.now.sent is None or self.now.sent.step != answer.step:
            return
        assert self.now.start is not None
        x_1P = self.now.sent.model
        start, self.now.start = self.now.start, self._taken(answer.parcel)
        path = self._path(start, self.now.sent.path, self.now.start)
        edge = Edge(start.model, self.now.correction, self._column(answer.rate), self.now.start.model, path)
        state = sync.apply_answer(self._edge.rule, self.now.sent.state, x_1P, edge)
        self._counted()
        self.now.state = state
        self._correct()

    def begin(self, begin: Begin) -> None:
        """A new round: what was last sent counts or is forgotten, and what came from above is taken
        over."""
        if self.now.sent is not None and begin.heard == self.now.sent.step:
            self._counted()
        self.now.sent = None
        if begin.parcel is not None:
            self.now.start = self._taken(begin.parcel)
        if self.now.start is None:
            raise InvalidInput("begin", begin.step, "the first round must come with a model")
        if self.now.state is None:
            self.now.state, self.now.born = self._edge.rule.init(self.now.start.model), begin.step
            self.now.channel = self._edge.channels.up.init(self.now.start.rows)
        self._catch_up(begin, self.now.state)
        if begin.above is not None:
            self.now.above = begin.above
        self.now.begun = begin.step
        self._correct()

    def _catch_up(self, begin: Begin, state: Rows) -> None:
        """What happened to the state since the last round it began, in its order: shifts, and
        models that came from above the parent, which at the same step come after."""
        rule, start, begun = self._edge.rule, self.now.start, self.now.begun
        assert start is not None
        shifts = [shift for shift in begin.shifts if begun is None or shift.step > begun]
        # to a state that begins now nothing has happened but what all siblings' states went through
        since = begun if begun is not None else min([begin.step, *(shift.step - 1 for shift in shifts)])
        for shift in shifts:
            state = sync.apply_from_above(rule, state, self._job.restarts(self._level, since, shift.step - 1))
            since = shift.step - 1
            if shift.rows is None:
                state = rule.init(start.model)
            else:
                state = state | {name: state[name] - rows for name, rows in shift.rows.items()}
        self.now.state = sync.apply_from_above(rule, state, self._job.restarts(self._level, since, begin.step))

    def report(
        self, x_1P: Tensor, b_1B: Tensor, rate: float, optimiser: Rows | None = None, attached: bool = False
    ) -> Report:
        """What to bring to the meeting; a leaf's optimiser is to be in this state if it counts.
        `attached`: with the state until now."""
        now, every = self.now, self._job.every[self._level]
        assert now.begun is not None and now.start is not None and now.state is not None
        path = self._path(now.start, b_1B[:, self._job.buffers :])
        edge = Edge(now.start.model, now.correction, self._column(rate), path=path)
        key = self._edge.channel_key(now.begun // every + 1, np.array([self._number]))
        sent = sync.upload(
            self._edge,
            state=now.state,
            channel=now.channel or {},
            model_NP=x_1P,
            buffers_NB=b_1B,
            view=edge,
            key=key,
        )
        message = {name: rows for name, rows in sent.payload.items() if name != BUFFERS}
        known = sent.buffers_NB[:, self._job.buffers :] if self._job.has_path else None
        now.sent = Sent(now.begun + every, sent.state, sent.model_NP, sent.channel, optimiser or {}, known)
        return Report(now.sent.step, rate, message, sent.payload[BUFFERS], state=now.state if attached else None)

    @property
    def path(self) -> Tensor | None:
        """The sum of the corrections from this node to the root."""
        parts = [part for part in (self.now.above, self.now.correction) if part is not None]
        return torch.cat(parts).sum(dim=0, keepdim=True) if parts else None

    def _counted(self) -> None:
        """What the last report leads to is so from now on."""
        now, sent = self.now, self.now.sent
        assert sent is not None
        now.state, now.channel, now.optimiser, now.sent = sent.state, sent.channel, sent.optimiser, None

    def _path(self, start: Parcel, end_1P: Tensor | None, merged: Parcel | None = None) -> SgdPath | None:
        """The path since this model was given, where nodes have one."""
        if not self._job.has_path or end_1P is None:
            return None
        merged_1P = None if merged is None else merged.buffers[:, self._job.buffers :]
        return SgdPath(start.buffers[:, self._job.buffers :], end_1P, merged_1P)

    def _correct(self) -> None:
        assert self.now.state is not None and self.now.start is not None
        self.now.correction = sync.correction(self._edge.rule, self.now.state, self.now.start.rows)

    def _taken(self, parcel: Parcel) -> Parcel:
        """What the parent gave, as this child understands it."""
        return Parcel.of(sync.decode_broadcast(self._edge, parcel.rows))

    def _column(self, rate: float) -> Tensor:
        return torch.full((1, 1), rate, dtype=self._job.dtype)
