"""What pulls a tree apart: the quantities of the paper's convergence analysis, measured at every meeting.

Per edge level m and global round (docs/diagnostics.md has the formulas):

    drift        how far the children are from their mean just before their parent replaces their models
                 (the leaves': client model drift, Q_t; the groups': group model drift, D_t)
    correction   how long the corrections are that they used until then (z, y)
    progress     how far a model moved (Theta): a leaf's by training, an aggregator's by a meeting of its children
    bias, cosine how far, and in what angle, a correction is from the ideal one (Z, Y); only where asked for

All are root mean squares: over the nodes of the level that took part, each with its weight in the tree, and over the
meetings of the round. Looking changes nothing, and numbers stay on the device until the round ends.

Shape suffixes: N nodes of a level, M nodes of the level above, P parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stratafl.placing import placed
from stratafl.tree import Tree

Diagnose = Literal["none", "drift", "ideal"]
Levels = dict[str, dict[str, float]]
"""A level's number, as a text since JSON knows no other keys, to its quantities by name."""
Gradients = Callable[[int, Tensor], Tensor]
"""A level and a model for each of its nodes to each leaf's gradient, over its own data, at its ancestor's model."""

BLOCK = 2**25
"""Numbers looked at in one go: the difference of two matrices then needs no room of its size."""


