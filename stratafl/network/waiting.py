"""Whom a parent waits for, per edge level: all, those that come in time, the first so many; and
whether the work of the others counts later.

A meeting opens when the parent has the model that it hands out, and closes

    all        when the last child is heard that was asked;
    deadline   so many seconds after it opened, or before that with the last child;
    first      with the k-th child, k being a number, or a fraction of those that were asked;

and with both of the last two, whichever comes first. A parent that heard nobody by its deadline
waits for the first child, whenever that comes. Of children that are heard at the same moment, the
first in the tree's order counts as the first. An aggregator to which nobody came has no model to
report, and says so; that counts as nobody, and is waited for where there is nobody else, or by one
that waits for all.

A child that is not heard by then is late. Unless late work counts, it is told to stop, which takes
no time, and is free when its parent's next round begins, for which it gets a new model if it is
asked. In the meeting that it missed it is as absent as if it had not been drawn.

Where late work counts, a late child goes on, and is one of those that the parent's next meeting
waits for, beside those that begin then. A level that waits for the first k in this way meets
asynchronously: `{ buffer = k }` is short for it.

Shape suffixes: R rounds, N nodes of a level, M nodes of the level above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.validation import check_choice, check_count_or_fraction, check_integer, check_number
from stratafl.network.links import SiblingGroups

FIRST = "must be a number, or a fraction with a point"
KINDS = (
    'must be "all", { deadline = seconds }, { first = a number, or a fraction with a point } or { buffer = a number }'
)
ASYNCHRONOUS = ("async", "asynchronous")
Late = Literal["stops", "counts"]
STALENESS = 0.5
"""The exponent of FedBuff: work that is s meetings old counts 1 / sqrt(1 + s)."""


@dataclass(frozen=True)
class WaitPolicy:
    """Of one edge level."""

    deadline: float | None = None
    """Seconds."""
    first: int | float | None = None
    """So many children of each parent, or such a share of those that it asked."""
    late: Late = "stops"
    """What becomes of the work of children that are late."""
    staleness: float = STALENESS
    """Where it counts: work that is s meetings old counts (1 + s) to the power of minus this."""

    @property
    def is_all(self) -> bool:
        return self.deadline is None and self.first is None

    @property
    def counts_late(self) -> bool:
        return self.late == "counts"

    def enough(self, asked: np.ndarray) -> np.ndarray:
        """With how many children parents are content that asked so many."""
        if self.first is None:
            return asked
        if isinstance(self.first, float):
            return np.where(asked > 0, np.maximum(1, np.round(self.first * asked)), 0)
        return np.minimum(self.first, asked)

    def as_plain(self) -> str | dict[str, Any]:
        """As a config has it."""
        if self.is_all:
            return "all"
        closes = {name: value for name in ("deadline", "first") if (value := getattr(self, name)) is not None}
        return closes | ({"late": self.late, "staleness": self.staleness} if self.counts_late else {})


WAIT_FOR_ALL = WaitPolicy()
Wait = None | str | Mapping[str, Any] | WaitPolicy
"""What may be said of one level."""


def check_wait(wait: Wait | Sequence[Wait], depth: int, field: str = "wait") -> tuple[WaitPolicy, ...]:
    """One policy per edge level, root first; a single one stands for the leaves' level."""
    if isinstance(wait, Sequence) and not isinstance(wait, str):
        if len(wait) != depth:
            raise InvalidInput(field, list(wait), f"needs one entry per edge level, {depth} of them")
        return tuple(_policy(each, field) for each in wait)
    return (WAIT_FOR_ALL,) * (depth - 1) + (_policy(wait, field),)


def _policy(given: Any, field: str) -> WaitPolicy:
    if isinstance(given, WaitPolicy):
        return given
    if given is None or (isinstance(given, str) and given == "all"):
        return WAIT_FOR_ALL
    if isinstance(given, str) and given in ASYNCHRONOUS:
        told = (
            "say how many children's work is merged together: { buffer = 10 } is FedBuff's, { buffer = 1 } FedAsync's"
        )
        raise InvalidInput(field, given, told)
    if not isinstance(given, Mapping) or not given:
        raise InvalidInput(field, given, KINDS)
    known = ("deadline", "first", "buffer", "late", "staleness")
    for key in given:
        if key not in known:
            raise unknown_name(f"{field} key", key, known)
    values = {key: value for key, value in given.items() if value is not None}
    if "buffer" in values:
        if "first" in values or "deadline" in values or values.get("late", "counts") != "counts":
            told = 'is short for first = a number, late = "counts", and goes with staleness alone'
            raise InvalidInput(f"{field}.buffer", values["buffer"], told)
        size = check_integer(f"{field}.buffer", values.pop("buffer"), at_least=1, at_most=1 << 31)
        values |= {"first": size, "late": "counts"}
    deadline, first = values.get("deadline"), values.get("first")
    late = check_choice(f"{field}.late", values.get("late", "stops"), get_args(Late))
    if late == "counts" and deadline is None and first is None:
        raise InvalidInput(field, given, "late work counts where a deadline or first says who is late")
    if late == "stops" and "staleness" in values:
        raise InvalidInput(f"{field}.staleness", values["staleness"], 'is for late = "counts"')
    return WaitPolicy(
        None if deadline is None else check_number(f"{field}.deadline", deadline, above=0),
        None if first is None else check_count_or_fraction(f"{field}.first", first, FIRST),
        late,
        check_number(f"{field}.staleness", values.get("staleness", STALENESS), at_least=0),
    )


class ClosedRound(NamedTuple):
    """How the meetings of a level ended."""

    came_RN: np.ndarray
    """Who was heard before they closed."""
    count_RM: np.ndarray
    """Of how many there is a model."""
    end_RM: np.ndarray
    """When they closed, not before they opened; as soon as they opened where nobody was asked."""


def close_round(
    policy: WaitPolicy,
    families: SiblingGroups,
    heard_RN: np.ndarray,
    asked_RN: np.ndarray,
    full_RN: np.ndarray,
    opened_RM: np.ndarray,
) -> ClosedRound:
    """heard_RN: when each child that was asked would be heard, if its parent waited for it;
    full_RN: of whom there is a model, and not only the word that there is none."""
    full_RN = asked_RN & full_RN
    asked_RM, full_RM = (families.sum(each_RN.astype(np.float64)) for each_RN in (asked_RN, full_RN))
    all_RM = np.where(asked_RM > 0, families.max(np.where(asked_RN, heard_RN, -np.inf)), opened_RM)
    if policy.is_all:
        return ClosedRound(asked_RN, full_RM, all_RM)
    model_RN = np.where(full_RN, heard_RN, np.inf)
    place_RN = families.earliest(model_RN)
    wanted_RM, limit_RM = policy.enough(full_RM), np.full_like(full_RM, np.inf)
    if policy.deadline is not None:
        limit_RM = np.maximum(opened_RM + policy.deadline, families.min(model_RN))
    came_RN = full_RN & (place_RN < families.spread(wanted_RM)) & (model_RN <= families.spread(limit_RM))
    count_RM = families.sum(came_RN.astype(np.float64))
    last_RM = families.max(np.where(came_RN, model_RN, -np.inf))
    # work that was late may have come before the meeting opened
    end_RM = np.where(count_RM < wanted_RM, limit_RM, last_RM)
    end_RM = np.maximum(np.where(full_RM > 0, end_RM, all_RM), opened_RM)
    came_RN = came_RN | (asked_RN & ~full_RN & (heard_RN <= families.spread(end_RM)))
    return ClosedRound(came_RN, count_RM, end_RM)
