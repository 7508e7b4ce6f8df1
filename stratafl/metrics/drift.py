"""What pulls a tree apart: the quantities of the paper's convergence analysis, measured at every
meeting.

Per edge level m and global round (docs/diagnostics.md has the formulas):

    drift        how far the children are from their mean, just before their parent replaces their
                 models
                 (the leaves': client model drift, Q_t; the groups': group model drift, D_t)
    correction   how long the corrections are that they used until then (z, y)
    progress     how far a model moved (Theta): a leaf's by training, an aggregator's by a meeting
                 of its children
    bias, cosine how far, and in what angle, a correction is from the ideal one (Z, Y); where
                 asked for only

All are root mean squares: over the nodes of the level that took part, each with its weight in the
tree, and over the meetings of the round. Looking changes nothing, and numbers stay on the device
until the round ends.

Where the tree lies in several parts, each part has one `Drift`, whose means are of the nodes it
answers for. What each `take`s, at the end of a round or where it is interrupted, is put together by
`joined`, and made a record of by `levels`.

Shape suffixes: N nodes of a level, M nodes of the level above, P parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.topology import ALL, Tree
from stratafl.core.rows import column_blocks
from stratafl.federation.events import LevelSynchronized, Observer

Diagnose = Literal["none", "drift", "ideal"]
Levels = dict[str, dict[str, float]]
"""A level's number, as a text since JSON knows no other keys, to its quantities by name."""
Gradients = Callable[[int, Tensor], Tensor]
"""A level and a model for each of its nodes to each leaf's gradient, over its own data, at its
ancestor's model."""

DriftSamples = list[tuple[int, str, list[float], list[float]]]
"""Level, name, and for each meeting a mean and the weight of the nodes it is of."""
DriftSums = list[tuple[int, str, list[float], list[float]]]
"""Level, name, and for each meeting a sum over the whole tree and the weight of the nodes in it."""


START_TO_MEAN = "from start to mean"
"""How far the mean of the children moved: with the drift about it, how far they moved
themselves."""


class NodeWeights(NamedTuple):
    """Weights of the nodes of a level in a mean: they add up to one, or are all zero."""

    each_N: Tensor
    total: float
    """What they added up to before."""

    @staticmethod
    def of(weights_N: np.ndarray, counted_N: np.ndarray, like: Tensor) -> NodeWeights:
        weights_N = weights_N * counted_N
        total = float(weights_N.sum())
        return NodeWeights(to_device(weights_N / (total or 1.0), like.device, like.dtype), total)


class Drift(Observer):
    """Collects what the meetings of one round show."""

    def __init__(self, tree: Tree, gradients: Gradients | None = None):
        """gradients: where given, corrections are compared with the ideal ones."""
        self.tree, self.gradients = tree, gradients
        self._node_weights = _node_weights(tree)
        self._means: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._totals: dict[tuple[int, str], list[float | Tensor]] = defaultdict(list)
        self._everybody: dict[tuple[int, torch.device], tuple[NodeWeights, NodeWeights]] = {}

    def on_sync(self, event: LevelSynchronized) -> None:
        level, models = event.level, event.models
        if models is None:
            return
        model_NP, start_MP, result = models.model_NP, models.start_MP, models.result
        mean_MP, merged_MP = result.mean_MP, result.merged_MP
        weight_M = result.weight_M * result.updated_M
        children, parents = self._sync_weights(level, result.accepted_N, weight_M, model_NP)
        self._add(level, "drift", self._squared_distances(level, model_NP, mean_MP), children)
        moved_M = _squared_norms(merged_MP - start_MP)
        self._add(level - 1, "progress", moved_M, parents)
        if models.correction_NP is not None:
            self._add(level, "correction", _squared_norms(models.correction_NP), children)
        if level < self.tree.depth:
            return
        if models.takes_mean:
            start_to_mean_M = moved_M if merged_MP is mean_MP else _squared_norms(mean_MP - start_MP)
            self._add(level, START_TO_MEAN, start_to_mean_M, parents)
        else:
            self._add(level, "progress", self._squared_distances(level, model_NP, start_MP), children)

    def compare(self, corrections: Sequence[Tensor | None], held_MP: Tensor) -> None:
        """Hold the corrections in force, indexed by edge level, against the ideal ones.

        held_MP: the models of the leaves' parents. A node's ideal correction is its parent's
        gradient minus its own, both at the mean of the models below the parent.
        """
        tree = self.tree
        if self.gradients is None:
            return
        point_MP = held_MP
        for level in range(tree.depth, 0, -1):
            if level < tree.depth:
                point_MP = tree.mean(level, point_MP)
            correction_NP = corrections[level]
            if correction_NP is None:
                continue
            g_NP = self.gradients(level - 1, point_MP)
            for lower in range(tree.depth, level, -1):
                g_NP = tree.mean(lower, g_NP)
            ideal_NP = tree.spread(level, tree.mean(level, g_NP)) - g_NP
            everybody = np.ones(tree.sizes[level], dtype=bool)
            weights = self._weights(level, everybody, np.ones(tree.sizes[level - 1]), held_MP)
            self._add(level, "bias", _squared_norms(correction_NP - ideal_NP), weights)
            length_N = (_squared_norms(correction_NP) * _squared_norms(ideal_NP)).sqrt()
            defined_N = length_N > 0
            cosine_N = (correction_NP * ideal_NP).sum(dim=1) / length_N.where(defined_N, length_N.new_ones(()))
            # where a correction is zero there is no angle to speak of
            share_N = weights.each_N * defined_N
            defined = share_N.sum()
            self._means[level, "cosine"].append(_mean(cosine_N, share_N) / defined.where(defined > 0, 1.0))
            self._totals[level, "cosine"].append(defined * weights.total)

    def pop_round(self) -> DriftSamples:
        """What the meetings of a round showed, in one read from the device; a new round starts."""
        numbers = [each for name in self._means for each in (*self._means[name], *self._totals[name])]
        on_device = [each for each in numbers if isinstance(each, Tensor)]
        read = iter(torch.stack(on_device).tolist() if on_device else ())
        values = iter([next(read) if isinstance(each, Tensor) else each for each in numbers])
        taken: DriftSamples = []
        for (level, name), means in self._means.items():
            taken.append((level, name, [next(values) for _ in means], [next(values) for _ in means]))
        self._means.clear()
        self._totals.clear()
        return taken

    # -- weights and distances ---------------------------------------------------------------------

    def _add(self, level: int, name: str, values_N: Tensor, weights: NodeWeights) -> None:
        self._means[level, name].append(_mean(values_N, weights.each_N))
        self._totals[level, name].append(weights.total)

    def _weights(self, level: int, present_N: np.ndarray, share_M: np.ndarray, like: Tensor) -> NodeWeights:
        """Weights of the nodes that are present: as their parents weigh them, times the parents'
        own weight in the tree."""
        tree = self.tree
        per_child_M = self._node_weights[level - 1] * (share_M > 0) / np.where(share_M > 0, share_M, 1.0)
        return NodeWeights.of(
            tree.weights[level] * present_N * per_child_M[tree.parents[level]], tree.counted(level), like
        )

    def _sync_weights(
        self, level: int, present_N: np.ndarray, share_M: np.ndarray, like: Tensor
    ) -> tuple[NodeWeights, NodeWeights]:
        """Weights of the children and of the parents; where all are present they are kept for the
        next meeting."""
        key = level, like.device
        # of a parent that lies in several parts, children elsewhere may be absent
        everybody = bool(present_N.all()) and bool((share_M > ALL).all())
        if not everybody or key not in self._everybody:
            children = self._weights(level, present_N, share_M, like)
            parents = NodeWeights.of(self._node_weights[level - 1] * (share_M > 0), self.tree.counted(level - 1), like)
            if not everybody:
                return children, parents
            self._everybody[key] = children, parents
        return self._everybody[key]

    def _squared_distances(self, level: int, x_NP: Tensor, of_MP: Tensor) -> Tensor:
        """Each node's squared distance from its parent's row."""
        children = self.tree.children(level - 1)
        squares = []
        for x_NB, of_MB in column_blocks(x_NP, of_MP):
            if (children == children[0]).all():
                # siblings are neighbours, so equal families need no copy of their parents' rows
                difference = x_NB.unflatten(0, (len(children), -1)) - of_MB[:, None]
                squares.append(_squared_norms(difference).flatten())
            else:
                squares.append(_squared_norms(x_NB - self.tree.spread(level, of_MB)))
        return torch.stack(squares).sum(dim=0) if len(squares) > 1 else squares[0]


