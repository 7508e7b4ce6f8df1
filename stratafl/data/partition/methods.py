"""Partition methods, and sizes of siblings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.validation import check_choice, check_integer, check_number, name_and_params
from stratafl.data.partition.label_skew import (
    allocate_counts,
    apportion,
    assign_classes,
    fill_fixed_priors,
    fill_released_code,
)

ALLOWED = 'must be "equal", {"lognormal": sigma} or one count per node of the level'

MOST = 1 << 31
"""Most samples or classes of a node; sums of as many are exact."""


@dataclass(frozen=True)
class EqualSizes:
    """Every client below the node gets the same number; the remainder is dropped.

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
    least: int  # samples an owner must have, for `natural`
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
        """One line that describes the method."""
        params = ", ".join(f"{k} {v:g}" for k, v in self.params.items() if v is not None)
        parts = [self.name, f"({params})" if params else "", self.sizes.text if self.sizes else ""]
        return " ".join(part for part in parts if part)


def iid(sizes: object = None) -> PartitionMethod:
    """Independent and identically distributed: random samples, whatever their class."""

    def assign(node: NodeSamples, rng: np.random.Generator) -> np.ndarray:
        sizes_N = _child_sizes(node, len(node.labels_S), rng)
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
                "name",
                "natural",
                f"needs {owners} owners with at least {node.least} samples, has {len(eligible)}",
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
        check_choice(f"{field}.name", spec["name"], SPLITS)  # whose complaint names the key
    name, params = name_and_params(field, spec, "a Split")
    function = SPLITS[check_choice(f"{field}.name", name, SPLITS)]
    parameters = inspect.signature(function).parameters
    for key in params:
        if key not in parameters:
            raise unknown_name(f"{field} key", key, parameters)
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
        sizes_N = _child_sizes(node, len(class_S), rng)
        return _draw_by_class(class_S, allocate(pool_K, sizes_N, rng), rng)

    return assign


def _child_sizes(node: NodeSamples, total: int, rng: np.random.Generator) -> np.ndarray:
    if node.sizes is None:
        raise TypeError("this split has no sizes of its own")
    return node.sizes(total, rng)


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
