"""Leaf, aggregator and root: state machines that know nothing of networks.

A leaf has a side upward, a root one downward, an aggregator both. Each takes a bundle and gives a reply. It works on a
copy of its state, which becomes its state once `save` has kept it, before the reply leaves: so a bundle may come twice,
a node may die at any moment, and what could not be saved has not happened.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stratafl.deploy import bounds
from stratafl.deploy.downward import Below, Downward
from stratafl.deploy.job import Job
from stratafl.deploy.messages import PROTOCOL, Answer, Begin, Bundle, Parcel, Refused, Reply, Report
from stratafl.deploy.upward import Above, Upward
from stratafl.engine.spread import Spread
from stratafl.engine.work import Engine, Pull, Work
from stratafl.errors import InvalidInput, printable, told


@dataclass
class Kept:
    """Everything a node must not lose."""

    above: Above | None = None
    below: Below | None = None
    reply: Reply | None = None
    """To the last bundle that began a round: it is not trained twice."""
    line: str = ""
    """The root's: its last round as the record tells it."""

    def copy(self) -> Kept:
        """One that can be changed without changing this one; arrays, which nobody changes, are shared."""
        return Kept(*(_copied(getattr(self, field.name)) for field in dataclasses.fields(self)))


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return dataclasses.replace(value, **{f.name: _copied(getattr(value, f.name)) for f in dataclasses.fields(value)})


FAREWELL = 20.0
"""Seconds: what is lost with a farewell is one last update of a correction that nobody will use."""
Save = Callable[[Kept], None]
Tell = Callable[[Below, tuple[str, ...], tuple[str, ...]], str]
"""A round's line: of what came of it, who was refused and who was absent."""
LOG = logging.getLogger(__name__)


class Link(Protocol):
    """A parent's way to its children."""

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> Mapping[str, Reply | Refused]:
        """What came in time."""
        ...


class Leaf:
    """A client beside its data."""

    def __init__(self, job: Job, number: int, engine: Engine, samples: int, save: Save, kept: Kept | None = None):
        self.job, self.number, self.engine, self.samples = job, number, engine, samples
        self.site = job.tree.names[-1][number]
        self._save, self._kept = save, kept or Kept(above=Above())

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        lost = has_lost(bundle.begin, self._kept)
        kept = Kept(above=Above()) if lost else self._kept.copy()
        assert kept.above is not None
        up, report = Upward(self.job, self.job.tree.depth, kept.above), None
        if bundle.answer is not None:
            up.answer(bundle.answer)
        if bundle.begin is not None and not lost:
            up.begin(bundle.begin)
            report = self._train(up, bundle.begin.step)
        reply = Reply(self.job.name, self.site, self.samples, report, self.job.fingerprint)
        if report is not None:
            kept.reply = reply
        self._save(kept)
        self._kept = kept
        return reply

    def _train(self, up: Upward, step: int) -> Report:
        start = up.now.start
        assert start is not None
        steps, round = self.job.every[-1], self.job.global_round(step)
        corrections = [part for part in (up.now.above, up.now.correction) if part is not None]
        work = Work(
            x=self._row(start.model),
            b=self._row(start.buffers),
            corrections=tuple(map(self._row, corrections)),
            pulls=self._pulls(start, up.now.correction),
            active=[self.number],
            step=step,
            steps=steps,
            round=round,
        )
        x_1P, b_1B = self.engine.train(work)
        return up.report(x_1P, b_1B, self.engine.leaf.rate(round, steps))

    def _pulls(self, start: Parcel, correction: Tensor | None) -> tuple[Pull, ...]:
        local = self.job.rules[-1].local
        if local is None:
            return ()
        rate = torch.zeros(1, 1, dtype=self.job.dtype)  # it begins anew at every meeting
        mine = None if correction is None else self._row(correction)
        return (Pull(local, self._row(start.model), mine, self._row(rate)),)

    def _row(self, rows_1P: Tensor) -> Spread:
        """The one row, as that of this leaf's number."""
        return Spread(rows_1P, np.zeros(self.number + 1, dtype=np.int64))


