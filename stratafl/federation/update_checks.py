"""Checks of updates: an update is rejected if it is not finite, or far larger than its siblings'.

All are pure functions of rows, so that a simulated parent and a deployed one reject the same
updates.

Shape suffixes: N nodes of a level, M nodes of the level above, P parameters, B buffer values or a
block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.base.validation import check_number, plain
from stratafl.core.rows import column_blocks
from stratafl.core.rule import Rule

DEFAULT_RATIO = 1e4
"""Largest accepted ratio of an update's size to its siblings' median; healthy updates stay far
below it."""
FREE_RATIO = 100.0
"""Ratio of an update's size to the larger of 1 and the model it began from, below which it is
accepted whatever its siblings do: some may have next to nothing left to learn."""
MIN_SIBLING_NORM = 0.025
"""Lower bound of the siblings' median norm, as a share of the norm of the model that children
were given: siblings with little left to learn are no reference for the others. With a norm ratio
of 8, an update whose norm is at most a fifth of the model's is always accepted."""
NEGLIGIBLE = 1e-3
"""Share of the model's norm below which the siblings' median is not used at all: they have nothing
left to learn."""


class Rejection(NamedTuple):
    """A node whose update, or whose aggregate of its children's updates, was left out."""

    name: str
    is_oversized: bool
    """Whether it was finite, but far larger than its siblings'; otherwise it was not finite."""


@dataclass(frozen=True, kw_only=True)
class UpdateLimits:
    """Limits of the updates that a parent accepts; None for no limit."""

    ratio: float | None = None
    """Largest ratio of an update's largest magnitude to its siblings' median."""
    norm_ratio: float | None = None
    """Largest ratio of an update's norm to its siblings' median."""
    checks_all_parts: bool = False
    """Whether buffers, and what a rule sends beside the model, are held to `ratio` as well: where
    the children belong to somebody else."""


NO_LIMITS = UpdateLimits()


def limits_by_level(
    rules: Sequence[Rule], update_limit: float | None, update_factor: object, *, checks_all_parts: bool = False
) -> list[UpdateLimits]:
    """Limits of every edge level, root first.

    update_limit: the ratio for all levels, 0 for no limit. Unless given, a rule with a reducer of
        its own has none: a single update has little influence on its result.
    update_factor: the norm ratio, one number for all levels or one per level, 0 or None for none.
    """
    ratios = _ratios(rules, update_limit)
    norm_ratios = _norm_ratios(rules, update_factor)
    return [
        UpdateLimits(ratio=ratio, norm_ratio=norm_ratio, checks_all_parts=checks_all_parts)
        for ratio, norm_ratio in zip(ratios, norm_ratios, strict=True)
    ]


def _ratios(rules: Sequence[Rule], update_limit: float | None) -> list[float | None]:
    if update_limit is None:
        return [DEFAULT_RATIO if rule.reduce is None else None for rule in rules]
    if 0 < check_number("aggregation.update_limit", update_limit, at_least=0) < 1:
        raise InvalidInput(
            "aggregation.update_limit", update_limit, "must be 0, for no limit, or a number of at least 1"
        )
    return [float(update_limit) or None for _ in rules]


def _norm_ratios(rules: Sequence[Rule], update_factor: object) -> list[float | None]:
    if update_factor is None:
        return [None for _ in rules]
    update_factor = plain(update_factor)
    by_level = list(update_factor) if isinstance(update_factor, list | tuple) else [update_factor] * len(rules)
    if len(by_level) != len(rules):
        raise InvalidInput(
            "aggregation.update_factor", update_factor, f"needs one number per edge level, {len(rules)} of them"
        )
    factors = [check_number("aggregation.update_factor", factor, at_least=0) for factor in by_level]
    if any(0 < factor < 1 for factor in factors):
        raise InvalidInput("aggregation.update_factor", update_factor, "must be 0, for none, or a number of at least 1")
    return [factor or None for factor in factors]


def needs_inspection(max_abs_N: np.ndarray, ratio: float | None) -> np.ndarray:
    """Mask of the updates that may be too large or are not finite, by the largest magnitude of the
    models alone.

    With r = min(ratio, FREE_RATIO), a rejected update is larger than r * max(start, 1), so the new
    model is larger than r - 1; the bound r / 2 - 1 leaves room for rounding.
    """
    return ~(max_abs_N <= (np.finfo(np.float64).max if ratio is None else min(ratio, FREE_RATIO) / 2 - 1))


def exceeds_ratio(
    tree: Topology, level: int, max_abs_N: np.ndarray, start_M: np.ndarray, present_N: np.ndarray, ratio: float
) -> np.ndarray:
    """Mask of the present children of which a part of the update exceeds the ratio; sizes are
    largest magnitudes of rows."""
    siblings_N = tree.sibling_median(level, max_abs_N, present_N)
    return present_N & is_oversized(max_abs_N, siblings_N, start_M[tree.parents[level]], ratio)


