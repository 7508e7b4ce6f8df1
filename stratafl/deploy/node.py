"""Leaf, aggregator and root: state machines that know nothing of networks.

A leaf has a side upward, a root one downward, an aggregator both. Each takes a bundle and gives a reply, keeping its
state with `save` before the reply leaves: so a bundle may come twice, and a node may die at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stratafl.deploy.downward import Below, Downward
from stratafl.deploy.job import Job
from stratafl.deploy.messages import PROTOCOL, Answer, Begin, Bundle, Parcel, Reply, Report
from stratafl.deploy.upward import Above, Upward
from stratafl.engine.spread import Spread
from stratafl.engine.work import Engine, Pull, Work
from stratafl.errors import InvalidInput


@dataclass
class Kept:
    """Everything a node must not lose."""

    above: Above | None = None
    below: Below | None = None
    reply: Reply | None = None
    """To the last bundle that began a round: it is not trained twice."""


FAREWELL = 20.0
"""Seconds: what is lost with a farewell is one last update of a correction that nobody will use."""
Save = Callable[[Kept], None]


class Link(Protocol):
    """A parent's way to its children."""

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply]:
        """Their replies, of those that came in time."""
        ...


class Leaf:
    """A client beside its data."""

    def __init__(self, job: Job, number: int, engine: Engine, samples: int, save: Save, kept: Kept | None = None):
        self.job, self.number, self.engine, self.samples = job, number, engine, samples
        self.site = job.tree.names[-1][number]
        self._save, self._kept = save, kept or Kept(above=Above())
        assert self._kept.above is not None
        self._up = Upward(job, job.tree.depth, self._kept.above)

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        if bundle.answer is not None:
            self._up.answer(bundle.answer)
        report = None
        if bundle.begin is not None:
            self._up.begin(bundle.begin)
            report = self._train(bundle.begin.step)
        reply = Reply(self.job.name, self.site, self.samples, report, self.job.fingerprint)
        if report is not None:
            self._kept.reply = reply
        self._save(self._kept)
        return reply

    def _train(self, step: int) -> Report:
        start = self._up.now.start
        assert start is not None
        steps, round = self.job.every[-1], self.job.global_round(step)
        corrections = [part for part in (self._up.now.above, self._up.now.correction) if part is not None]
        work = Work(
            x=self._row(start.model),
            b=self._row(start.buffers),
            corrections=tuple(map(self._row, corrections)),
            pulls=self._pulls(start),
            active=[self.number],
            step=step,
            steps=steps,
            round=round,
        )
        x_1P, b_1B = self.engine.train(work)
        return self._up.report(x_1P, b_1B, self.engine.leaf.rate(round, steps))

    def _pulls(self, start: Parcel) -> tuple[Pull, ...]:
        local, correction = self.job.rules[-1].local, self._up.now.correction
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
        assert self._kept.above is not None
        self._up = Upward(job, level, self._kept.above)

    def handle(self, bundle: Bundle) -> Reply:
        again = check_bundle(self.job, self.site, bundle, self._kept)
        if again is not None:
            return again
        begin = bundle.begin
        if begin is None:
            return self._pass_on(bundle)
        if begin.step != self._up.now.begun:
            self._take_over(bundle.answer, begin)
        down = self._down()
        end = begin.step + self.job.every[self.level]
        while down.now.step < end:
            relayed = down.now.step + self.job.every[self.level + 1] == end
            meet(self.job, self.level, down, self.link, self._up.path, relayed)
            if not relayed:  # after the last one it is saved with the report
                self._save(self._kept)
        report = Report(end, 0.0, {}, None)
        if down.now.rate > 0:
            report = self._up.report(down.now.held, down.now.buffers, down.now.rate)
        else:
            self._up.now.sent = None
        report = Report(end, report.rate, report.message, report.buffers, down.now.refused, down.now.absent)
        down.now.refused = down.now.absent = ()
        self._kept.reply = Reply(self.job.name, self.site, down.samples, report, self.job.fingerprint)
        self._save(self._kept)
        return self._kept.reply

    def _take_over(self, answer: Answer | None, begin: Begin) -> None:
        """A new round of its own edge: what it got goes on to its subtree."""
        up, is_first = self._up, self._up.now.begun is None
        if answer is not None:
            up.answer(answer)
        up.begin(begin)
        start = up.now.start
        assert start is not None
        # every meeting of its edge may have moved its correction; before the first it is known to be zero, if it is
        corrected = _nonzero(up.path) if begin.step == 0 else up.now.correction is not None
        self._down(start if is_first else None).take(start, begin.step, corrected or begin.above is not None)
        self._save(self._kept)

    def _pass_on(self, bundle: Bundle) -> Reply:
        """Ask who is there below, or tell them that the run is over."""
        if bundle.answer is not None:
            self._up.answer(bundle.answer)
        down = self._down()
        greet(self.job, self.level, down, self.link, bundle.end)
        self._save(self._kept)
        return Reply(self.job.name, self.site, down.samples, fingerprint=self.job.fingerprint)

    def _down(self, first: Parcel | None = None) -> Downward:
        job = self.job
        known = self._kept.below
        if known is None or first is not None:
            # a greeting may come before the first model, which then begins everything but the sample counts
            given = first or Parcel(_zeros(job.parameters, job), _zeros(job.buffers, job), {})
            self._kept.below = Downward.new(job, self.level, self.number, given.model, given.buffers).now
            for child, before in zip(self._kept.below.children, known.children if known else (), strict=False):
                child.samples = before.samples
        assert self._kept.below is not None
        return Downward(job, self.level, self.number, self._kept.below)


