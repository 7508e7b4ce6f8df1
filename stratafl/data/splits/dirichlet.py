"""Filling siblings with samples one at a time, each sibling drawing classes from a Dirichlet prior.

Both fillings pick a random sibling that is not full and draw a class from its prior; they differ in
what happens when that class has run out. Only counts are needed: which samples of a class go where
is a shuffle, made afterwards. Priors change at such events alone, so the loop between them is a
table lookup.

Shape suffixes: N siblings, K classes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

BLOCK = 1 << 16

# (sibling, the empty class it drew, what is left of each class) -> a class that is not empty
WhenEmpty = Callable[[int, int, list[int]], int]


def keeping(pool_K: np.ndarray, sizes_N: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """How many of each class each sibling gets: priors kept, renormalised over the classes left."""
    log_NK = log_dirichlet(len(sizes_N), len(pool_K), alpha, rng)
    weights_NK = np.exp(log_NK - log_NK.max(axis=1, keepdims=True))
    cumulative = _cumulative(weights_NK).tolist()

    def when_empty(i: int, c: int, left: list[int]) -> int:
        # In logarithms, since for a small alpha all the mass of the classes left may underflow.
        log_K = np.where(np.array(left) > 0, log_NK[i], -np.inf)
        cumulative[i] = _cumulative(np.exp(log_K - log_K.max())).tolist()
        return bisect_left(cumulative[i], 1.0 - rng.random())

    return _fill(pool_K, sizes_N, cumulative, when_empty, rng)


def flattening(pool_K: np.ndarray, sizes_N: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """A Dirichlet split by the procedure of the paper's released code, which flattens the priors as
    it goes.

    When a sibling draws a class that has run out, all classes found empty so far by any of the
    siblings are zeroed in its *cumulative* prior, which is divided by its sum. The cumulative sum
    of that is its cumulative prior from then on, while the sample at hand is drawn with the divided
    vector itself: the first entry not below a uniform draw, class 0 if there is none. If nothing
    but zeros is left, the release takes class 0, and hangs where class 0 has run out too; here the
    classes left are then equally likely, so that it always ends.
    """
    log_NK = log_dirichlet(len(sizes_N), len(pool_K), alpha, rng)
    weights_NK = np.exp(log_NK - log_NK.max(axis=1, keepdims=True))
    cumulative = _cumulative(weights_NK).tolist()
    found_empty: list[int] = []

    def when_empty(i: int, c: int, left: list[int]) -> int:
        vector_K = np.array(cumulative[i])
        while not left[c]:
            if c not in found_empty:
                found_empty.append(c)
            vector_K[found_empty] = 0.0
            if not vector_K.any() and not left[0]:
                vector_K = (np.array(left) > 0).astype(float)
            if vector_K.any():
                vector_K = vector_K / vector_K.sum()
            # A draw above every entry falls on class 0; where that is known to be empty nothing
            # changes and the draw is made again, which comes to drawing below the largest entry at
            # once.
            top = vector_K.max() if 0 in found_empty else 1.0
            c = int(np.argmax(vector_K >= top * (1.0 - rng.random())))
        if vector_K.any():
            cumulative[i] = np.cumsum(vector_K).tolist()
        return c

    return _fill(pool_K, sizes_N, cumulative, when_empty, rng)


def log_dirichlet(n: int, k: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of n draws from a symmetric Dirichlet over k classes, up to a constant per row.

    A gamma variable of shape alpha is one of shape alpha + 1 times U ** (1 / alpha); in logarithms
    this stays exact where the plain draw would be zero.
    """
    log_uniform_NK = np.log1p(-rng.random((n, k)))
    return np.log(rng.standard_gamma(alpha + 1.0, (n, k))) + log_uniform_NK / alpha


def _cumulative(weights: np.ndarray) -> np.ndarray:
    sums = np.cumsum(weights, axis=-1)
    return sums / sums[..., -1:]


def _fill(
    pool_K: np.ndarray,
    sizes_N: np.ndarray,
    cumulative: list[list[float]],
    when_empty: WhenEmpty,
    rng: np.random.Generator,
) -> np.ndarray:
    k = len(pool_K)
    left, need = pool_K.tolist(), sizes_N.tolist()
    counts = [[0] * k for _ in need]
    open_ = [i for i, wanted in enumerate(need) if wanted]
    remaining = sum(need)
    while remaining:
        block = min(remaining, BLOCK)
        picks = rng.random(block).tolist()
        draws = (1.0 - rng.random(block)).tolist()
        for pick, draw in zip(picks, draws, strict=True):
            at = int(pick * len(open_))
            i = open_[at]
            c = bisect_left(cumulative[i], draw)
            if c == k:
                c = 0
            if not left[c]:
                c = when_empty(i, c, left)
            left[c] -= 1
            counts[i][c] += 1
            need[i] -= 1
            if not need[i]:
                open_[at] = open_[-1]
                open_.pop()
        remaining -= block
    return np.array(counts, dtype=np.int64)
