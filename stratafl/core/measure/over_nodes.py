"""How differently the nodes of a level do: for one client a mean may say little."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from stratafl.base.topology import Tree
from stratafl.core.objective.metric import Better, Directions

OverNodes = dict[str, dict[str, dict[str, float]]]
"""Mean, worst and deviation by level (as a text, since JSON knows no other keys) and by metric."""


def over_nodes(tree: Tree, nodes: Mapping[str, Mapping[str, float]], better: Directions) -> OverNodes:
    """For each level and metric the mean, the worst and the deviation over the nodes, which are all
    there are: the deviation is that of a population. With one that is no number, none of the three
    is."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, found in nodes.items():
        level = values.setdefault(str(tree.find(name)[0]), {})
        for metric, value in found.items():
            level.setdefault(metric, []).append(value)
    return {
        level: {metric: _over(numbers, better.get(metric, "higher")) for metric, numbers in found.items()}
        for level, found in sorted(values.items(), key=lambda each: int(each[0]))
    }


def _over(values: Sequence[float], better: Better) -> dict[str, float]:
    if not all(map(math.isfinite, values)):
        return dict.fromkeys(("mean", "worst", "deviation"), math.nan)
    worst = min(values) if better == "higher" else max(values)
    return {"mean": statistics.fmean(values), "worst": worst, "deviation": statistics.pstdev(values)}
