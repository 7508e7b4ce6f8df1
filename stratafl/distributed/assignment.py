"""Assignment of the clients to the ranks.

Every rank gets a contiguous range of clients of about the same cost. A cut between two ranks that
divides a group makes the synchronisations of this group reach across ranks. Among all assignments
that are nearly as balanced as possible, those with the fewest such synchronisations are chosen, and
among these the best balanced one.

Shape suffixes: N clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.data.batches import Sampling

MAX_IMBALANCE = 1.1
"""The busiest rank may have this many times the least possible cost, if that keeps groups
together."""
STEP_COST = 8.0
"""Approximate part of a step's cost that does not depend on its batch, in samples."""
SEARCH_STEPS = 12
"""Bisection steps in the search for the best balance among assignments with the fewest
synchronisations across ranks."""


def client_cost(samples: Sequence[int], batch: int | None, sampling: Sampling) -> np.ndarray:
    """Cost of a step of each client: the mean length of its batches, plus `STEP_COST`."""
    size_N = np.asarray(samples, dtype=float)
    if batch is None:
        return size_N + STEP_COST
    if sampling == "replacement":
        return np.minimum(size_N, batch) + STEP_COST
    return size_N / np.ceil(size_N / batch) + STEP_COST


def assign_clients(tree: Topology, work_N: np.ndarray, syncs_per_round: np.ndarray, ranks: int) -> np.ndarray:
    """Split the clients into contiguous ranges of about equal cost, one per rank.

    Returns the first client of each rank, and the number of clients at the end.

    syncs_per_round: synchronisations of each edge level in a round; entry m is of the edges between
        levels m - 1 and m.
    """
    if ranks > tree.leaves:
        raise InvalidInput("ranks", ranks, f"the tree has {tree.leaves} clients; every rank needs one at least")
    ends = np.concatenate([[0.0], np.cumsum(work_N)])
    cost_N = _cut_costs(tree, syncs_per_round)
    least = _min_makespan(ends, ranks)
    cuts, cheapest = _cheapest_cuts(ends, cost_N, ranks, least * MAX_IMBALANCE)
    low, high = least, least * MAX_IMBALANCE
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        balanced_cuts, cost = _cheapest_cuts(ends, cost_N, ranks, middle)
        if cost <= cheapest:
            cuts, high = balanced_cuts, middle
        else:
            low = middle
    return cuts


def _cut_costs(tree: Topology, syncs_per_round: np.ndarray) -> np.ndarray:
    """Synchronisations in a round that reach across ranks if there is a cut before a client.

    Those of the root are not counted: they reach across ranks wherever cuts are.
    """
    cost_N = np.zeros(tree.leaves)
    for level in range(1, tree.depth):
        ancestor_N = tree.ancestors(level)
        cost_N[1:] += syncs_per_round[level + 1] * (ancestor_N[1:] == ancestor_N[:-1])
    return cost_N


def _min_makespan(ends: np.ndarray, ranks: int) -> float:
    """Smallest possible cost of the busiest rank, by bisection."""
    low, high = max(np.diff(ends).max(), ends[-1] / ranks), ends[-1]
    for _ in range(60):
        middle = (low + high) / 2
        begin, used = 0, 0
        while begin < len(ends) - 1 and used < ranks:
            begin = int(np.searchsorted(ends, ends[begin] + middle, side="right")) - 1
            used += 1
        if begin == len(ends) - 1:
            high = middle
        else:
            low = middle
    # a little more, so that rounding does not make it impossible
    return high * (1 + 1e-9)


def _cheapest_cuts(ends: np.ndarray, cost_N: np.ndarray, ranks: int, limit: float) -> tuple[np.ndarray, float]:
    """Cuts of least cost for which no rank has more than `limit` to do, and their cost.

    The cost is infinite if there are no such cuts. `total[j]` is the least cost of assigning the
    first j clients to the ranks so far.
    """
    clients = len(cost_N)
    # for each j, the first client that a rank can begin with if its range ends before client j
    earliest = np.searchsorted(ends, ends - limit, side="left")
    total = np.full(clients + 1, np.inf)
    total[0] = 0.0
    begins = []
    for _ in range(ranks):
        total, begin = _range_argmin(total + np.concatenate([cost_N, [np.inf]]), earliest, np.arange(clients + 1))
        begins.append(begin)
    if not np.isfinite(total[clients]):
        return np.empty(0, dtype=np.int64), np.inf
    cuts = [clients]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return np.array(cuts[::-1]), float(total[clients])


def _range_argmin(values: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimum of values[first:end] for each pair of bounds, and its first index.

    The minimum of an empty range is infinite. `tables[i][j]` is the index of the minimum of
    values[j : j + 2**i] (a sparse table).
    """
    tables = [np.arange(len(values))]
    while 2 ** len(tables) <= len(values):
        half, last = 2 ** (len(tables) - 1), tables[-1]
        left, right = last[:-half], last[half:]
        tables.append(np.where(values[left] <= values[right], left, right))
    length = end - first
    minimum, index = np.full(len(first), np.inf), np.zeros(len(first), dtype=np.int64)
    for size, table in enumerate(tables):
        of_size = (length >= 2**size) & (length < 2 ** (size + 1))
        left, right = table[first[of_size]], table[end[of_size] - 2**size]
        index[of_size] = np.where(values[left] <= values[right], left, right)
        minimum[of_size] = values[index[of_size]]
    return minimum, index
