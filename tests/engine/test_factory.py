"""Engines by name, and the choice of the faster one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.core.client_training import ClientTraining
from stratafl.core.client_update import leaf
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import InMemorySamples
from stratafl.engine import factory
from stratafl.engine.factory import make_engine


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_timings", {})


def made(name: str, module: nn.Module | None = None, **more):
    flat = FlatModule(module or nn.Linear(3, 2))
    parts = list(torch.arange(12).split(4))
    data = torch.randn(12, 3), torch.randint(2, (12,))
    return make_engine(
        name,
        ClientTraining(
            flat=flat,
            loss=F.cross_entropy,
            samples=InMemorySamples(*data),
            partition=parts,
            client_update=leaf(),
            batch_size=2,
            sampling="epochs",
            seed=0,
        ),
        **more,
    )


WAYS = ["loop", "stacked", "vmap"]


@pytest.mark.parametrize("name", WAYS)
def test_by_name(name: str) -> None:
    assert made(name).description == name


@pytest.mark.parametrize("fastest", WAYS)
def test_auto_takes_the_fastest_and_measures_once(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def seconds(engine, *rest) -> float:
        timed.append(engine.description)
        return 1.0 if engine.description == fastest else 2.0

    monkeypatch.setattr(factory, "_time_engine", seconds)
    assert made("auto").description == made("auto").description == fastest
    assert sorted(timed) == WAYS
    made("auto", nn.Linear(3, 2, bias=False))
    assert len(timed) == 2 * len(WAYS)


def test_auto_measures_for_real() -> None:
    assert made("auto").description in WAYS


def test_auto_is_the_loop_where_the_model_needs_it() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    assert made("auto", Deciding(3, 2)).name == "loop"


@pytest.mark.parametrize("wrong", [{"name": "staked"}, {"name": "loop", "precision": "fp64"}])
def test_unknown_names(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        made(**wrong)
