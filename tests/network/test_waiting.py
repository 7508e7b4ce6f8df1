"""Waiting policies: decisions and seconds against an event simulation."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl.base.errors import InvalidInput
from stratafl.costs.costs import costs
from stratafl.network.waiting import check_wait
from tests.network.cases import Case, script, waiting_case
from tests.network.events import World
from tests.slow import slow_unless


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_fractions_of_numpy_are_fractions(kind: type) -> None:
    (policy,) = check_wait({"first": kind(0.5), "deadline": kind(2), "late": "counts", "staleness": kind(0.25)}, 1)
    assert policy == check_wait({"first": 0.5, "deadline": 2, "late": "counts", "staleness": 0.25}, 1)[0]
    assert type(policy.first) is float
    with pytest.raises(InvalidInput, match=r"wait.first = np.float\d\d\(1.5\): must be a finite number above 0"):
        check_wait({"first": kind(1.5)}, 1)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64])
def test_whole_numbers_of_numpy_are_so_many_children(kind: type) -> None:
    assert check_wait({"first": kind(3)}, 1) == check_wait({"first": 3}, 1)
    assert check_wait({"buffer": kind(3)}, 1) == check_wait({"buffer": 3}, 1)


@pytest.mark.parametrize("first", [np.True_, True, "half", [1]], ids=str)
def test_what_is_no_number_is_told_what_could_be(first: object) -> None:
    with pytest.raises(InvalidInput, match="must be a number, or a fraction with a point"):
        check_wait({"first": first}, 1)


def present_of(case: Case, world: World) -> dict[tuple[int, int], set[int]]:
    """Participants: nodes that arrived in time, with all their ancestors; rounds of a level are
    counted from 0."""
    result: dict[tuple[int, int], set[int]] = {}
    periods, parents = case.workload.schedule.periods, case.workload.tree.parents
    for (level, number), came in sorted(world.came.items()):
        above = result.get((level - 1, number // periods[level - 2])) if level > 1 else {0}
        result[level, number] = {node for node in came if above is not None and int(parents[level][node]) in above}
    return result


@pytest.mark.parametrize("block", slow_unless(lambda block: block == 0, range(4)))
def test_decisions_and_seconds_are_those_of_an_event_simulation(block: int) -> None:
    late = 0
    for seed in range(75 * block, 75 * block + 75):
        case = waiting_case(seed)
        result = costs(case.workload, case.instance)
        for round, row in enumerate(case.rows()):
            world = World(script(case, *row))
            np.testing.assert_allclose(result.seconds_R[round], world.seconds(), rtol=1e-9, err_msg=f"case {seed}")
            expected, (chunk, at, _) = present_of(case, world), row
            begun = [0] * (case.workload.tree.depth + 1)
            for stage in chunk.stages:
                for level in range(stage.begin, case.workload.tree.depth + 1):
                    active_N = stage.active[level][at]
                    participants = set(np.flatnonzero(active_N).tolist())
                    assert participants == expected.get((level, begun[level]), set()), f"case {seed}"
                    late += int((stage.working(level)[at] & ~active_N).sum())
                    begun[level] += 1
        np.testing.assert_allclose(sum(result.parts.values()), result.seconds_R, rtol=1e-9)
        assert min(seconds.min() for seconds in result.parts.values()) > -1e-9 * result.seconds_R.max()
        assert (result.joules_R >= 0).all()
    assert late > 100