class Root:
    """The top: it has the clock."""

    def __init__(self, job: Job, x_P: Tensor, b_B: Tensor, link: Link, save: Save, kept: Kept | None = None):
        self.job, self.link, self._save = job, link, save
        self._kept = kept or Kept(below=Downward.new(job, 0, 0, x_P[None], b_B[None]).now)
        assert self._kept.below is not None
        self.down = Downward(job, 0, 0, self._kept.below)

    @property
    def round(self) -> int:
        """How many global rounds are done."""
        return self.job.global_round(self.down.now.step)

    def greet(self) -> None:
        """Learn how many samples there are; nobody's absence stops the run here."""
        greet(self.job, 0, self.down, self.link, end=False)
        self._save(self._kept)

    def one_round(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """One global round; who was refused and who was absent in it."""
        meet(self.job, 0, self.down, self.link, None, relayed=False)
        now = self.down.now
        happened = now.refused, now.absent
        now.refused = now.absent = ()
        self._save(self._kept)
        return happened

    def end(self) -> None:
        greet(self.job, 0, self.down, self.link, end=True)
        self._save(self._kept)


def meet(job: Job, level: int, down: Downward, link: Link, path: Tensor | None, relayed: bool) -> None:
    """One round of a node's children, from the model it gives them to the one it makes of theirs."""
    names = down.drawn()
    bundles = down.bundles(names, path)
    replies = link.ask(bundles, job.patience_at(level + 1).deadline)
    meeting = down.now.step + job.every[level + 1]
    reports = {}
    for name in names:
        reply = replies.get(name)
        if reply is not None and reply.fingerprint != job.fingerprint:
            down.now.refused += (name,)
            continue
        if reply is None or reply.report is None or reply.report.step != meeting:
            down.now.absent += (name,)
            continue
        down.delivered(bundles[name], reply)
        reports[name] = reply.report
    down.merge(reports, relayed)


def greet(job: Job, level: int, down: Downward, link: Link, end: bool) -> None:
    """Before the run, learn who is there and with how many samples; at its end say so, and wait for nobody long."""
    bundles, deadline = down.greetings(end), job.patience_at(level + 1).deadline
    if end:
        # each level's wait holds those of the levels below it
        deadline = FAREWELL * (job.tree.depth - level)
    for name, reply in link.ask(bundles, deadline).items():
        if reply.fingerprint == job.fingerprint:
            down.delivered(bundles[name], reply)


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
    if bundle.begin is None:
        return None
    step, every = bundle.begin.step, job.every[job.tree.find(site)[0]]
    if step < 0 or step % every:
        raise InvalidInput("begin.step", step, f"rounds of this node begin at multiples of {every}")
    done = kept.reply.report.step - every if kept.reply is not None and kept.reply.report is not None else None
    if done is not None and step < done:
        raise InvalidInput("begin.step", step, f"a round that is over: the last one began at step {done}")
    return replace(kept.reply, fingerprint=job.fingerprint) if kept.reply is not None and step == done else None


def _zeros(width: int, job: Job) -> Tensor:
    return torch.zeros(1, width, dtype=job.dtype)


def _nonzero(rows: Tensor | None) -> bool:
    return rows is not None and bool(rows.any())
