"""Participation: which children of each parent take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.rng import Stream, derive_seed, generator, seeded_rng
from stratafl.base.topology import Topology
from stratafl.base.validation import check_count_or_fraction, plain
from stratafl.core.rule import documented


@documented
class ParticipationContext(NamedTuple):
    """Argument of a user's participation function, which returns a boolean mask of the level's
    nodes.

    For a run to be resumed with the same masks, the function must depend on this argument alone and
    draw random numbers only from `generator`.
    """

    tree: Topology
    """The whole tree; the mask has `tree.sizes[level]` entries."""
    level: int
    """Level of the nodes: 1 are the root's children, `tree.depth` the clients."""
    round: int
    """Number of earlier rounds of this level."""
    generator: np.random.Generator
    """Random generator of this level and round, derived from the run's seed."""


Participation = None | str | float | int | Callable[[ParticipationContext], np.ndarray]
"""All children (None, "all" or 1.0), a fraction or a number of the children of each parent, or a
function that returns a mask of the level."""


def check_participation(
    participation: Participation | Sequence[Participation], depth: int
) -> tuple[Participation, ...]:
    """Check participation and return one value per edge level, root first; a single value is that
    of the clients' level."""
    participation = plain(participation)
    if isinstance(participation, Sequence) and not isinstance(participation, str):
        per_level = tuple(participation)
        if len(per_level) != depth:
            raise InvalidInput(
                "schedule.participation", list(per_level), f"needs one entry per edge level, {depth} of them"
            )
    else:
        per_level = (None,) * (depth - 1) + (participation,)
    return tuple(map(_check_one, per_level))


def _check_one(participation: Participation) -> Participation:
    if participation is None or callable(participation):
        return participation
    if isinstance(participation, str) and participation == "all":
        return participation
    return check_count_or_fraction(
        "schedule.participation", participation, 'must be "all", a fraction, a number or a function'
    )


def sample_participants(
    participation: Participation, tree: Topology, level: int, round: int, seed: int, busy_N: np.ndarray | None = None
) -> np.ndarray:
    """Draw the children of each parent for the level's next round, as a mask of the level.

    A drawn node takes part only if its parent does, which the caller checks. At least one child of
    each parent is drawn or busy, unless a user's own function decides otherwise.

    busy_N: nodes that still work on an earlier round; they use up places of the draw, and are not
        in the mask.
    """
    size = tree.sizes[level]
    busy_N = np.zeros(size, dtype=bool) if busy_N is None else busy_N
    if participation is None or isinstance(participation, str):
        return ~busy_N
    random = generator(seed, Stream.PARTICIPATION, level, round)
    if callable(participation):
        key = derive_seed(seed, Stream.PARTICIPATION, level, round)
        with (
            convert_errors("schedule.participation", getattr(participation, "__name__", participation)),
            seeded_rng(key),
        ):
            mask = np.asarray(participation(ParticipationContext(tree, level, round, random)))
        if mask.shape != (size,) or mask.dtype != bool:
            raise InvalidInput("schedule.participation", mask, f"the function must give a boolean mask of {size} nodes")
        return mask & ~busy_N
    siblings_M = tree.children(level - 1)
    busy_M = np.bincount(tree.parents[level][busy_N], minlength=len(siblings_M))
    key_N = np.where(busy_N, np.inf, random.random(size))
    return _smallest(key_N, siblings_M, _cohort_size(participation, siblings_M) - busy_M)


def _smallest(key_N: np.ndarray, siblings_M: np.ndarray, count_M: np.ndarray) -> np.ndarray:
    """Mask of the `count` children of each parent that have the smallest keys.

    Siblings have consecutive numbers. Parents with the same numbers of children and participants
    are partitioned together, in linear time.
    """
    chosen_N = np.zeros(len(key_N), dtype=bool)
    first_M = np.cumsum(siblings_M) - siblings_M
    for size, count in set(zip(siblings_M.tolist(), count_M.tolist(), strict=True)):
        if count > 0:
            parents = np.flatnonzero((siblings_M == size) & (count_M == count))
            children_MK = first_M[parents, None] + np.arange(size)
            positions_MK = np.argpartition(key_N[children_MK], count - 1, axis=1)[:, :count]
            chosen_N[np.take_along_axis(children_MK, positions_MK, axis=1)] = True
    return chosen_N


def _cohort_size(participation: float | int, siblings_M: np.ndarray) -> np.ndarray:
    """Number of children of each parent that take part."""
    if isinstance(participation, float):
        return np.maximum(1, np.round(participation * siblings_M).astype(int))
    return np.minimum(participation, siblings_M)


def expected_share(participation: Sequence[Participation], tree: Topology) -> np.ndarray:
    """Expected share of the rounds in which each client takes part; a user's function counts as
    1."""
    share_N = np.ones(tree.leaves)
    for level, at_level in enumerate(participation, 1):
        if isinstance(at_level, float | int):
            siblings_M = tree.children(level - 1)
            parent_N = tree.ancestors(level - 1)
            share_N *= (_cohort_size(at_level, siblings_M) / siblings_M)[parent_N]
    return share_N
