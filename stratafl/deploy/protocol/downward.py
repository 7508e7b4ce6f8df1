"""A parent's side of the edges to its children: the rule's memory, its model, and what each child
must still get.

Shape suffixes: K children, P parameters, B buffer values.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache
from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.topology import Topology
from stratafl.core.channel import BUFFERS, MODEL
from stratafl.core.rule import Edge, Rows
from stratafl.deploy.protocol.bounds import OFFENCES, check_reply
from stratafl.deploy.protocol.counts import MOST_SHIFTS, after_restart, reweighed, undelivered, unsound
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import Account, Answer, Begin, Bundle, Parcel, Reply, Report, Shift
from stratafl.federation import sync
from stratafl.federation.sync import AggregationResult, AggregatorState, EdgeNodes, ReceivedUpdates

LOG = logging.getLogger(__name__)
WORDS_LOST = "it is not finite"
WORDS_LARGE = "it is far larger than its siblings' or than the model"


@dataclass
class Child:
    """What a parent keeps of one child."""

    samples: int = 0
    """What it counts with: as declared until it is heard, and then as it said with its last report
    that counted."""
    stale: bool = True
    """Whether the child has not got the model yet."""
    owed: bool = False
    """Whether the child has not got the corrections from above as they are now."""
    heard: int | None = None
    """The step of its last report that counted."""
    known: int | None = None
    """The step of the last round that it replied to."""
    answer: Answer | None = None
    """What it must still be told; kept until it replied to it."""
    born: int | None = None
    """The step at which the state began that its reports build on; None before the first."""
    left: bool = False
    """Whether it was out at the last meeting."""
    offences: int = 0
    """Messages that broke the bounds; from a limit on it is out until it is readmitted."""
    offence: str = ""
    """What the last of them was."""
    out_round: int | None = None
    """The global round, counted from 1, in which it came to be out."""
    account: Account = field(default_factory=Account)


@dataclass
class Below:
    """What a parent keeps of the edges to its children."""

    held: Tensor
    """The parent's model: what came of the last meeting, or from above since."""
    buffers: Tensor
    memory: Rows
    given: Parcel
    """The parent's model as its children get it."""
    children: tuple[Child, ...]
    channel: Rows = field(default_factory=dict)
    """The memory of the channel to them."""
    rate: float = 0.0
    """The children's mean since this node last met its own parent."""
    merged: bool = False
    """Whether anything came of a meeting with the children since."""
    shifts: tuple[Shift, ...] = ()
    """Those that some child may not have yet, the oldest first."""
    step: int = 0
    """Where the next round of the children begins."""
    refused: tuple[str, ...] = ()
    """Whose update was refused in this node's subtree since its last report."""
    absent: tuple[str, ...] = ()
    """Who was asked and did not answer in time, in this node's subtree and since its last
    report."""


class Family(NamedTuple):
    """A parent's children as they count, and what the parent's memory becomes by it."""

    counts_K: np.ndarray
    memory: Rows
    shift: Rows
    """What is taken from the state of every child."""


