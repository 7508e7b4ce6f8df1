"""What a parent refuses of what its children sent: what is not finite, and what is far larger than
the rest.

Both are pure functions of rows, so that a simulated parent and a deployed one refuse the same.

Shape suffixes: N nodes of a level, M nodes of the level above, P parameters, B buffer values or a
block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.base.validation import check_number, plain
from stratafl.core.rows import column_blocks
from stratafl.core.rule import Rule

DEFAULT_RATIO = 1e4
"""How many times larger than its siblings' median an update may be: no healthy one is ever so far
off."""
FREE_RATIO = 100.0
"""How many times larger than the model it began from, or than 1, it may be whatever the siblings
do: some may have next to nothing to learn any more."""
MIN_SIBLING_NORM = 0.025
"""The share of the norm of the model that children were given which the siblings' median is taken
for at least, since who has little left to learn is no measure for the others. With a factor of 8,
an update of a fifth of the model is in line with any."""
NEGLIGIBLE = 1e-3
"""The share of that norm below which the siblings' median is no measure at all: they have nothing
left to learn."""


class Refusal(NamedTuple):
    """A node whose update, or what it made of its children's, was left out."""

    name: str
    too_large: bool
    """Finite, but far larger than its siblings'; otherwise it was not finite."""


class Limits(NamedTuple):
    """What a parent accepts of what its children send."""

    size: float | None = None
    """How many times larger than its siblings' median an update may be; None for any size."""
    factor: float | None = None
    """How many times longer; None for any length."""
    every_part: bool = False
    """Whether buffers, and what a rule sends beside the model, are held to the size as well: where
    the children are not one's own."""


def update_limits(given: float | None, rules: Sequence[Rule]) -> list[float | None]:
    """The limit of each edge level, None for no limit.

    Unless one is given, a rule with a reducer of its own has none: what it makes of its children's
    messages is not at the mercy of one of them. 0 stands for no limit anywhere.
    """
    if given is None:
        return [DEFAULT_RATIO if rule.reduce is None else None for rule in rules]
    if 0 < check_number("update_limit", given, at_least=0) < 1:
        raise InvalidInput("update_limit", given, "must be 0, for no limit, or a number of at least 1")
    return [float(given) or None for _ in rules]


def update_factors(given: object, rules: Sequence[Rule]) -> list[float | None]:
    """The factor of each edge level, None for none, as it is unless one is given; one number stands
    for all levels, 0 for none."""
    if given is None:
        return [None for _ in rules]
    given = plain(given)
    each_level = list(given) if isinstance(given, list | tuple) else [given] * len(rules)
    if len(each_level) != len(rules):
        raise InvalidInput("update_factor", given, f"needs one number per edge level, {len(rules)} of them")
    factors = [check_number("update_factor", each, at_least=0) for each in each_level]
    if any(0 < each < 1 for each in factors):
        raise InvalidInput("update_factor", given, "must be 0, for none, or a number of at least 1")
    return [each or None for each in factors]


def needs_inspection(largest_N: np.ndarray, limit: float | None) -> np.ndarray:
    """Whose update may be too large or is not finite, judged by the largest magnitude of the model
    alone.

    An update that is refused is over its room times the model it began from, and over it times 1,
    so that the new model is larger than the room less 1, too; half of it is enough for rounding.
    """
    return ~(largest_N <= (np.finfo(np.float64).max if limit is None else min(limit, FREE_RATIO) / 2 - 1))


def exceeds_ratio(
    tree: Tree, level: int, sizes_N: np.ndarray, start_M: np.ndarray, present_N: np.ndarray, limit: float
) -> np.ndarray:
    """Whose part of a message is over the limit, among those present; sizes are the largest
    magnitudes of rows."""
    siblings_N = tree.sibling_median(level, sizes_N, present_N)
    return present_N & too_large(sizes_N, siblings_N, start_M[tree.parents[level]], limit)


def too_large(update_N: np.ndarray, siblings_N: np.ndarray, start_N: np.ndarray, limit: float) -> np.ndarray:
    """Whose update is over the limit times the siblings' median, and over its room; all measured by
    the largest magnitude of a row, which no rounding and no order of a sum can change.

    Where siblings have nothing to learn at all, or there are none, the limit is times the model
    they were given, or 1.
    """
    with np.errstate(over="ignore"):
        begun_N = np.maximum(start_N, 1.0)
        beside_N = np.maximum(limit * siblings_N, min(limit, FREE_RATIO) * begun_N)
        return update_N > np.where(siblings_N > 0, beside_N, limit * begun_N)


