"""Drift measures: the quantities of the paper's convergence analysis at every synchronisation.

Per edge level m and global round (docs/diagnostics.md has the formulas):

    drift        distance of the children's models from their mean, before their parent replaces
                 them (the clients': client model drift Q_t; the groups': group model drift D_t)
    correction   norm of the corrections that they used until then (z, y)
    progress     displacement of a model (Theta): a client's by training, an aggregator's by a
                 synchronisation of its children
    bias, cosine distance and angle of a correction from the ideal one (Z, Y), where asked for

All are root mean squares, but the cosine is a mean: over the nodes of the level that took part,
each with its weight in the tree, and over the synchronisations of the round. Measuring changes
nothing, and numbers stay on the device until the round ends.

Where the tree lies in several parts, each part has one `Drift`, whose means are of the nodes it
owns. The samples that each part pops, at the end of a round or where it is interrupted, are summed
by `sum_over_ranks`, and become a record in `drift_by_level`.

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
from stratafl.base.topology import ALL, Topology
from stratafl.core.rows import column_blocks
from stratafl.federation.events import LevelSynchronized, Observer, TrainingBegan

Diagnose = Literal["none", "drift", "ideal"]
Levels = dict[str, dict[str, float]]
"""Quantities by the number of their level, as text since JSON has no other keys, and name."""
Gradients = Callable[[int, Tensor], Tensor]
"""(level, a model for each of its nodes) -> each client's gradient over its own data, at the model
of its ancestor."""

DriftSamples = list[tuple[int, str, list[float], list[float]]]
"""Level, name, and for each synchronisation a mean and the weight of its nodes."""
DriftSums = list[tuple[int, str, list[float], list[float]]]
"""Level, name, and for each synchronisation a sum over the tree and the weight of its nodes."""


START_TO_MEAN = "from start to mean"
"""Squared displacement of the children's mean: with the drift about it, their own."""


class NodeWeights(NamedTuple):
    """Weights of the nodes of a level in a mean, which add up to one or are all zero."""

    weight_N: Tensor
    total: float
    """Their sum before normalisation."""

    @staticmethod
    def normalise(weights_N: np.ndarray, owned_N: np.ndarray, like: Tensor) -> NodeWeights:
        weights_N = weights_N * owned_N
        total = float(weights_N.sum())
        return NodeWeights(to_device(weights_N / (total or 1.0), like.device, like.dtype), total)


class Drift(Observer):
    """Measures the drift at every synchronisation of a round."""

    def __init__(self, tree: Topology, gradients: Gradients | None = None):
        """gradients: for ideal corrections, with which those in use are compared where given."""
        self.tree, self.gradients = tree, gradients
        self._node_weights = _node_weights(tree)
        self._means: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._totals: dict[tuple[int, str], list[float | Tensor]] = defaultdict(list)
        self._full_weights: dict[tuple[int, torch.device], tuple[NodeWeights, NodeWeights]] = {}

    def on_level_synchronized(self, event: LevelSynchronized) -> None:
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

    def on_training_begin(self, event: TrainingBegan) -> None:
        """Compare the corrections in use with the ideal ones, before a global round's last
        synchronisation.

        A node's ideal correction is its parent's gradient minus its own, both at the mean of the
        models below the parent.
        """
        if self.gradients is None or event.top_level > 1:
            return
        tree, point_MP = self.tree, event.model_MP
        for level in range(tree.depth, 0, -1):
            if level < tree.depth:
                point_MP = tree.mean(level, point_MP)
            correction_NP = event.corrections[level]
            if correction_NP is None:
                continue
            g_NP = self.gradients(level - 1, point_MP)
            for lower in range(tree.depth, level, -1):
                g_NP = tree.mean(lower, g_NP)
            ideal_NP = tree.to_children(level, tree.mean(level, g_NP)) - g_NP
            everybody = np.ones(tree.sizes[level], dtype=bool)
            weights = self._weights(level, everybody, np.ones(tree.sizes[level - 1]), event.model_MP)
            self._add(level, "bias", _squared_norms(correction_NP - ideal_NP), weights)
            length_N = (_squared_norms(correction_NP) * _squared_norms(ideal_NP)).sqrt()
            defined_N = length_N > 0
            cosine_N = (correction_NP * ideal_NP).sum(dim=1) / length_N.where(defined_N, length_N.new_ones(()))
            # a correction of zero has no angle
            share_N = weights.weight_N * defined_N
            defined = share_N.sum()
            self._means[level, "cosine"].append(_mean(cosine_N, share_N) / defined.where(defined > 0, 1.0))
            self._totals[level, "cosine"].append(defined * weights.total)

    def pop_round(self) -> DriftSamples:
        """The samples of a round, in one read from the device; the next round starts empty."""
        numbers = [number for name in self._means for number in (*self._means[name], *self._totals[name])]
        on_device = [number for number in numbers if isinstance(number, Tensor)]
        read = iter(torch.stack(on_device).tolist() if on_device else ())
        values = iter([next(read) if isinstance(number, Tensor) else number for number in numbers])
        samples: DriftSamples = []
        for (level, name), means in self._means.items():
            samples.append((level, name, [next(values) for _ in means], [next(values) for _ in means]))
        self._means.clear()
        self._totals.clear()
        return samples

    # -- weights and distances ---------------------------------------------------------------------

    def _add(self, level: int, name: str, values_N: Tensor, weights: NodeWeights) -> None:
        self._means[level, name].append(_mean(values_N, weights.weight_N))
        self._totals[level, name].append(weights.total)

    def _weights(self, level: int, present_N: np.ndarray, share_M: np.ndarray, like: Tensor) -> NodeWeights:
        """Weights of the nodes that are present: their weight among siblings times the parents'
        weight in the tree."""
        tree = self.tree
        per_child_M = self._node_weights[level - 1] * (share_M > 0) / np.where(share_M > 0, share_M, 1.0)
        return NodeWeights.normalise(
            tree.weights[level] * present_N * per_child_M[tree.parents[level]], tree.owned(level), like
        )

    def _sync_weights(
        self, level: int, present_N: np.ndarray, share_M: np.ndarray, like: Tensor
    ) -> tuple[NodeWeights, NodeWeights]:
        """Weights of the children and of the parents; where all are present they are kept for the
        next synchronisation."""
        key = level, like.device
        # a parent that lies in several parts may have absent children elsewhere
        everybody = bool(present_N.all()) and bool((share_M > ALL).all())
        if not everybody or key not in self._full_weights:
            children = self._weights(level, present_N, share_M, like)
            parents = NodeWeights.normalise(
                self._node_weights[level - 1] * (share_M > 0), self.tree.owned(level - 1), like
            )
            if not everybody:
                return children, parents
            self._full_weights[key] = children, parents
        return self._full_weights[key]

    def _squared_distances(self, level: int, x_NP: Tensor, of_MP: Tensor) -> Tensor:
        """Squared distance of each node from its parent's row."""
        children = self.tree.children(level - 1)
        squares = []
        for x_NB, of_MB in column_blocks(x_NP, of_MP):
            if (children == children[0]).all():
                # siblings are neighbours, so equal families need no copy of their parents' rows
                difference = x_NB.unflatten(0, (len(children), -1)) - of_MB[:, None]
                squares.append(_squared_norms(difference).flatten())
            else:
                squares.append(_squared_norms(x_NB - self.tree.to_children(level, of_MB)))
        return torch.stack(squares).sum(dim=0) if len(squares) > 1 else squares[0]


