"""States that go on under other weights, that begin with a node's first round, and that a learning
rate of 0 leaves as they are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import Rule, Simulation, average
from tests.deploy.trees import TOLERANCE, Deployed, assert_agrees, simulation
from tests.flat import client_options, simulate
from tests.slow import slow

SHAPE, LEAVES = [[2, 1], [1, 2]], 6
KEEP, GRADIENT = {"name": "mtgc", "restart": "keep"}, {"name": "mtgc", "restart": "gradient"}
every_engine = pytest.mark.parametrize("engine", ["loop", slow("stacked")])


def study(rules: Any, weights: Any = "samples", engine: str = "loop", **more: Any) -> Simulation:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(LEAVES * 6, 4, generator=random, dtype=torch.float64)
    targets = (inputs @ torch.randn(4, 3, generator=random, dtype=torch.float64)).argmax(dim=1)
    parts = [np.arange(leaf * 6, leaf * 6 + 4 + leaf % 3) for leaf in range(LEAVES)]
    settings = {"periods": [2, 2, 2], "rounds": 4, "batch": 3, "seed": 4, **more}
    return simulate(
        lambda: nn.Linear(4, 3).double(),
        (inputs, targets),
        parts,
        SHAPE,
        rules,
        weights=weights,
        engine=engine,
        **settings,
    )


def assert_balanced(sim: Simulation) -> None:
    federation = sim.federation
    for level in range(1, federation.tree.depth + 1):
        for name, rows in federation.levels[level].state.items():
            mean_MP = federation.tree.mean(level, rows)
            expected = torch.zeros_like(mean_MP) if name == "z" else federation.levels[level - 1].memory[name]
            torch.testing.assert_close(mean_MP, expected, rtol=0, atol=1e-11)


@every_engine
@pytest.mark.parametrize("method", ["mtgc", KEEP, GRADIENT, "scaffold", "feddyn"], ids=str)
@pytest.mark.parametrize("meetings", [slow(8), 11])
def test_a_run_goes_on_under_other_weights(meetings: int, method: Any, engine: str) -> None:
    """Between two rounds, and within one."""
    rules, weights = method if method == "feddyn" else [method] * 3, [1, 2, 3, 4, 5, 6]
    before = study(rules, weights, engine)
    for _ in range(meetings):
        before.advance()
    state = copy.deepcopy(before.state())
    other, same = study(rules, [6, 1, 1, 9, 1, 3], engine), study(rules, weights, engine)
    for sim in (other, same):
        sim.restore(copy.deepcopy(state))
        assert_balanced(sim)
    for sim in (before, other, same):
        sim.run()
        assert_balanced(sim)
    assert torch.equal(before.result().models[0], same.result().models[0])


# -- states that begin with the model of a node's first round --------------------------------------


def remembering() -> Rule:
    """Children and parents keep a mean of the models that they have seen, from their first on."""

    def up(state: dict[str, Tensor], x: Tensor, edge: Any) -> Any:
        return {"ema": 0.5 * state["ema"] + 0.5 * x}, {"model": x}

    def merge(memory: dict[str, Tensor], start: Tensor, mean: dict[str, Tensor], share: Tensor) -> Any:
        return {"seen": 0.5 * memory["seen"] + 0.5 * mean["model"]}, 0.9 * mean["model"] + 0.1 * memory["seen"]

    return average()._replace(
        init=lambda x: {"ema": x.clone()},
        open=lambda x: {"seen": x.clone()},
        up=up,
        merge=merge,
        note=lambda memory: memory,
        correction=lambda state, note: 0.1 * state["ema"] - 0.05 * note["seen"],
        relay=lambda state: {"ema": 0.5 * state["ema"]},
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_states_begin_with_the_first_round_as_deployed_ones_do(depth: int) -> None:
    chain = client_options(0.05, momentum=0.5, optimizer_state="keep")
    sim = simulation([remembering()] * depth, depth, participation=[0.5] * depth, rounds=5, leaf=chain)
    deployed = Deployed(sim, by_samples=True).run()
    torch.testing.assert_close(deployed.model(), sim.run().models[0][0], **TOLERANCE)


@every_engine
def test_states_that_begin_late_outlive_a_resume(engine: str) -> None:
    def make(engine: str) -> Simulation:
        return study([remembering()] * 3, engine=engine, participation=[0.5] * 3)

    uninterrupted, interrupted, resumed, oracle = make(engine), make(engine), make(engine), make("loop")
    for _ in range(7):
        interrupted.advance()
    resumed.restore(copy.deepcopy(interrupted.state()))
    assert torch.equal(resumed.run().models[0], uninterrupted.run().models[0])
    torch.testing.assert_close(uninterrupted.result().models[0], oracle.run().models[0], rtol=0, atol=1e-12)


# -- a learning rate of 0 --------------------------------------------------------------------------


def rates(*values: float) -> Any:
    return client_options(lambda round: values[round])


STILL: list[Any] = ["hfedavg", "fedprox", "group_correction", "local_correction", "mtgc", KEEP, GRADIENT, "scaffold"]


def assert_same_end(one: Simulation, other: Simulation) -> None:
    for rows, others in zip(one.run().models, other.run().models, strict=True):
        torch.testing.assert_close(rows, others, rtol=0, atol=1e-11)
    assert not any(result.refused for result in one.history)


@pytest.mark.parametrize("method", [*STILL, "median", "feddyn", "momentum"], ids=str)
def test_a_warm_up_from_0_changes_nothing(method: Any) -> None:
    """The run is the one that begins with the round after it."""
    warm = study(method, batch=None, leaf=rates(0.0, 0.05, 0.03), rounds=3)
    assert_same_end(warm, study(method, batch=None, leaf=rates(0.05, 0.03), rounds=2))


@every_engine
@pytest.mark.parametrize("method", STILL, ids=str)
def test_a_round_without_steps_keeps_corrections(method: Any, engine: str) -> None:
    """For rules whose parent has no momentum of its own."""
    paused = study(method, engine=engine, batch=None, leaf=rates(0.05, 0.0, 0.03), rounds=3)
    assert_same_end(paused, study(method, engine=engine, batch=None, leaf=rates(0.05, 0.03), rounds=2))


@pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
@pytest.mark.parametrize("method", ["hfedavg", "mtgc", "scaffold", "feddyn", "adam"])
def test_a_deployed_round_without_steps_is_the_simulation_s(method: str, depth: int) -> None:
    sim = simulation(method, depth, leaf=rates(0.0, 0.05, 0.0, 0.05), rounds=4)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert not any(result.refused for result in sim.history)
    assert_agrees(deployed, sim)


def test_who_heard_nobody_is_absent_also_at_a_rate_of_0() -> None:
    def first_group(draw: Any) -> np.ndarray:
        return np.arange(draw.tree.sizes[draw.level]) < 2

    sim = simulation("mtgc", 2, leaf=rates(0.0, 0.05, 0.05), participation=[None, first_group])
    sim.advance()
    deployed = Deployed(sim)
    deployed.root.greet()
    deployed.root.one_round()
    assert sim.federation.levels[1].has_update_N.tolist() == [True, False]
    first, second = (deployed.kept[name].reply for name in ("0", "1"))
    assert first is not None and first.report is not None and first.report.buffers is not None
    assert second is not None and second.report is not None and second.report.buffers is None