def exceeds_norm_ratio(norm_N: np.ndarray, siblings_N: np.ndarray, start_N: np.ndarray, factor: float) -> np.ndarray:
    """Whose update is so many times longer than the siblings' median; nobody's where they have
    nothing to learn, or there are none."""
    return (siblings_N > NEGLIGIBLE * start_N) & (norm_N > factor * np.maximum(siblings_N, MIN_SIBLING_NORM * start_N))


def norm_outliers(
    tree: Tree, level: int, rows_NP: Tensor, start_MP: Tensor, present_N: np.ndarray, factor: float | None
) -> np.ndarray:
    """Whose update is too long beside its siblings', among those present. All who have parents of
    this level in common must ask."""
    if factor is None:
        return np.zeros_like(present_N)
    blocks = column_blocks(rows_NP, start_MP)
    norm_N = np.sqrt(sum(row_norms(rows_NB - tree.to_children(level, start_MB)) ** 2 for rows_NB, start_MB in blocks))
    siblings_N = tree.sibling_median(level, norm_N, present_N, upper=True)
    return present_N & exceeds_norm_ratio(norm_N, siblings_N, row_norms(start_MP)[tree.parents[level]], factor)


def row_norms(rows_NP: Tensor) -> np.ndarray:
    """Each row's norm."""
    return torch.linalg.vector_norm(rows_NP, dim=1, dtype=torch.float64).cpu().numpy()


def size_outliers(
    tree: Tree,
    level: int,
    rows_NP: Tensor,
    largest_N: np.ndarray,
    start_MP: Tensor | None,
    present_N: np.ndarray,
    limit: float | None,
) -> np.ndarray:
    """Whose rows are too far from what their parents gave, or from zero where that is None, among
    those present.

    largest_N: the rows' largest magnitudes. All who have parents of this level in common must
    ask.
    """
    if limit is None or not tree.any_rank(level, bool((present_N & needs_inspection(largest_N, limit)).any())):
        return np.zeros_like(present_N)
    update_N, start_M = largest_N, np.zeros(tree.sizes[level - 1])
    if start_MP is not None:
        blocks = column_blocks(rows_NP, start_MP)
        update_N = np.max(
            [row_max_abs(rows_NB - tree.to_children(level, start_MB))[0] for rows_NB, start_MB in blocks], axis=0
        )
        (start_M,) = row_max_abs(start_MP)
    return exceeds_ratio(tree, level, update_N, start_M, present_N, limit)


def zero_unchanged(rows_NB: Tensor, given_NB: Tensor) -> Tensor:
    """The rows with zeros where they are what was given, also where that is not finite: a mask that
    nobody touches may hold -inf."""
    same_NB = (rows_NB == given_NB) | (rows_NB.isnan() & given_NB.isnan())
    return rows_NB.masked_fill(same_NB, 0.0)


def keep_nonfinite(mean_NB: Tensor, given_NB: Tensor) -> Tensor:
    """The mean, but what was given where that is not finite and the mean is not, either: 0 times
    -inf is no number."""
    return torch.where(mean_NB.isfinite() | given_NB.isfinite(), mean_NB, given_NB)


def row_max_abs(*matrices: Tensor) -> list[np.ndarray]:
    """Each row's largest magnitude, matrix by matrix, in one read from the device and without a
    mask.

    It is not finite where a row is not.
    """
    # most rules hand the mean on as the model: what is asked for twice is looked at once
    found = {key: _largest(rows) for key, rows in {id(rows): rows for rows in matrices}.items()}
    numbers = torch.cat(list(found.values())).cpu().double().numpy()
    ends = np.cumsum([len(each) for each in found.values()])
    parts = dict(zip(found, np.split(numbers, ends[:-1]), strict=True))
    return [parts[id(rows)] for rows in matrices]


def rows_finite(sizes: Sequence[np.ndarray]) -> np.ndarray:
    """Which rows are finite in every matrix, from what `largest` found of them."""
    return np.logical_and.reduce([np.isfinite(each) for each in sizes])


def _largest(rows: Tensor) -> Tensor:
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows))
    if rows.is_cuda:
        return torch.linalg.vector_norm(rows, torch.inf, dim=1)
    # on a CPU that norm takes twenty times as long as these two
    return torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
