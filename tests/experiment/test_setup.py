"""The parts of an experiment that sites of a deployed tree build are those of its simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl.core.client_training import Engine, TrainRequest
from stratafl.core.rows import IndexedRows
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import LabelCounts
from stratafl.simulation.build import build
from stratafl.simulation.deployed import initial_model, leaf_trainer, part_of, root_of

MODEL = """
import torch
from torch import nn


class Partly(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.first = nn.Linear(input_shape[0], 6).requires_grad_(False)
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, classes)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x).tanh())))
"""
"""Drawn at random are also parameters that nobody trains, and that no message carries."""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "own_model.py").write_text(MODEL)
    return Experiment.from_table(
        {
            "tree": {"shape": "2x2", "weights": "samples"},
            "data": {"source": "synthetic", "arguments": {"samples": 25, "features": 5, "classes": 3}},
            "model": {"name": f"{tmp_path / 'own_model.py'}:Partly"},
            "schedule": {"periods": [2, 3]},
            "client": {"lr": 0.1, "batch_size": 7, "clip_norm": 1.0, "optimizer": {"name": "sgd", "momentum": 0.5}},
            "rounds": 3,
            "seed": 7,
            "evaluation": {"every": 2},
        }
    )


def trained(engine: Engine, x_P: torch.Tensor, b_B: torch.Tensor, leaf: int) -> tuple[torch.Tensor, ...]:
    whose = np.zeros(leaf + 1, dtype=np.int64)
    work = TrainRequest(
        model=IndexedRows(x_P[None], whose),
        buffers=IndexedRows(b_B[None], whose),
        clients=[leaf],
        first_step=3,
        steps=4,
    )
    result = engine.train(work)
    return result.model_AP, result.buffers_AB


@pytest.mark.parametrize("leaf", range(4))
def test_a_leaf_alone_trains_as_in_the_whole(
    experiment: Experiment, leaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = build(experiment)
    x_P, b_B = simulation.flat.flatten_module(simulation.flat.module)
    wanted = trained(simulation.engine, x_P, b_B, leaf)
    monkeypatch.setattr("stratafl.simulation.build._build", None)  # nothing of the whole is needed
    torch.manual_seed(leaf)  # whatever the process has drawn before
    alone = leaf_trainer(experiment, leaf, *part_of(experiment, leaf)).engine
    for found, expected in zip(trained(alone, x_P, b_B, leaf), wanted, strict=True):
        assert torch.equal(found, expected)


def test_the_first_model_is_that_of_the_simulation(experiment: Experiment) -> None:
    made = build(experiment)
    start = initial_model(experiment, made.data.shape, made.data.outputs)
    result = made.result()
    assert torch.equal(start.x_P, result.models[0][0]) and torch.equal(start.b_B, result.buffers[0][0])
    assert torch.equal(start.flat.module.first.weight, result.module.first.weight)


def test_the_root_tests_as_the_simulation_does(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(experiment)
    history = made.run().history
    result = made.result()
    monkeypatch.setattr("stratafl.simulation.build._build", None)
    root = root_of(experiment)
    metrics = [root.metrics(round, result.models[0][0], result.buffers[0][0]) for round in (1, 2, 3)]
    assert metrics[0] == {} and metrics[1] == metrics[2] == history[-1].metrics
    assert root.counts.fingerprint == LabelCounts.of(made.data).fingerprint
    for ours, theirs in zip(root.tree.weights, result.tree.weights, strict=True):
        assert np.array_equal(ours, theirs)
