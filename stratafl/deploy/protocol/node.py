"""Leaf, aggregator and root: state machines that know nothing of networks.

A leaf has a side upward, a root one downward, an aggregator both. Each takes a bundle and gives a
reply. It works on a copy of its state, which becomes its state once `save` has kept it, before the
reply leaves: so a bundle may come twice, a node may die at any moment, and what could not be saved
has not happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.user_code import attribute_errors
from stratafl.core.client_training import LocalRule, TrainRequest
from stratafl.core.client_update import append_sgd_path
from stratafl.core.rows import IndexedRows
from stratafl.deploy.protocol import bounds
from stratafl.deploy.protocol.children import Link, greet, meet
from stratafl.deploy.protocol.downward import Below, Downward
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import PROTOCOL, Answer, Begin, Bundle, Parcel, Reply, Report, Shift
from stratafl.deploy.protocol.upward import Above, Upward
from stratafl.federation.local_parameters import ClientTrainer


@dataclass
class NodeState:
    """Everything a node must not lose."""

    above: Above | None = None
    below: Below | None = None
    reply: Reply | None = None
    """The reply to the last bundle that began a round: a round is not trained twice."""
    line: str = ""
    """The root's: its last round as the record tells it."""

    def copy(self) -> NodeState:
        """One that can be changed without changing this one; arrays, which nobody changes, are
        shared."""
        return NodeState(*(_copied(getattr(self, field.name)) for field in dataclasses.fields(self)))


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return dataclasses.replace(value, **{f.name: _copied(getattr(value, f.name)) for f in dataclasses.fields(value)})


Save = Callable[[NodeState], None]
Tell = Callable[[Below, tuple[str, ...], tuple[str, ...]], str]
"""A round's line: of what came of it, who was refused and who was absent."""
Readmitted = Callable[[], Collection[str]]
"""The children that an operator wants to be asked again although they are out."""


class _Keeping:
    """Has the state that was saved last: what could not be saved has not happened."""

    def __init__(self, save: Save, kept: NodeState):
        self._save, self._kept = save, kept

    def _keep(self, kept: NodeState) -> None:
        self._save(kept)
        self._kept = kept


class LeafNode(_Keeping):
    """A client beside its data."""

    def __init__(
        self, job: Job, number: int, trainer: ClientTrainer, samples: int, save: Save, kept: NodeState | None = None
    ):
        self.job, self.number, self.samples = job, number, samples
        self._trainer, self.engine = trainer, trainer.engine
        self.site = job.tree.names[-1][number]
        super().__init__(save, kept or NodeState(above=Above()))

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        lost = has_lost(bundle.begin, self._kept)
        kept = self._kept.copy()
        assert kept.above is not None
        if lost:
            # what of the model stays here nobody else has: of an older state it is kept
            own = {name: rows for name, rows in kept.above.optimiser.items() if name in self._trainer.initial_local}
            kept = NodeState(above=Above(optimiser=own))
            assert kept.above is not None
        up, report = Upward(self.job, self.job.tree.depth, self.number, kept.above), None
        if bundle.answer is not None:
            up.answer(bundle.answer)
        if bundle.begin is not None and not lost:
            up.begin(bundle.begin)
            report = self._train(up, bundle.begin)
        reply = Reply(self.job.name, self.site, self.samples, report, self.job.fingerprint, born=up.now.born)
        if report is not None:
            kept.reply = reply
        self._keep(kept)
        return reply

    def _train(self, up: Upward, begin: Begin) -> Report:
        start, chain = up.now.start, self.engine.client_update
        assert start is not None
        first = self._trainer.initial_local | (chain.optimizer.init(start.model) if chain.keeps_optimizer_state else {})
        up.now.optimiser = first | up.now.optimiser
        steps, round = self.job.every[-1], self.job.global_round(begin.step)
        corrections = [part for part in (up.now.above, up.now.correction) if part is not None]
        work = TrainRequest(
            model=self._row(start.model),
            buffers=self._row(start.buffers[:, : self.job.buffers]),
            corrections=tuple(map(self._row, corrections)),
            local_rules=self._pulls(start, up.now.correction),
            clients=[self.number],
            first_step=begin.step,
            steps=steps,
            round=round,
            client_rows={name: self._row(rows) for name, rows in up.now.optimiser.items()},
            wants_sgd_path=self.job.has_path,
        )
        with attribute_errors(lambda: self.engine.training.function_names(), f", in round {round + 1}"):
            trained = self._trainer.train(work)
        b_1B = trained.buffers_AB
        if self.job.has_path:
            b_1B = append_sgd_path(b_1B, start.buffers[:, self.job.buffers :] + trained.path_AP)
        is_recounted = begin.samples not in (None, self.samples)
        return up.report(trained.model_AP, b_1B, chain.lr_sum(round, steps), trained.client_rows, attached=is_recounted)

    def _pulls(self, start: Parcel, correction: Tensor | None) -> tuple[LocalRule, ...]:
        local = self.job.rules[-1].local
        if local is None:
            return ()
        rate = torch.zeros(1, 1, dtype=self.job.dtype)  # it begins anew at every meeting
        mine = None if correction is None else self._row(correction)
        return (LocalRule(local, self._row(start.model), mine, self._row(rate)),)

    def _row(self, rows_1P: Tensor) -> IndexedRows:
        """The one row, as that of this leaf's number."""
        return IndexedRows(rows_1P, np.zeros(self.number + 1, dtype=np.int64))


