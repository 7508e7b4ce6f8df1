"""What a dry run says of each run of a sweep, which is what the sweep then does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratafl.experiment.experiment import Experiment
from stratafl.runs.session import RunSession
from stratafl.sweeps.state import RunState, summary_line
from tests.commands import CONFIG, command
from tests.sweeps.inline import OPTION

RULE = """
from stratafl import average, register

@register("homesick", summary="averaging")
def homesick():
    return average()
"""
SWEEP = 'config = "study.toml"\n[base]\nplugins = ["rule.py"]\n[grid]\nmethod = ["homesick", "mtgc"]\nseed = 2\n'
WORDS = ("sweep", "grid.toml", "--executor", OPTION, "-q")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("study.toml", CONFIG), ("rule.py", RULE), ("grid.toml", SWEEP)):
        (tmp_path / name).write_text(text)
    return tmp_path


def dry_run(monkeypatch: pytest.MonkeyPatch, capsys, *options: str) -> str:
    capsys.readouterr()
    assert command(monkeypatch, *WORDS, "--dry-run", *options) == 0
    return capsys.readouterr().out


def test_a_dry_run_says_what_there_is_to_do(project: Path, monkeypatch, capsys) -> None:
    new = "homesick-seed=0: new\nhomesick-seed=1: new\nmtgc-seed=0: new\nmtgc-seed=1: new\n4 runs: 4 new\n"
    assert dry_run(monkeypatch, capsys) == new
    assert not (project / "runs").exists(), "nothing is made"

    (project / "grid.toml").write_text(SWEEP.replace("seed = 2", "seed = 1"))
    assert command(monkeypatch, *WORDS) == 0
    (project / "grid.toml").write_text(SWEEP)
    experiment = Experiment.from_toml(project / "study.toml", ["method=mtgc", "seed=1"])
    plugins = [str(project / "rule.py")]
    session = RunSession.start(experiment.replace(plugins=plugins), "mtgc-seed=1", project / "runs" / "grid")
    assert session.writer is not None
    session.writer.append_round(session.simulation.advance() or next(session.simulation))
    session.writer.set_status("interrupted", session.progress, "it was stopped")
    session.close()
    said = "homesick-seed=0: current\nhomesick-seed=1: new\nmtgc-seed=0: current\n"
    said += "mtgc-seed=1: interrupted at round 1 of 3\n"
    assert dry_run(monkeypatch, capsys) == f"{said}4 runs: 2 current, 1 interrupted at round 1 of 3, 1 new\n"

    with (project / "rule.py").open("a") as file:
        file.write("# other\n")
    (*lines, summary) = dry_run(monkeypatch, capsys).splitlines()
    assert lines[0] == "homesick-seed=0: stale (rule.py was changed)"
    assert summary == "4 runs: 3 stale (rule.py was changed), 1 new"
    kept = json.loads(dry_run(monkeypatch, capsys, "--keep-stale", "--json"))
    assert [run["state"] for run in kept["runs"]] == ["current", "new", "current", "interrupted"]
    further = json.loads(dry_run(monkeypatch, capsys, "--set", "rounds=5", "--json"))["runs"]
    assert {run["rounds"] for run in further} == {5}
    assert len(list((project / "runs" / "grid").iterdir())) == len(["lock", *range(3)])


def test_a_wrong_value_is_found_before_anything_trains(project: Path, monkeypatch, capsys) -> None:
    (project / "grid.toml").write_text(SWEEP.replace('"mtgc"]', '"mtgc", "mtcg"]'))
    for words in (WORDS, (*WORDS, "--dry-run"), ("sweep", "grid.toml", "--executor", "slrm")):
        assert command(monkeypatch, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "did you mean 'mtgc'?" in line or "slrm" in line
    assert not (project / "runs").exists()


def test_the_summary_names_what_was_changed() -> None:
    states = [RunState("a", "stale", 4, reason="rule.py was changed")] * 2
    states += [RunState("b", "interrupted", 10, round=4), RunState("c", "new", 10)]
    said = "4 runs: 2 stale (rule.py was changed), 1 interrupted at round 4 of 10, 1 new"
    assert summary_line(states) == said
