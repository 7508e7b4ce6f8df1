"""Partition methods: sizes of siblings, label skew, natural owners."""

from __future__ import annotations

import heapq
import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.validation import check_integer, check_keys, check_number, find_name, name_and_params


def apportion(total: int, weights_N: np.ndarray, least_N: np.ndarray) -> np.ndarray:
    """Integers that add up to `total`, near proportional to weights, none below its minimum.

    The remaining units go to the largest remainders. `total` must not be below the sum of the
    minima.
    """
    ideal_N = least_N.astype(float)
    free_N = np.ones(len(weights_N), dtype=bool)
    while free_N.any():
        rest = total - int(least_N[~free_N].sum())
        share_N = rest * (weights_N / weights_N[free_N].sum())
        short_N = free_N & (share_N < least_N)
        if not short_N.any():
            ideal_N[free_N] = share_N[free_N]
            break
        free_N &= ~short_N
    sizes_N = np.maximum(np.floor(ideal_N).astype(np.int64), least_N)
    over = total - int(sizes_N.sum())
    first_N = np.argsort(sizes_N - ideal_N, kind="stable")
    # `over` is below N but for rounding of very large totals; the modulo deals those out as well.
    np.add.at(sizes_N, first_N[np.arange(over) % len(first_N)], 1)
    return sizes_N


ROUNDS = 200
"""Maximum number of times that the table of `allocate_counts` is scaled."""