class Aggregator(_Keeping):
    """A node between the root and the leaves."""

    def __init__(
        self,
        job: Job,
        level: int,
        number: int,
        link: Link,
        save: Save,
        kept: NodeState | None = None,
        readmitted: Readmitted = tuple,
    ):
        self.job, self.level, self.number, self.link, self._readmitted = job, level, number, link, readmitted
        self.site = job.tree.names[level][number]
        super().__init__(save, kept or NodeState(above=Above()))

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        begin = bundle.begin
        if begin is None:
            return self._pass_on(bundle)
        if has_lost(begin, self._kept):
            self._keep(NodeState(above=Above()))
            return Reply(self.job.name, self.site, 0, fingerprint=self.job.fingerprint)
        assert self._kept.above is not None
        if begin.step != self._kept.above.begun:
            self._take_over(bundle.answer, begin)
        end = begin.step + self.job.every[self.level]
        while True:
            kept, up, down = self._sides()
            is_last = down.now.step + self.job.every[self.level + 1] == end
            down.readmit(self._readmitted())
            meet(self.job, self.level, down, self.link, up.path, relayed=is_last)
            if is_last:  # it is saved with the report
                kept.reply = reply = self._reply(up, down, begin)
                self._keep(kept)
                return reply
            self._keep(kept)

    def _reply(self, up: Upward, down: Downward, begin: Begin) -> Reply:
        """The reply after the last meeting of a round."""
        report, now = Report(begin.step + self.job.every[self.level], 0.0, {}, None), down.now
        if now.merged:
            is_recounted = begin.samples not in (None, down.samples)
            report = up.report(now.held, now.buffers, now.rate, attached=is_recounted)
        else:
            up.now.sent = None
        report = replace(report, refused=now.refused, absent=now.absent)
        now.refused = now.absent = ()
        return Reply(self.job.name, self.site, down.samples, report, self.job.fingerprint, born=up.now.born)

    def _take_over(self, answer: Answer | None, begin: Begin) -> None:
        """A new round of its own edge: what it got goes on to its subtree."""
        kept, up, down = self._sides()
        is_first = up.now.begun is None
        if answer is not None:
            up.answer(answer)
        up.begin(begin)
        start = up.now.start
        assert start is not None
        if is_first:
            down = self._first(down, start, begin.step)
            kept.below = down.now
        # every meeting of its edge may have moved its correction; before the first it is known to
        # be zero, if it is
        corrected = _nonzero(up.path) if begin.step == 0 else up.now.correction is not None
        down.take(start, begin.step, corrected or begin.above is not None)
        self._keep(kept)

    def _pass_on(self, bundle: Bundle) -> Reply:
        """Ask who is there below, or tell them that the run is over."""
        kept, up, down = self._sides()
        if bundle.answer is not None:
            up.answer(bundle.answer)
        greet(self.job, self.level, down, self.link, bundle.end)
        self._keep(kept)
        return Reply(self.job.name, self.site, down.samples, fingerprint=self.job.fingerprint)

    def _sides(self) -> tuple[NodeState, Upward, Downward]:
        """A copy of the state to work on, and the two sides that change it."""
        job, kept = self.job, self._kept.copy()
        assert kept.above is not None
        if kept.below is None:
            # a greeting may come before the first model
            x_1P, b_1B = _zeros(job.parameters, job), _zeros(job.carried, job)
            kept.below = Downward.new(job, self.level, self.number, x_1P, b_1B).now
        return (
            kept,
            Upward(job, self.level, self.number, kept.above),
            Downward(job, self.level, self.number, kept.below),
        )

    def _first(self, greeted: Downward, start: Parcel, step: int) -> Downward:
        """The first model begins everything but the sample counts."""
        down = Downward.new(self.job, self.level, self.number, start.model, start.buffers)
        if step and self.job.rules[self.level].reweigh is not None:
            # where this node has lost its state, its children have what went with the old memory
            down.now.shifts = (Shift(step, None),)
        for child, before in zip(down.now.children, greeted.now.children, strict=True):
            child.samples = before.samples
        return down