def _squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of every row."""
    return torch.linalg.vector_norm(rows, dim=-1).square()


def _mean(values_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted mean; values of zero weight may be anything, also NaN."""
    return torch.dot(weights_N, values_N.where(weights_N > 0, 0.0))


def sum_over_ranks(parts: Sequence[DriftSamples]) -> DriftSums:
    """Sums over the whole tree, from the samples of all its parts."""
    sums: DriftSums = []
    for samples in zip(*parts, strict=True):
        level, name = samples[0][:2]
        means = np.array([means for _, _, means, _ in samples])
        totals = np.array([totals for _, _, _, totals in samples])
        # the mean of a part without weight may be anything, also NaN
        added = np.where(totals > 0, means * totals, 0.0).sum(axis=0)
        sums.append((level, name, added.tolist(), totals.sum(axis=0).tolist()))
    return sums


def append_syncs(first: DriftSums, second: DriftSums) -> DriftSums:
    """The sums of the first synchronisations, followed by those of later ones."""
    by_key = {(level, name): (sums, weights) for level, name, sums, weights in first}
    for level, name, sums, weights in second:
        before = by_key.get((level, name), ([], []))
        by_key[level, name] = [*before[0], *sums], [*before[1], *weights]
    return [(level, name, *numbers) for (level, name), numbers in by_key.items()]


def drift_by_level(depth: int, samples: DriftSums) -> Levels:
    """The drift measures of a round; those without a finite value are left out, since JSON has
    none."""
    squares: dict[int, dict[str, float]] = {level: {} for level in range(depth + 1)}
    for level, name, *numbers in samples:
        sums, weights = (np.array(values) for values in numbers)
        if name == "cosine":
            # every correction that is not zero counts alike, in whichever synchronisation
            sums, weights = sums.sum(keepdims=True), weights.sum(keepdims=True)
        if (weights > 0).any():
            squares[level][name] = float((sums[weights > 0] / weights[weights > 0]).mean())
    return {str(level): _root_mean_squares(at_level) for level, at_level in squares.items()}


def _root_mean_squares(mean_squares: dict[str, float]) -> dict[str, float]:
    """Roots of mean squares; a cosine stays as it is."""
    squares = dict(mean_squares)
    if START_TO_MEAN in squares:
        # the mean square about any point is that about the mean plus the mean's own (paper, first
        # lemma of F.1)
        squares["progress"] = squares["drift"] + squares.pop(START_TO_MEAN)
    values = {name: value if name == "cosine" else value**0.5 for name, value in sorted(squares.items())}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _node_weights(tree: Topology) -> list[np.ndarray]:
    """Weights of the nodes in the whole tree, by level: the product of the sibling weights on a
    node's path."""
    weights = [np.ones(1)]
    for level in range(1, tree.depth + 1):
        weights.append(weights[-1][tree.parents[level]] * tree.weights[level])
    return weights
