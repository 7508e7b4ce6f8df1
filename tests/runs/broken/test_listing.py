"""A damaged run beside a healthy one: the healthy one is listed and reported as ever, and nothing
that a file holds steers the terminal it is shown on."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratafl.base.errors import escape_control
from stratafl.experiment.experiment import Experiment
from stratafl.reports.page_data import page_data
from stratafl.runs.format import is_locked
from stratafl.runs.groups import collect_runs
from stratafl.runs.session import RunSession
from tests.commands import command
from tests.runs.broken.nested import changed, paths
from tests.runs.stopped import CONFIG
from tests.slow import slow

ODD: list[Any] = [
    KeyError, None, True, -1, 0, 7.5, 10**30, 10**400, float("nan"), float("inf"), float("-inf"), "", "text", "\ud800",
    "a\ud83db", "\x1b[2J\x1b]0;mine\x07", "a\nb\tc\x9b", "\u202edesrever", "[red]x[/red]", "[/]", "../../x", [], [[]],
    [None], ["\ud800"], [[[[1]]]], {}, {"name": None}, {"\x1b[31m": {"\udc80": float("inf")}}, {"a": {"b": {"c": [1]}}},
    ["drift.1.2.3"], {"1.2": {"x": 1}}, {"drift.x": 1.0}, 2**63, -(2**63),
]  # fmt: skip
DEEP = "deep"
"""Stands for what JSON can say and few programs can walk through."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    experiment = Experiment.from_table({**CONFIG, "rounds": 2, "evaluation": {"levels": [1]}})
    for seed, name in enumerate(("healthy", "hurt")):
        RunSession.start(experiment.replace(seed=seed), name, folder / "runs").run()
    return folder / "runs"


@pytest.fixture
def runs(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "runs"))


def named(runs: Path, name: str) -> Path:
    return next(path for path in runs.iterdir() if path.name.startswith(name))


