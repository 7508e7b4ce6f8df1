"""A parent's side of the edges to its children: the rule's memory, its model, and what each child must still get.

Shape suffixes: K children, P parameters, B buffer values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stratafl.deploy.bounds import OFFENCES, check_reply
from stratafl.deploy.job import Job
from stratafl.deploy.messages import Account, Answer, Begin, Bundle, Parcel, Reply, Report
from stratafl.errors import printable
from stratafl.refusal import carried, changed, finite, largest, lengths, too_large, too_long
from stratafl.rule import Rows
from stratafl.tree import median_of_siblings

LOG = logging.getLogger(__name__)
SOUND, NOT_FINITE, TOO_LARGE = range(3)
WORDS = {NOT_FINITE: "it is not finite", TOO_LARGE: "it is far larger than its siblings' or than the model"}


@dataclass
class Child:
    """What a parent keeps of one child."""

    samples: int = 0
    stale: bool = True
    """It has not got the model."""
    owed: bool = False
    """It has not got the corrections from above as they are now."""
    heard: int | None = None
    """The step of its last report that counted."""
    known: int | None = None
    """The step of the last round that it replied to."""
    answer: Answer | None = None
    """What it must still be told; kept until it replied to it."""
    offences: int = 0
    """Messages that broke the bounds; past a limit it is out for the run."""
    account: Account = field(default_factory=Account)


@dataclass
class Below:
    """What a parent keeps of the edges to its children."""

    held: Tensor
    buffers: Tensor
    memory: Rows
    children: tuple[Child, ...]
    rate: float = 0.0
    """The children's mean since this node last met its own parent."""
    step: int = 0
    """Where the next round of the children begins."""
    refused: tuple[str, ...] = ()
    """Since this node's last report: whose update was refused, in its subtree."""
    absent: tuple[str, ...] = ()
    """Likewise: who was asked and did not answer in time."""


