"""Whom parents wait for: decisions and seconds against an event simulation, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl.clock.price.costs import costs
from tests.clock.cases import Case, script, waiting_case
from tests.clock.events import World


def present_of(case: Case, world: World) -> dict[tuple[int, int], set[int]]:
    """Who came in time, with all its ancestors; rounds of a level are counted from 0."""
    found: dict[tuple[int, int], set[int]] = {}
    periods, parents = case.story.schedule.periods, case.story.tree.parents
    for (level, number), came in sorted(world.came.items()):
        above = found.get((level - 1, number // periods[level - 2])) if level > 1 else {0}
        found[level, number] = {node for node in came if above is not None and int(parents[level][node]) in above}
    return found


@pytest.mark.parametrize("block", range(4))
def test_decisions_and_seconds_are_those_of_an_event_simulation(block: int) -> None:
    late = 0
    for seed in range(75 * block, 75 * block + 75):
        case = waiting_case(seed)
        found = costs(case.story, case.placed)
        for round, row in enumerate(case.rows()):
            world = World(script(case, *row))
            np.testing.assert_allclose(found.seconds_R[round], world.seconds(), rtol=1e-9, err_msg=f"case {seed}")
            wanted, (chunk, at, _) = present_of(case, world), row
            begun = [0] * (case.story.tree.depth + 1)
            for stage in chunk.stages:
                for level in range(stage.begin, case.story.tree.depth + 1):
                    active_N = stage.active[level][at]
                    there = set(np.flatnonzero(active_N).tolist())
                    assert there == wanted.get((level, begun[level]), set()), f"case {seed}"
                    late += int((stage.working(level)[at] & ~active_N).sum())
                    begun[level] += 1
        np.testing.assert_allclose(sum(found.parts.values()), found.seconds_R, rtol=1e-9)
        assert min(each.min() for each in found.parts.values()) > -1e-9 * found.seconds_R.max()
        assert (found.joules_R >= 0).all()
    assert late > 100