def check_listed(runs: Path, monkeypatch, capsys, *, report: bool = False, figures: bool = False) -> None:
    """Check that every view of the folder shows the healthy run, and printable text only."""
    monkeypatch.setenv("COLUMNS", "300")
    assert command(monkeypatch, "runs", "list", runs) == 0
    check_text(capsys, "healthy-")
    assert command(monkeypatch, "runs", "list", runs, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert "healthy" in [run["name"] for run in result["runs"]]
    assert len(result["runs"]) + len(result["unreadable"]) == 2
    readable, unreadable = collect_runs([runs])
    assert len(readable) == len(result["runs"])
    json.dumps(page_data(readable, None, unreadable), allow_nan=False)
    if report:
        out = runs.parent / "report.html"
        more = ["--figures", runs.parent / "figures"] if figures else []
        assert command(monkeypatch, "report", runs, "-o", out, *more) == 0
        check_text(capsys, "")
        assert b"healthy" in out.read_bytes()
        assert {path.name for path in runs.parent.iterdir()} <= {"runs", "report.html", "figures"}


def check_text(capsys, expected: str) -> None:
    shown = capsys.readouterr()
    assert expected in shown.out
    shown.out.encode(), shown.err.encode()
    assert all(letter.isprintable() or letter == "\n" for letter in shown.out + shown.err)


def places(run: Path) -> Iterator[tuple[str, int | None, tuple]]:
    """Paths to the fields of all files, and of the last record."""
    for name in ("run.json", "status.json", "tree.json", "summary.json"):
        for where in paths(json.loads((run / name).read_text())):
            yield name, None, where
    line = (run / "rounds.jsonl").read_text().splitlines()[-1]
    for where in paths(json.loads(line)):
        yield "rounds.jsonl", -1, where


def damage(run: Path, name: str, line: int | None, where: tuple, new: Any) -> None:
    path = run / name
    lines = path.read_text().splitlines() if line is not None else [path.read_text()]
    place = line or 0
    value = changed(json.loads(lines[place]), where, "@deep@" if new is DEEP else new)
    lines[place] = json.dumps(value).replace('"@deep@"', '{"a": [' * 450 + "1" + "]}" * 450)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_every_field_damaged_in_some_way(stored: Path, runs: Path, monkeypatch, capsys) -> None:
    """Damage every field once, with odd values in turn; write the slower report for some."""
    chance = random.Random(17)
    healthy = named(runs, "hurt")
    every = list(places(healthy))
    assert len(every) > 150
    odd = [*ODD, DEEP]
    for number, (name, line, where) in enumerate(every):
        shutil.copytree(named(stored, "hurt"), healthy, dirs_exist_ok=True)
        damage(healthy, name, line, where, odd[(number + chance.randrange(len(odd))) % len(odd)])
        check_listed(runs, monkeypatch, capsys, report=number % 20 == 0, figures=number % 60 == 0)


FIELDS = [
    ("run.json", None, ("name",)), ("run.json", None, ("id",)), ("run.json", None, ("created",)),
    ("run.json", None, ("config", "seed")), ("run.json", None, ("config", "model")),
    ("run.json", None, ("environment", "torch")), ("status.json", None, ("reason",)),
    ("status.json", None, ("rounds",)), ("status.json", None, ("updated",)), ("status.json", None, ("diverged",)),
    ("tree.json", None, ("levels", 1, "labels")), ("tree.json", None, ("levels", 1, "labels", 0, 0)),
    ("tree.json", None, ("levels", 2, "samples", 0)), ("tree.json", None, ("levels", 2, "names", 0)),
    ("tree.json", None, ("classes",)), ("summary.json", None, ("seconds",)), ("rounds.jsonl", -1, ("seconds",)),
    ("rounds.jsonl", -1, ("metrics",)), ("rounds.jsonl", -1, ("metrics", "loss")), ("rounds.jsonl", -1, ("drift",)),
    ("rounds.jsonl", -1, ("drift", "1")), ("rounds.jsonl", -1, ("refused",)), ("rounds.jsonl", -1, ("nodes",)),
    ("rounds.jsonl", -1, ("bytes_per_client",)), ("rounds.jsonl", -1, ("steps",)), ("rounds.jsonl", -1, ("round",)),
]  # fmt: skip


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: f"{place[0]} {place[2]}")
@pytest.mark.parametrize("every", [12, slow(4)])
def test_what_is_read_most_damaged_in_every_way(
    place: tuple, every: int, stored: Path, runs: Path, monkeypatch, capsys
) -> None:
    hurt = named(runs, "hurt")
    for new in [*ODD[FIELDS.index(place) % every :: every], DEEP]:
        shutil.copytree(named(stored, "hurt"), hurt, dirs_exist_ok=True)
        damage(hurt, *place, new)
        check_listed(runs, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["lock", "run.json", "status.json", "tree.json", "summary.json", "rounds.jsonl"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name: str, runs: Path, monkeypatch, capsys) -> None:
    hurt = named(runs, "hurt")
    # only of a run that says it is going on does anybody ask for the lock
    status = json.loads((hurt / "status.json").read_text())
    (hurt / "status.json").write_text(json.dumps({**status, "status": "running"}))
    (hurt / name).unlink()
    os.mkfifo(hurt / name)
    assert not is_locked(hurt)
    check_listed(runs, monkeypatch, capsys, report=name == "lock")


def test_a_folder_with_a_steering_name(runs: Path, monkeypatch, capsys) -> None:
    named(runs, "hurt").rename(runs / "hurt\x1b[2J\x1b]0;x\x07")
    check_listed(runs, monkeypatch, capsys, report=True)
    named(runs, "hurt").rename(runs / os.fsdecode(b"hurt\xff\xfe"))
    check_listed(runs, monkeypatch, capsys, report=True)
    (named(runs, "hurt") / "run.json").write_text("{}")
    check_listed(runs, monkeypatch, capsys, report=True)


def test_a_resumed_run_s_texts_are_cleaned_too(runs: Path, monkeypatch, capsys) -> None:
    hurt = named(runs, "hurt")
    described = json.loads((hurt / "run.json").read_text())
    described["environment"]["torch"] = described["name"] = "\x1b[31mred\ud800"
    (hurt / "run.json").write_text(json.dumps(described))
    status = json.loads((hurt / "status.json").read_text())
    (hurt / "status.json").write_text(json.dumps({**status, "status": "interrupted"}))
    assert command(monkeypatch, "resume", hurt) == 0
    check_text(capsys, r"\x1b[31mred\ud800: 2 rounds")


def test_a_sweep_passes_a_damaged_run_by(runs: Path, monkeypatch, capsys) -> None:
    hurt = named(runs, "hurt")
    (hurt / "status.json").write_text(json.dumps({"status": "\x1b[31m", "reason": 3}))
    (runs.parent / "runs.toml").write_text('[base]\nschedule.periods = [1, 1]\nrounds = 1\nmodel.name = "logistic"\n')
    assert command(monkeypatch, "sweep", runs.parent / "runs.toml", "--runs", runs.parent, "--workers", 1) == 0
    check_text(capsys, "1/1")


def test_what_is_printable_stays_as_it_is() -> None:
    for text in ("MTGC, lr 0.1", "Zürich/模型 ±", "a\\b"):
        assert escape_control(text) == text
    assert escape_control("a\x1bb\n\ud800\x9b\u202e") == r"a\x1bb\n\ud800\x9b\u202e"
