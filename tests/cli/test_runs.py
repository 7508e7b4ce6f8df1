"""Commands on stored runs, and a run by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import CONFIG, command


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch, capsys) -> list[str]:
    """Names of two runs in runs/, which differ in method and seed, the older one first."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    short = ("--rounds", 1, "--device", "cpu", "-q")
    assert command(monkeypatch, "run", "c.toml", *short, "--name", "one", "-s", "storage.keep_state=true") == 0
    assert command(monkeypatch, "run", "c.toml", *short, "--seed", 5, "-s", "method=scaffold", "--name", "two") == 0
    capsys.readouterr()
    return [next(Path("runs").glob(f"{name}-*")).name for name in ("one", "two")]


def test_a_run_is_shown_and_compared(two_runs: list[str], monkeypatch, capsys) -> None:
    one, two = two_runs
    assert command(monkeypatch, "runs", "show", "latest", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["status"], shown["config"]["seed"], shown["rounds"]) == ("two", "done", 5, 1)
    assert command(monkeypatch, "runs", "show", "one") == 0
    assert any(line.split() == ["execution.device", "cpu"] for line in capsys.readouterr().out.splitlines())
    assert command(monkeypatch, "runs", "diff", "one", f"runs/{two}", "--json") == 0
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert differences["seed"] == [0, 5] and differences["method.name"][1] == "scaffold"
    assert command(monkeypatch, "runs", "diff", "one", one) == 0
    assert capsys.readouterr().out == "the runs do not differ\n"


def test_a_run_goes_on_by_its_name(two_runs: list[str], monkeypatch, capsys) -> None:
    assert command(monkeypatch, "resume", "one", "--rounds", 2, "-q") == 0
    assert f"written to runs/{two_runs[0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [("-20", "is a part of several names: one-"), ("thre", "unknown"), ("lates", "did you mean 'latest'?")],
)
def test_a_name_must_be_of_one_run(name: str, message: str, two_runs: list[str], monkeypatch, capsys) -> None:
    assert command(monkeypatch, "runs", "show", "--", name) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: RUN = {name!r}: ") and message in shown and shown.count("\n") == 1


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "runs", "show", "nowhere") == 2
    assert "Traceback" not in capsys.readouterr().err
    for words in (["-v", "runs", "show", "nowhere"], ["runs", "show", "nowhere", "-v"]):
        assert command(monkeypatch, *words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback") and lines[-1].startswith("error: RUN = 'nowhere'")


@pytest.mark.parametrize("kind", ["methods", "models", "datasets", "partitions", "networks", "optimizers", "losses"])
def test_every_kind_is_listed_and_one_of_it_shown(kind: str, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "list", kind, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert command(monkeypatch, "list", kind, rows[0]["name"], "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == rows[0]["name"]
    assert command(monkeypatch, "list", kind) == command(monkeypatch, "list", kind, rows[0]["name"]) == 0
    assert capsys.readouterr().out.count(rows[0]["name"]) >= 2
    assert command(monkeypatch, "list", kind, "nothing") == 2
    assert "= 'nothing': unknown" in capsys.readouterr().err
