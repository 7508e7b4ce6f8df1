"""What a config's parts are set up to is what its whole simulation has, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl.config import setup
from stratafl.config.schema import Config
from stratafl.config.setup import experiment, initial_model, leaf_trainer, part_of, root_of, study
from stratafl.core.client_training import Engine, TrainRequest
from stratafl.core.rows import IndexedRows

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
def config(tmp_path: Path) -> Config:
    (tmp_path / "own_model.py").write_text(MODEL)
    return Config.of(
        {
            "tree": {"shape": "2x2", "weights": "samples"},
            "data": {"name": "synthetic", "synthetic": {"samples": 25, "features": 5, "classes": 3}},
            "model": {"name": f"{tmp_path / 'own_model.py'}:Partly"},
            "schedule": {"periods": [2, 3]},
            "leaf": {"lr": 0.1, "batch": 7, "clip": 1.0, "momentum": 0.5},
            "run": {"rounds": 3, "seed": 7, "evaluate_every": 2},
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
def test_a_leaf_alone_trains_as_in_the_whole(config: Config, leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = experiment(config)
    x_P, b_B = simulation.flat.flatten_module(simulation.flat.module)
    wanted = trained(simulation.engine, x_P, b_B, leaf)
    monkeypatch.setattr(setup, "set_up", None)  # nothing of the whole is needed
    torch.manual_seed(leaf)  # whatever the process has drawn before
    alone = leaf_trainer(config, leaf, *part_of(config, leaf)).engine
    for found, expected in zip(trained(alone, x_P, b_B, leaf), wanted, strict=True):
        assert torch.equal(found, expected)


def test_the_first_model_is_that_of_the_simulation(config: Config) -> None:
    made = study(config)
    start = initial_model(config, made.data.shape, len(made.data.classes))
    result = made.simulation.result()
    assert torch.equal(start.x_P, result.models[0][0]) and torch.equal(start.b_B, result.buffers[0][0])
    assert torch.equal(start.flat.module.first.weight, result.module.first.weight)


def test_the_root_tests_as_the_simulation_does(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study(config)
    history = made.simulation.run().history
    result = made.simulation.result()
    monkeypatch.setattr(setup, "set_up", None)
    root = root_of(config)
    metrics = [root.metrics(round, result.models[0][0], result.buffers[0][0]) for round in (1, 2, 3)]
    assert metrics[0] == {} and metrics[1] == metrics[2] == history[-1].metrics
    assert root.counts.fingerprint == made.counts.fingerprint
    for ours, theirs in zip(root.tree.weights, result.tree.weights, strict=True):
        assert np.array_equal(ours, theirs)
