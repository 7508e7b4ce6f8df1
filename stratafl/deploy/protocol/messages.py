"""What a parent and its child say to each other.

    parent to child   Bundle: Answer (how the last meeting went), Begin (train from here on)
    child to parent   Reply: Report (what came of it)

Both tell the fingerprint of what they are made of, so that no two work together by mistake. A
bundle is one transmission: an answer waits for the next Begin and travels with it. One with neither
asks who is there, before the run, or ends it. Steps are local steps since the start of the run, the
same for all nodes: they number the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from stratafl.core.channel import BUFFERS, MODEL
from stratafl.core.rule import Rows
from stratafl.federation.sync import extras_of

PROTOCOL = 4


@dataclass(frozen=True)
class Parcel:
    """A parent's model as it gives it to a child: rows of one."""

    model: Tensor
    buffers: Tensor
    note: Rows

    @staticmethod
    def of(rows: Rows) -> Parcel:
        return Parcel(rows[MODEL], rows[BUFFERS], extras_of(rows))

    @property
    def rows(self) -> Rows:
        return {**self.note, MODEL: self.model, BUFFERS: self.buffers}


@dataclass(frozen=True)
class Answer:
    """The child's report on the meeting at `step` counted, and this is the model that came of
    it."""

    step: int
    rate: float
    """The siblings' mean, so that their corrections keep summing to zero."""
    parcel: Parcel


@dataclass(frozen=True)
class Shift:
    """What became of all children's states when a parent's weights of them changed, or when one of
    these states was lost."""

    step: int
    """The meeting at which that was."""
    rows: Rows | None
    """What is taken from each child's state; None where all begin anew."""


@dataclass(frozen=True)
class Begin:
    """Train, or have your subtree train, from `step` until we next meet."""

    step: int
    heard: int | None
    """The step of the child's last report that counted."""
    parcel: Parcel | None
    """None where the child has it: it came with the answer."""
    above: Tensor | None
    """The sum of the corrections from the child's parent to the root, where it changed."""
    known: int | None = None
    """The step of the last round that the child replied to: one that does not know of it has lost
    its state."""
    samples: int | None = None
    """The samples that the parent counts the child with, where the rule has to know when that
    changes: one that has others sends its state along."""
    shifts: tuple[Shift, ...] = ()
    """Those that the child may not know of, the oldest first; it has all up to the last round that
    it began."""


@dataclass(frozen=True)
class Report:
    """What a child brings to the meeting at `step`."""

    step: int
    rate: float
    """The sum of the learning rates since the last meeting."""
    message: Rows
    buffers: Tensor | None
    """None, and no message, from an aggregator that heard nobody."""
    refused: tuple[str, ...] = ()
    """The nodes of its subtree whose update was refused since."""
    absent: tuple[str, ...] = ()
    """The names of those that were asked and did not answer in time."""
    state: Rows | None = None
    """The rule's state with which the child began the round, where it has other samples than its
    parent counts it with."""

    @property
    def payload(self) -> Rows:
        """Everything of a child's model that travels, where there is any."""
        return self.message if self.buffers is None else {**self.message, BUFFERS: self.buffers}


@dataclass(frozen=True)
class Bundle:
    """What a parent sends to one child."""

    job: str
    site: str
    """Whom it is for."""
    answer: Answer | None = None
    begin: Begin | None = None
    end: bool = False
    """The run is over."""
    fingerprint: str = ""
    """The digest of what the parent is made of."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Reply:
    """What a child answers its parent."""

    job: str
    site: str
    """Who it is from."""
    samples: int
    """The samples in the child's subtree."""
    report: Report | None = None
    """None where the bundle asked for nothing, or where the child has lost what it builds on and
    needs everything."""
    fingerprint: str = ""
    """The digest of what the child is made of."""
    made_of: dict[str, str] = field(default_factory=dict)
    """What that is, where it is not the parent's: then nothing was done."""
    born: int | None = None
    """The step of the round with which the child's state began: another one than before tells that
    the child lost its state since, however often either end was interrupted."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Refused:
    """Stands in the place of a child's reply where something came that is none."""

    reason: str
    sealed: bool
    """Whether it was signed with the child's own key: it is the child itself that breaks the
    rules."""


@dataclass
class Account:
    """What went over one edge: messages with arrays in them, and the bytes of these."""

    messages_up: int = 0
    messages_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def sent(self, bundle: Bundle) -> None:
        if bundle.answer is not None:
            self.messages_down += 1
            self.bytes_down += _parcel_bytes(bundle.answer.parcel)
        begin = bundle.begin
        if begin is not None and (begin.parcel is not None or begin.above is not None):
            self.messages_down += 1
            self.bytes_down += 0 if begin.parcel is None else _parcel_bytes(begin.parcel)
            self.bytes_down += 0 if begin.above is None else _bytes(begin.above)
        if begin is not None:
            self.bytes_down += sum(_rows_bytes(shift.rows) for shift in begin.shifts)

    def came(self, report: Report) -> None:
        if report.buffers is not None:
            self.messages_up += 1
            self.bytes_up += _rows_bytes(report.payload) + _rows_bytes(report.state)


def _bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()


def _rows_bytes(rows: Rows | None) -> int:
    return sum(map(_bytes, (rows or {}).values()))


def _parcel_bytes(parcel: Parcel) -> int:
    return _rows_bytes(parcel.rows)
