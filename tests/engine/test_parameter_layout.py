"""Rows with channels-last filters: the run is the same, and reordering is reversible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl.core.client_update import ClientUpdate
from stratafl.core.flat_module import FlatModule
from stratafl.core.optimizer import SGD, constant
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import average
from stratafl.engine import kernels
from stratafl.engine.parameter_layout import ParameterLayout
from stratafl.rules import feddyn
from tests.engine.pairs import CLOSE, compare, federation, stacked
from tests.flat import client_options


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 3, (1, 2))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 5 * 4, 3)).double()


def ramp(x: Tensor) -> Tensor:
    """Different numbers for all parameters."""
    return torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


FILTERS = ["0.weight", "2.weight", "3.weight"]


def copy(source: Tensor, out: Tensor) -> None:
    assert source.shape == out.shape and source.stride() != out.stride()
    out.copy_(source)


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "backend_for", lambda *_: kernels.TORCH_BACKEND._replace(convert_filters=copy))


@pytest.mark.parametrize(
    "settings",
    [
        {"rules": ["mtgc", "mtgc"]},
        {"rules": ["mtgc", "fedprox"], "participation": [0.5, 2], "rounds": 4},
        {"rules": ["mtgc", feddyn(0.5, pull="after_clip")], "leaf": client_options(0.2, clip_norm=0.2)},
        {"rules": {"name": "mtgc", "restart": "gradient"}, "rounds": 3},
        {"rules": ["mtgc", average()._replace(local=lambda x, g, edge: 0.5 * g * (1 + (x - edge.model).abs()))]},
        {"rules": ["mtgc", average()._replace(local=lambda x, g, edge: g + ramp(x) * (x - edge.model))], "chunk": 2},
        {"leaf": ClientUpdate(constant(0.1), (lambda d, x, correct: correct(x, d) * ramp(x),), SGD(0.5))},
        {"leaf": client_options(0.2, clip_norm=0.2, weight_decay=0.01, momentum=0.5), "chunk": None},
    ],
    ids=[
        "two corrections",
        "a pull",
        "a pull behind the clip",
        "from gradients",
        "a direction",
        "one for each parameter",
        "a stage",
        "momentum",
    ],
)
@pytest.mark.usefixtures("channels_last")
def test_runs_with_channels_last_filters_are_the_same(settings: dict) -> None:
    assert compare(model=convolutional, shape=(2, 5, 5), **settings) < CLOSE


@pytest.mark.usefixtures("channels_last")
def test_the_engines_rows_have_channels_last_filters() -> None:
    engine = stacked(federation(model=convolutional, shape=(2, 5, 5))).engine
    row_1P = torch.arange(engine.training.flat.parameters, dtype=torch.float64)[None]
    first = engine._gradients.layout.named(row_1P, row_1P[:, :0])["0.weight"]
    assert torch.equal(first[0].permute(0, 2, 3, 1).flatten(), row_1P[0, : first.numel()])


@pytest.mark.parametrize("of", [None, [1, 0, 1, 1]])
def test_reordering_is_reversible(of: list[int] | None) -> None:
    flat = FlatModule(convolutional())
    layout = ParameterLayout(flat, FILTERS)
    rows = torch.randn(4 if of is None else 2, flat.parameters, dtype=torch.float64)
    indexed, clients, none = IndexedRows(rows, None if of is None else np.array(of)), [3, 0, 2], rows.new_empty(3, 0)
    plain, reordered = indexed.take(clients), layout.take(indexed, clients)
    assert not torch.equal(reordered, plain)
    for name, view in layout.named(reordered, none).items():
        assert torch.equal(view, flat.unflatten(plain, none)[name]), name
    back = torch.full_like(plain, float("nan"))
    layout.restore(reordered, back)
    assert torch.equal(back, plain)


def test_only_rows_of_the_chunks_clients_are_reordered() -> None:
    flat, ordered = FlatModule(convolutional()), []
    layout = ParameterLayout(flat, FILTERS, lambda source, out: ordered.append(len(out)) or copy(source, out))
    indexed = IndexedRows(torch.randn(6, flat.parameters, dtype=torch.float64), np.array([0, 0, 2, 5, 5, 2, 1]))
    reordered = layout.take(indexed, [3, 5, 4])
    assert set(ordered) == {2}
    back = torch.empty_like(reordered)
    layout.restore(reordered, back)
    assert torch.equal(back, indexed.take([3, 5, 4]))


def test_other_rows_than_parameters_are_not_reordered() -> None:
    rate = IndexedRows(torch.randn(4, 1, dtype=torch.float64))
    assert torch.equal(ParameterLayout(FlatModule(convolutional()), FILTERS).take(rate, [2, 1]), rate.take([2, 1]))


def test_filters_of_one_tap_or_channel_are_not_reordered() -> None:
    flat = FlatModule(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 1)))
    rows = torch.randn(2, flat.parameters)
    assert torch.equal(ParameterLayout(flat, ["0.weight", "1.weight"], copy).take(IndexedRows(rows), [0, 1]), rows)
