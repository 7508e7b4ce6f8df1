"""Syntax of targets, which sweeps, reports, prices and plans share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratafl.base.errors import InvalidInput
from stratafl.cli.main import app
from stratafl.metrics.objective import Goal
from stratafl.reports.page_data import page_data
from stratafl.runs.groups import collect_runs
from stratafl.sweeps import note_target
from tests.commands import command

FORMS = ["0.2", "accuracy=0.2", "accuracy = .2", "accuracy >= 0.2"]
MALFORMED = ["high", "= 0.2", "accuracy=", "accuracy == 0.2", "accuracy < 0.2", "accuracy=x"]
COMMANDS = {
    "sweep": ["sweep", "{folder}/sweep.toml"],
    "report": ["report", "{runs}", "-o", "{folder}/report.html"],
    "cost": ["cost", "{runs}", "-n", "plato", "--json"],
    "tune": ["tune", "{folder}/study.toml", "-n", "plato"],
}


@pytest.fixture
def words(runs: Path, tmp_path: Path):
    """A command's words, with a study and its sweep in a folder."""
    (tmp_path / "study.toml").write_text('model.name = "logistic"\nschedule.periods = [2, 2]\n')
    (tmp_path / "sweep.toml").write_text('config = "study.toml"\n')

    def made(name: str, target: str) -> list[str]:
        return [*(word.format(folder=tmp_path, runs=runs) for word in COMMANDS[name]), "--target", target]

    return made


@pytest.mark.parametrize("text", FORMS)
def test_every_form_means_the_same(text: str, words, monkeypatch, capsys) -> None:
    assert command(monkeypatch, *words("report", text)) == 0
    assert "rounds to 20 %" in capsys.readouterr().out
    assert command(monkeypatch, *words("cost", text)) == 0
    assert {row["until"] for row in json.loads(capsys.readouterr().out)} == {"accuracy 20 %", "all rounds"}


@pytest.mark.parametrize("text", ["loss=2.2", "loss <= 2.2"])
def test_a_metric_may_be_named(text: str, words, monkeypatch, capsys) -> None:
    assert command(monkeypatch, *words("report", text)) == 0
    assert "rounds to 2.2" in capsys.readouterr().out
    assert command(monkeypatch, *words("cost", text)) == 0
    assert {row["until"] for row in json.loads(capsys.readouterr().out)} == {"loss 2.2", "all rounds"}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_target_gets_the_same_line(name: str, text: str, words) -> None:
    ran = CliRunner().invoke(app, words(name, text))
    assert isinstance(ran.exception, InvalidInput)
    assert str(ran.exception) == f'--target = {text!r}: must look like 0.8, "accuracy=0.8" or "loss <= 0.1"'


@pytest.mark.parametrize("name", COMMANDS)
def test_an_accuracy_is_a_share(name: str, words) -> None:
    ran = CliRunner().invoke(app, words(name, "accuracy=75"))
    assert "--target = 75.0: must be a finite number above 0 and at most 1" in str(ran.exception)


def test_a_report_refuses_the_wrong_way_round(words) -> None:
    ran = CliRunner().invoke(app, words("report", "loss >= 2"))
    assert "--target = 'loss >= 2': is the wrong way round" in str(ran.exception)
    assert "loss <= 2" in str(ran.exception)


def test_a_report_has_the_target_of_the_sweep(copied: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    result = collect_runs([copied])[0]
    usual = page_data(result)["targets"]
    note_target(copied, Goal("accuracy", 0.15, ">="))
    assert page_data(result)["targets"] == {**usual, "accuracy": [0.15]}
    assert page_data(result, [0.3])["targets"]["accuracy"] == [0.3], "what is asked for comes first"
    note_target(copied, Goal("loss", 2.5))
    noted = page_data(result)
    assert noted["targets"] == {**usual, "loss": [2.5]} and noted["metric"] == "loss"
    assert command(monkeypatch, "report", copied, "-o", tmp_path / "r.html") == 0
    assert "rounds to 2.5" in capsys.readouterr().out
    note_target(copied, Goal("f1", 0.5))
    assert page_data(result)["targets"] == usual, "these runs have no such metric"
