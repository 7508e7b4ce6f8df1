"""Setting up a run leaves the user's generators where they were, and what an augmentation draws
from torch's does not depend on the engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base.rng import rng_states
from stratafl.engine.batches import supports_stacked_batches
from tests.simulation.module_profiles import data, run


def dropping() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double()


def of_torch(x: Tensor, *key: object) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def of_numpy(x: Tensor, *key: object) -> Tensor:
    return x + np.random.rand()


def of_python(x: Tensor, *key: object) -> Tensor:
    return x + random.random()


def seldom(x: Tensor, *key: object) -> Tensor:
    """Draws, and hardly ever shows it."""
    return x.flip(-1) if torch.rand(()) < 1e-6 else x


def noisy_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), labels)


def noisy_metric(outputs: Tensor, labels: Tensor) -> float:
    return float(outputs.mean()) + np.random.rand() + random.random()


DRAWING: dict[str, dict[str, object]] = {
    "augmentation": {"augment": of_torch},
    "augmentation, by NumPy": {"augment": of_numpy},
    "augmentation, by Python": {"augment": of_python},
    "model": {"model": dropping},
    "loss": {"loss": noisy_loss},
    "metric": {"metrics": {"noisy": noisy_metric}, "test": data()},
    "rate": {"leaf": lambda round: 0.1 + 0.01 * random.random()},
}


def make(model: Callable[[], nn.Module] = lambda: nn.Linear(4, 3).double(), **more: object):
    return run(model, data(), **more)


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap", None])
@pytest.mark.parametrize("what", DRAWING)
def test_set_up_leaves_every_generator_as_it_was(what: str, engine: str | None) -> None:
    before = rng_states()
    make(engine=engine, **DRAWING[what])
    assert rng_states() == before


@pytest.mark.parametrize("augment", [of_torch, seldom])
@pytest.mark.parametrize("engine", ["stacked", "vmap"])
def test_an_augmentation_draws_the_same_whoever_trains(engine: str, augment: Callable) -> None:
    models = []
    for number, name in enumerate(("loop", engine)):
        torch.manual_seed(number)
        before = rng_states()
        sim = make(engine=name, augment=augment)
        assert sim.engine.name == name
        models.append(sim.run().models[0])
        assert rng_states() == before
    torch.testing.assert_close(*models, rtol=0, atol=1e-10)


@pytest.mark.parametrize("augment", [of_torch, of_numpy, of_python, seldom])
def test_what_draws_takes_one_client_at_a_time(augment: Callable) -> None:
    assert not supports_stacked_batches(augment, data()[0][:4], 0)
    assert supports_stacked_batches(lambda x, *key: x * 2, data()[0][:4], 0)
