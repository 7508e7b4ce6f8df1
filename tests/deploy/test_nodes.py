"""Leaves, aggregators and a root that hand each other messages end where the simulation ends."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

from stratafl import InvalidInput
from stratafl.registry import entries
from tests.deploy.trees import Deployed, simulation

every_depth = pytest.mark.parametrize("depth", [1, 2, 3])
METHODS: list[Any] = [*(entry.name for entry in entries()), {"name": "mtgc", "restart": "keep"}]
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def assert_agrees(deployed: Deployed, sim) -> None:
    result = sim.result()
    torch.testing.assert_close(deployed.model(), result.models[0][0], **TOLERANCE)
    tree = deployed.job.tree
    for level in range(1, tree.depth + 1):
        for number in range(tree.sizes[level]):
            assert deployed.traffic(level, number) == astuple(result.communication.node(level, number))


@every_depth
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_final_model_and_the_bytes_are_those_of_the_simulation(method: Any, depth: int) -> None:
    sim = simulation(method, depth)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert_agrees(deployed, sim)


@every_depth
@pytest.mark.parametrize("method", ["mtgc", "scaffold", "median", {"name": "mtgc", "restart": "keep"}], ids=str)
def test_partial_participation(method: Any, depth: int) -> None:
    sim = simulation(method, depth, participation=[0.5] * depth)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert_agrees(deployed, sim)


@every_depth
@pytest.mark.parametrize("rule", ["mtgc", "scaffold", "momentum", "median"])
def test_a_rule_on_every_edge(rule: str, depth: int) -> None:
    sim = simulation([rule] * depth, depth)
    deployed = Deployed(sim).run()
    sim.run()
    assert_agrees(deployed, sim)


def test_corrections_are_those_of_the_simulation() -> None:
    sim = simulation("mtgc", 3)
    deployed = Deployed(sim)
    deployed.root.greet()
    for _ in sim:
        deployed.root.one_round()
    deployed.root.end()
    for number, row in enumerate(sim.result().corrections[0]):
        torch.testing.assert_close(deployed.correction(1, number), row, **TOLERANCE)


def test_buffers_dropout_momentum_and_clipping() -> None:
    from stratafl.local import leaf

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))

    sim = simulation(
        "mtgc", 2, batch=None, model=model, leaf=leaf(0.05, momentum=0.5, clip_norm=1.0, weight_decay=0.01)
    )
    deployed = Deployed(sim).run()
    sim.run()
    assert_agrees(deployed, sim)
    torch.testing.assert_close(deployed.root.down.now.buffers[0], sim.federation.held_buffers[0][0], **TOLERANCE)


def test_what_cannot_be_deployed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="restart from gradients"):
        Deployed(simulation({"name": "mtgc", "restart": "gradient"}, 2))
    with pytest.raises(InvalidInput, match="leaves' edge"):
        Deployed(simulation(["fedprox", "fedprox"], 2))
