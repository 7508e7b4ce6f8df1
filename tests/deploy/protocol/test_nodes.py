"""Leaves, aggregators and a root that hand each other messages end where the simulation ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stratafl import InvalidInput
from stratafl.rules.registry import entries
from tests.deploy.trees import TOLERANCE, Deployed, assert_agrees, normed, simulation
from tests.flat import client_options

every_depth = pytest.mark.parametrize("depth", [1, 2, 3])
METHODS: list[Any] = [*(entry.name for entry in entries()), {"name": "mtgc", "restart": "keep"}]


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
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))

    sim = simulation(
        "mtgc", 2, batch=None, model=model, leaf=client_options(0.05, momentum=0.5, clip_norm=1.0, weight_decay=0.01)
    )
    deployed = Deployed(sim).run()
    sim.run()
    assert_agrees(deployed, sim)
    torch.testing.assert_close(deployed.root.down.now.buffers[0], sim.federation.levels[0].buffers[0], **TOLERANCE)


@every_depth
@pytest.mark.parametrize("method", ["mtgc", "scaffold", "fedprox"])
@pytest.mark.parametrize("at_home", ["batch_norm", ["2", "1.running_mean"]], ids=str)
def test_what_stays_with_the_leaves(at_home: Any, method: str, depth: int) -> None:
    """It is sent to nobody, and is the simulation's to the bit."""
    rules, chain = ["average"] * (depth - 1) + [method], client_options(0.05, momentum=0.5, optimizer_state="keep")
    some = {"batch": None, "participation": [0.6] * depth}
    sim = simulation(rules, depth, model=normed, local_parameters=at_home, leaf=chain, **some)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert_agrees(deployed, sim)
    assert torch.equal(deployed.model(), sim.home.shared(sim.result().models[0])[0])
    assert deployed.job.parameters + deployed.job.buffers < sim.flat.parameters + sim.flat.buffers
    own = sim.federation.levels[-1].client_rows
    for number, name in enumerate(deployed.job.tree.names[-1]):
        for rows, value in own.items():
            assert torch.equal(deployed.own(name)[rows][0], value[number]), (name, rows)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf, torch.nan]))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.out(x + self.mask[0])


@every_depth
@pytest.mark.parametrize("method", ["mtgc", "median"])
def test_a_mask_with_infinities_among_the_buffers(method: str, depth: int) -> None:
    sim = simulation(method, depth, model=Masked)
    deployed = Deployed(sim, by_samples=True).run()
    sim.run()
    assert sim.result().refused == {}
    assert_agrees(deployed, sim)
    ours, theirs = deployed.root.down.now.buffers[0], sim.federation.levels[0].buffers[0]
    torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCE)
    assert ours[1] == -torch.inf and ours[4] != 0


@every_depth
@pytest.mark.parametrize("method", ["mtgc", "scaffold", "median"])
@pytest.mark.parametrize("limit", [None, 0, 20.0])
def test_huge_updates_are_refused_as_in_the_simulation(method: str, depth: int, limit: float | None) -> None:
    sim = simulation(method, depth, huge={1: -1e15}, batch=None, update_limit=limit)
    deployed = Deployed(sim, by_samples=True, update_limit=limit)
    deployed.is_checked = limit != 0  # with updates of 1e15 nothing sums to zero in float32
    deployed.root.greet()
    for seen in sim:
        refused, _ = deployed.root.one_round()
        assert sorted(refused) == sorted(seen.refused)
        assert bool(seen.too_large) == (limit == 20 or (limit is None and method != "median"))
    deployed.root.end()
    if limit != 0:
        assert_agrees(deployed, sim)


def test_what_cannot_be_deployed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="restart from gradients"):
        Deployed(simulation({"name": "mtgc", "restart": "gradient"}, 2))
    with pytest.raises(InvalidInput, match="leaves' edge"):
        Deployed(simulation(["fedprox", "fedprox"], 2))
