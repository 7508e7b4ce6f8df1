"""Whom a parent waits for, per edge level: all, those that come in time, the first so many.

A meeting opens when the parent has the model that it hands out, and closes

    all        when the last child is heard that was asked;
    deadline   so many seconds after it opened, or before that with the last child;
    first      with the k-th child, k being a number, or a fraction of those that were asked;

and with both of the last two, whichever comes first. A parent that heard nobody by its deadline
waits for the first child, whenever that comes. Of children that are heard at the same moment, the
first in the tree's order counts as the first.

A child that is not heard by then is late. It is told to stop, which takes no time, and is free when
its parent's next round begins, for which it gets a new model if it is asked. In the meeting that it
missed it is as absent as if it had not been drawn.

Shape suffixes: R rounds, N nodes of a level, M nodes of the level above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, integer, number, unknown
from stratafl.clock.model.families import Families

KINDS = 'must be "all", { deadline = seconds } or { first = a number, or a fraction with a point }'
ASYNCHRONOUS = ("async", "asynchronous", "buffer", "staleness")


@dataclass(frozen=True)
class Policy:
    """Of one edge level."""

    deadline: float | None = None
    """Seconds."""
    first: int | float | None = None
    """So many children of each parent, or such a share of those that it asked."""

    @property
    def is_all(self) -> bool:
        return self.deadline is None and self.first is None

    def as_plain(self) -> str | dict[str, float]:
        """As a config has it."""
        return "all" if self.is_all else {name: value for name, value in vars(self).items() if value is not None}


ALL = Policy()
Wait = None | str | Mapping[str, float] | Policy
"""What may be said of one level."""


def check_wait(wait: Wait | Sequence[Wait], depth: int, field: str = "wait") -> tuple[Policy, ...]:
    """One policy per edge level, root first; a single one stands for the leaves' level."""
    if isinstance(wait, Sequence) and not isinstance(wait, str):
        if len(wait) != depth:
            raise InvalidInput(field, list(wait), f"needs one entry per edge level, {depth} of them")
        return tuple(_policy(each, field) for each in wait)
    return (ALL,) * (depth - 1) + (_policy(wait, field),)


def _policy(given: Any, field: str) -> Policy:
    if isinstance(given, Policy):
        return given
    if given is None or given == "all":
        return ALL
    keys = [given] if isinstance(given, str) else list(given) if isinstance(given, Mapping) else []
    if any(key in ASYNCHRONOUS for key in keys):
        raise InvalidInput(field, given, "levels that meet asynchronously are not there yet: wait by deadline or first")
    if not isinstance(given, Mapping) or not given:
        raise InvalidInput(field, given, KINDS)
    for key in given:
        if key not in ("deadline", "first"):
            raise unknown(f"{field} key", key, ("deadline", "first"))
    deadline, first = given.get("deadline"), given.get("first")
    return Policy(
        None if deadline is None else number(f"{field}.deadline", deadline, above=0),
        None if first is None else _first(f"{field}.first", first),
    )


def _first(field: str, given: Any) -> int | float:
    if isinstance(given, float):
        return number(field, given, above=0, at_most=1)
    return integer(field, given, at_least=1, at_most=1 << 31)


class Closed(NamedTuple):
    """How the meetings of a level ended."""

    came_RN: np.ndarray
    """Who was heard before they closed."""
    count_RM: np.ndarray
    """How many."""
    end_RM: np.ndarray
    """When they closed; 0 where nobody was asked."""


def closed(
    policy: Policy, families: Families, heard_RN: np.ndarray, asked_RN: np.ndarray, opened_RM: np.ndarray
) -> Closed:
    """heard_RN: when each child that was asked would be heard, if its parent waited for it."""
    asked_RM = families.sum(asked_RN.astype(np.float64))
    if policy.is_all:
        last_RM = families.max(np.where(asked_RN, heard_RN, -np.inf))
        return Closed(asked_RN, asked_RM, np.where(asked_RM > 0, last_RM, 0.0))
    heard_RN = np.where(asked_RN, heard_RN, np.inf)
    place_RN = families.earliest(heard_RN)
    wanted_RM, limit_RM = _wanted(policy, asked_RM), np.full_like(asked_RM, np.inf)
    if policy.deadline is not None:
        limit_RM = np.maximum(opened_RM + policy.deadline, families.min(heard_RN))
    came_RN = asked_RN & (place_RN < families.spread(wanted_RM)) & (heard_RN <= families.spread(limit_RM))
    count_RM = families.sum(came_RN.astype(np.float64))
    last_RM = families.max(np.where(came_RN, heard_RN, -np.inf))
    end_RM = np.where(count_RM < wanted_RM, limit_RM, last_RM)
    return Closed(came_RN, count_RM, np.where(asked_RM > 0, end_RM, 0.0))


def _wanted(policy: Policy, asked_RM: np.ndarray) -> np.ndarray:
    """With how many children each parent is content."""
    if policy.first is None:
        return asked_RM
    if isinstance(policy.first, float):
        return np.where(asked_RM > 0, np.maximum(1, np.round(policy.first * asked_RM)), 0)
    return np.minimum(policy.first, asked_RM)
