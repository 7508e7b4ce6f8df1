"""How many samples each child of a node gets, before anyone asks which ones.

Shape suffixes: N children of the node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stratafl.errors import InvalidInput, unknown

ALLOWED = 'must be "equal", {"lognormal": sigma} or one count per node of the level'


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
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput("sizes", value, ALLOWED)
    if (array < 1).any():
        raise InvalidInput("sizes", value, "every count must be at least 1")
    return Counts(tuple(array.tolist()))


def non_negative(field: str, value: object) -> float:
    """The value as a finite float that is not below zero."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        raise InvalidInput(field, value, "must be a number, at least 0")
    return float(value)  # type: ignore[arg-type]


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
