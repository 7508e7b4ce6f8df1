"""Schedules of synchronisation, and participation."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl import InvalidInput, ParticipationContext, SyncSchedule, Topology
from stratafl.core.participation import Participation, check_participation, sample_participants


@pytest.mark.parametrize(
    ("periods", "events"),
    [
        ([1], [(1, 1)]),
        ([4], [(4, 1)]),
        ([3, 2], [(2, 2), (2, 2), (2, 1)]),
        ([1, 5], [(5, 1)]),
        ([2, 1], [(1, 2), (1, 1)]),
        ([2, 2, 3], [(3, 3), (3, 2), (3, 3), (3, 1)]),
        ([1, 2, 1], [(1, 3), (1, 1)]),
        ([2, 1, 2], [(2, 2), (2, 1)]),
        ([1, 1, 1], [(1, 1)]),
        ([2, 1, 2, 1], [(1, 4), (1, 2), (1, 4), (1, 1)]),
    ],
    ids=repr,
)
def test_events_of_a_global_round(periods: list[int], events: list[tuple[int, int]]) -> None:
    assert list(SyncSchedule.of(periods, len(periods)).events()) == events


def test_the_paper_s_schedule() -> None:
    schedule = SyncSchedule.of([30, 20], 2)
    assert schedule.steps == (600, 20)
    assert list(schedule.events()) == [(20, 2)] * 29 + [(20, 1)]


def test_the_paper_s_list_of_steps() -> None:
    schedule = SyncSchedule.of_steps([500, 100, 10], 3)
    assert schedule.periods == (5, 10, 10)
    assert schedule.steps == (500, 100, 10)
    assert schedule == SyncSchedule.of([5, 10, 10], 3)


def test_an_event_synchronises_every_level_whose_period_ends() -> None:
    schedule = SyncSchedule.of([2, 3, 2], 3)
    done = 0
    for steps, top in schedule.events():
        done += steps
        due = [level for level, period in enumerate(schedule.steps, 1) if done % period == 0]
        assert due == list(range(top, 4))
    assert done == schedule.steps[0]


def test_whole_floats_count_as_numbers() -> None:
    periods = SyncSchedule.of([3.0, 2.0], 2).periods
    assert periods == (3, 2)
    assert all(type(period) is int for period in periods)


@pytest.mark.parametrize(
    "periods",
    [[], [3], [3, 2, 2], [3, 0], [3, -1], [3, 1.5], [3, float("nan")], [3, "2"], [3, True]],
)
def test_bad_periods(periods: list) -> None:
    with pytest.raises(InvalidInput) as caught:
        SyncSchedule.of(periods, 2)
    assert caught.value.field == "schedule.periods"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [[], [100, 30], [10, 100], [100, 0], [100, -10], [100, 2.5], [100, None]], ids=repr)
def test_bad_steps(steps: list) -> None:
    with pytest.raises(InvalidInput) as caught:
        SyncSchedule.of_steps(steps, 2)
    assert caught.value.field == "steps_per_sync"
    assert "\n" not in str(caught.value)


def test_steps_for_another_depth_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 of them"):
        SyncSchedule.of_steps([100, 10], 3)


# -- participation --------------------------------------------------------------------------------

UNEVEN = [2, 5, 1, 8]


def sampled(participation: Participation, shape=UNEVEN, level: int = 2, round: int = 0, seed: int = 0):
    tree = Topology.of(shape)
    mask = sample_participants(participation, tree, level, round, seed)
    assert mask.dtype == bool
    assert mask.shape == (tree.sizes[level],)
    return mask, np.bincount(tree.parents[level], weights=mask).astype(int).tolist()


@pytest.mark.parametrize("all_of_them", [None, "all", 1.0, 100], ids=repr)
def test_all_take_part(all_of_them: Participation) -> None:
    assert sampled(all_of_them)[0].all()


@pytest.mark.parametrize(
    ("participation", "per_parent"),
    [
        (1, [1, 1, 1, 1]),
        (3, [2, 3, 1, 3]),
        (0.6, [1, 3, 1, 5]),
        (0.25, [1, 1, 1, 2]),
        (1e-9, [1, 1, 1, 1]),
    ],
)
def test_number_of_participants_of_each_parent(participation, per_parent: list[int]) -> None:
    for round in range(5):
        assert sampled(participation, round=round)[1] == per_parent


def test_participants_depend_on_seed_level_and_round_only() -> None:
    shape = "12x1"
    base = sampled(0.5, shape, 1, 3, 7)[0]
    assert np.array_equal(base, sampled(0.5, shape, 1, 3, 7)[0])
    assert not np.array_equal(base, sampled(0.5, shape, 1, 4, 7)[0])
    assert not np.array_equal(base, sampled(0.5, shape, 1, 3, 8)[0])
    one_parent = Topology.of([12])
    other_level = sample_participants(0.5, one_parent, 2, 3, 7)
    assert not np.array_equal(base, other_level)


def test_all_children_take_part_equally_often() -> None:
    share = np.mean([sampled(3, "1x10", round=round)[0] for round in range(400)], axis=0)
    np.testing.assert_allclose(share, 0.3, atol=0.09)
    assert share.mean() == pytest.approx(0.3)


def test_a_function_of_the_user_s_own() -> None:
    seen: list[tuple[int, int]] = []

    def every_other(chance: ParticipationContext) -> np.ndarray:
        seen.append((chance.level, chance.round))
        return np.arange(chance.tree.sizes[chance.level]) % 2 == chance.round % 2

    assert sampled(every_other, "2x2", round=0)[0].tolist() == [True, False, True, False]
    assert sampled(every_other, "2x2", round=1)[0].tolist() == [False, True, False, True]
    assert seen == [(2, 0), (2, 1)]


def test_a_function_may_select_nobody_and_its_generator_is_pure() -> None:
    assert sampled(lambda chance: np.zeros(16, dtype=bool))[1] == [0, 0, 0, 0]

    def random_half(chance: ParticipationContext) -> np.ndarray:
        return chance.generator.random(16) < 0.5

    assert np.array_equal(sampled(random_half)[0], sampled(random_half)[0])
    assert not np.array_equal(sampled(random_half)[0], sampled(random_half, round=1)[0])


@pytest.mark.parametrize("mask", [np.ones(15, dtype=bool), np.ones(16), np.ones((16, 1), dtype=bool), None, [0, 3]])
def test_a_function_must_give_a_mask(mask) -> None:
    with pytest.raises(InvalidInput, match=r"participation = .*boolean mask of 16 nodes"):
        sampled(lambda chance: mask)


def test_a_single_participation_is_that_of_the_clients() -> None:
    assert check_participation(0.5, 3) == (None, None, 0.5)
    assert check_participation(None, 1) == (None,)
    assert check_participation("all", 2) == (None, "all")
    assert check_participation([2, None, 0.5], 3) == (2, None, 0.5)


def test_participation_in_numbers_of_numpy() -> None:
    checked = check_participation([np.int32(2), np.float32(0.5), np.float16(1.0)], 3)
    assert checked == (2, 0.5, 1.0) and list(map(type, checked)) == [int, float, float]
    with pytest.raises(InvalidInput, match="must be a finite number above 0 and at most 1"):
        check_participation(np.float32(1.5), 1)


@pytest.mark.parametrize(
    "participation",
    [
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        float("nan"),
        float("inf"),
        "half",
        True,
        [0.5],
        [0.5, 0.5, 0.5],
        [None, 0],
        [2.0, None],
        [None, "most"],
        {"clients": 0.5},
    ],
    ids=repr,
)
def test_bad_participation(participation) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_participation(participation, 2)
    assert caught.value.field == "schedule.participation"
    assert "\n" not in str(caught.value)
