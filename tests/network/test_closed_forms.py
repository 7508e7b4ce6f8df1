"""Time line in cases with a closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stratafl.base.topology import Topology
from stratafl.core.schedule import SyncSchedule
from stratafl.costs.costs import RunCosts, costs
from stratafl.network.instance import instantiate_network
from stratafl.network.links import Transfers, transfer_end_times
from stratafl.network.messages import message_sizes
from stratafl.network.replay import Workload, trace_round
from stratafl.network.specification import Network
from stratafl.network.timeline import NetworkTimeline
from stratafl.network.waiting import WAIT_FOR_ALL, WaitPolicy
from stratafl.rules.registry import rules_for

MB = 1_000_000
PARAMETERS = MB // 4
MBIT = {"up_mbit_s": 8, "down_mbit_s": 16}
"""Rates at which a model of one megabyte takes a second up and half a second down."""


def make_workload(shape: Any, periods: list[int], method: Any = "hfedavg", rounds: int = 2, **options: Any) -> Workload:
    tree = Topology.of(shape)
    usual: dict[str, Any] = {
        "participation": (None,) * tree.depth,
        "seed": 0,
        "steps_N": np.full(tree.leaves, periods[-1]),
        "samples_N": np.full(tree.leaves, 10),
    }
    sizes = message_sizes(rules_for(method, tree.depth), PARAMETERS, 0)
    return Workload(
        tree=tree, schedule=SyncSchedule.of(periods, tree.depth), sizes=sizes, rounds=rounds, **{**usual, **options}
    )


def spent(workload: Workload, *tiers: dict[str, Any], leaf: dict[str, Any] | None = None, **rest: Any) -> RunCosts:
    network = Network.of({"tier": list(tiers), "leaf": leaf or {"step_s": 0.1}, **rest})
    return costs(workload, instantiate_network(network, workload.tree, workload.seed, workload.samples_N))


def test_a_star_without_a_pipe() -> None:
    result = spent(make_workload("3", [5]), {**MBIT, "latency_s": 0.01, "overhead_s": 0.002, "merge_s": 0.3})
    seconds = (0.002 + 0.5 + 0.01) + 5 * 0.1 + (0.002 + 1 + 0.01) + 0.3
    np.testing.assert_allclose(result.seconds_R, [seconds, seconds], rtol=1e-12)
    assert result.parts["compute", 1] == pytest.approx([0.5, 0.5])
    assert result.bytes[0] == pytest.approx([6 * MB, 6 * MB])


def test_a_tree_meets_as_often_as_its_schedule_says() -> None:
    result = spent(make_workload("2x3", [4, 5]), MBIT, {"up_mbit_s": 4, "down_mbit_s": 4})
    group = 0.5 + 5 * 0.1 + 1
    np.testing.assert_allclose(result.seconds_R, 2 + 4 * group + 2, rtol=1e-12)


def test_children_share_a_pipe_fairly() -> None:
    result = spent(make_workload("4", [1]), {**MBIT, "pipe_up_mbit_s": 8, "pipe_down_mbit_s": 16})
    np.testing.assert_allclose(result.seconds_R, 4 * 0.5 + 0.1 + 4 * 1, rtol=1e-12)
    assert spent(make_workload("1", [1]), {**MBIT, "pipe_up_mbit_s": 80}).seconds_R == pytest.approx([1.6, 1.6])


def test_what_one_link_cannot_take_is_the_others() -> None:
    """A pipe of 10 with links of 2, 9 and 9: they get 2, 4 and 4; when the first is alone, 2."""
    transfers = Transfers(np.zeros((1, 3)), np.array([[8.0, 4.0, 4.0]]), np.array([[2.0, 9.0, 9.0]]),
                          np.array([10.0]), np.ones((1, 3), dtype=bool))  # fmt: skip
    np.testing.assert_allclose(transfer_end_times(transfers), [[4, 1, 1]])


def test_a_later_transfer_takes_its_part_from_when_it_begins() -> None:
    """10 bytes alone at 10 per second for half a second, then two at 5 each."""
    transfers = Transfers(np.array([[0.0, 0.5]]), np.array([[10.0, 10.0]]), np.array([[10.0, 10.0]]),
                          np.array([10.0]), np.ones((1, 2), dtype=bool))  # fmt: skip
    np.testing.assert_allclose(transfer_end_times(transfers), [[1.5, 2.0]])


def test_a_parent_waits_for_the_slowest() -> None:
    result = spent(make_workload("3", [1]), MBIT, nodes={"2": {"step_s": 2.1}})
    np.testing.assert_allclose(result.seconds_R, 0.5 + 2.1 + 1)
    np.testing.assert_allclose(result.parts["wait", 1], 2 * 2 / 3)
    np.testing.assert_allclose(result.parts["compute", 1], (0.1 + 0.1 + 2.1) / 3)


def test_corrections_from_gradients_are_an_exchange_of_their_own() -> None:
    """Models down, one step for a gradient, gradients up, the mean down, then the round itself."""
    zero, gradient = (
        make_workload("2", [5], {"name": "mtgc", "restart": restart}, 1) for restart in ("zero", "gradient")
    )
    more = spent(gradient, MBIT).seconds_R - spent(zero, MBIT).seconds_R
    np.testing.assert_allclose(more, 0.1 + 1 + 0.5)


def test_joules_and_money() -> None:
    leaf = {"step_s": 0.1, "watts": 10, "money_per_hour": 36}
    tier = {**MBIT, "up_watts": 2, "down_watts": 3, "money_per_gb_up": 5, "overhead_bytes": MB, "merge_s": 1,
            "merge_watts": 7, "parent_money_per_hour": 18}  # fmt: skip
    result = spent(make_workload("2", [5], rounds=1), tier, leaf=leaf)
    seconds = 1 + 0.5 + 2 + 1
    assert result.seconds_R == pytest.approx([seconds])
    assert result.joules_R == pytest.approx([2 * (0.5 * 10 + 2 * 2 + 1 * 3) + 7])
    assert result.money_R == pytest.approx([2 * 2 * MB / 1e9 * 5 + seconds / 3600 * (2 * 36 + 18)])


def test_work_that_is_lost_is_done_again() -> None:
    result = spent(make_workload("1", [1], rounds=4000), {"up_mbit_s": 1e9}, leaf={"step_s": 1.0, "dropout": 0.5})
    times, counts = np.unique(np.round(result.seconds_R).astype(int), return_counts=True)
    assert times[0] == 1 and abs(counts[0] / 4000 - 0.5) < 0.03 and abs(counts[1] / 4000 - 0.25) < 0.03


def test_a_leaf_that_is_away_is_waited_for() -> None:
    result = spent(make_workload("1", [1], rounds=4000), {"up_mbit_s": 1e9},
                 leaf={"step_s": 1.0, "availability": 0.75, "away_s": 9.0})  # fmt: skip
    assert abs((result.seconds_R > 9).mean() - 0.25) < 0.03
    np.testing.assert_allclose(result.parts["away", 1], np.where(result.seconds_R > 9, 9, 0))


def test_what_a_leaf_does_fills_the_round_without_gaps() -> None:
    workload = make_workload("3", [5], rounds=1, seed=2)
    leaf = {"step_s": 0.1, "availability": 0.5, "away_s": 9.0, "pause_s": {"name": "uniform", "low": 0, "high": 1}}
    network = Network.of({"tier": [{**MBIT, "latency_s": 0.01, "merge_s": 0.3}], "leaf": leaf})
    instance, observed = instantiate_network(network, workload.tree, workload.seed), []
    trace_round(workload, 0, NetworkTimeline(instance), observed.append)
    seconds = costs(workload, instance).seconds_R[0]
    for node in range(3):
        activities = [activity for activity in observed if activity.kind != "merge" and activity.active_RN[0, node]]
        intervals = sorted((activity.begin_RN[0, node], activity.end_RN[0, node]) for activity in activities)
        np.testing.assert_allclose(
            [end for _, end in intervals], [begin for begin, _ in intervals[1:]] + [seconds - 0.3]
        )
        assert intervals[0][0] == 0
    away = [activity for activity in observed if activity.kind == "away"]
    assert 0 < away[0].active_RN.sum() < 3 and away[1].active_RN.all()


def test_a_device_that_says_how_fast_it_computes() -> None:
    workload = make_workload("2", [5], rounds=1)
    network = Network.of({"tier": [MBIT], "leaf": {"gflop_s": 2}})
    instance = instantiate_network(network, workload.tree, 0, workload.samples_N, flops=1e8)
    assert instance.devices.step_s_N == pytest.approx([0.5, 0.5])


def test_deeper_trees_repeat_the_last_tier() -> None:
    network = Network.of({"tier": [MBIT, {"up_mbit_s": 1}], "leaf": {"step_s": 1}, "direct": {"up_mbit_s": 3}})

    def speeds(depth: int) -> list[float]:
        tiers = [network.tier(level, depth).up_mbit_s for level in range(1, depth + 1)]
        return [tier.quantile_at(0.5) for tier in tiers if tier is not None]

    assert speeds(4) == [1, 1, 1, 8] and speeds(2) == [1, 8] and speeds(1) == [3]


def test_draws_are_the_runs_own_and_the_same_in_any_order() -> None:
    leaf = {"step_s": 0.1, "slowdown": {"name": "lognormal", "median": 1, "sigma": 1}}
    first, again, other = (
        spent(make_workload("3x2", [2, 3], rounds=50, seed=seed), MBIT, leaf=leaf).seconds_R for seed in (1, 1, 2)
    )
    assert (first == again).all() and (first != other).any()
    assert (spent(make_workload("3x2", [2, 3], rounds=20, seed=1), MBIT, leaf=leaf).seconds_R == first[:20]).all()


@pytest.mark.parametrize(
    "wait", [WAIT_FOR_ALL, WaitPolicy(first=1), WaitPolicy(first=2, late="counts")], ids=["all", "first", "buffer"]
)
def test_extreme_quantities_have_finite_results(wait: WaitPolicy) -> None:
    most = {"latency_s": 1e60, "jitter_s": 1e60, "overhead_s": 1e60, "overhead_bytes": 1e60, "merge_s": 1e60,
            "up_watts": 1e60, "down_watts": 1e60, "merge_watts": 1e60, "money_per_gb_up": 1e60,
            "parent_money_per_hour": 1e60}  # fmt: skip
    slow = {"up_mbit_s": 1e-60, "pipe_up_mbit_s": 1e-60, "pipe_down_mbit_s": 1e-60}
    leaf = {"gflop_s": 1e-60, "flops_per_sample": 1e60, "slowdown": 1e60, "watts": 1e60, "dropout": 0.9}
    workload = make_workload("2x3", [2, 5], wait=(WAIT_FOR_ALL, wait))
    for result in (
        spent(workload, most | slow, leaf=leaf | {"money_per_hour": 1e60, "pause_s": 1e60}),
        spent(workload, {"up_mbit_s": 1e60, "pipe_up_mbit_s": 1e60}, leaf={"step_s": 1e-60}),
    ):
        for values_R in (result.seconds_R, result.joules_R, result.money_R, *result.bytes, *result.parts.values()):
            assert np.isfinite(values_R).all() and (values_R >= 0).all()
