"""The time line against an event simulation, and against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl.cost.costs import costs
from tests.network.cases import random_case, script
from tests.network.events import World


@pytest.mark.parametrize("block", range(10))
def test_a_round_takes_as_long_as_in_an_event_simulation(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        case = random_case(seed)
        found = costs(case.story, case.placed)
        wanted = [World(script(case, *row)).seconds() for row in case.rows()]
        np.testing.assert_allclose(found.seconds_R, wanted, rtol=1e-9, err_msg=f"case {seed}")
        np.testing.assert_allclose(sum(found.parts.values()), found.seconds_R, rtol=1e-9)
        assert min(each.min() for each in found.parts.values()) > -1e-9 * found.seconds_R.max()
