"""Rules that only aggregate: the weighted mean, and the coordinate-wise median."""

from __future__ import annotations

from torch import Tensor

from stratafl.core.rule import Rule, average
from stratafl.rules.registry import register

register("average", levels="all", summary="HFedAvg's rule for one edge: the weighted mean of the children.")(average)
register("hfedavg", levels="all", summary="HFedAvg: averaging at every level, each at its own period.")(average)


@register("median", levels="all")
def median() -> Rule:
    """Coordinate-wise median of the children's models instead of their mean (weights are
    ignored)."""

    def middle(rows_KP: Tensor, weights_K: Tensor) -> Tensor:
        ordered = rows_KP.sort(dim=0).values
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    return average()._replace(reduce=middle)
