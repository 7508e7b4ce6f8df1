"""Reducers that look at every child's own message."""

from __future__ import annotations

from torch import Tensor

from stratafl.core.rule import Rule, average
from stratafl.rules.registry import register


@register("median", at="every")
def median() -> Rule:
    """Coordinate-wise median of the children's models instead of their mean (weights are
    ignored)."""

    def middle(rows_KP: Tensor, weights_K: Tensor) -> Tensor:
        ordered = rows_KP.sort(dim=0).values
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    return average()._replace(reduce=middle)
