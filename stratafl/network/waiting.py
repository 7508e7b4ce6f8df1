"""Waiting policies: which updates an aggregator waits for, and whether late ones are applied later.

A round of a level opens when the parent has the model that it hands out, and closes, with

- `all`: when the last selected child's update arrives;
- `deadline`: that many seconds after it opened, or earlier with the last update;
- `first`: with the k-th update, where k is a number, or a fraction of the selected children;
- `deadline` and `first`: at the earlier of the two times.

A parent that received nothing by its deadline
waits for the first update, whenever it arrives. Updates that arrive at the same time are ordered as
the children are in the tree. An aggregator that received nothing has no model to send, and says so;
this message does not count as an update, and is waited for only by a parent that waits for all, or
if no child of the parent sends a model.

A child whose update has not arrived by then is late. Unless late updates are applied, it is
stopped, which takes no time, and is free when its parent's next round begins. In the round that it
missed it is treated like a child that was not selected.

Where late updates are applied, a late child continues, and is one of those that the parent's next
round waits for, beside the children that begin then. A level that waits for the first k in this way
is asynchronous: `{ buffer = k }` is short for it.

Shape suffixes: R rounds, N nodes of a level, M nodes of the level above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_choice, check_count_or_fraction, check_integer, check_keys, check_number
from stratafl.network.links import SiblingGroups

FIRST = "must be a number, or a fraction with a point"
KINDS = (
    'must be "all", { deadline = seconds }, { first = a number, or a fraction with a point } or { buffer = a number }'
)
ASYNCHRONOUS = ("async", "asynchronous")
Late = Literal["stops", "counts"]
STALENESS = 0.5
"""Exponent of FedBuff: an update that is s rounds old is weighted with 1 / sqrt(1 + s)."""


@dataclass(frozen=True)
class WaitPolicy:
    """Waiting policy of one edge level."""

    deadline: float | None = None
    """Seconds after the round opened."""
    first: int | float | None = None
    """Number of updates per parent, or fraction of its selected children that send a model."""
    late: Late = "stops"
    """Whether late updates are discarded ("stops") or applied ("counts")."""
    staleness: float = STALENESS
    """Weight of an update that is s rounds old: (1 + s) to the power of minus this."""

    @property
    def waits_for_all(self) -> bool:
        return self.deadline is None and self.first is None

    @property
    def applies_late_updates(self) -> bool:
        return self.late == "counts"

    def required_updates(self, possible: np.ndarray) -> np.ndarray:
        """Number of updates that aggregators wait for.

        possible: number of selected children of each aggregator that send a model.
        """
        if self.first is None:
            return possible
        if isinstance(self.first, float):
            return np.where(possible > 0, np.maximum(1, np.round(self.first * possible)), 0)
        return np.minimum(self.first, possible)

    def to_plain(self) -> str | dict[str, Any]:
        """Value of the policy in a config."""
        if self.waits_for_all:
            return "all"
        closes = {name: value for name in ("deadline", "first") if (value := getattr(self, name)) is not None}
        return closes | ({"late": self.late, "staleness": self.staleness} if self.applies_late_updates else {})


WAIT_FOR_ALL = WaitPolicy()
Wait = None | str | Mapping[str, Any] | WaitPolicy
"""Policy of one level as users write it."""


def check_wait(wait: Wait | Sequence[Wait], depth: int) -> tuple[WaitPolicy, ...]:
    """Check waiting policies, one per edge level, root first; a single one is for the leaves'
    level."""
    if isinstance(wait, Sequence) and not isinstance(wait, str):
        if len(wait) != depth:
            raise InvalidInput("schedule.wait", list(wait), f"needs one entry per edge level, {depth} of them")
        return tuple(map(_policy, wait))
    return (WAIT_FOR_ALL,) * (depth - 1) + (_policy(wait),)


def _policy(value: Any) -> WaitPolicy:
    if isinstance(value, WaitPolicy):
        return value
    if value is None or (isinstance(value, str) and value == "all"):
        return WAIT_FOR_ALL
    if isinstance(value, str) and value in ASYNCHRONOUS:
        reason = (
            "say how many children's work is merged together: { buffer = 10 } is FedBuff's, { buffer = 1 } FedAsync's"
        )
        raise InvalidInput("schedule.wait", value, reason)
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput("schedule.wait", value, KINDS)
    check_keys("schedule.wait", value, ("deadline", "first", "buffer", "late", "staleness"))
    values = {key: entry for key, entry in value.items() if entry is not None}
    if "buffer" in values:
        if "first" in values or "deadline" in values or values.get("late", "counts") != "counts":
            reason = 'is short for first = a number, late = "counts", and goes with staleness alone'
            raise InvalidInput("schedule.wait.buffer", values["buffer"], reason)
        size = check_integer("schedule.wait.buffer", values.pop("buffer"), at_least=1, at_most=1 << 31)
        values |= {"first": size, "late": "counts"}
    deadline, first = values.get("deadline"), values.get("first")
    late = check_choice("schedule.wait.late", values.get("late", "stops"), get_args(Late))
    if late == "counts" and deadline is None and first is None:
        raise InvalidInput("schedule.wait", value, "late work counts where a deadline or first says who is late")
    if late == "stops" and "staleness" in values:
        raise InvalidInput("schedule.wait.staleness", values["staleness"], 'is for late = "counts"')
    return WaitPolicy(
        None if deadline is None else check_number("schedule.wait.deadline", deadline, above=0),
        None if first is None else check_count_or_fraction("schedule.wait.first", first, FIRST),
        late,
        check_number("schedule.wait.staleness", values.get("staleness", STALENESS), at_least=0),
    )


class ClosedRound(NamedTuple):
    """End of the rounds of a level."""

    arrived_RN: np.ndarray
    """Children whose updates arrived before the round closed."""
    count_RM: np.ndarray
    """Number of these updates that contain a model."""
    end_RM: np.ndarray
    """Closing time, at least the opening time; the opening time where no child was selected."""


def close_round(
    policy: WaitPolicy,
    siblings: SiblingGroups,
    arrival_RN: np.ndarray,
    selected_RN: np.ndarray,
    has_model_RN: np.ndarray,
    opened_RM: np.ndarray,
) -> ClosedRound:
    """Close the rounds of a level.

    arrival_RN: when the update of each selected child arrives if its parent waits for it.
    has_model_RN: whether it contains a model rather than the message that there is none.
    """
    has_model_RN = selected_RN & has_model_RN
    selected_RM, model_count_RM = (siblings.sum(mask_RN.astype(np.float64)) for mask_RN in (selected_RN, has_model_RN))
    last_arrival_RM = np.where(selected_RM > 0, siblings.max(np.where(selected_RN, arrival_RN, -np.inf)), opened_RM)
    if policy.waits_for_all:
        return ClosedRound(selected_RN, model_count_RM, last_arrival_RM)
    model_arrival_RN = np.where(has_model_RN, arrival_RN, np.inf)
    rank_RN = siblings.arrival_rank(model_arrival_RN)
    required_RM, limit_RM = policy.required_updates(model_count_RM), np.full_like(model_count_RM, np.inf)
    if policy.deadline is not None:
        limit_RM = np.maximum(opened_RM + policy.deadline, siblings.min(model_arrival_RN))
    arrived_RN = (
        has_model_RN
        & (rank_RN < siblings.to_children(required_RM))
        & (model_arrival_RN <= siblings.to_children(limit_RM))
    )
    count_RM = siblings.sum(arrived_RN.astype(np.float64))
    last_used_RM = siblings.max(np.where(arrived_RN, model_arrival_RN, -np.inf))
    # a late update may have arrived before the round opened
    end_RM = np.where(count_RM < required_RM, limit_RM, last_used_RM)
    end_RM = np.maximum(np.where(model_count_RM > 0, end_RM, last_arrival_RM), opened_RM)
    arrived_RN = arrived_RN | (selected_RN & ~has_model_RN & (arrival_RN <= siblings.to_children(end_RM)))
    return ClosedRound(arrived_RN, count_RM, end_RM)