class Root(_Keeping):
    """The top: it has the clock."""

    def __init__(
        self,
        job: Job,
        x_P: Tensor,
        b_B: Tensor,
        link: Link,
        save: Save,
        kept: NodeState | None = None,
        readmitted: Readmitted = tuple,
    ):
        self.job, self.link, self._readmitted = job, link, readmitted
        if job.has_path:
            b_B = append_sgd_path(b_B, torch.zeros_like(x_P))
        first = Downward.new(job, 0, 0, x_P[None], b_B[None])
        first.give()
        super().__init__(save, kept or NodeState(below=first.now))

    @property
    def down(self) -> Downward:
        return self._side(self._kept)

    @property
    def round(self) -> int:
        """How many global rounds are done."""
        return self.job.global_round(self.down.now.step)

    @property
    def line(self) -> str:
        """What the last of them told of itself; empty before the first."""
        return self._kept.line

    def greet(self) -> None:
        """Learn how many samples there are; who is absent is waited for as in a round."""
        self._greet(end=False)

    def one_round(self, tell: Tell | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """One global round; who was refused and who was absent in it. Its line is kept with its
        state."""
        kept = self._kept.copy()
        down = self._side(kept)
        down.readmit(self._readmitted())
        meet(self.job, 0, down, self.link, None, relayed=False)
        now = down.now
        happened = now.refused, now.absent
        now.refused = now.absent = ()
        if tell is not None:
            kept.line = tell(now, *happened)
        self._keep(kept)
        return happened

    def end(self) -> None:
        self._greet(end=True)

    def _greet(self, end: bool) -> None:
        kept = self._kept.copy()
        greet(self.job, 0, self._side(kept), self.link, end)
        self._keep(kept)

    def _side(self, kept: NodeState) -> Downward:
        assert kept.below is not None
        return Downward(self.job, 0, 0, kept.below)


def introduction(job: Job, site: str) -> Reply:
    """The reply to a parent that is made of something else, or speaks another protocol: who this
    is, and what it is made of."""
    return Reply(job.name, site, 0, None, job.fingerprint, dict(job.made_of))


def check_bundle(job: Job, site: str, bundle: Bundle, kept: NodeState) -> Reply | None:
    """Refuse what is not for this node now; the reply where there is nothing to be done: the bundle
    was answered before, or its sender does not belong to the same run."""
    if bundle.protocol != PROTOCOL:
        raise InvalidInput("protocol", bundle.protocol, f"this node speaks version {PROTOCOL}")
    if bundle.job != job.name:
        raise InvalidInput("job", bundle.job, f"this node works for {job.name}")
    if bundle.site != site:
        raise InvalidInput("site", bundle.site, f"this node is {site}")
    if bundle.fingerprint not in ("", job.fingerprint):
        return introduction(job, site)
    level = job.tree.find(site)[0]
    bounds.check_bundle(job, level, bundle)
    if bundle.begin is None:
        return None
    step, every = bundle.begin.step, job.every[level]
    done = kept.reply.report.step - every if kept.reply is not None and kept.reply.report is not None else None
    if done is not None and step < done:
        raise InvalidInput("begin.step", step, f"a round that is over: the last one began at step {done}")
    if kept.reply is None or step != done:
        return None
    # it may have been made, and kept, by a version that spoke another protocol
    return replace(kept.reply, fingerprint=job.fingerprint, protocol=PROTOCOL)


def has_lost(begin: Begin | None, kept: NodeState) -> bool:
    """Whether the parent knows of a later round of this node than the node itself: its state was
    lost, or is an older one. It then begins anew, and a reply without a report asks the parent for
    everything."""
    if begin is None or begin.known is None:
        return False
    begun = kept.above.begun if kept.above is not None else None
    return begun is None or begun < begin.known


def _zeros(width: int, job: Job) -> Tensor:
    return torch.zeros(1, width, dtype=job.dtype)


def _nonzero(rows: Tensor | None) -> bool:
    return rows is not None and bool(rows.any())
