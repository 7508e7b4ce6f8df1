"""Invariants for any tree, any weights and any data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl import Topology, mtgc, place, scaffold
from stratafl.federation.local_parameters import ClientTrainer
from tests.problems import PERIODS, LeastSquares, root
from tests.slow import slow

few = settings(max_examples=8, deadline=None, derandomize=True)
groups = st.lists(st.integers(1, 3), min_size=1, max_size=3)
shapes = st.one_of(st.integers(1, 5), groups, st.lists(groups, min_size=1, max_size=2))
restarts = st.sampled_from(["zero", "gradient", "keep"])
seeds = st.integers(0, 10_000)


def weights_of(shape, seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(rng.uniform(0.1, 3, size=n)) for n in Topology.of(shape).sizes[1:]]


def assert_close(actual, expected, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@few
@given(shapes, restarts, seeds, st.sampled_from([None, 0.5, 1]))
def test_corrections_sum_to_zero_per_parent(shape, restart, seed, participation) -> None:
    problem = LeastSquares(shape, weights_of(shape, seed), seed)
    rules = place({"name": "mtgc", "restart": restart}, problem.tree.depth)
    sim = problem.simulation(rules, rounds=2, participation=participation, seed=seed)
    moved = 0.0
    for steps, top in list(sim.schedule.events()) * 2:
        federation, trainer = sim.federation, ClientTrainer(sim.engine, sim.home)
        federation.train_and_synchronize(trainer, round=0, first_step=0, steps=steps, top_level=top)
        for level in range(1, problem.tree.depth + 1):
            correction = federation.levels[level].correction
            moved = max(moved, float(correction.abs().max()))
            assert_close(problem.tree.mean(level, correction).numpy(), 0, atol=1e-11)
    if participation is None and problem.tree.leaves > 1:
        assert moved > 0


@few
@given(shapes, seeds)
def test_corrections_do_not_change_the_mean_step(shape, seed) -> None:
    problem = LeastSquares(shape, weights_of(shape, seed), seed)
    depth = problem.tree.depth
    sim = problem.simulation(place("mtgc", depth), rounds=2, seed=seed)
    next(sim)
    work = sim.federation.train_request(0, 1, 0)
    assert len(work.corrections) == depth
    corrected = torch.stack([rows.take(range(problem.tree.leaves)) for rows in work.corrections]).sum(dim=0)
    for level in range(depth, 0, -1):
        corrected = problem.tree.mean(level, corrected)
    assert_close(corrected.numpy(), 0, atol=1e-11)


@few
@given(st.integers(1, 5), restarts.filter(lambda r: r != "gradient"), seeds)
def test_depth_1_is_scaffold(clients, restart, seed) -> None:
    problem = LeastSquares(clients, weights_of(clients, seed), seed)
    mtgc_result = problem.run([mtgc(restart)], rounds=5)
    scaffold_result = problem.run([scaffold()], rounds=5)
    assert_close(root(mtgc_result), root(scaffold_result))
    assert_close(mtgc_result.corrections[0].numpy(), scaffold_result.corrections[0].numpy(), atol=1e-11)


@few
@given(st.integers(2, 5), seeds)
def test_one_group_with_kept_corrections_is_scaffold(clients, seed) -> None:
    weights = weights_of(clients, seed)
    star = LeastSquares(clients, weights, seed).run([scaffold()], periods=[4], rounds=5)
    group = LeastSquares([clients], [[1.0], *weights], seed)
    kept = group.run(place({"name": "mtgc", "restart": "keep"}, 2), periods=[1, 4], rounds=5)
    assert_close(root(kept), root(star))


@few
@given(st.integers(2, 5), seeds)
def test_one_group_with_corrections_from_zero_is_fedavg(clients, seed) -> None:
    """The client correction is reset before it is ever used (not discussed in section 3.3 of the
    paper)."""
    group = LeastSquares([clients], None, seed)
    restarted = group.run("mtgc", periods=[1, 4], rounds=5)
    averaged = group.run("hfedavg", periods=[1, 4], rounds=5)
    kept = group.run({"name": "mtgc", "restart": "keep"}, periods=[1, 4], rounds=5)
    assert_close(root(restarted), root(averaged))
    assert np.abs(root(kept) - root(averaged)).max() > 1e-6


@few
@given(shapes.filter(lambda s: Topology.of(s).depth < 3), seeds)
def test_an_aggregator_with_a_single_child_changes_nothing(shape, seed) -> None:
    keep = {"name": "mtgc", "restart": "keep"}
    plain = LeastSquares(shape, None, seed)
    periods = PERIODS[plain.tree.depth]
    expected = root(plain.run(keep, periods=periods))

    below_root = LeastSquares([shape], None, seed)
    assert_close(root(below_root.run(keep, periods=[1, *periods])), expected)

    above_each_client = LeastSquares(_one_client_groups(shape), None, seed)
    halves = [*periods[:-1], periods[-1] // 2, 2]
    assert_close(root(above_each_client.run(keep, periods=halves)), expected)


def _one_client_groups(shape):
    if isinstance(shape, int):
        return [1] * shape
    return [_one_client_groups(child) for child in shape]


@few
@given(st.permutations([0, 1, 2]), st.sampled_from(["mtgc", "scaffold", "feddyn", "adam"]), seeds)
def test_the_order_of_groups_does_not_matter(order, method, seed) -> None:
    sizes = [2, 1, 3]
    problem = LeastSquares(sizes, None, seed)
    firsts = np.cumsum([0, *sizes])
    leaves = [leaf for g in order for leaf in range(firsts[g], firsts[g + 1])]

    shuffled = LeastSquares([sizes[g] for g in order], None, seed)
    shuffled.A, shuffled.b = problem.A, problem.b
    shuffled.partition = [problem.partition[leaf] for leaf in leaves]

    a, b = problem.run(method), shuffled.run(method)
    assert_close(root(b), root(a))
    assert_close(b.models[1].numpy(), a.models[1].numpy()[order])
    assert_close(b.models[2].numpy(), a.models[2].numpy()[leaves])


@pytest.mark.parametrize("restart", [slow("gradient"), "keep"])
def test_mtgc_finds_the_minimiser_that_hfedavg_misses(restart: str) -> None:
    problem = LeastSquares([[2, 1], [3]], None, spread=3.0)
    target = problem.minimiser()

    def miss(rules, rounds: int) -> float:
        sim = problem.simulation(rules, periods=[2, 2, 2], rounds=rounds, lr=0.08)
        return float(np.linalg.norm(root(sim.run()) - target))

    assert miss({"name": "mtgc", "restart": restart}, 100) < 1e-9
    assert miss("hfedavg", 30) > 1e-3


def test_scaffold_control_is_the_mean_of_all_clients_controls() -> None:
    problem = LeastSquares([3, 4], weights_of([3, 4], 0), 5)
    sim = problem.simulation("scaffold", rounds=6, participation=0.5, seed=3)
    for _ in sim:
        controls = sim.federation.levels[2].state["c"]
        assert_close(sim.federation.levels[1].memory["c"], problem.tree.mean(2, controls), atol=1e-11)
    assert torch.count_nonzero(sim.federation.levels[1].memory["c"]) > 0
