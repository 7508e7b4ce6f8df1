"""Engines by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine.factory import make_engine
from tests.flat import client_options, update_of


def made(name: str, module: nn.Module | None = None, clients: int = 3, **more):
    flat = FlatModule(module or nn.Linear(3, 2))
    parts = list(torch.arange(12).chunk(clients))
    data = torch.randn(12, 3), torch.randint(2, (12,))
    return make_engine(
        name,
        ClientTraining(
            flat=flat,
            loss=F.cross_entropy,
            samples=InMemorySamples(*data),
            clients=ClientIndex.from_lists(parts),
            client_update=update_of(client_options()),
            batch_size=2,
            sampling="shuffle",
            seed=0,
        ),
        **more,
    )


WAYS = ["loop", "stacked", "vmap"]


@pytest.mark.parametrize("name", WAYS)
def test_engines_by_name(name: str) -> None:
    assert made(name).how == name


def test_auto_is_the_default() -> None:
    assert made("auto").how == "loop", "of few clients"
    assert made("auto", clients=12).how == "stacked"


def test_auto_is_the_loop_for_models_that_need_it() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    assert made("auto", Deciding(3, 2), clients=12).name == "loop"


@pytest.mark.parametrize("wrong", [{"name": "staked"}, {"name": "loop", "precision": "fp64"}])
def test_unknown_names_are_rejected(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        made(**wrong)
