"""Rules' states set anew from the gradients at a model that came from above.

Shape suffixes: N nodes of a level, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stratafl.base.topology import Tree
from stratafl.core.meeting import choose_rows
from stratafl.core.refusal import far_off, largest
from stratafl.core.rule import Rows, Rule


class Restarted(NamedTuple):
    """What came of it, by edge level."""

    states: dict[int, Rows]
    sent: dict[int, np.ndarray]
    """Who sent a gradient to its parent."""


def from_gradients(
    tree: Tree,
    rules: Sequence[Rule],
    states: Sequence[Rows],
    fresh: Sequence[int],
    g_NP: Tensor,
    active_N: np.ndarray,
    limit: float | None,
) -> Restarted:
    """The states of edge levels from the leaves' up to the first of `fresh`, whose rules ask for
    it; rules and states by level, gradients the leaves', sizes of which `limit` bounds."""
    found = Restarted({}, {})
    (largest_N,) = largest(g_NP)
    there_N = active_N & np.isfinite(largest_N)
    there_N &= ~far_off(tree, tree.depth, g_NP, largest_N, None, there_N, limit)
    for level in range(tree.depth, fresh[0] - 1, -1):
        share_M = tree.share(level, there_N)
        mean_MP = tree.mean(level, g_NP, there_N, share_M)
        from_gradient, before = rules[level].from_gradient, states[level]
        if from_gradient:
            new = from_gradient(before, g_NP, tree.spread(level, mean_MP))
            found.states[level] = choose_rows(there_N, new, before)
        found.sent[level] = there_N
        g_NP, there_N = mean_MP, share_M > 0
    return found