class Aggregator:
    """A node between the root and the leaves."""

    def __init__(self, job: Job, level: int, number: int, link: Link, save: Save, kept: Kept | None = None):
        self.job, self.level, self.number, self.link = job, level, number, link
        self.site = job.tree.names[level][number]
        self._save, self._kept = save, kept or Kept(above=Above())

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        begin = bundle.begin
        if begin is None:
            return self._pass_on(bundle)
        if has_lost(begin, self._kept):
            self._keep(Kept(above=Above()))
            return Reply(self.job.name, self.site, 0, fingerprint=self.job.fingerprint)
        assert self._kept.above is not None
        if begin.step != self._kept.above.begun:
            self._take_over(bundle.answer, begin)
        end = begin.step + self.job.every[self.level]
        while True:
            kept, up, down = self._sides()
            is_last = down.now.step + self.job.every[self.level + 1] == end
            meet(self.job, self.level, down, self.link, up.path, relayed=is_last)
            if is_last:  # it is saved with the report
                kept.reply = reply = self._reply(up, down, end)
                self._keep(kept)
                return reply
            self._keep(kept)

    def _reply(self, up: Upward, down: Downward, end: int) -> Reply:
        """After the last meeting of a round."""
        report, now = Report(end, 0.0, {}, None), down.now
        if now.rate > 0:
            report = up.report(now.held, now.buffers, now.rate)
        else:
            up.now.sent = None
        report = Report(end, report.rate, report.message, report.buffers, now.refused, now.absent)
        now.refused = now.absent = ()
        return Reply(self.job.name, self.site, down.samples, report, self.job.fingerprint)

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
            down = self._first(down, start)
            kept.below = down.now
        # every meeting of its edge may have moved its correction; before the first it is known to be zero, if it is
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

    def _keep(self, kept: Kept) -> None:
        self._save(kept)
        self._kept = kept

    def _sides(self) -> tuple[Kept, Upward, Downward]:
        """A copy of the state to work on, and the two sides that change it."""
        job, kept = self.job, self._kept.copy()
        assert kept.above is not None
        if kept.below is None:
            # a greeting may come before the first model
            x_1P, b_1B = _zeros(job.parameters, job), _zeros(job.buffers, job)
            kept.below = Downward.new(job, self.level, self.number, x_1P, b_1B).now
        return kept, Upward(job, self.level, kept.above), Downward(job, self.level, self.number, kept.below)

    def _first(self, greeted: Downward, start: Parcel) -> Downward:
        """The first model begins everything but the sample counts."""
        down = Downward.new(self.job, self.level, self.number, start.model, start.buffers)
        for child, before in zip(down.now.children, greeted.now.children, strict=True):
            child.samples = before.samples
        return down