class Drift:
    """Collects what the meetings of one round show."""

    def __init__(self, tree: Tree, gradients: Gradients | None = None):
        """gradients: where given, corrections are compared with the ideal ones."""
        self.tree, self.gradients = tree, gradients
        self._node_weights = _node_weights(tree)
        self._squares: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._cosines: dict[int, list[Tensor]] = defaultdict(list)
        self._everybody: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def met(
        self,
        level: int,
        x_NP: Tensor,
        start_MP: Tensor,
        mean_MP: Tensor,
        merged_MP: Tensor,
        correction_NP: Tensor | None,
        present_N: np.ndarray,
        is_mean: bool = True,
    ) -> None:
        """Look at one meeting: the children's models, what their parents had given them, the mean of those present and
        what the parents made of it. `is_mean` is false where a rule has a reducer of its own."""
        if not present_N.any():
            return
        weights_N, weights_M = self._meeting_weights(level, present_N, x_NP)
        drift = _mean(self._apart(level, x_NP, mean_MP), weights_N)
        moved = _mean(_squares(merged_MP - start_MP), weights_M)
        self._squares[level, "drift"].append(drift)
        self._squares[level - 1, "progress"].append(moved)
        if correction_NP is not None:
            self._squares[level, "correction"].append(_mean(_squares(correction_NP), weights_N))
        if level < self.tree.depth:
            return
        if is_mean:
            # the mean square about any point is that about the mean plus the mean's own (paper, first lemma of F.1)
            start_to_mean = moved if merged_MP is mean_MP else _mean(_squares(mean_MP - start_MP), weights_M)
            self._squares[level, "progress"].append(drift + start_to_mean)
        else:
            self._squares[level, "progress"].append(_mean(self._apart(level, x_NP, start_MP), weights_N))

    def compare(self, corrections: Sequence[Tensor | None], held_MP: Tensor) -> None:
        """Hold the corrections in force, indexed by edge level, against the ideal ones.

        held_MP: the models of the leaves' parents. A node's ideal correction is its parent's gradient minus its own,
        both at the mean of the models below the parent.
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
            weights_N = self._weights(level, np.ones(tree.sizes[level], dtype=bool), held_MP)
            self._squares[level, "bias"].append(_mean(_squares(correction_NP - ideal_NP), weights_N))
            length_N = (_squares(correction_NP) * _squares(ideal_NP)).sqrt()
            defined_N = length_N > 0
            cosine_N = (correction_NP * ideal_NP).sum(dim=1) / length_N.where(defined_N, length_N.new_ones(()))
            share_N = weights_N * defined_N
            self._cosines[level].append(torch.stack([_mean(cosine_N, share_N), share_N.sum()]))

    def read(self) -> Levels:
        """What the round showed, in one read from the device; a new round starts.

        What has no finite value is left out, since JSON could not say it.
        """
        found: dict[int, dict[str, float]] = {level: {} for level in range(self.tree.depth + 1)}
        names = list(self._squares)
        means = [torch.stack(self._squares[name]).mean() for name in names]
        cosines = [(level, *torch.stack(each).sum(dim=0)) for level, each in self._cosines.items()]
        numbers = means + [part for _, total, share in cosines for part in (total, share)]
        values = torch.stack(numbers).tolist() if numbers else []
        for (level, name), value in zip(names, values, strict=False):
            found[level][name] = value**0.5
        rest = values[len(names) :]
        for (level, *_), total, share in zip(cosines, rest[::2], rest[1::2], strict=True):
            # where every correction is zero there is no angle to speak of
            if share > 0:
                found[level]["cosine"] = total / share
        self._squares.clear()
        self._cosines.clear()
        return {
            str(level): {name: value for name, value in sorted(quantities.items()) if math.isfinite(value)}
            for level, quantities in found.items()
        }

    # -- weights and distances ----------------------------------------------------------------------------------------

    def _weights(self, level: int, present_N: np.ndarray, like: Tensor) -> Tensor:
        """Of the nodes present: as their parents weigh them, times the parents' own weight in the tree."""
        tree = self.tree
        share_M = tree.share(level, present_N)
        parent_M = self._node_weights[level - 1] * (share_M > 0)
        per_child_M = parent_M / parent_M.sum() / np.where(share_M > 0, share_M, 1.0)
        weights_N = tree.weights[level] * present_N * per_child_M[tree.parents[level]]
        return placed(weights_N, like.device, like.dtype)

    def _parent_weights(self, level: int, heard_M: np.ndarray, like: Tensor) -> Tensor:
        weights_M = self._node_weights[level - 1] * heard_M
        return placed(weights_M / weights_M.sum(), like.device, like.dtype)

    def _meeting_weights(self, level: int, present_N: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of the children and of the parents; when all are there they need not be made anew."""
        key = level, like.device
        if not present_N.all() or key not in self._everybody:
            heard_M = self.tree.occupied(level, present_N)
            weights = self._weights(level, present_N, like), self._parent_weights(level, heard_M, like)
            if not present_N.all():
                return weights
            self._everybody[key] = weights
        return self._everybody[key]

    def _apart(self, level: int, x_NP: Tensor, of_MP: Tensor) -> Tensor:
        """Each node's squared distance from its parent's row."""
        children = self.tree.children(level - 1)
        columns = max(1, BLOCK // len(x_NP))
        squares = []
        for x_NB, of_MB in zip(x_NP.split(columns, dim=1), of_MP.split(columns, dim=1), strict=True):
            if (children == children[0]).all():
                # siblings are neighbours, so equal families need no copy of their parents' rows
                difference = x_NB.unflatten(0, (len(children), -1)) - of_MB[:, None]
                squares.append(_squares(difference).flatten())
            else:
                squares.append(_squares(x_NB - self.tree.spread(level, of_MB)))
        return torch.stack(squares).sum(dim=0) if len(squares) > 1 else squares[0]


def _squares(rows: Tensor) -> Tensor:
    """Squared norms."""
    return torch.linalg.vector_norm(rows, dim=-1).square()


def _mean(values_N: Tensor, weights_N: Tensor) -> Tensor:
    """Those of no weight may be anything, also NaN."""
    return torch.dot(weights_N, values_N.where(weights_N > 0, 0.0))


def _node_weights(tree: Tree) -> list[np.ndarray]:
    """Each node's weight in the whole tree, per level: the product of the sibling weights on its path."""
    weights = [np.ones(1)]
    for level in range(1, tree.depth + 1):
        weights.append(weights[-1][tree.parents[level]] * tree.weights[level])
    return weights