def _squared_norms(rows: Tensor) -> Tensor:
    """Squared norms."""
    return torch.linalg.vector_norm(rows, dim=-1).square()


def _mean(values_N: Tensor, weights_N: Tensor) -> Tensor:
    """The weighted mean; values of no weight may be anything, also NaN."""
    return torch.dot(weights_N, values_N.where(weights_N > 0, 0.0))


def sum_over_ranks(parts: Sequence[DriftSamples]) -> DriftSums:
    """What some meetings showed, from what each part of the tree took."""
    sums: DriftSums = []
    for each in zip(*parts, strict=True):
        level, name = each[0][:2]
        means = np.array([means for _, _, means, _ in each])
        totals = np.array([totals for _, _, _, totals in each])
        # a part without weight may have seen anything, also NaN
        added = np.where(totals > 0, means * totals, 0.0).sum(axis=0)
        sums.append((level, name, added.tolist(), totals.sum(axis=0).tolist()))
    return sums


def append_syncs(first: DriftSums, second: DriftSums) -> DriftSums:
    """What the first meetings and those after them showed."""
    found = {(level, name): (sums, weights) for level, name, sums, weights in first}
    for level, name, more, weights in second:
        before = found.get((level, name), ([], []))
        found[level, name] = [*before[0], *more], [*before[1], *weights]
    return [(level, name, *numbers) for (level, name), numbers in found.items()]


def drift_by_level(depth: int, samples: DriftSums) -> Levels:
    """What a round showed.

    What has no finite value is left out, since JSON could not say it.
    """
    found: dict[int, dict[str, float]] = {level: {} for level in range(depth + 1)}
    for level, name, *numbers in samples:
        sums, weights = (np.array(each) for each in numbers)
        if name == "cosine":
            # a meeting counts for as much as there were corrections to speak of
            sums, weights = sums.sum(keepdims=True), weights.sum(keepdims=True)
        if (weights > 0).any():
            found[level][name] = float((sums[weights > 0] / weights[weights > 0]).mean())
    return {str(level): _root_mean_squares(squares) for level, squares in found.items()}


def _root_mean_squares(found: dict[str, float]) -> dict[str, float]:
    """Roots of mean squares; a cosine is what it is."""
    squares = dict(found)
    if START_TO_MEAN in squares:
        # the mean square about any point is that about the mean plus the mean's own (paper, first
        # lemma of F.1)
        squares["progress"] = squares["drift"] + squares.pop(START_TO_MEAN)
    values = {name: value if name == "cosine" else value**0.5 for name, value in sorted(squares.items())}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _node_weights(tree: Tree) -> list[np.ndarray]:
    """Each node's weight in the whole tree, per level: the product of the sibling weights on its
    path."""
    weights = [np.ones(1)]
    for level in range(1, tree.depth + 1):
        weights.append(weights[-1][tree.parents[level]] * tree.weights[level])
    return weights
