"""Which classes each child holds when it may hold only k, and how the samples are shared out.

Shape suffixes: N children, K classes of the parent.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.data.splits.sizes import apportion

ROUNDS = 200


def choose_classes(pool_K: np.ndarray, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """A random table of who holds which class: k per child, larger classes with more holders."""
    if k > len(pool_K):
        raise InvalidInput("k", k, f"a node to be split holds only {len(pool_K)} classes")
    quota_K = _holders(pool_K, n, k, rng)
    holds_NK = np.zeros((n, len(pool_K)), dtype=bool)
    for turn, child in enumerate(rng.permutation(n).tolist()):
        # A class with as many places as there are children to come must go to each of them; the
        # others are drawn by their places. So every child finds k different classes and every place
        # is filled.
        must_K = quota_K == n - turn
        keys_K = np.log(rng.random(len(quota_K)) + 1e-300) / np.maximum(quota_K, 1e-9)
        keys_K = np.where(must_K, np.inf, np.where(quota_K > 0, keys_K, -np.inf))
        picked = np.argpartition(-keys_K, k - 1)[:k]
        holds_NK[child, picked] = True
        quota_K[picked] -= 1
    return holds_NK


def _holders(pool_K: np.ndarray, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """How many children hold each class: one each, then always the class with most per place."""
    limit_K = np.minimum(pool_K, n)
    if limit_K.sum() < n * k:
        raise InvalidInput("k", k, f"too few samples for {n} nodes with {k} classes each")
    order = rng.permutation(len(pool_K))
    quota_K = np.zeros(len(pool_K), dtype=np.int64)
    quota_K[order[: n * k]] = 1
    heap = [(-pool_K[c] / 2, rank, int(c)) for rank, c in enumerate(order) if limit_K[c] > 1]
    heapq.heapify(heap)
    for _ in range(n * k - int(quota_K.sum())):
        _, rank, c = heapq.heappop(heap)
        quota_K[c] += 1
        if quota_K[c] < limit_K[c]:
            heapq.heappush(heap, (-pool_K[c] / (quota_K[c] + 1), rank, c))
    return quota_K


def share_out(pool_K: np.ndarray, holds_NK: np.ndarray, leaves_N: np.ndarray, sizes_N: np.ndarray | None) -> np.ndarray:
    """How many samples of each class each holder gets.

    Without sizes each class is divided over its holders by their leaves. With sizes, that table is
    scaled to them, row and column in turn, rounded down, and the last units find their place by
    augmenting paths.
    """
    if sizes_N is None:
        counts_NK = np.zeros(holds_NK.shape, dtype=np.int64)
        for c in np.flatnonzero(pool_K):
            holders = np.flatnonzero(holds_NK[:, c])
            one_each = np.ones(len(holders), dtype=np.int64)
            counts_NK[holders, c] = apportion(int(pool_K[c]), leaves_N[holders], one_each)
        return counts_NK
    table_NK = holds_NK * (pool_K / np.maximum(holds_NK.sum(axis=0), 1))
    for _ in range(ROUNDS):
        rows_N = table_NK.sum(axis=1)
        if np.abs(rows_N - sizes_N).max() < 0.5 / holds_NK.shape[1]:
            break
        table_NK *= (sizes_N / rows_N)[:, None]
        table_NK *= np.minimum(1.0, pool_K / np.maximum(table_NK.sum(axis=0), 1e-300))
    # Whole numbers that floating point left just below themselves stay what they are.
    counts_NK = np.floor(table_NK + 1e-9).astype(np.int64)
    _settle(counts_NK, pool_K, holds_NK, sizes_N)
    return counts_NK


def _settle(counts_NK: np.ndarray, pool_K: np.ndarray, holds_NK: np.ndarray, sizes_N: np.ndarray) -> None:
    """Give every child the samples it still lacks, in place."""
    for child in range(len(sizes_N)):
        while lacks := int(sizes_N[child] - counts_NK[child].sum()):
            spare_K = pool_K - counts_NK.sum(axis=0)
            path = _path(counts_NK, holds_NK, np.flatnonzero(holds_NK[child]), spare_K)
            if not path:
                raise InvalidInput("sizes", sizes_N.tolist(), "the classes the nodes hold cannot give these sizes")
            moved = min(lacks, int(spare_K[path[-1][0]]))
            for (c, _), (_, giver) in pairwise(path):
                moved = min(moved, int(counts_NK[giver, c]))
            counts_NK[child, path[0][0]] += moved
            for (c, _), (d, giver) in pairwise(path):
                counts_NK[giver, c] -= moved
                counts_NK[giver, d] += moved


def _path(counts_NK: np.ndarray, holds_NK: np.ndarray, start: np.ndarray, spare_K: np.ndarray) -> list[tuple[int, int]]:
    """Classes from `start` to one with samples to spare, each with the child that changes to it."""
    came: dict[int, tuple[int, int]] = {int(c): (-1, -1) for c in start}
    queue = list(came)
    for c in queue:
        if spare_K[c] > 0:
            path = []
            while c >= 0:
                before, giver = came[c]
                path.append((c, giver))
                c = before
            return path[::-1]
        givers = np.flatnonzero(counts_NK[:, c] > 0)
        for d in np.flatnonzero(holds_NK[givers].any(axis=0)).tolist():
            if d not in came:
                able = givers[holds_NK[givers, d]]
                came[d] = c, int(able[np.argmax(counts_NK[able, c])])
                queue.append(d)
    return []