class Root:
    """The top: it has the clock."""

    def __init__(self, job: Job, x_P: Tensor, b_B: Tensor, link: Link, save: Save, kept: Kept | None = None):
        self.job, self.link, self._save = job, link, save
        self._kept = kept or Kept(below=Downward.new(job, 0, 0, x_P[None], b_B[None]).now)

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
        """Learn how many samples there are; nobody's absence stops the run here."""
        self._greet(end=False)

    def one_round(self, tell: Tell | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """One global round; who was refused and who was absent in it. Its line is kept with its state."""
        kept = self._kept.copy()
        down = self._side(kept)
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

    def _keep(self, kept: Kept) -> None:
        self._save(kept)
        self._kept = kept

    def _side(self, kept: Kept) -> Downward:
        assert kept.below is not None
        return Downward(self.job, 0, 0, kept.below)


def meet(job: Job, level: int, down: Downward, link: Link, path: Tensor | None, relayed: bool) -> None:
    """One round of a node's children, from the model it gives them to the one it makes of theirs."""
    drawn, deadline, began = down.drawn(), job.patience_at(level + 1).deadline, time.monotonic()
    bundles = down.bundles([name for name in drawn if not down.is_out(name)], path)
    came = dict(link.ask(bundles, deadline))
    lost = [name for name in bundles if is_lost(bundles[name], came.get(name)) and not is_stranger(job, came[name])]
    for name in lost:
        down.forget(name)
        del came[name]
    left = None if deadline is None else deadline - (time.monotonic() - began)
    # a leaf begins anew at once; an aggregator in the next round, as its children may have done some of this one
    if lost and level + 1 == job.tree.depth and (left is None or left > 0):
        whole = down.bundles(lost, path)
        bundles |= whole
        came |= link.ask(whole, left)
    reports = {}
    for name in drawn:
        if name not in bundles or is_stranger(job, came.get(name)):
            down.refuse_unheard(name)
        elif name not in came:
            down.now.absent += (name,)
        elif (reply := hear(down, bundles[name], came[name])) is not None:
            if reply.report is None:
                down.now.absent += (name,)
            else:
                reports[name] = reply.report
    try:
        down.merge(reports, relayed)
    except Exception as problem:
        # no message can be told to be the cause: the parent keeps its model, as if it had heard nobody
        down.refuse_all()
        LOG.error("what came from %s cannot be merged: %s", printable(", ".join(reports)), told(problem))


def hear(down: Downward, bundle: Bundle, came: Reply | Refused) -> Reply | None:
    """What came from a child, if it is a reply that may count; whatever else it is, nothing but its sender suffers."""
    if isinstance(came, Refused):
        why, offence = came.reason, came.sealed
    else:
        try:
            down.check(bundle, came)
            down.delivered(bundle, came)
            return came
        except Exception as problem:
            why, offence = told(problem), True
    down.refuse(bundle.site, why, offence)
    return None


def greet(job: Job, level: int, down: Downward, link: Link, end: bool) -> None:
    """Before the run, learn who is there and with how many samples; at its end say so, and wait for nobody long."""
    bundles, deadline = down.greetings(end), job.patience_at(level + 1).deadline
    if end:
        # each level's wait holds those of the levels below it
        deadline = FAREWELL * (job.tree.depth - level)
    for name, came in link.ask(bundles, deadline).items():
        if name in bundles and not is_stranger(job, came):
            hear(down, bundles[name], came)


def is_lost(bundle: Bundle, came: Reply | Refused | None) -> bool:
    """Whether a child that was asked to go on says that it has lost what it had."""
    going_on = bundle.begin is not None and bundle.begin.known is not None
    return going_on and isinstance(came, Reply) and came.report is None


def is_stranger(job: Job, came: Reply | Refused | None) -> bool:
    """Whether a child works with something else than its parent: that is said, and no offence."""
    return isinstance(came, Reply) and came.fingerprint != job.fingerprint


def introduction(job: Job, site: str) -> Reply:
    """To a parent that is made of something else, or speaks another protocol: who this is, and what it is made of."""
    return Reply(job.name, site, 0, None, job.fingerprint, dict(job.made_of))


def check_bundle(job: Job, site: str, bundle: Bundle, kept: Kept) -> Reply | None:
    """Refuse what is not for this node now; the reply where there is nothing to be done: the bundle was answered
    before, or its sender does not belong to the same run."""
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
    return replace(kept.reply, fingerprint=job.fingerprint) if kept.reply is not None and step == done else None


def has_lost(begin: Begin | None, kept: Kept) -> bool:
    """Whether the parent knows of a later round of this node than the node itself: its state was lost, or is an older
    one. It then begins anew, and a reply without a report asks the parent for everything."""
    if begin is None or begin.known is None:
        return False
    begun = kept.above.begun if kept.above is not None else None
    return begun is None or begun < begin.known


def _zeros(width: int, job: Job) -> Tensor:
    return torch.zeros(1, width, dtype=job.dtype)


def _nonzero(rows: Tensor | None) -> bool:
    return rows is not None and bool(rows.any())
