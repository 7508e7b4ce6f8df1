"""Random numbers of user code depend on the seed, and the library changes no other generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import Rule, average, register
from stratafl.base.rng import rng_states
from stratafl.base.user_code import load_attribute
from stratafl.core.losses import parse_loss
from stratafl.core.optimizer import parse_optimizer
from stratafl.experiment.loading import import_plugins
from stratafl.rules import registry
from tests.mistakes.studies import study

DRAWN = "random.random() + np.random.rand() + torch.rand(()).item()"
FILE = f"""
import random

import numpy as np
import torch

IMPORTED = {DRAWN}


class Loss:
    def __init__(self):
        self.drawn = {DRAWN}

    def __call__(self, outputs, targets):
        return outputs.sum() * self.drawn


class Steps(Loss):
    def init(self, x):
        return {{}}

    def step(self, state, direction, x, lr):
        return state, lr * direction


def imported():
    return IMPORTED
"""


def drawn() -> float:
    return random.random() + np.random.rand() + torch.rand(()).item()


def model() -> nn.Module:
    made = nn.Linear(3, 2)
    nn.init.constant_(made.weight, drawn())
    return made


def of_builder(folder: Path) -> float:
    return study(model=model).federation.levels[0].model.sum().item()


def of_participation(folder: Path) -> list[float]:
    found = []

    def some(chance: object) -> np.ndarray:
        found.append(drawn())
        return np.ones(4, dtype=bool)

    study(participation=some).run()
    assert len(set(found)) == len(found) == 2  # another draw in every round
    return found


def of_rule(folder: Path) -> Tensor:
    @register("drawn", summary="A rule that draws while it is made.")
    def make() -> Rule:
        shift = torch.full((), drawn())
        return average()._replace(local=lambda x, g, edge: g + shift)

    rule = registry.entry("drawn").rule()
    return rule.local(torch.zeros(1, 1), torch.zeros(1, 1), None)


def of_loss(folder: Path) -> float:
    return parse_loss(f"{folder}/own.py:Loss").drawn


def of_optimiser(folder: Path) -> float:
    return parse_optimizer(f"{folder}/own.py:Steps").drawn


def of_import(folder: Path) -> float:
    import_plugins([f"{folder}/own.py"])
    return load_attribute("data.name", f"{folder}/own.py:imported")()


@pytest.mark.parametrize("make", [of_builder, of_participation, of_rule, of_loss, of_optimiser, of_import])
def test_what_a_users_code_draws_is_of_the_seed_alone(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "own.py").write_text(FILE)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = rng_states()
        found.append(make(tmp_path))
        assert rng_states() == before
    assert found[0] == found[1]


def test_a_builder_draws_otherwise_from_another_seed() -> None:
    first, second = (study(model=model, seed=seed).federation.levels[0].model for seed in (0, 1))
    assert not torch.equal(first, second)
