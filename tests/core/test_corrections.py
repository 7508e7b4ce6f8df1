"""Corrections with optimizers other than SGD: they sum to zero, and MTGC with Adam converges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl import Topology, mtgc, place
from stratafl.core.optimizer import step_decay
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode
from tests.deploy.trees import Deployed, assert_agrees, simulation
from tests.flat import client_options
from tests.problems import LeastSquares, root
from tests.rules.test_invariants import weights_of
from tests.slow import slow

CHAINS: dict[str, dict[str, Any]] = {
    "nesterov": {"optimizer": {"name": "sgd", "momentum": 0.8, "nesterov": True}},
    "kept momentum": {"momentum": 0.8, "optimizer_state": "keep"},
    "adam": {"optimizer": "adam"},
    "kept adam": {"optimizer": "adam", "optimizer_state": "keep"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.0, "clip_norm": 1.0},
}


def two_levels_of_adam(problem: LeastSquares, restart: str, keep: bool, E: int, H: int, lr: float) -> Any:
    """Algorithm 1 of the MTGC paper with Adam instead of SGD, line by line: a correction is the
    mean of the siblings' mean directions minus the client's, corrections included."""
    parents, rounds = problem.tree.parents[2], 3
    groups, clients = range(problem.tree.sizes[1]), range(problem.tree.leaves)
    w1, w2 = problem.tree.weights[1], problem.tree.weights[2]
    x = problem.x0.copy()
    z, y = np.zeros((len(clients), 3)), np.zeros((len(groups), 3))
    m, v, t = np.zeros_like(z), np.zeros_like(z), np.zeros(len(clients))
    for _ in range(rounds):
        x_group, group_mean = np.stack([x for _ in groups]), np.zeros_like(y)
        if restart == "zero":
            z[:] = 0
        for _ in range(E):
            local, mean = np.stack([x_group[parents[i]] for i in clients]), np.zeros_like(z)
            if not keep:
                m[:], v[:], t[:] = 0, 0, 0
            for i in clients:
                for _ in range(H):
                    d = problem.gradient(i, local[i]) + z[i] + y[parents[i]]
                    t[i] += 1
                    m[i] = 0.9 * m[i] + 0.1 * d
                    v[i] = 0.999 * v[i] + 0.001 * d * d
                    local[i] -= lr * m[i] / (1 - 0.9 ** t[i]) / (np.sqrt(v[i] / (1 - 0.999 ** t[i])) + 1e-8)
                    mean[i] += d / H
            for j in groups:
                family = [i for i in clients if parents[i] == j]
                x_group[j] = sum(w2[i] * local[i] for i in family)
                family_mean = sum(w2[i] * mean[i] for i in family)
                group_mean[j] += family_mean / E
                for i in family:
                    z[i] += family_mean - mean[i]
        x = sum(w1[j] * x_group[j] for j in groups)
        overall = sum(w1[j] * group_mean[j] for j in groups)
        y += overall - group_mean
    return x, y, z


@pytest.mark.parametrize("restart", ["zero", "keep"])
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_mtgc_with_adam_line_by_line(restart: str, state: str) -> None:
    problem = LeastSquares([2, 3, 1], weights_of([2, 3, 1], 0))
    x, y, z = two_levels_of_adam(problem, restart, state == "keep", 3, 2, 0.05)
    chain = client_options(0.05, optimizer="adam", optimizer_state=state)
    result = problem.run([mtgc(restart)] * 2, periods=[3, 2], rounds=3, lr=chain)
    np.testing.assert_allclose(root(result), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.corrections[0], y, rtol=0, atol=1e-10)
    if restart == "keep":
        np.testing.assert_allclose(result.corrections[1], z, rtol=0, atol=1e-10)
    assert np.abs(y).max() > 0.1


groups = st.lists(st.integers(1, 3), min_size=1, max_size=3)
shapes = st.one_of(st.integers(1, 5), groups, st.lists(groups, min_size=1, max_size=2))
methods = st.sampled_from([*({"name": "mtgc", "restart": r} for r in ("zero", "gradient", "keep")), "scaffold"])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes, methods, st.sampled_from(list(CHAINS)), st.integers(0, 10_000), st.sampled_from([None, 0.5, 1]))
def test_corrections_sum_to_zero_per_parent(shape, method, chain, seed, participation) -> None:
    """Over all children of a parent, present or absent, with every optimizer."""
    problem = LeastSquares(shape, weights_of(shape, seed), seed)
    rules = [method] * problem.tree.depth
    sim = problem.simulation(
        rules, rounds=2, participation=participation, seed=seed, lr=client_options(0.05, **CHAINS[chain])
    )
    moved = 0.0
    for _ in sim:
        for level in range(1, problem.tree.depth + 1):
            correction = sim.federation.levels[level].correction
            moved = max(moved, float(correction.abs().max()))
            np.testing.assert_allclose(problem.tree.mean(level, correction), 0, atol=1e-11)
    if participation is None and problem.tree.leaves > 1 and Topology.of(shape).sizes[1] > 1:
        assert moved > 0


@pytest.mark.parametrize("restart", ["gradient", slow("keep")])
def test_mtgc_with_kept_adam_finds_the_minimiser(restart: str) -> None:
    problem = LeastSquares([[2, 1], [3]], None, spread=3.0)

    def miss(rules: Any, rounds: int = 60) -> float:
        chain = client_options(0.1, optimizer={"name": "adam", "betas": [0.9, 0.99]}, optimizer_state="keep")
        sim = problem.simulation(rules, periods=[2, 2, 2], rounds=rounds, lr=chain)
        return float(np.linalg.norm(root(sim.run()) - problem.minimiser()))

    assert miss({"name": "mtgc", "restart": restart}) < 1e-4
    assert miss("hfedavg") > 0.5


def test_reset_adam_gets_as_close_as_its_learning_rate_is_small() -> None:
    """Adam's first step is as long as the learning rate, however small the gradient."""
    problem = LeastSquares([[2, 1], [3]], None, spread=3.0)
    chain = client_options(step_decay(0.1, every=15, factor=0.3), optimizer="adam")
    sim = problem.simulation({"name": "mtgc", "restart": "keep"}, periods=[2, 2, 2], rounds=75, lr=chain)
    assert np.linalg.norm(root(sim.run()) - problem.minimiser()) < 0.02


