"""When the levels of a tree synchronise, and which children take part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, guarded
from stratafl.base.rng import Purpose, generator, seed_of, seeded
from stratafl.base.topology import Tree
from stratafl.base.validation import check_count_or_fraction, check_integer, plain
from stratafl.core.rule import documented

MOST_STEPS = 1_000_000
"""Local steps in a global round: nothing is shown before it ends, and no study needs more."""


class Event(NamedTuple):
    """Train this many steps, then synchronise the edge levels from the leaves' up to `top`."""

    steps: int
    top: int


@dataclass(frozen=True)
class Schedule:
    """How often each edge level synchronises, in units of the level below, root first.

    `Schedule((30, 20))` is the paper's E = 30, H = 20: a group averages every 20 steps, the root
    every 30 group rounds.
    """

    periods: tuple[int, ...]

    @staticmethod
    def of(periods: Sequence[int], depth: int, epochs: int | None = None) -> Schedule:
        """Make a schedule of the periods of all edge levels, root first. With `epochs`, the lowest
        level's period is that many passes over a client's data, and the periods are those of the
        others."""
        periods, depth = plain(periods), check_integer("depth", depth, at_least=1)
        if epochs is not None:
            if not isinstance(periods, Sequence) or len(periods) != depth - 1:
                wanted = f"with epochs, needs one number per edge level but the lowest, {depth - 1} of them"
                raise InvalidInput("periods", periods, wanted)
            periods = [*periods, epochs]
        if not isinstance(periods, Sequence) or len(periods) != depth:
            raise InvalidInput("periods", periods, f"needs one number per edge level, {depth} of them")
        whole_periods = tuple(check_integer("periods", period, at_least=1) for period in periods)
        if math.prod(whole_periods) > MOST_STEPS:
            raise InvalidInput("periods", list(periods), f"at most {MOST_STEPS:,} local steps in a global round")
        return Schedule(whole_periods)

    @staticmethod
    def of_steps(steps: Sequence[int], depth: int) -> Schedule:
        """Make a schedule of the paper's P list: level m synchronises every P_m local steps, root
        first."""
        wanted = "each must be a whole number that divides the one before it"
        steps, depth = plain(steps), check_integer("depth", depth, at_least=1)
        if not isinstance(steps, Sequence) or len(steps) != depth:
            raise InvalidInput("steps_per_sync", steps, f"needs one number per edge level, {depth} of them")
        steps = [check_integer("steps_per_sync", period, at_least=1, at_most=MOST_STEPS) for period in steps]
        ratios = []
        for above, below in zip(steps, [*steps[1:], 1], strict=True):
            if above % below:
                raise InvalidInput("steps_per_sync", steps, wanted)
            ratios.append(above // below)
        return Schedule.of(ratios, depth)

    @property
    def steps(self) -> tuple[int, ...]:
        """The paper's P list: local steps between two synchronisations of each edge level."""
        return tuple(math.prod(self.periods[level:]) for level in range(len(self.periods)))

    @property
    def meetings(self) -> np.ndarray:
        """How often each edge level meets in a global round, indexed by level."""
        return np.array([0, *(self.steps[0] // every for every in self.steps)])

    def events(self) -> Iterator[Event]:
        """What happens in one global round."""
        return map(self.event, range(self.meetings[-1]))

    def event(self, number: int) -> Event:
        """One of them, counted from 0."""
        every = self.steps
        done = (number + 1) * every[-1]
        return Event(every[-1], next(level for level, period in enumerate(every, 1) if done % period == 0))


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


def draw(
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
    random = generator(seed, Purpose.PARTICIPATION, level, round)
    if callable(participation):
        key = seed_of(seed, Purpose.PARTICIPATION, level, round)
        with guarded("participation", getattr(participation, "__name__", participation)), seeded(key):
            mask = np.asarray(participation(Draw(tree, level, round, random)))
        if mask.shape != (count,) or mask.dtype != bool:
            raise InvalidInput("participation", mask, f"the function must give a boolean mask of {count} nodes")
        return mask & ~busy_N
    parents = tree.parents[level]
    siblings = tree.children(level - 1)
    wanted = _wanted(participation, siblings) - np.bincount(parents[busy_N], minlength=len(siblings))
    # a random order within each set of siblings, the busy ones last; those ranked first take part
    order = np.lexsort((random.random(count), busy_N, parents))
    rank = np.empty(count, dtype=int)
    rank[order] = np.arange(count) - (np.cumsum(siblings) - siblings)[parents[order]]
    return (rank < wanted[parents]) & ~busy_N


def _wanted(participation: float | int, siblings: np.ndarray) -> np.ndarray:
    """How many children of each parent take part."""
    if isinstance(participation, float):
        return np.maximum(1, np.round(participation * siblings).astype(int))
    return np.minimum(participation, siblings)


def expected(participation: Sequence[Participation], tree: Tree) -> np.ndarray:
    """The share of rounds that each leaf may be expected to take part in; a user's own function is
    taken for all."""
    share_N = np.ones(tree.leaves)
    for level, each in enumerate(participation, 1):
        if isinstance(each, float | int):
            siblings = tree.children(level - 1)
            parent_N = tree.ancestors(level - 1)
            share_N *= (_wanted(each, siblings) / siblings)[parent_N]
    return share_N
