"""`stratafl tune` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stratafl.cli import tune as tune_module
from stratafl.runs.reader import list_runs
from stratafl.tuning.result import TuningResult
from tests.commands import command
from tests.tuning.conftest import TARGET

SMALL = "[tune]\ndefaults = false\nlr = [0.05, 0.1, 0.2]\nmethod = ['hfedavg', 'mtgc']\n"


@pytest.fixture
def typed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    space = tmp_path / "space.toml"
    space.write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return ["tune", file, "--search-space", space, "--trials", 2, "--seeds", 2, "-q"]


def test_from_a_config_to_one_that_can_be_run(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET, "--minimize", "bytes", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["minimise"] == "bytes" and plan["networks"][0]["choice"]["reached"] == 2
    folder = Path("plans/tiny")
    names = {"plan.json", "trials.csv", "best-lan_wan.toml", "frontier.png", "frontier.pdf", "optuna.journal"}
    assert names <= {path.name for path in folder.iterdir()}
    assert command(monkeypatch, "run", folder / "best-lan_wan.toml", "-q") == 0
    (again,) = list_runs("runs")
    assert again.rounds[-1]["metrics"]["accuracy"] >= 0.8
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET, "--minimize", "bytes", "--resume") == 0
    out = capsys.readouterr().out
    assert "choice" in out and "as given" in out and "frontier" in out


def test_a_target_that_is_never_reached_is_said_with_what_was(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", "accuracy=0.9999") == 1
    output = capsys.readouterr()
    assert "No setting reached the target here." in output.out
    (line,) = output.err.splitlines()
    assert line.startswith("target not reached: no setting of 3 reached accuracy >= 0.9999; the best got to 0.")
    assert json.loads(Path("plans/tiny/plan.json").read_text())["networks"][0]["choice"] is None


def test_a_budget_in_which_the_target_is_not_reached_is_named(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "-n", "lan_wan", "--target", TARGET, "--budget", "seconds=1e-9", "--budget", "bytes=1e12"
    assert command(monkeypatch, *typed, *words) == 1
    output = capsys.readouterr()
    assert "No setting reached the target here within the budget." in output.out
    (line,) = output.err.splitlines()
    assert "no setting of 3 reached accuracy >= 0.8 within 1e-09 seconds and 1e+12 bytes; the best got to 0." in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", TARGET], "--network = None: must be given"),
        (["-n", "lan_wan"], "--target = None: must be given"),
        (["-n", "lan_wann", "--target", TARGET], "did you mean 'lan_wan'"),
        (["-n", "lan_wan", "--target", "acc=0.8"], "--target = 'acc=0.8': 'acc' is not measured"),
        (["-n", "lan_wan", "--target", "accuracy=8"], "--target = 8.0"),
        (["-n", "plato", "--target", TARGET, "--minimize", "money"], "the network plato says nothing of it"),
        (["-n", "lan_wan", "--target", TARGET, "--budget", "bytes"], "must look like seconds=3600"),
        (["-n", "lan_wan", "-n", "lan_wan", "--target", TARGET], "two networks of this name"),
        (["-n", "lan_wan", "--target", TARGET, "--trials", "0"], "--trials = 0"),
        (["-n", "lan_wan", "--target", TARGET, "--time-limit", "0"], "--time-limit = '0': must be a time above 0"),
        (["-n", "lan_wan", "--target", TARGET, "--resume"], "no search in it that could go on"),
        (["-n", "lan_wan", "--target", TARGET, "--set", "method.name=mtgcc"], "did you mean 'mtgc'"),
    ],
)
def test_bad_input_is_one_line(
    typed: list[object],
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *typed, *words) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ") and message in said.err


def test_a_time_limit_has_an_exit_code_of_its_own(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET, "--time-limit", "0.0001s") == 75
    assert "the same command goes on" in capsys.readouterr().err


def test_an_empty_space_is_refused(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("space.toml").write_text("[tune]\ndefaults = false\n")
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET) == 2
    assert "leaves nothing to choose" in capsys.readouterr().err
    Path("space.toml").write_text("lr = [1, 2]\n")
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET) == 2
    assert "has no [tune] table" in capsys.readouterr().err


def test_without_optuna_it_says_what_to_install(
    typed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert command(monkeypatch, *typed, "-n", "lan_wan", "--target", TARGET) == 2
    assert "stratafl tune needs the package optuna: pip install 'stratafl[plan]'" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_fit_the_terminal(
    tuned: TuningResult, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    tune_module._print(tuned)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    assert any(line.startswith("choice") for line in lines)


@pytest.mark.slow
def test_a_plan_of_the_digits_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the example of the guide: three levels, twelve settings, two networks."""
    example = Path(__file__).parents[2] / "examples" / "digits.toml"
    words = ("-n", "lan_wan", "-n", "nyc_mesh", "--target", TARGET, "--trials", 12, "--seeds", 2, "--json", "-q")
    assert command(monkeypatch, "tune", example, *words, "--out", tmp_path / "plan") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["complete"] and all(each["choice"] is not None for each in plan["networks"])
