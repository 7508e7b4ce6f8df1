"""Which children take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.rng import Stream, derive_seed, generator, seeded_rng
from stratafl.base.topology import Tree
from stratafl.base.validation import check_count_or_fraction, plain
from stratafl.core.rule import documented


@documented
class Draw(NamedTuple):
    """What a user's own participation function gets. It returns who takes part: a boolean mask with
    an entry for each node of the level, `tree.sizes[level]` of them. A function of what is given
    alone draws the same whenever the run goes on; its random numbers are those of `generator`."""

    tree: Tree
    """The whole tree; `tree.sizes[level]` is the length of the mask."""
    level: int
    """Whose nodes may take part: 1 are the root's children, `tree.depth` the clients."""
    round: int
    """How many rounds this level has had before."""
    generator: np.random.Generator
    """Random numbers of this level and round, which follow from the run's seed."""


Participation = None | str | float | int | Callable[[Draw], np.ndarray]
"""All (None, "all" or 1.0), a fraction, a number of children per parent, or a function giving a
mask of the level."""


def check_participation(
    participation: Participation | Sequence[Participation], depth: int
) -> tuple[Participation, ...]:
    """One participation per edge level, root first; a single one stands for the leaves' level."""
    participation = plain(participation)
    if isinstance(participation, Sequence) and not isinstance(participation, str):
        per_level = tuple(participation)
        if len(per_level) != depth:
            raise InvalidInput("participation", list(per_level), f"needs one entry per edge level, {depth} of them")
    else:
        per_level = (None,) * (depth - 1) + (participation,)
    return tuple(_checked(each) for each in per_level)


def _checked(each: Participation) -> Participation:
    if each is None or callable(each) or (isinstance(each, str) and each == "all"):
        return each
    return check_count_or_fraction("participation", each, 'must be "all", a fraction, a number or a function')


def sample_participants(
    participation: Participation, tree: Tree, level: int, round: int, seed: int, busy_N: np.ndarray | None = None
) -> np.ndarray:
    """Which nodes of a level take part in its next round, as a mask; at least one child of each
    parent, unless the user's own function decides otherwise.

    busy_N: who is still at work, and counts as one of those that take part without beginning anew.
    """
    count = tree.sizes[level]
    busy_N = np.zeros(count, dtype=bool) if busy_N is None else busy_N
    if participation is None or isinstance(participation, str):
        return ~busy_N
    random = generator(seed, Stream.PARTICIPATION, level, round)
    if callable(participation):
        key = derive_seed(seed, Stream.PARTICIPATION, level, round)
        with convert_errors("participation", getattr(participation, "__name__", participation)), seeded_rng(key):
            mask = np.asarray(participation(Draw(tree, level, round, random)))
        if mask.shape != (count,) or mask.dtype != bool:
            raise InvalidInput("participation", mask, f"the function must give a boolean mask of {count} nodes")
        return mask & ~busy_N
    parents = tree.parents[level]
    siblings = tree.children(level - 1)
    wanted = _cohort_size(participation, siblings) - np.bincount(parents[busy_N], minlength=len(siblings))
    # a random order within each set of siblings, the busy ones last; those ranked first take part
    order = np.lexsort((random.random(count), busy_N, parents))
    rank = np.empty(count, dtype=int)
    rank[order] = np.arange(count) - (np.cumsum(siblings) - siblings)[parents[order]]
    return (rank < wanted[parents]) & ~busy_N


def _cohort_size(participation: float | int, siblings: np.ndarray) -> np.ndarray:
    """How many children of each parent take part."""
    if isinstance(participation, float):
        return np.maximum(1, np.round(participation * siblings).astype(int))
    return np.minimum(participation, siblings)


def expected_share(participation: Sequence[Participation], tree: Tree) -> np.ndarray:
    """The share of rounds that each leaf may be expected to take part in; a user's own function is
    taken for all."""
    share_N = np.ones(tree.leaves)
    for level, each in enumerate(participation, 1):
        if isinstance(each, float | int):
            siblings = tree.children(level - 1)
            parent_N = tree.ancestors(level - 1)
            share_N *= (_cohort_size(each, siblings) / siblings)[parent_N]
    return share_N
