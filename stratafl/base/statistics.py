"""Mean and standard deviation over seeds, as every table, figure and report has them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class OverSeeds(NamedTuple):
    """Values of one setting's runs, which differ only in their seed."""

    mean: float
    deviation: float | None
    """Sample standard deviation (divided by n - 1); None for a single seed."""


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Summarise `values`, one number per seed; at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return OverSeeds(mean, None)
    if min(values) == max(values):
        return OverSeeds(mean, 0.0)  # a mean may be a hair beside equal values
    # statistics.stdev is exact in fractions, which takes seconds for the curves of a hundred runs
    return OverSeeds(mean, math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1))
