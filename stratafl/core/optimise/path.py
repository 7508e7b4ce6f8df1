"""A leaf's path: where plain SGD would have come from the same start, along the same directions.

Rules that correct gradients (MTGC, SCAFFOLD) learn what these were from how far models moved, and
from the sum of the learning rates. That holds for SGD alone: Adam moves a model by about the
learning rate in every coordinate, however long the gradient is. Where a chain bends (`Leaf.bends`)
and a rule of the tree measures (`Rule.measures`), every leaf therefore takes -lr * direction to its
path in every step, and paths are averaged at every meeting like models. They travel behind a
module's buffers, as the last columns of the same rows, which are averaged and never corrected.

Shape suffixes: N nodes, P parameters, B buffer values, with the path where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratafl.core.leaf import Leaf
from stratafl.core.rule import Rule


def wants_path(leaf: Leaf, rules: Sequence[Rule]) -> bool:
    """Whether nodes of such a tree carry paths beside their models."""
    return leaf.bends and any(rule.measures for rule in rules)


def with_path(b_NB: Tensor, path_NP: Tensor) -> Tensor:
    """Buffers, and paths behind them."""
    return torch.cat([b_NB, path_NP], dim=-1)