@pytest.mark.parametrize("rules", ["mtgc", "scaffold", "hfedavg", {"name": "mtgc", "restart": "keep"}], ids=str)
@pytest.mark.parametrize("chain", ["adam", "kept adam", "kept momentum"])
def test_a_deployed_tree_has_the_same_result(rules: Any, chain: str) -> None:
    depth = 2 if chain == "kept momentum" else 3
    settings = {"leaf": client_options(0.05, **CHAINS[chain]), "participation": 0.6}
    sim = simulation(place(rules, depth), depth, **settings)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert_agrees(deployed, sim)  # also in bytes sent


@pytest.mark.parametrize("chain", ["kept adam", "kept momentum"])
def test_deployed_nodes_resume_from_their_files(chain: str) -> None:
    """Moments and step count are stored at the client only."""
    sim = simulation("mtgc", 2, leaf=client_options(0.05, **CHAINS[chain]))
    uninterrupted, restarted = Deployed(sim).run(), Deployed(sim)
    restarted.root.greet()
    while restarted.root.round < restarted.job.rounds:
        restarted.root.one_round()
        stored = {name: encode(child, once=True) for name, child in restarted.kept.items()}
        for level in range(restarted.job.tree.depth, -1, -1):
            for number, name in enumerate(restarted.job.tree.names[level]):
                restarted.make(level, number, decode(stored[name], NodeState))
    assert np.array_equal(restarted.model(), uninterrupted.model())
    child = restarted.kept["0/0"].above
    assert child is not None and child.sent is not None
    assert set(child.sent.optimiser) == ({"m", "v", "steps"} if chain == "kept adam" else {"velocity"})
    parent = restarted.kept["0"].above
    assert parent is not None and parent.sent is not None and parent.sent.optimiser == {}
