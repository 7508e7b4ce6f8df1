"""`stratafl.cost`, `stratafl.report` and `stratafl.tune`: what the commands do, from Python."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import stratafl
from stratafl.base.errors import InvalidInput
from stratafl.costs.pricing import cost
from stratafl.runs.reader import list_runs
from tests.commands import command


def test_a_package_is_called_like_its_function(runs: Path) -> None:
    assert inspect.signature(stratafl.cost) == inspect.signature(cost)
    by_folder = stratafl.cost(runs, "plato", "accuracy>=0.15")
    assert by_folder == cost(list_runs(runs), ["plato"], ["accuracy>=0.15"])
    assert {milestone.until for milestone in by_folder[0].milestones} == {"accuracy 15 %", "all rounds"}
    with pytest.warns(DeprecationWarning, match=r"stratafl\.price is now stratafl\.cost"):
        assert stratafl.price(runs, "plato", [0.15]) == by_folder


def test_a_report_returns_the_summary_that_the_command_prints(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    rows = stratafl.report(runs, tmp_path / "a.html", target="accuracy>=0.15", network="plato", title="Mine")
    assert "<title>Mine" in (tmp_path / "a.html").read_text()
    words = ["--target", "accuracy>=0.15", "-n", "plato", "--json"]
    assert command(monkeypatch, "report", runs, "-o", tmp_path / "b.html", *words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"] == rows and shown["metric"] == "accuracy" and shown["targets"] == [0.15]
    assert {"setting", "runs", "accuracy_percent", "accuracy_percent_std", "rounds_to_15_percent"} <= set(rows[0])
    assert stratafl.report(list_runs(runs), None, target=0.15, network=["plato"]) == rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runs: stratafl.report(runs, "page.pdf"), "out = 'page.pdf': must be a file that ends in .html"),
        (lambda runs: stratafl.report(runs, None, metric="f1"), "metric = 'f1': these runs have accuracy, loss"),
        (lambda runs: stratafl.report(runs, None, target="high"), "target = 'high': must look like"),
        (lambda runs: stratafl.cost(runs), "network = None: must be given"),
        (lambda runs: stratafl.cost(runs, "plto"), "network = 'plto': unknown; did you mean 'plato'?"),
        (lambda runs: stratafl.tune("c.toml", "plato", 0.8), "config = 'c.toml': No such file"),
    ],
)
def test_errors_name_the_argument(call, message: str, runs: Path) -> None:
    with pytest.raises(InvalidInput) as problem:
        call(runs)
    assert str(problem.value).startswith(message)