def is_oversized(update_N: np.ndarray, siblings_N: np.ndarray, start_N: np.ndarray, ratio: float) -> np.ndarray:
    """Mask of the updates larger than the ratio times the siblings' median, and than the free ratio
    (or the ratio, if smaller) times the larger of 1 and the model they began from.

    All sizes are largest magnitudes of rows, which no rounding and no order of a sum can change.
    Where siblings have nothing to learn, or there are none, the larger of 1 and the model takes the
    median's place.
    """
    with np.errstate(over="ignore"):
        begun_N = np.maximum(start_N, 1.0)
        limit_N = np.maximum(ratio * siblings_N, min(ratio, FREE_RATIO) * begun_N)
        return update_N > np.where(siblings_N > 0, limit_N, ratio * begun_N)


def norm_outliers(
    tree: Topology, level: int, rows_NP: Tensor, start_MP: Tensor, present_N: np.ndarray, ratio: float | None
) -> np.ndarray:
    """Mask of the present children whose update's norm exceeds the ratio times their siblings'
    median; none where siblings have nothing to learn, or there are none.

    Where a tree lies in several parts, all parts that share parents of this level must call it.
    """
    if ratio is None:
        return np.zeros_like(present_N)
    blocks = column_blocks(rows_NP, start_MP)
    norm_N = np.sqrt(sum(row_norms(rows_NB - tree.to_children(level, start_MB)) ** 2 for rows_NB, start_MB in blocks))
    siblings_N = tree.sibling_median(level, norm_N, present_N, upper=True)
    start_N = row_norms(start_MP)[tree.parents[level]]
    is_longer_N = norm_N > ratio * np.maximum(siblings_N, MIN_SIBLING_NORM * start_N)
    return present_N & (siblings_N > NEGLIGIBLE * start_N) & is_longer_N


def row_norms(rows_NP: Tensor) -> np.ndarray:
    """Euclidean norm of every row."""
    return torch.linalg.vector_norm(rows_NP, dim=1, dtype=torch.float64).cpu().numpy()


def size_outliers(
    tree: Topology,
    level: int,
    rows_NP: Tensor,
    max_abs_N: np.ndarray,
    start_MP: Tensor | None,
    present_N: np.ndarray,
    ratio: float | None,
) -> np.ndarray:
    """Mask of the present children whose rows are too far from what their parents gave, or from
    zero where that is None.

    max_abs_N: the rows' largest magnitudes. Where a tree lies in several parts, all parts that
    share parents of this level must call it.
    """
    if ratio is None or not tree.any_rank(level, bool((present_N & needs_inspection(max_abs_N, ratio)).any())):
        return np.zeros_like(present_N)
    update_N, start_M = max_abs_N, np.zeros(tree.sizes[level - 1])
    if start_MP is not None:
        blocks = column_blocks(rows_NP, start_MP)
        update_N = np.max(
            [row_max_abs(rows_NB - tree.to_children(level, start_MB))[0] for rows_NB, start_MB in blocks], axis=0
        )
        (start_M,) = row_max_abs(start_MP)
    return exceeds_ratio(tree, level, update_N, start_M, present_N, ratio)


def zero_unchanged(rows_NB: Tensor, start_NB: Tensor) -> Tensor:
    """Rows with zeros for entries that are as at the start, finite or not: a mask that nobody
    changes may hold -inf."""
    same_NB = (rows_NB == start_NB) | (rows_NB.isnan() & start_NB.isnan())
    return rows_NB.masked_fill(same_NB, 0.0)


def keep_nonfinite(mean_NB: Tensor, start_NB: Tensor) -> Tensor:
    """Mean, with the start's values where neither is finite: -inf with a weight of 0 gives NaN."""
    return torch.where(mean_NB.isfinite() | start_NB.isfinite(), mean_NB, start_NB)


def row_max_abs(*matrices: Tensor) -> list[np.ndarray]:
    """Largest magnitude of every row, matrix by matrix, in one read from the device; not finite
    where a row is not."""
    # most rules hand the mean on as the model: a matrix that comes twice is read once
    by_id = {key: _max_abs(rows) for key, rows in {id(rows): rows for rows in matrices}.items()}
    numbers = torch.cat(list(by_id.values())).cpu().double().numpy()
    ends = np.cumsum([len(rows) for rows in by_id.values()])
    parts = dict(zip(by_id, np.split(numbers, ends[:-1]), strict=True))
    return [parts[id(rows)] for rows in matrices]


def rows_finite(max_abs: Sequence[np.ndarray]) -> np.ndarray:
    """Mask of the rows that are finite in every matrix, given their largest magnitudes."""
    return np.logical_and.reduce([np.isfinite(sizes_N) for sizes_N in max_abs])


def _max_abs(rows: Tensor) -> Tensor:
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows))
    if rows.is_cuda:
        return torch.linalg.vector_norm(rows, torch.inf, dim=1)
    # on a CPU that norm takes twenty times as long as these two
    return torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
