"""Engines by name, and the choice of the faster one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stratafl.engine import choose
from stratafl.engine.choose import make_engine
from stratafl.engine.loop import LoopEngine
from stratafl.engine.stacked import StackedEngine
from stratafl.errors import InvalidInput
from stratafl.flat import Flat
from stratafl.local import leaf


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_faster", {})


def made(name: str, module: nn.Module | None = None, **more):
    flat = Flat(module or nn.Linear(3, 2))
    parts = list(torch.arange(12).split(4))
    return make_engine(
        name, flat, F.cross_entropy, torch.randn(12, 3), torch.randint(2, (12,)), parts, leaf(), 2, "epochs", 0, **more
    )


def test_by_name() -> None:
    assert type(made("loop")) is LoopEngine
    assert type(made("stacked")) is StackedEngine


@pytest.mark.parametrize(("slow", "chosen"), [(LoopEngine, StackedEngine), (StackedEngine, LoopEngine)])
def test_auto_takes_the_faster_and_measures_once(slow: type, chosen: type, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def seconds(engine, *rest) -> float:
        timed.append(engine)
        return 2.0 if type(engine) is slow else 1.0

    monkeypatch.setattr(choose, "_seconds", seconds)
    assert type(made("auto")) is type(made("auto")) is chosen
    assert len(timed) == 2
    made("auto", nn.Linear(3, 2, bias=False))
    assert len(timed) == 4


def test_auto_measures_for_real() -> None:
    assert isinstance(made("auto"), LoopEngine | StackedEngine)


def test_auto_is_the_loop_where_the_model_needs_it() -> None:
    assert type(made("auto", nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)))) is LoopEngine


@pytest.mark.parametrize("wrong", [{"name": "staked"}, {"name": "loop", "precision": "fp64"}])
def test_unknown_names(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        made(**wrong)
