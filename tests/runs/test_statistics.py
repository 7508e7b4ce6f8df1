"""Mean and deviation over seeds, worked out by hand."""

from __future__ import annotations

import pytest

from stratafl.base.statistics import mean_std


def test_the_deviation_is_that_of_a_sample() -> None:
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_std([0.8, 0.9]) == pytest.approx((0.85, 0.005**0.5))


def test_one_seed_has_a_mean_and_no_deviation() -> None:
    assert mean_std([0.25]) == (0.25, None)
