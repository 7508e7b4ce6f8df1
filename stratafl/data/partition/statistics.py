"""Heterogeneity of a partition, level by level.

Distances are total variation between label distributions: half the sum of absolute differences, 0
when equal and 1 when no class is shared. Global means all samples that were kept.

Shape suffixes: N nodes of a level, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratafl.base.errors import InvalidInput


@dataclass(frozen=True)
class MinMedianMax:
    """Minimum, median and maximum over the nodes of a level."""

    least: int
    median: float
    most: int

    @staticmethod
    def of(values: np.ndarray) -> MinMedianMax:
        return MinMedianMax(int(values.min()), float(np.median(values)), int(values.max()))


@dataclass(frozen=True)
class LevelHeterogeneity:
    """Heterogeneity of one edge level; distances are unweighted means over its nodes."""

    level: int
    nodes: int
    to_parent: float
    to_global: float
    classes: MinMedianMax
    sizes: MinMedianMax


@dataclass(frozen=True)
class HeterogeneityReport:
    """Heterogeneity of all levels, the root's children first."""

    samples: int
    dropped: int
    classes: int
    levels: tuple[LevelHeterogeneity, ...]


def heterogeneity(
    labels: np.ndarray,
    leaves: Sequence[np.ndarray],
    parents: Sequence[Sequence[int] | np.ndarray],
) -> HeterogeneityReport:
    """Measure a partition: `leaves` holds the samples of each client, `parents` is the tree."""
    counts = class_counts(labels, leaves, parents)
    levels = []
    for level in range(1, len(counts)):
        counts_NK = counts[level]
        share_NK = _shares(counts_NK)
        parent_NK = _shares(counts[level - 1])[np.asarray(parents[level], dtype=np.int64)]
        levels.append(
            LevelHeterogeneity(
                level,
                len(counts_NK),
                float(total_variation(share_NK, parent_NK).mean()),
                float(total_variation(share_NK, _shares(counts[0])).mean()),
                MinMedianMax.of((counts_NK > 0).sum(axis=1)),
                MinMedianMax.of(counts_NK.sum(axis=1)),
            )
        )
    kept = int(counts[0].sum())
    return HeterogeneityReport(kept, len(labels) - kept, int((counts[0] > 0).sum()), tuple(levels))


def class_counts(
    labels: np.ndarray,
    leaves: Sequence[np.ndarray],
    parents: Sequence[Sequence[int] | np.ndarray],
) -> list[np.ndarray]:
    """Number of samples of each class that each node holds (N x K), per level, root first."""
    if len(leaves) != len(parents[-1]):
        raise InvalidInput("leaves", len(leaves), f"the tree has {len(parents[-1])} leaves")
    classes = int(np.max(labels)) + 1
    counts = [np.stack([np.bincount(labels[leaf], minlength=classes) for leaf in leaves])]
    for level in range(len(parents) - 1, 0, -1):
        above = 1 if level == 1 else len(parents[level - 1])
        sums = np.zeros((above, classes), dtype=np.int64)
        np.add.at(sums, np.asarray(parents[level], dtype=np.int64), counts[0])
        counts.insert(0, sums)
    return counts


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation distance between distributions along the last axis."""
    return np.abs(p - q).sum(axis=-1) / 2.0


def _shares(counts_NK: np.ndarray) -> np.ndarray:
    return counts_NK / np.maximum(counts_NK.sum(axis=1, keepdims=True), 1)
