"""Heterogeneity of a partition, level by level: measures and figures.

Distances are total variation between label distributions: half the sum of absolute differences, 0
when equal and 1 when no class is shared. Global means all samples that were kept.

Shape suffixes: N nodes of a level, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.topology import subtree_counts
from stratafl.data.transforms import rotate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    labels: np.ndarray, leaves: Sequence[np.ndarray], parents: Sequence[Sequence[int] | np.ndarray]
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
    labels: np.ndarray, leaves: Sequence[np.ndarray], parents: Sequence[Sequence[int] | np.ndarray]
) -> list[np.ndarray]:
    """Number of samples of each class that each node holds (N x K), per level, root first."""
    if len(leaves) != len(parents[-1]):
        raise InvalidInput("leaves", len(leaves), f"the tree has {len(parents[-1])} leaves")
    classes = int(np.max(labels)) + 1
    return subtree_counts(parents, np.stack([np.bincount(labels[leaf], minlength=classes) for leaf in leaves]))


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation distance between distributions along the last axis."""
    return np.abs(p - q).sum(axis=-1) / 2.0


def _shares(counts_NK: np.ndarray) -> np.ndarray:
    return counts_NK / np.maximum(counts_NK.sum(axis=1, keepdims=True), 1)


Parents = Sequence[Sequence[int] | np.ndarray]

LEGEND_CLASSES = 20
NAMED_NODES = 30
SEPARATE_BARS = 200
SEPARATORS = 100
INK, GREY, BAR = "#222222", "#8a8a8a", "#4c72b0"


def split_figure(
    path: str | Path,
    labels: np.ndarray,
    leaves: Sequence[np.ndarray],
    parents: Parents,
    *,
    class_names: Sequence[str] = (),
    title: str = "",
) -> Path:
    """Draw each level of a tree in its own rows, top down: class shares as bars, then sizes.

    A node's bar is above the bars of its descendants; lines separate the nodes of the level above.
    Classes too many for a legend are coloured by their number.
    """
    counts = class_counts(labels, leaves, parents)
    used = np.flatnonzero(counts[0][0])
    left, width = _places(parents)
    depth = len(counts) - 1
    wide = float(np.clip(0.11 * len(leaves) + 3.0, 8.0, 16.0))
    heights = [height for _ in range(depth) for height in (2.2, 0.9)]
    figure = _figure(wide, 0.75 * sum(heights) + 1.0)
    axes = figure.subplots(2 * depth, 1, height_ratios=heights, sharex=True, squeeze=False)
    colours = _colours(len(used))
    for level in range(1, depth + 1):
        shares, sizes = axes[2 * level - 2, 0], axes[2 * level - 1, 0]
        total_N = counts[level].sum(axis=1)
        bottom_N = np.zeros(len(total_N))
        for colour, c in zip(colours, used, strict=True):
            top_N = bottom_N + counts[level][:, c] / total_N
            _bars(shares, left[level], width[level], bottom_N, top_N, colour)
            bottom_N = top_N
        _bars(sizes, left[level], width[level], np.zeros(len(total_N)), total_N, BAR)
        _dress(shares, sizes, level, depth, left, width)
    axes[0, 0].set_xlim(0, len(leaves))
    _explain(figure, axes, colours, [str(class_names[c]) if c < len(class_names) else str(c) for c in map(int, used)])
    if title:
        figure.suptitle(title, color=INK, fontsize=11)
    return _save(figure, path)


