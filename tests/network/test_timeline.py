"""Time line against an event simulation."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl.costs.costs import costs
from tests.network.cases import random_case, script
from tests.network.events import World
from tests.slow import slow_unless


@pytest.mark.parametrize("block", slow_unless(lambda block: block == 0, range(10)))
def test_a_round_takes_as_long_as_in_an_event_simulation(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        case = random_case(seed)
        result = costs(case.workload, case.instance)
        expected = [World(script(case, *row)).seconds() for row in case.rows()]
        np.testing.assert_allclose(result.seconds_R, expected, rtol=1e-9, err_msg=f"case {seed}")
        np.testing.assert_allclose(sum(result.parts.values()), result.seconds_R, rtol=1e-9)
        assert min(seconds_R.min() for seconds_R in result.parts.values()) > -1e-9 * result.seconds_R.max()
