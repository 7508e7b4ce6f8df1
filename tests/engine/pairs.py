"""The same small run on the loop engine and on the stacked one."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from stratafl.engine.factory import EngineName, make_engine
from stratafl.simulation.simulation import Simulation
from tests.flat import simulate

SHAPES = {1: 4, 2: [2, 3], 3: [[2, 1], [1, 2]]}
PERIODS = {1: [3], 2: [2, 3], 3: [2, 1, 3]}
CLOSE = 1e-10


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def federation(rules="mtgc", depth: int = 2, model=perceptron, shape: tuple[int, ...] = (4,), **more) -> Simulation:
    leaves = {1: 4, 2: 5, 3: 6}[depth]
    random = torch.Generator().manual_seed(1)
    inputs = more.pop("inputs", None)
    if inputs is None:
        inputs = torch.randn(leaves * 12, *shape, generator=random, dtype=torch.float64)
    targets = torch.randint(3, (len(inputs),), generator=random)
    parts = [np.arange(leaf * 12, leaf * 12 + 3 + 4 * leaf % 9) for leaf in range(leaves)]
    settings = {"batch": 4, "seed": 4, "rounds": 2, "periods": PERIODS[depth], "weights": "samples", **more}
    targets = settings.pop("targets", targets)
    return simulate(model, (inputs, targets), parts, SHAPES[depth], rules, **settings)


def stacked(sim: Simulation, name: EngineName = "stacked", **options) -> Simulation:
    """The same run on an engine for stacked clients, or on the loop where that cannot train the
    module."""
    sim.engine = make_engine(name, sim.engine.training, **options)
    return sim


def compare(how: str = "stacked", chunk: int | None = 2, **settings) -> float:
    """The largest difference of any node's model or correction between the two engines."""
    expected = federation(**settings).run()
    sim = stacked(federation(**settings), chunk_size=chunk)
    assert sim.engine.how.startswith(how), sim.engine.how
    got = sim.run()
    pairs = list(zip(expected.models, got.models, strict=True))
    pairs += [(a, b) for a, b in zip(expected.corrections, got.corrections, strict=True) if a is not None]
    pairs += list(zip(expected.buffers, got.buffers, strict=True))
    assert not torch.equal(expected.models[0][0], expected.models[-1][0])
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())
