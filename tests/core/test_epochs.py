"""Passes over a client's own data instead of steps, with clients of different sizes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import InvalidInput, mtgc, scaffold
from stratafl.base.topology import Topology
from stratafl.data.batches import batch_indices
from stratafl.engine.factory import make_engine
from stratafl.experiment.algorithm import sync_schedule
from stratafl.experiment.experiment import Experiment
from stratafl.simulation.build import build
from tests.deploy.trees import Deployed, assert_agrees, simulation
from tests.engine import pairs
from tests.flat import client_options, simulate
from tests.problems import LeastSquares, root
from tests.slow import slow

SEED, BATCH = 7, 2


def transcribed(problem: LeastSquares, method: str, E: int, epochs: int, lr: float, rounds: int = 3) -> Any:
    """Two levels by hand: each client makes `epochs` passes over its own data, and corrections
    compare the clients' mean directions, whatever their numbers of steps."""
    parents, w1, w2 = problem.tree.parents[2], problem.tree.weights[1], problem.tree.weights[2]
    groups, clients = range(problem.tree.sizes[1]), range(problem.tree.leaves)
    x, passes = problem.x0.copy(), 0
    z, y = np.zeros((len(clients), 3)), np.zeros((len(groups), 3))
    control, server = np.zeros_like(z), np.zeros_like(y)
    for _ in range(rounds):
        x_group, group_mean = np.stack([x for _ in groups]), np.zeros_like(y)
        for _ in range(E):
            local, mean = np.stack([x_group[parents[i]] for i in clients]), np.zeros_like(z)
            for i in clients:
                size = problem.sizes[i]
                steps = -(-size // BATCH)
                added = {
                    "mtgc": z[i] + y[parents[i]],
                    "scaffold": server[parents[i]] - control[i],
                    "hfedavg": 0 * z[i],
                }[method]
                for batch in batch_indices(SEED, i, size, passes * steps, epochs * steps, BATCH):
                    A, b = problem.A[i][batch.numpy()], problem.b[i][batch.numpy()]
                    d = A.T @ (A @ local[i] - b) / len(b) + added
                    local[i] = local[i] - lr * d
                    mean[i] += d / (epochs * steps)
                if method == "scaffold":
                    mean[i] = mean[i] - added
            for j in groups:
                family = [i for i in clients if parents[i] == j]
                x_group[j] = sum(w2[i] * local[i] for i in family)
                family_mean = sum(w2[i] * mean[i] for i in family)
                group_mean[j] += family_mean / E
                server[j] += sum(w2[i] * (mean[i] - control[i]) for i in family)
                for i in family:
                    z[i] += family_mean - mean[i]
                    control[i] = mean[i]
            passes += epochs
        x = sum(w1[j] * x_group[j] for j in groups)
        y += sum(w1[j] * group_mean[j] for j in groups) - group_mean
    return x, y, z


RULES: dict[str, Any] = {"mtgc": [mtgc("keep")] * 2, "scaffold": ["hfedavg", scaffold()], "hfedavg": "hfedavg"}


@pytest.mark.parametrize("method", RULES)
def test_line_by_line(method: str) -> None:
    problem = LeastSquares([2, 3, 1], "samples")
    assert len({-(-size // BATCH) for size in problem.sizes}) > 1
    x, y, z = transcribed(problem, method, 2, 3, 0.03)
    options = {"periods": [2], "rounds": 3, "lr": client_options(0.03, epochs=3), "batch": BATCH, "seed": SEED}
    for engine in ("loop", "stacked"):
        result = problem.run(RULES[method], engine=engine, **options)
        np.testing.assert_allclose(root(result), x, rtol=0, atol=1e-11)
        if method == "mtgc":
            np.testing.assert_allclose(result.corrections[0], y, rtol=0, atol=1e-10)
            np.testing.assert_allclose(result.corrections[1], z, rtol=0, atol=1e-10)
            assert np.abs(problem.tree.mean(2, result.corrections[1]).numpy()).max() < 1e-11
    assert np.linalg.norm(x - problem.x0) > 0.1


def test_every_sample_is_seen_once_in_every_pass() -> None:
    sizes = [3, 7, 4]
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    data = torch.eye(14, dtype=torch.float64), torch.zeros(14, 1, dtype=torch.float64)

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    for engine in ("loop", "stacked"):
        sim = simulate(
            nn.Linear(14, 1, bias=False, dtype=torch.float64), data, parts, 3, "hfedavg", periods=[], rounds=2,
            leaf=client_options(1.0, epochs=4), batch=2, loss=total, initial={"weight": np.zeros((1, 14))},
            engine=engine,
        )  # fmt: skip
        next(sim)
        seen = -sim.result().models[1]
        expected = torch.zeros(3, 14, dtype=torch.float64)
        for client, part in enumerate(parts):
            expected[client, part] = 4.0
        torch.testing.assert_close(seen, expected)
        assert sim.step == 4


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_record_has_the_clients_mean_number_of_steps(participation: float) -> None:
    """Batches of 2 from 3, 7 and 4 samples: 2, 4 and 2 steps per pass, independent of
    participation."""
    parts, data = [range(0, 3), range(3, 10), range(10, 14)], (torch.eye(14), torch.zeros(14, 1))
    how = {"loss": "mse", "batch": 2, "rounds": 2, "participation": participation}
    sim = simulate(
        lambda: nn.Linear(14, 1), data, parts, 3, "hfedavg", periods=[], leaf=client_options(0.1, epochs=4), **how
    )
    assert [record.steps for record in sim] == [round(4 * 8 / 3), round(8 * 8 / 3)]
    sim = simulate(lambda: nn.Linear(14, 1), data, parts, 3, "hfedavg", periods=[4], leaf=client_options(0.1), **how)
    assert [record.steps for record in sim] == [4, 8]


def test_with_full_batches_a_pass_is_a_step() -> None:
    problem = LeastSquares([2, 1])
    passes = problem.run("mtgc", periods=[3], rounds=2, lr=client_options(0.05, epochs=2))
    steps = problem.run("mtgc", periods=[3, 2], rounds=2, lr=client_options(0.05))
    np.testing.assert_allclose(root(passes), root(steps), rtol=0, atol=1e-12)
    np.testing.assert_allclose(passes.corrections[0], steps.corrections[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rules", ["mtgc", ["scaffold", "fedprox"], {"name": "mtgc", "restart": "gradient"}], ids=str)
@pytest.mark.parametrize(
    "chain", [slow({}), {"optimizer": "adam", "optimizer_state": "keep", "clip_norm": 0.2}], ids=str
)
@pytest.mark.parametrize("participation", [slow(None), [1.0, 0.7]], ids=["all", "some"])
def test_every_engine_gives_the_loop_s_result(rules: Any, chain: dict[str, Any], participation: Any) -> None:
    settings = {
        "rules": rules,
        "leaf": client_options(0.05, epochs=2, **chain),
        "periods": [2],
        "participation": participation,
    }
    for engine, chunk_size in (("stacked", 2), ("stacked", None), ("vmap", 3)):
        loop, other = pairs.federation(**settings), pairs.federation(**settings)
        other.engine = make_engine(engine, other.engine.training, chunk_size=chunk_size)
        loop.run(), other.run()
        assert other.engine.name == engine
        for a, b in zip(loop.federation.levels, other.federation.levels, strict=True):
            torch.testing.assert_close(a.model, b.model, rtol=0, atol=1e-9)
            torch.testing.assert_close(a.buffers, b.buffers, rtol=0, atol=1e-9)
            assert all(torch.allclose(a.client_rows[name], b.client_rows[name]) for name in a.client_rows)
        assert loop.engine.clipped_steps == other.engine.clipped_steps


def test_a_resumed_run_and_a_deployed_tree_have_the_same_result() -> None:
    settings = {"leaf": client_options(0.05, epochs=2, optimizer="adam"), "participation": 0.6}
    sim = simulation("mtgc", 2, periods=[2], **settings)
    deployed = Deployed(sim, by_samples=True).run()
    next(sim)
    state = copy.deepcopy(sim.state())
    sim.run()
    assert_agrees(deployed, sim)
    resumed = simulation("mtgc", 2, periods=[2], **settings)
    resumed.restore(state)
    assert torch.equal(resumed.run().models[0], sim.result().models[0])


def test_from_a_config() -> None:
    values = {"schedule": {"unit": "epochs", "periods": [2, 2]}, "client": {"batch_size": 40}, "tree": {"shape": "2x2"}}
    config = Experiment.from_table({**values, "rounds": 1, "model": {"name": "logistic"}})
    assert sync_schedule(config.schedule, Topology.of("2x2")).periods == (2, 2)
    assert build(config).run().history[-1].steps == 4 * 9  # passes over 360 samples each
    for periods, words in (([2], "2 of them"), ([2, 0], "at least 1"), ([1, 2, 3], "2 of them")):
        with pytest.raises(InvalidInput, match=words):
            Experiment.from_table({**values, "schedule": {"unit": "epochs", "periods": periods}}).check()