class Downward:
    def __init__(self, job: Job, level: int, number: int, now: Below):
        self._job, self._level, self._rule = job, level, job.rules[level]
        self._numbers = job.children(level, number)
        self.names: Sequence[str] = [job.tree.names[level + 1][child] for child in self._numbers]
        self._places = {name: place for place, name in enumerate(self.names)}
        self._me = job.tree.names[level][number]
        self.now = now

    @staticmethod
    def new(job: Job, level: int, number: int, x_1P: Tensor, b_1B: Tensor) -> Downward:
        children = tuple(Child() for _ in job.children(level, number))
        return Downward(job, level, number, Below(x_1P, b_1B, job.rules[level].open(x_1P), children))

    def child(self, name: str) -> Child:
        return self.now.children[self._places[name]]

    # -- the start of a round ---------------------------------------------------------------------------------------

    def take(self, parcel: Parcel, step: int, above_changed: bool) -> None:
        """Go on from a model that came from above."""
        now = self.now
        now.held, now.buffers, now.step, now.rate = parcel.model, parcel.buffers, step, 0.0
        for child in now.children:
            child.stale = True
            child.owed |= above_changed

    def drawn(self) -> list[str]:
        """The children that take part in the next round."""
        drawn_N = self._job.taking_part(self._level + 1, self.now.step)
        return [name for name, number in zip(self.names, self._numbers, strict=True) if drawn_N[number]]

    def bundles(self, names: Sequence[str], above: Tensor | None) -> dict[str, Bundle]:
        """What to send to these children; asked twice for the same round, the same."""
        now, note, made = self.now, self._rule.note(self.now.memory), {}
        for name in names:
            child = self.child(name)
            begin = Begin(
                step=now.step,
                heard=child.heard,
                parcel=Parcel(now.held, now.buffers, note) if child.stale else None,
                above=above if child.owed else None,
                known=child.known,
            )
            made[name] = Bundle(self._job.name, name, child.answer, begin, fingerprint=self._job.fingerprint)
        return made

    def greetings(self, end: bool = False) -> dict[str, Bundle]:
        """What to send before the run, or when it ends."""
        job = self._job
        return {
            name: Bundle(job.name, name, self.child(name).answer, end=end, fingerprint=job.fingerprint)
            for name in self.names
        }

    def forget(self, name: str) -> None:
        """A child that has lost its state is to get everything, as a new one."""
        before = self.child(name)
        fresh = Child(samples=before.samples, owed=True, offences=before.offences, account=before.account)
        self.now.children = tuple(fresh if child is before else child for child in self.now.children)

    # -- the end of a round -----------------------------------------------------------------------------------------

    def is_out(self, name: str) -> bool:
        """Whether a child has broken the bounds too often to be asked again."""
        return self.child(name).offences >= OFFENCES

    def check(self, bundle: Bundle, reply: Reply) -> None:
        """Refuse a reply that this child cannot truly have given to the bundle."""
        place = self._places[bundle.site]
        known = self.now.children[place].samples
        check_reply(self._job, self._level + 1, self._numbers[place], bundle, reply, known)

    def refuse(self, name: str, why: str, offence: bool) -> None:
        """A child's message does not count."""
        child, shown = self.child(name), printable(name)
        self.now.refused += (name,)
        child.offences += offence
        LOG.warning("%s: its message is refused: %s", shown, why)
        if offence and child.offences == OFFENCES:
            LOG.warning("%s is out for the rest of the run: %d of its messages were refused", shown, OFFENCES)

    def refuse_unheard(self, name: str) -> None:
        """A child that is out is not asked, and told of as long as it would be."""
        self.now.refused += (name,)

    def refuse_all(self) -> None:
        """What came of all messages together does not count."""
        self.now.refused += (self._me,)

    def delivered(self, bundle: Bundle, reply: Reply) -> None:
        """A child has what was sent to it, since it replied."""
        child = self.child(bundle.site)
        child.account.sent(bundle)
        child.samples = reply.samples
        child.answer = None
        if bundle.begin is not None and reply.report is not None:
            child.stale = child.owed = False
            child.known = bundle.begin.step
        if reply.report is not None:
            child.account.came(reply.report)
            self.now.refused += reply.report.refused
            self.now.absent += reply.report.absent

    def merge(self, reports: Mapping[str, Report], relayed: bool) -> None:
        """Make a new model of what those that came have sent. `relayed`: a newer one is about to come from above."""
        job, rule, now = self._job, self._rule, self.now
        now.step += job.every[self._level + 1]
        for child in now.children:
            child.stale = True
        came = [name for name in self.names if name in reports and reports[name].rate > 0]
        if len(came) < job.patience_at(self._level + 1).min_children:
            return
        judged = self._judge([reports[name] for name in came])
        for name, verdict in zip(came, judged, strict=True):
            if verdict != SOUND:
                self.refuse(name, WORDS[verdict], offence=verdict == TOO_LARGE)
        present = [name for name, verdict in zip(came, judged, strict=True) if verdict == SOUND]
        weights_K = self._weights()[[self._places[name] for name in present]]
        share, own = float(weights_K.sum()), [reports[name] for name in present]
        if not share > 0:
            return

        parts_K = torch.as_tensor(weights_K / share, dtype=job.dtype)
        reduce = rule.reduce or _mean
        mean = {key: reduce(torch.cat([r.message[key] for r in own]), parts_K)[None] for key in own[0].message}
        buffers_1B = _mean(torch.cat([r.buffers for r in own if r.buffers is not None]), parts_K)[None]
        buffers_1B = carried(buffers_1B, now.buffers)
        share_11 = torch.full((1, 1), share, dtype=job.dtype)
        memory, model_1P = rule.merge(now.memory, now.held, mean, share_11)
        if not finite(largest(model_1P, changed(buffers_1B, now.buffers), *mean.values())).all():
            self.refuse_all()
            return

        now.memory, now.held, now.buffers = memory, model_1P, buffers_1B
        rate = float((weights_K * [r.rate for r in own]).sum() / share)
        now.rate += rate
        answered = rule.down is not None and not (relayed and rule.relay is not None)
        parcel = Parcel(now.held, now.buffers, rule.note(now.memory))
        for child in map(self.child, present):
            child.heard = now.step
            if answered:
                child.answer, child.stale = Answer(now.step, rate, parcel), False

    def _judge(self, reports: Sequence[Report]) -> np.ndarray:
        """Whose report is finite, and is not far off the others'."""
        if not reports:
            return np.full(0, SOUND)
        now, limit, factor = self.now, self._job.limits[self._level], self._job.factors[self._level]
        together_K = np.zeros(len(reports), dtype=np.int64)
        changed_KB = changed(torch.cat([r.buffers for r in reports if r.buffers is not None]), now.buffers)
        message = {key: torch.cat([r.message[key] for r in reports]) for key in reports[0].message}
        *others, buffers_K = sizes = largest(*message.values(), changed_KB)
        sound_K = finite(sizes)
        large_K = np.zeros_like(sound_K)
        update_KP = message["model"] - now.held
        if limit is not None:
            update_K, start_1, given_1 = largest(update_KP, now.held, now.buffers.nan_to_num(0.0, 0.0, 0.0))
            # a variance among the buffers goes with the square of what the others go with
            looks = [(update_K, start_1, limit), (buffers_K, given_1, limit**2)]
            looks += [(each_K, start_1, limit) for key, each_K in zip(message, others, strict=True) if key != "model"]
            for each_K, begun_1, most in looks:
                large_K |= too_large(each_K, median_of_siblings(each_K, sound_K, together_K), begun_1, most)
        if factor is not None:
            norm_K, near_K = lengths(update_KP), sound_K & ~large_K
            siblings_K = median_of_siblings(norm_K, near_K, together_K, upper=True)
            large_K |= near_K & too_long(norm_K, siblings_K, lengths(now.held), factor)
        return np.where(sound_K, np.where(large_K, TOO_LARGE, SOUND), NOT_FINITE)

    @property
    def samples(self) -> int:
        return sum(child.samples for child in self.now.children)

    def _weights(self) -> np.ndarray:
        if self._job.by_samples:
            return np.array([child.samples for child in self.now.children]) / max(self.samples, 1)
        return self._job.tree.weights[self._level + 1][self._numbers]


def _mean(rows_KP: Tensor, weights_K: Tensor) -> Tensor:
    return weights_K @ rows_KP
