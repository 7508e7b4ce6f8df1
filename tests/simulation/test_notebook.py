"""Representation of a simulation and its result in notebooks and as plain text."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import InvalidInput, Simulation
from stratafl.base.errors import MissingExtra
from tests.flat import simulate

INPUTS, TARGETS = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 2


def made(rules="mtgc", **more) -> Simulation:
    return simulate(
        lambda: nn.Linear(4, 2),
        (INPUTS, TARGETS),
        [np.arange(k * 4, k * 4 + 4) for k in range(4)],
        "2x2",
        rules,
        periods=[1, 2],
        rounds=4,
        **{"test": (INPUTS, TARGETS), **more},
    )


def test_a_table_has_a_row_per_round_and_a_column_per_value() -> None:
    pytest.importorskip("pandas")
    result = made(evaluate_every=2).run()
    table = result.frame()
    assert list(table["round"]) == [1, 2, 3, 4]
    assert table["metrics.accuracy"].notna().tolist() == [False, True, False, True]
    assert table["metrics.loss"].iloc[-1] == result.history[-1].metrics["loss"]
    drifts = [name for name in table.columns if name.startswith("drift.")]
    assert len(drifts) > 2, "a column for every level and quantity"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = made().run()
    for package, call in {"pandas": result.frame, "matplotlib": result.plot}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=package):
            call()


def test_a_plot_is_on_the_axes_given_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    import matplotlib

    before = matplotlib.get_backend()
    monkeypatch.setattr(pyplot, "show", lambda: pytest.fail("nothing is shown"))
    monkeypatch.setattr(matplotlib, "use", lambda *arguments: pytest.fail("the backend is the user's"))
    result = made(evaluate_every=2).run()
    figure, axes = pyplot.subplots()
    try:
        assert result.plot("loss", ax=axes) is axes
        (line,) = axes.lines
        assert line.get_xdata().tolist() == [2, 4]
        assert line.get_ydata().tolist() == [record.metrics["loss"] for record in result.history if record.metrics]
        assert (axes.get_xlabel(), axes.get_ylabel(), line.get_label()) == ("global round", "loss", "mtgc")
        other = result.plot()
        assert other is not axes and other.get_ylabel() == "accuracy"
        pyplot.close(other.figure)
    finally:
        pyplot.close(figure)
    assert matplotlib.get_backend() == before
    with pytest.raises(InvalidInput, match="known: accuracy, loss"):
        result.plot("acuracy")
    with pytest.raises(InvalidInput, match="no round was evaluated"):
        made(test=None).run().plot()


def test_a_card_is_valid_small_and_uses_the_page_s_colours() -> None:
    simulation = made({"name": "fedprox", "mu": 0.1})
    before = simulation._repr_html_()
    assert "<svg" not in before, "no curve yet"
    result = simulation.run()
    for source in (simulation, result):
        text = source._repr_html_()
        assert len(text) < 4000
        card = ET.fromstring(text)
        shown = " ".join(card.itertext())
        assert "fedprox (mu 0.1)" in shown and "1 > 2 > 4" in shown and "accuracy" in shown
        (curve,) = card.iter("polyline")
        assert len(curve.get("points", "").split()) == 4
        assert curve.get("stroke") == "currentColor"
        assert "http" not in text and "#" not in text, "nothing is loaded, and no colour set"


def test_names_are_escaped() -> None:
    class Net(nn.Linear):
        pass

    Net.__name__ = "<script>alert(1)</script>"
    simulation = made(model := "mtgc")
    assert model in repr(simulation)
    hostile = simulate(lambda: Net(4, 2), (INPUTS, TARGETS), [np.arange(16)], 1, "hfedavg", periods=[1], rounds=1)
    assert "<script>" not in hostile._repr_html_()
    assert "&lt;script&gt;" in hostile._repr_html_()


def test_plain_text_is_one_line() -> None:
    simulation = made()
    assert repr(simulation) == "<Simulation of mtgc: Linear of 10 parameters on 4 clients, round 0 of 4>"
    result = simulation.run()
    assert repr(result).startswith("<Result of mtgc on 4 clients after 4 rounds: ")
    assert "accuracy 0." in repr(result) or "accuracy 1." in repr(result)
    assert "\n" not in repr(result) and len(repr(result)) < 150
    assert repr(made(test=None).run()) == "<Result of mtgc on 4 clients after 4 rounds>"


def test_a_curve_that_is_not_finite_is_drawn_as_far_as_it_goes() -> None:
    result = made("hfedavg").run()
    for record in result.history[2:]:
        record.metrics.update(accuracy=float("nan"))
    (curve,) = ET.fromstring(result._repr_html_()).iter("polyline")
    assert len(curve.get("points", "").split()) == 2
