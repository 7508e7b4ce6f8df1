"""The benchmark runs, counts and says what it measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from stratafl import bench as module
from stratafl.bench import bench, contenders
from stratafl.engine import kernels
from stratafl.errors import InvalidInput


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 10)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_every_way_is_timed(model: str) -> None:
    table = bench(model, clients=4, batch=4, steps=4, rounds=1)
    assert [f"{row.engine}:{row.precision}" for row in table.rows] == contenders("cpu")
    for row in table.rows:
        assert row.ms > 0 and 0 < row.roofline < 1
        assert row.client_steps == pytest.approx(4e3 / row.ms)
        assert row.peak_bytes is None
    ours = table.rows[-1]
    assert ours.how == "stacked" and list(ours.stages_ms) == ["train", "meet"] and min(ours.stages_ms.values()) > 0
    assert json.loads(json.dumps(table.as_dict()))["model"] == model
    assert all(row.engine in table.text() for row in table.rows)


def test_it_is_known_what_every_kernel_is_for() -> None:
    """One that is not would pass for the library's."""
    sources = [path.read_text() for path in Path(kernels.__file__).parent.glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"\b(_\w+)\[(?:\(|grid\b)", source)}
    assert {"_forward", "_step", "_parameter_gradient"} <= launched
    assert launched <= set(module.KINDS)


def test_operations_are_counted() -> None:
    table = bench("logistic", clients=1, batch=4, steps=1, rounds=1, engines=["loop"])
    # forward and the weights' gradient; the inputs need none
    assert table.operations == 2 * (2 * 4 * 784 * 10)
    assert table.parameters == 7850
    assert table.bytes["fp32"] > 7 * 4 * 7850


def test_images_and_text() -> None:
    torch.manual_seed(0)
    for name in ("cnn", "lstm"):
        table = bench(name, clients=1, batch=2, steps=1, rounds=1, engines=["plain loop", "vmap", "stacked"])
        assert [row.how for row in table.rows] == ["plain loop", "vmap", "stacked"]


@pytest.mark.parametrize("wrong", [{"model": "mpl"}, {"model": "logistic", "clients": 1, "engines": ["fast"]}])
def test_unknown_names(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        bench(**wrong)