def assign_classes(pool_K: np.ndarray, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Assign k classes to each child at random; larger classes get more holders."""
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
    """Number of children that hold each class: one each, then to the class with most per holder."""
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


def allocate_counts(
    pool_K: np.ndarray, holds_NK: np.ndarray, leaves_N: np.ndarray, sizes_N: np.ndarray | None
) -> np.ndarray:
    """Number of samples of each class for each holder.

    Without sizes each class is divided over its holders by their numbers of clients. With sizes,
    that table is scaled to them by rows and columns in turn and rounded down, and the remaining
    units are placed by augmenting paths.
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
    _fill_remaining(counts_NK, pool_K, holds_NK, sizes_N)
    return counts_NK


def _fill_remaining(counts_NK: np.ndarray, pool_K: np.ndarray, holds_NK: np.ndarray, sizes_N: np.ndarray) -> None:
    """Give every child the samples it still lacks, in place."""
    for child in range(len(sizes_N)):
        while lacks := int(sizes_N[child] - counts_NK[child].sum()):
            spare_K = pool_K - counts_NK.sum(axis=0)
            path = _augmenting_path(counts_NK, holds_NK, np.flatnonzero(holds_NK[child]), spare_K)
            if not path:
                raise InvalidInput("sizes", sizes_N.tolist(), "the classes the nodes hold cannot give these sizes")
            moved = min(lacks, int(spare_K[path[-1][0]]))
            for (c, _), (_, giver) in pairwise(path):
                moved = min(moved, int(counts_NK[giver, c]))
            counts_NK[child, path[0][0]] += moved
            for (c, _), (d, giver) in pairwise(path):
                counts_NK[giver, c] -= moved
                counts_NK[giver, d] += moved


def _augmenting_path(
    counts_NK: np.ndarray, holds_NK: np.ndarray, start: np.ndarray, spare_K: np.ndarray
) -> list[tuple[int, int]]:
    """Path from a class of `start` to a class with samples left, with the children that change
    class."""
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


BLOCK = 1 << 16


# (sibling, the empty class it drew, what is left of each class) -> a class that is not empty
WhenEmpty = Callable[[int, int, list[int]], int]


def fill_fixed_priors(pool_K: np.ndarray, sizes_N: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Class counts of each sibling; priors stay fixed, renormalised over the classes left."""
    log_NK = log_dirichlet(len(sizes_N), len(pool_K), alpha, rng)
    weights_NK = np.exp(log_NK - log_NK.max(axis=1, keepdims=True))
    cumulative = _cumulative(weights_NK).tolist()

    def when_empty(i: int, c: int, left: list[int]) -> int:
        # In logarithms, since for a small alpha all the mass of the classes left may underflow.
        log_K = np.where(np.array(left) > 0, log_NK[i], -np.inf)
        cumulative[i] = _cumulative(np.exp(log_K - log_K.max())).tolist()
        return bisect_left(cumulative[i], 1.0 - rng.random())

    return _fill(pool_K, sizes_N, cumulative, when_empty, rng)


def fill_released_code(pool_K: np.ndarray, sizes_N: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Class counts of each sibling by the procedure of the paper's released code.

    It flattens the priors as it goes. When a sibling draws a class that has run out, all classes
    found empty so far by any of the siblings are zeroed in its *cumulative* prior, which is divided
    by its sum. The cumulative sum of that is its cumulative prior from then on, while the current
    sample is drawn with the divided vector itself: the first entry not below a uniform draw, class
    0 if there is none. If only zeros are left, the released code takes class 0, and does not end if
    class 0 has run out too; here the classes left are then equally likely, so that it always ends.
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
    """Logarithms of n draws of a symmetric Dirichlet over k classes, up to a constant per row.

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
    open_ = [i for i, count in enumerate(need) if count]
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


ALLOWED = 'must be "equal", {"lognormal": sigma} or one count per node of the level'
MOST = 1 << 31
"""Most samples or classes of a node; sums of as many are exact."""


@dataclass(frozen=True)
class EqualSizes:
    """Equal number for every client below the node; the remainder is dropped.

    A child's share is its number of clients, so that clients of unequal groups are still equal.
    """

    text: ClassVar[str] = "equal sizes"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        return leaves_N * (total // int(leaves_N.sum()))


@dataclass(frozen=True)
class LogNormal:
    """Log-normal shares times the child's number of clients; no sample is dropped."""

    sigma: float

    @property
    def text(self) -> str:
        return f"log-normal sizes (sigma {self.sigma:g})"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        # Shifted by the largest so that no sigma overflows.
        powers_N = self.sigma * rng.standard_normal(len(leaves_N))
        return apportion(total, leaves_N * np.exp(powers_N - powers_N.max()), leaves_N)


@dataclass(frozen=True)
class GivenSizes:
    """A given count for each node of the level; the remaining samples are dropped."""

    counts: tuple[int, ...]
    text: ClassVar[str] = "given sizes"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        return np.array(self.counts[nodes], dtype=np.int64)


Sizes = EqualSizes | LogNormal | GivenSizes


def parse_sizes(value: object) -> Sizes | None:
    """Parse sizes from a config value; None leaves them to the method."""
    if value is None or isinstance(value, Sizes):
        return value
    if isinstance(value, str):
        if value != "equal":
            raise unknown_name("sizes", value, ["equal", "lognormal"])
        return EqualSizes()
    if isinstance(value, Mapping):
        if set(value) != {"lognormal"}:
            raise InvalidInput("sizes", dict(value), ALLOWED)
        return LogNormal(non_negative("sizes.lognormal", value["lognormal"]))
    counts = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(counts, Sequence) or isinstance(counts, bytes):
        raise InvalidInput("sizes", value, ALLOWED)
    return GivenSizes(tuple(check_integer("sizes", count, at_least=1, at_most=MOST) for count in counts))


def non_negative(field: str, value: object) -> float:
    """Return a value as a finite float, not negative and small enough for products of it."""
    try:
        return check_number(field, value, at_least=0, at_most=1e100)
    except InvalidInput:
        raise InvalidInput(field, value, "must be a number, at least 0") from None


DROPPED = -1


@dataclass(frozen=True)
class NodeSamples:
    """Samples of a node that is divided, and requirements of its children."""

    labels_S: np.ndarray
    owner_S: np.ndarray | None
    leaves_N: np.ndarray  # leaves below each child
    owners_N: np.ndarray  # how many owners each child has to hold, for `natural`
    least: int  # fewest samples an owner may have, for `natural`
    sizes: Callable[[int, np.random.Generator], np.ndarray] | None  # None: as the method makes them


class PartitionMethod(NamedTuple):
    """Method by which the children of each node of a level share its samples."""

    name: str
    params: Mapping[str, Any]
    sizes: Sizes | None  # as asked for
    default_sizes: Sizes | None  # where no sizes are asked for; None: as the method makes them
    assign: Callable[[NodeSamples, np.random.Generator], np.ndarray]

    @property
    def text(self) -> str:
        """Description of the method in one line."""
        params = ", ".join(f"{k} {v:g}" for k, v in self.params.items() if v is not None)
        parts = [self.name, f"({params})" if params else "", self.sizes.text if self.sizes else ""]
        return " ".join(part for part in parts if part)


def iid(sizes: object = None) -> PartitionMethod:
    """Independent and identically distributed: random samples, whatever their class."""

    def assign(node: NodeSamples, rng: np.random.Generator) -> np.ndarray:
        assert node.sizes is not None, "a method without sizes of its own has default sizes"
        sizes_N = node.sizes(len(node.labels_S), rng)
        child_S = np.full(len(node.labels_S), DROPPED)
        child_S[: sizes_N.sum()] = np.repeat(np.arange(len(sizes_N)), sizes_N)
        return rng.permutation(child_S)

    return PartitionMethod("iid", {}, parse_sizes(sizes), EqualSizes(), assign)


def lognormal(sigma: float) -> PartitionMethod:
    """Random samples in log-normal numbers: `iid` with such sizes, under its own name."""
    return iid({"lognormal": sigma})._replace(name="lognormal")


def dirichlet(alpha: float, sizes: object = None) -> PartitionMethod:
    """Dirichlet label skew: each child draws classes from its own symmetric Dirichlet(alpha) prior.

    The prior stays fixed: a class that has run out is removed and the others are renormalised.
    """
    alpha = _alpha(alpha)
    assign = _by_class(lambda pool_K, sizes_N, rng: fill_fixed_priors(pool_K, sizes_N, alpha, rng))
    return PartitionMethod("dirichlet", {"alpha": alpha}, parse_sizes(sizes), EqualSizes(), assign)


def release_dirichlet(alpha: float, sizes: object = None) -> PartitionMethod:
    """Dirichlet label skew by the procedure of the paper's released code.

    It is milder, because priors are flattened during the procedure. With alpha 0.1 on both levels
    and 50,000 samples of 10 classes over 10 x 10 nodes, total variation between label distributions
    is 0.22 (client to group) and 0.38 (group to global); with `dirichlet` it is 0.38 and 0.58.
    """
    alpha = _alpha(alpha)
    assign = _by_class(lambda pool_K, sizes_N, rng: fill_released_code(pool_K, sizes_N, alpha, rng))
    return PartitionMethod("release_dirichlet", {"alpha": alpha}, parse_sizes(sizes), EqualSizes(), assign)


def classes(k: int, sizes: object = None) -> PartitionMethod:
    """Label shift: each child holds k of its parent's classes.

    Larger classes get more holders, so that a child has about as many samples of each of its
    classes. A class is divided over its holders by their numbers of clients, or as the sizes
    require; classes that nobody holds (more classes than k times the children) are dropped.
    """
    k = check_integer("k", k, at_least=1, at_most=MOST)

    def assign(node: NodeSamples, rng: np.random.Generator) -> np.ndarray:
        _, class_S, pool_K = np.unique(node.labels_S, return_inverse=True, return_counts=True)
        holds_NK = assign_classes(pool_K, len(node.leaves_N), k, rng)
        pool_K = np.where(holds_NK.any(axis=0), pool_K, 0)
        sizes_N = node.sizes(int(pool_K.sum()), rng) if node.sizes else None
        counts_NK = allocate_counts(pool_K, holds_NK, node.leaves_N, sizes_N)
        return _draw_by_class(class_S, counts_NK, rng)

    return PartitionMethod("classes", {"k": k}, parse_sizes(sizes), None, assign)


def natural(samples: int | None = None) -> PartitionMethod:
    """Natural partition: one owner (a role, a writer, a hospital) per node, chosen at random.

    On several levels in a row, a node holds as many owners as it has nodes below it on the last of
    them. `samples` keeps that many samples of each owner, the first in the data's order; owners
    with fewer are left out.
    """
    if samples is not None:
        samples = check_integer("samples", samples, at_least=1, at_most=MOST)

    def assign(node: NodeSamples, rng: np.random.Generator) -> np.ndarray:
        if node.owner_S is None:
            raise InvalidInput("name", "natural", "this data set does not say who owns a sample")
        _, owner_S, count_O = np.unique(node.owner_S, return_inverse=True, return_counts=True)
        eligible = np.flatnonzero(count_O >= node.least)
        owners = int(node.owners_N.sum())
        if len(eligible) < owners:
            raise InvalidInput(
                "name", "natural", f"needs {owners} owners with at least {node.least} samples, has {len(eligible)}"
            )
        child_O = np.full(len(count_O), DROPPED)
        chosen = rng.permutation(eligible)[:owners]
        child_O[chosen] = np.repeat(np.arange(len(node.owners_N)), node.owners_N)
        child_S = child_O[owner_S]
        if samples is not None:
            order = np.argsort(owner_S, kind="stable")
            rank_S = np.empty(len(order), dtype=np.int64)
            rank_S[order] = np.arange(len(order)) - np.repeat(np.cumsum(count_O) - count_O, count_O)
            child_S[rank_S >= samples] = DROPPED
        return child_S

    return PartitionMethod("natural", {"samples": samples}, None, None, assign)


SPLITS: dict[str, Callable[..., PartitionMethod]] = {
    function.__name__: function for function in (iid, lognormal, dirichlet, release_dirichlet, classes, natural)
}


def parse(spec: object, field: str) -> PartitionMethod:
    """Parse a partition method: a name, a table with name and parameters, or a method."""
    if isinstance(spec, PartitionMethod):
        return spec
    if isinstance(spec, Mapping) and "name" in spec:
        find_name(f"{field}.name", spec["name"], SPLITS)  # whose error names the key
    name, params = name_and_params(field, spec, "a Split")
    function = SPLITS[find_name(f"{field}.name", name, SPLITS)]
    parameters = inspect.signature(function).parameters
    check_keys(field, params, parameters)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in params:
            raise InvalidInput(f"{field}.{key}", None, f"{name} needs it")
    try:
        return function(**params)
    except InvalidInput as error:
        raise InvalidInput(f"{field}.{error.field}", error.value, error.allowed) from None


def _by_class(
    allocate: Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray],
) -> Callable[[NodeSamples, np.random.Generator], np.ndarray]:
    def assign(node: NodeSamples, rng: np.random.Generator) -> np.ndarray:
        _, class_S, pool_K = np.unique(node.labels_S, return_inverse=True, return_counts=True)
        assert node.sizes is not None, "a method without sizes of its own has default sizes"
        sizes_N = node.sizes(len(class_S), rng)
        return _draw_by_class(class_S, allocate(pool_K, sizes_N, rng), rng)

    return assign


def _draw_by_class(class_S: np.ndarray, counts_NK: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw random samples of each class in the given numbers; the others are dropped."""
    n, k = counts_NK.shape
    child_S = np.full(len(class_S), DROPPED)
    shuffled_S = rng.permutation(len(class_S))
    by_class_S = shuffled_S[np.argsort(class_S[shuffled_S], kind="stable")]
    ends_K = np.cumsum(np.bincount(class_S, minlength=k))
    given_K = counts_NK.sum(axis=0)
    rank = np.arange(given_K.sum()) - np.repeat(np.cumsum(given_K) - given_K, given_K)
    starts_K = np.concatenate([[0], ends_K[:-1]])
    who = np.repeat(np.tile(np.arange(n), k), counts_NK.T.ravel())
    child_S[by_class_S[np.repeat(starts_K, given_K) + rank]] = who
    return child_S


def _alpha(value: object) -> float:
    # Beyond these a prior is one class or an even split to the last bit, and logarithms run out.
    alpha = non_negative("alpha", value)
    if not 1e-6 <= alpha <= 1e9:
        raise InvalidInput("alpha", value, "must be from 1e-6 to 1e9")
    return alpha