class Downward:
    """What a parent does at the edges to its children, on the state `Below`."""

    def __init__(self, job: Job, level: int, number: int, now: Below):
        self._job, self._level, self._number, self._edge = job, level, number, job.edge(level + 1)
        self._numbers = job.children(level, number)
        self.names: Sequence[str] = [job.tree.names[level + 1][child] for child in self._numbers]
        self._places = {name: place for place, name in enumerate(self.names)}
        self._me = job.tree.names[level][number]
        self.now = now

    @staticmethod
    def new(job: Job, level: int, number: int, x_1P: Tensor, b_1B: Tensor) -> Downward:
        edge, numbers = job.edge(level + 1), job.children(level, number)
        children = tuple(Child(samples=sum(job.declared(level + 1, child))) for child in numbers)
        memory = edge.rule.open(x_1P)
        state = AggregatorState(model_MP=x_1P, buffers_MB=b_1B, memory=memory)
        parcel = sync.broadcast_message(edge.rule, state)
        now = Below(x_1P, b_1B, memory, Parcel.of(parcel), children, edge.channels.down.init(parcel))
        return Downward(job, level, number, now)

    def child(self, name: str) -> Child:
        return self.now.children[self._places[name]]

    # -- the start of a round ----------------------------------------------------------------------

    def take(self, parcel: Parcel, step: int, above_changed: bool) -> None:
        """Go on from a model that came from above."""
        now = self.now
        now.held, now.buffers, now.step, now.rate, now.merged = parcel.model, parcel.buffers, step, 0.0, False
        now.shifts = after_restart(self._edge.rule, now.shifts, self._job.states[self._level])
        for child in now.children:
            child.stale = True
            child.owed |= above_changed
        self.give()

    def drawn(self) -> list[str]:
        """The children that take part in the next round."""
        drawn_N = self._job.taking_part(self._level + 1, self.now.step)
        return [name for name, number in zip(self.names, self._numbers, strict=True) if drawn_N[number]]

    def bundles(self, names: Sequence[str], above: Tensor | None) -> dict[str, Bundle]:
        """What to send to these children; asked twice for the same round, the same."""
        now, made, tells = self.now, {}, self._job.states[self._level] is not None
        for name in names:
            child = self.child(name)
            begin = Begin(
                step=now.step,
                heard=child.heard,
                parcel=now.given if child.stale else None,
                above=above if child.owed else None,
                known=child.known,
                samples=child.samples if tells else None,
                shifts=undelivered(now.shifts, child.known),
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
        """A child that has lost its state is to get everything, as a new one. Its family begins
        anew when it is heard."""
        before = self.child(name)
        fresh = Child(before.samples, owed=True, born=before.born, left=before.left, account=before.account)
        fresh.offences, fresh.offence, fresh.out_round = before.offences, before.offence, before.out_round
        self.now.children = tuple(fresh if child is before else child for child in self.now.children)

    # -- the end of a round ------------------------------------------------------------------------

    def is_out(self, name: str) -> bool:
        """Whether a child has broken the bounds too often to be asked again."""
        return self.child(name).offences >= OFFENCES

    def check(self, bundle: Bundle, reply: Reply) -> None:
        """Refuse a reply that this child cannot truly have given to the bundle."""
        place = self._places[bundle.site]
        check_reply(self._job, self._level + 1, self._numbers[place], bundle, reply)

    def refuse(self, name: str, why: str | Exception, offence: bool) -> None:
        """A child's message does not count."""
        child, shown = self.child(name), escape_control(name)
        self.now.refused += (name,)
        LOG.warning("%s: its message is refused: %s", shown, why)
        if not offence:
            return
        # of an error that is no complaint of ours, only the class: it is told to the root
        is_ours = isinstance(why, str | InvalidInput)
        child.offences, child.offence = child.offences + 1, str(why) if is_ours else type(why).__name__
        if child.offences == OFFENCES:
            child.out_round = self._job.global_round(self.now.step) + 1
            LOG.warning("%s is out until it is readmitted: %d of its messages broke the bounds", shown, OFFENCES)

    def readmit(self, names: Collection[str]) -> None:
        """Ask children again that are out."""
        for name in self.names:
            if name in names and self.is_out(name):
                child = self.child(name)
                child.offences, child.offence, child.out_round = 0, "", None
                LOG.info("%s is readmitted", escape_control(name))

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
        child.answer = None
        if bundle.begin is None and all(each.known is None and each.born is None for each in self.now.children):
            # nothing is in use yet that was made under other weights
            child.samples = reply.samples
        if bundle.begin is not None and reply.report is not None:
            child.stale = child.owed = False
            child.known = bundle.begin.step
            child.born = reply.born if child.born is None else child.born
        if reply.report is not None:
            child.account.came(reply.report)
            self.now.refused += reply.report.refused
            self.now.absent += reply.report.absent

    def merge(self, replies: Mapping[str, Reply], relayed: bool) -> None:
        """Make a new model of what those that came have sent. `relayed`: a newer one is about to
        come from above."""
        job, now = self._job, self.now
        now.step += job.every[self._level + 1]
        for child in now.children:
            child.stale = True
        reports = {name: each.report for name, each in replies.items() if each.report is not None}
        came = [name for name in self.names if name in reports and reports[name].buffers is not None]
        if len(came) < job.patience_at(self._level + 1).min_children:
            return
        came = [name for name in came if self._is_sound(name, reports[name])]
        if not came:
            return
        arrived = self._arrived([reports[name] for name in came])
        family, outcome = self._met(came, replies, arrived)
        for name, is_lost, is_large in zip(came, outcome.nonfinite_N, outcome.oversized_N, strict=True):
            if is_lost or is_large:
                self.refuse(name, WORDS_LARGE if is_large else WORDS_LOST, offence=False)
        if outcome.failed_M[0]:
            self.refuse_all()
        if not outcome.updated_M[0]:
            return
        now.held, now.buffers, now.memory = outcome.state.model_MP, outcome.state.buffers_MB, outcome.state.memory
        rate = float(outcome.lr_sum_M[0])
        now.rate, now.merged = now.rate + rate, True
        present = [name for name, is_present in zip(came, outcome.accepted_N, strict=True) if is_present]
        self._take_count(family, {name: replies[name].born for name in present})
        is_answered = sync.answers_reports(self._edge.rule, relayed)
        if is_answered or not relayed:
            self.give()
        for name in present:
            child = self.child(name)
            child.heard = now.step
            if is_answered:
                child.answer, child.stale = Answer(now.step, rate, now.given), False

    def settle(self) -> None:
        """Count those that are out, or are back, as such also where nothing came of a meeting."""
        if [child.left for child in self.now.children] == self._out().tolist():
            return
        before = self.now.memory
        self._take_count(self._family({}), {})
        if self.now.memory is not before:
            self.give()

    def _is_sound(self, name: str, report: Report) -> bool:
        """Whether the state that came along, if one did, may be reckoned with; it is refused here
        if not."""
        is_lost = is_large = False
        if report.state is not None:
            is_lost, is_large = unsound(report.state, self.now.held, self._edge.limits)
        if is_lost or is_large:
            self.refuse(name, WORDS_LARGE if is_large else WORDS_LOST, offence=False)
        return not (is_lost or is_large)

    def _met(
        self, came: Sequence[str], replies: Mapping[str, Reply], arrived: ReceivedUpdates
    ) -> tuple[Family, AggregationResult]:
        """What the meeting comes to, and the family as those whose report counts change it."""
        counted = list(came)
        while True:
            family = self._family({name: replies[name] for name in counted})
            model_1P, buffers_1B = self._given()
            held = AggregatorState(model_MP=model_1P, buffers_MB=buffers_1B, memory=family.memory)
            outcome = sync.aggregate(self._edge, self._nodes(came, family.counts_K), held, arrived)
            present = {name for name, is_present in zip(came, outcome.accepted_N, strict=True) if is_present}
            if not outcome.updated_M[0] or present.issuperset(counted):
                return family, outcome
            counted = [name for name in counted if name in present]

    def _family(self, replies: Mapping[str, Reply]) -> Family:
        """The family with the counts that children now say."""
        before_K = np.array([child.samples for child in self.now.children])
        after_K, states = before_K.copy(), {}
        for name, reply in replies.items():
            place = self._places[name]
            after_K[place] = reply.samples
            if reply.report is not None and reply.report.state and after_K[place] != before_K[place]:
                states[place] = reply.report.state
        here_K = ~self._out()
        if not self._job.by_samples:
            states = {}
        return Family(
            after_K, *reweighed(self._edge.rule, self.now.memory, before_K * here_K, after_K * here_K, states)
        )

    def _take_count(self, family: Family, born: Mapping[str, int | None]) -> None:
        """Count from now on as the family does, and let every child have what comes of that. born:
        when the states of those present began."""
        now, rule, out_K = self.now, self._edge.rule, self._out()
        lost = [name for name, step in born.items() if self.child(name).born not in (None, step)]
        lost += [name for name, is_out in zip(self.names, out_K, strict=True) if is_out != self.child(name).left]
        for child, count, is_out in zip(now.children, family.counts_K, out_K, strict=True):
            child.samples, child.left = int(count), bool(is_out)
        for name, step in born.items():
            self.child(name).born = step
        known = [child.known for child in now.children if not child.left]
        shifts = [shift for shift in now.shifts if any(undelivered([shift], step) for step in known)]
        if any(bool(rows.any()) for rows in family.shift.values()):
            shifts.append(Shift(now.step, family.shift))
        if rule.reweigh is not None and (lost or len(shifts) > MOST_SHIFTS):
            why = (
                f"nobody knows the state of {', '.join(map(escape_control, lost))}"
                if lost
                else "some were away for long"
            )
            LOG.warning("%s and its children begin their corrections anew: %s", escape_control(self._me), why)
            now.memory, shifts = rule.open(now.held), [Shift(now.step, None)]
        now.shifts = tuple(shifts)

    def _nodes(self, names: Sequence[str], counts_K: np.ndarray) -> EdgeNodes:
        """This node and some of its children, with their weights among all of them."""
        family = Topology.family(self._me, names, self._weights(counts_K)[[self._places[name] for name in names]])
        return EdgeNodes(tree=family, level=1, cache=DeviceCache(self.now.held.device))

    def _arrived(self, reports: Sequence[Report]) -> ReceivedUpdates:
        """What came, as the parent understands it: a row for each."""
        known = Edge(self._given()[0], None, torch.ones(1, 1, dtype=self._job.dtype))
        messages = [sync.decode_upload(self._edge, report.payload, known) for report in reports]
        rows = {name: torch.cat([message[name] for message in messages]) for name in messages[0]}
        return ReceivedUpdates(
            message=rows,
            reported_N=np.ones(len(reports), dtype=bool),
            lr_sum_N=np.array([report.rate for report in reports]),
        )

    def _given(self) -> tuple[Tensor, Tensor]:
        """The model and the buffers that the children have been given, as they understand them."""
        taken = sync.decode_broadcast(self._edge, self.now.given.rows)
        return taken[MODEL], taken[BUFFERS]

    def give(self) -> None:
        """Give the children what this node holds now."""
        now = self.now
        key = self._edge.channel_key(now.step // self._job.every[self._level + 1], np.array([self._number]))
        held = AggregatorState(model_MP=now.held, buffers_MB=now.buffers, memory=now.memory)
        now.channel, payload = sync.broadcast(self._edge, now.channel, held, key)
        now.given = Parcel.of(payload)

    @property
    def samples(self) -> int:
        return sum(child.samples for child in self.now.children)

    def _out(self) -> np.ndarray:
        """Which children are out: they count for nothing."""
        return np.array([self.is_out(name) for name in self.names])

    def _weights(self, counts_K: np.ndarray) -> np.ndarray:
        out_K = self._out()
        if self._job.by_samples:
            counts_K = counts_K * ~out_K
            return counts_K / max(counts_K.sum(), 1)
        weights_K = self._job.tree.weights[self._level + 1][self._numbers]
        return weights_K if not out_K.any() else weights_K * ~out_K / max(float((weights_K * ~out_K).sum()), 1e-300)
