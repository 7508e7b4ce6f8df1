"""Which rank trains which leaves.

Every rank gets leaves that are neighbours in the tree, and about the same work. Where a cut between
two ranks goes through a group, that group's meetings reach across ranks; so among all ways that are
nearly as even as can be, the one whose cuts cost the fewest such meetings is taken.

Shape suffixes: N leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.data.batches import Sampling

MAX_IMBALANCE = 1.1
"""The factor by which the busiest rank may have more to do than it must, if that keeps groups
together."""
STEP_COST = 8.0
"""What a step costs whatever is in its batch, in samples; roughly."""
SEARCH_STEPS = 12
"""Halvings of the slack, in search of the most even of the cheapest ways."""


def client_cost(samples: Sequence[int], batch: int | None, sampling: Sampling) -> np.ndarray:
    """What a step of each leaf costs: the mean length of its batches, and something for the step
    itself."""
    size_N = np.asarray(samples, dtype=float)
    if batch is None:
        return size_N + STEP_COST
    if sampling == "replacement":
        return np.minimum(size_N, batch) + STEP_COST
    return size_N / np.ceil(size_N / batch) + STEP_COST


def assign_clients(tree: Tree, work_N: np.ndarray, meetings: np.ndarray, ranks: int) -> np.ndarray:
    """Where each rank's leaves begin, and where the last one's end.

    meetings: how often each edge level meets in a round, indexed by level.
    """
    if ranks > tree.leaves:
        raise InvalidInput("ranks", ranks, f"the tree has {tree.leaves} clients; every rank needs one at least")
    ends = np.concatenate([[0.0], np.cumsum(work_N)])
    cost = _cut_costs(tree, meetings)
    least = _min_makespan(ends, ranks)
    cuts, cheapest = _cheapest_cuts(ends, cost, ranks, least * MAX_IMBALANCE)
    below, above = least, least * MAX_IMBALANCE
    for _ in range(SEARCH_STEPS):
        middle = (below + above) / 2
        found, price = _cheapest_cuts(ends, cost, ranks, middle)
        if price <= cheapest:
            cuts, above = found, middle
        else:
            below = middle
    return cuts


def _cut_costs(tree: Tree, meetings: np.ndarray) -> np.ndarray:
    """How many meetings in a round a cut before each leaf makes reach across ranks, the root's
    aside."""
    cost = np.zeros(tree.leaves)
    for level in range(1, tree.depth):
        ancestor_N = tree.ancestors(level)
        cost[1:] += meetings[level + 1] * (ancestor_N[1:] == ancestor_N[:-1])
    return cost


def _min_makespan(ends: np.ndarray, ranks: int) -> float:
    """The work of the busiest rank where nothing but evenness counts."""
    work = np.diff(ends)
    below, above = max(work.max(), ends[-1] / ranks), ends[-1]
    for _ in range(60):
        middle = (below + above) / 2
        begin, used = 0, 0
        while begin < len(work) and used < ranks:
            begin = int(np.searchsorted(ends, ends[begin] + middle, side="right")) - 1
            used += 1
        if begin == len(work):
            above = middle
        else:
            below = middle
    # a hair above, so that rounding does not make it impossible
    return above * (1 + 1e-9)


def _cheapest_cuts(ends: np.ndarray, cost: np.ndarray, ranks: int, most: float) -> tuple[np.ndarray, float]:
    """The cuts that cost least where no rank has more than `most` to do, and what they cost."""
    count = len(cost)
    # the last rank's leaves may begin here at the earliest, if they end before leaf j
    earliest = np.searchsorted(ends, ends - most, side="left")
    price = np.full(count + 1, np.inf)
    price[0] = 0.0
    came_from = []
    for _ in range(ranks):
        entered = price + np.concatenate([cost, [np.inf]])
        best, where = _range_argmin(entered, earliest, np.arange(count + 1))
        came_from.append(where)
        price = best
    if not np.isfinite(price[count]):
        return np.empty(0, dtype=np.int64), np.inf
    cuts = [count]
    for where in reversed(came_from):
        cuts.append(int(where[cuts[-1]]))
    return np.array(cuts[::-1]), float(price[count])


def _range_argmin(values: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest of values[first:end] for each pair of bounds, and where it is; infinite where
    there is none."""
    tables = [np.arange(len(values))]
    while 2 ** len(tables) <= len(values):
        half, last = 2 ** (len(tables) - 1), tables[-1]
        left, right = last[:-half], last[half:]
        tables.append(np.where(values[left] <= values[right], left, right))
    length = end - first
    best, where = np.full(len(first), np.inf), np.zeros(len(first), dtype=np.int64)
    for size, table in enumerate(tables):
        mine = (length >= 2**size) & (length < 2 ** (size + 1))
        left, right = table[first[mine]], table[end[mine] - 2**size]
        chosen = np.where(values[left] <= values[right], left, right)
        best[mine], where[mine] = values[chosen], chosen
    return best, where
