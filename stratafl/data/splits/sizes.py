"""How many samples each child of a node gets, before anyone asks which ones.

Shape suffixes: N children of the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stratafl.base.errors import InvalidInput, unknown
from stratafl.base.validation import check_integer, check_number

ALLOWED = 'must be "equal", {"lognormal": sigma} or one count per node of the level'
MOST = 1 << 31
"""Samples or classes of a node: no data set has more, and sums of as many stay exact."""


@dataclass(frozen=True)
class Equal:
    """Every leaf below the node gets the same number; what does not divide is dropped.

    A child's share is therefore its number of leaves, so unequal groups still have equal clients.
    """

    text: ClassVar[str] = "equal sizes"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        return leaves_N * (total // int(leaves_N.sum()))


@dataclass(frozen=True)
class LogNormal:
    """Shares are log-normal, times the leaves of the child; nothing is dropped."""

    sigma: float

    @property
    def text(self) -> str:
        return f"log-normal sizes (sigma {self.sigma:g})"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        # Shifted by the largest so that no sigma overflows.
        powers_N = self.sigma * rng.standard_normal(len(leaves_N))
        return apportion(total, leaves_N * np.exp(powers_N - powers_N.max()), leaves_N)


@dataclass(frozen=True)
class Counts:
    """The counts given, one for each node of the level; samples nobody asked for are dropped."""

    counts: tuple[int, ...]
    text: ClassVar[str] = "given sizes"

    def draw(self, total: int, leaves_N: np.ndarray, nodes: slice, rng: np.random.Generator) -> np.ndarray:
        return np.array(self.counts[nodes], dtype=np.int64)


Sizes = Equal | LogNormal | Counts


def parse(value: object) -> Sizes | None:
    """The sizes a config value stands for; None leaves the choice to the method."""
    if value is None or isinstance(value, Sizes):
        return value
    if isinstance(value, str):
        if value != "equal":
            raise unknown("sizes", value, ["equal", "lognormal"])
        return Equal()
    if isinstance(value, Mapping):
        if set(value) != {"lognormal"}:
            raise InvalidInput("sizes", dict(value), ALLOWED)
        return LogNormal(non_negative("sizes.lognormal", value["lognormal"]))
    counts = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(counts, Sequence) or isinstance(counts, bytes):
        raise InvalidInput("sizes", value, ALLOWED)
    return Counts(tuple(check_integer("sizes", count, at_least=1, at_most=MOST) for count in counts))


def non_negative(field: str, value: object) -> float:
    """The value as a finite float that is not below zero, nor so large that products of it
    overflow."""
    try:
        return check_number(field, value, at_least=0, at_most=1e100)
    except InvalidInput:
        raise InvalidInput(field, value, "must be a number, at least 0") from None


def apportion(total: int, weights_N: np.ndarray, least_N: np.ndarray) -> np.ndarray:
    """Whole numbers that add up to `total`, near proportional to the weights, none below its least.

    Largest remainders get the units left over. `total` must not be below the sum of the leasts.
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