def contact_sheet(
    path: str | Path,
    images: np.ndarray,
    leaves: Sequence[np.ndarray],
    parents: Parents,
    *,
    angles: np.ndarray | None = None,
    level: int = 1,
    per_node: int = 12,
    title: str = "",
) -> Path:
    """Draw a row of training images for each node of a level, rotated by its clients' angles.

    images  uint8 (N, H, W) or (N, H, W, 3), as data sets store them
    """
    depth = len(parents) - 1
    if not 1 <= level <= depth:
        raise InvalidInput("level", level, f"must be a level of the tree, 1 to {depth}")
    node_of_leaf = np.arange(len(leaves))
    for lower in range(depth, level, -1):
        node_of_leaf = np.asarray(parents[lower])[node_of_leaf]
    nodes = int(node_of_leaf.max()) + 1
    side = 0.62
    figure = _figure(per_node * side + 1.6, nodes * side + (0.6 if title else 0.2))
    axes = figure.subplots(nodes, 1, squeeze=False)
    for node, axis in enumerate(axes[:, 0]):
        below = np.flatnonzero(node_of_leaf == node)
        strip = _strip(images, [leaves[int(i)] for i in below], below, angles, per_node)
        axis.imshow(strip, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_visible(False)
        label = f"{'client' if level == depth else 'group'} {node}"
        if angles is not None:
            label += "\n" + _degrees(angles[below])
        axis.set_ylabel(label, rotation=0, ha="right", va="center", color=INK)
    if title:
        figure.suptitle(title, color=INK, fontsize=11)
    return _save(figure, path)


def _strip(
    images: np.ndarray, leaves: Sequence[np.ndarray], numbers: np.ndarray, angles: np.ndarray | None, count: int
) -> np.ndarray:
    """Images from as many of a node's clients as possible, side by side with a small gap."""
    picked = []
    for turn in range(count):
        leaf, nth = turn % len(leaves), turn // len(leaves)
        if nth < len(leaves[leaf]):
            # Evenly through the leaf, since data sets may be sorted by class.
            rounds = -(-count // len(leaves))
            sample = leaves[leaf][nth * len(leaves[leaf]) // rounds]
            picked.append((int(sample), 0.0 if angles is None else float(angles[numbers[leaf]])))
    index = np.array([sample for sample, _ in picked])
    degrees = torch.tensor([angle for _, angle in picked])
    turned = rotate(torch.from_numpy(np.ascontiguousarray(images[index])), degrees).numpy()
    gap = max(1, turned.shape[2] // 16)
    blank = count - len(turned)
    edges = [(0, blank), (0, 0), (0, gap), *[(0, 0)] * (turned.ndim - 3)]
    padded = np.pad(turned, edges, constant_values=255)
    return np.concatenate(list(padded), axis=1)


def _places(parents: Parents) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Start and width of each node of each level, in numbers of clients."""
    width = subtree_counts(parents, np.ones(len(parents[-1])))
    return [np.cumsum(w) - w for w in width], width


def _bars(axis: Axes, left: np.ndarray, width: np.ndarray, bottom: np.ndarray, top: np.ndarray, colour: Any) -> None:
    if len(left) <= SEPARATE_BARS:
        gap = 0.06 * width.min()
        axis.bar(left + gap / 2, top - bottom, width - gap, bottom, align="edge", color=colour, linewidth=0)
    else:
        # One outline for all: thousands of separate bars would take minutes and show no gaps
        # anyway.
        edges = np.append(left, left[-1] + width[-1])
        low, high = (np.append(values, values[-1]) for values in (bottom, top))
        axis.fill_between(edges, low, high, step="post", color=colour, linewidth=0)


def _dress(shares: Axes, sizes: Axes, level: int, depth: int, left: list[np.ndarray], width: list[np.ndarray]) -> None:
    name = "clients" if level == depth else "groups" if level == 1 else f"level {level}"
    shares.set_ylabel(f"{name}\nclass shares", color=INK)
    sizes.set_ylabel("samples", color=INK)
    shares.set_ylim(0, 1)
    shares.set_yticks([0, 0.5, 1])
    sizes.locator_params(axis="y", nbins=3)
    for axis in (shares, sizes):
        axis.tick_params(axis="x", length=0, labelbottom=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if len(left[level - 1]) <= SEPARATORS:
            for start in left[level - 1][1:]:
                axis.axvline(start, color=INK, linewidth=0.9)
    nodes = len(left[level])
    if nodes <= NAMED_NODES:
        for number, (start, wide) in enumerate(zip(left[level], width[level], strict=True)):
            shares.text(start + wide / 2, 1.03, str(number), ha="center", va="bottom", fontsize=8, color=GREY)


def _explain(figure: Figure, axes: np.ndarray, colours: list[Any], names: list[str]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    if len(names) <= LEGEND_CLASSES:
        patches = [Patch(color=c, label=n) for c, n in zip(colours, names, strict=True)]
        figure.legend(handles=patches[::-1], loc="outside right upper", frameon=False, title="class")
    else:
        scale = ScalarMappable(Normalize(0, len(names) - 1), ListedColormap(colours))
        figure.colorbar(scale, ax=list(axes[:, 0]), label="class", pad=0.01, aspect=40)


def _colours(classes: int) -> list[Any]:
    import matplotlib

    for name, enough in (("tab10", 10), ("tab20", LEGEND_CLASSES)):
        if classes <= enough:
            return list(matplotlib.colormaps[name](np.arange(classes)))
    return list(matplotlib.colormaps["turbo"](np.linspace(0.0, 1.0, classes)))


def _degrees(angles: np.ndarray) -> str:
    low, high = angles.min(), angles.max()
    return f"{low:+g}°" if low == high else f"{low:+g}° to {high:+g}°"


def _figure(width: float, height: float) -> Figure:
    """New figure without a window and without global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("a figure", "matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target
