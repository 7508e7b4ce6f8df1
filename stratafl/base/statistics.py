"""Mean and standard deviation over seeds, as every table, figure and report has them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class MeanStd(NamedTuple):
    """Mean and standard deviation over the seeds of a group of runs."""

    mean: float
    deviation: float | None
    """Sample standard deviation (divided by n - 1), since the seeds are a sample; None for a single
    seed."""


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and standard deviation of one number per seed, at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return MeanStd(mean, None)
    if min(values) == max(values):
        return MeanStd(mean, 0.0)  # a mean may be a hair beside equal values
    # statistics.stdev is exact in fractions, which takes seconds for the curves of a hundred runs
    return MeanStd(mean, math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1))
