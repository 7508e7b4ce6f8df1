"""Mean and standard deviation over seeds, as every table, figure and report has them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class OverSeeds(NamedTuple):
    """What the runs of one setting, which differ in their seed only, gave."""

    mean: float
    deviation: float | None
    """Standard deviation of a sample (divided by n - 1): seeds are a few of many. None for one
    seed, of which nothing is known but its value."""


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """`values` has one number per seed, at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return OverSeeds(mean, None)
    if min(values) == max(values):
        return OverSeeds(mean, 0.0)  # a mean may be a hair beside equal values
    # statistics.stdev is exact in fractions, which takes seconds for the curves of a hundred runs
    return OverSeeds(mean, math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1))
