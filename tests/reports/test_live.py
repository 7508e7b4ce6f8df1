"""Live page: only changed runs are read and priced again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stratafl.costs import costs
from stratafl.metrics.objective import Goal
from stratafl.reports.page import Live
from stratafl.runs import curves, groups, list_runs
from stratafl.runs.reader import pack_runs
from stratafl.sweeps import note_target
from tests.reports.conftest import ROUNDS, edit


class Counted:
    """The names of runs that were read, how many were priced, and how many curves were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.read: list[str] = []
        self.priced = self.curves = 0
        read_run, priced_on, curve_of = groups.read_run, costs.costs, curves.curve_of

        def reading(path: Path) -> Any:
            self.read.append(path.name)
            return read_run(path)

        def pricing(*given: Any) -> Any:
            self.priced += 1
            return priced_on(*given)

        def making_a_curve(*given: Any) -> Any:
            self.curves += 1
            return curve_of(*given)

        monkeypatch.setattr(curves, "curve_of", making_a_curve)
        monkeypatch.setattr(groups, "read_run", reading)
        monkeypatch.setattr(costs, "costs", pricing)

    def since(self) -> tuple[list[str], int]:
        """Since the last time."""
        now = self.read, self.priced
        self.read, self.priced = [], 0
        return now


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_only_what_changed_is_read_and_priced(copied: Path, counted: Counted) -> None:
    live = Live([copied], ["plato"])
    first = live.read()
    names = sorted(path.name for path in copied.iterdir())
    reader, priced = counted.since()
    assert (sorted(reader), priced) == (names, len(names)) and "seconds on plato" in first["axes"]
    assert live.read() is first and counted.since() == ([], 0)
    for name in ("run.json", "status.json", "rounds.jsonl", "tree.json", "summary.json"):
        path = copied / names[1] / name
        path.write_text(path.read_text() + " \n" * (name != "rounds.jsonl"))
        path.touch()
        made = counted.curves
        assert live.read() is not first and counted.since() == ([names[1]], 1), name
        assert counted.curves == made + 1


def test_neither_an_archive_nor_a_copy_is_read_again(copied: Path, tmp_path: Path, counted: Counted) -> None:
    packed = tmp_path / "runs.tar.gz"
    pack_runs(list_runs(copied), copied, packed)
    shutil.copytree(copied, tmp_path / "copies")
    shutil.rmtree(sorted(copied.iterdir())[0])
    live = Live([copied, tmp_path / "copies", packed], ["plato"])
    first = live.read()
    assert sum(len(setting["runs"]) for setting in first["settings"]) == 4
    counted.since()
    assert live.read() is first and counted.since() == ([], 0)
    pack_runs(list_runs(copied)[:1], copied, packed)
    for path in (tmp_path / "copies").iterdir():
        shutil.rmtree(path)
    assert sum(len(setting["runs"]) for setting in live.read()["settings"]) == 3


def test_an_archive_alone_is_a_live_page(copied: Path, tmp_path: Path, counted: Counted) -> None:
    pack_runs(list_runs(copied), copied, tmp_path / "runs.tar.gz")
    live = Live([tmp_path / "runs.tar.gz"], ["plato"])
    first = live.read()
    assert counted.since()[1] == 4
    assert live.read() is first and counted.since() == ([], 0)


def test_every_real_change_shows(copied: Path, counted: Counted) -> None:
    live = Live([copied])
    runs = sorted(copied.iterdir())

    def shown() -> list[dict[str, Any]]:
        return [run for setting in live.read()["settings"] for run in setting["runs"]]

    assert [run["round"] for run in shown()] == [ROUNDS] * 4
    lines = (runs[0] / "rounds.jsonl").read_text().splitlines(keepends=True)
    (runs[0] / "rounds.jsonl").write_text("".join(lines[:2]))
    assert sorted(run["round"] for run in shown()) == [2, ROUNDS, ROUNDS, ROUNDS]
    (runs[0] / "rounds.jsonl").write_text("".join(lines))
    edit(runs[0] / "status.json", lambda values: values.update(status="failed"))
    assert [run["status"] for run in shown()].count("failed") == 1
    (runs[1] / "tree.json").write_text("[]")
    assert len(shown()) == 3 and len(live.read()["unreadable"]) == 1
    shutil.rmtree(runs[2])
    assert len(shown()) == 2
    shutil.copytree(runs[3], copied / "another")
    assert len(shown()) == 2, "a copy is no other run"
    edit(copied / "another" / "run.json", lambda values: values.update(id="another"))
    assert [run["id"] for run in shown()][1:] == ["another"], "a second run of a seed stands for the first"
    assert any("2 runs of seed" in line for line in live.read()["unreadable"])
    edit(copied / "another" / "run.json", lambda values: values["config"].update(seed=9))
    assert len(shown()) == 3
    shutil.rmtree(copied)
    assert shown() == [] and "no such folder" in live.read()["unreadable"][0]


def test_a_process_that_is_gone_shows(copied: Path) -> None:
    run = sorted(copied.iterdir())[0]
    edit(run / "status.json", lambda values: values.update(status="running"))
    live = Live([run])

    def status() -> str:
        return str(live.read()["settings"][0]["runs"][0]["status"])

    lock = read_lock(run)
    assert status() == "running"
    lock.release()
    assert status() == "interrupted", "no file changes where a process is killed"


def read_lock(run: Path) -> Any:
    from stratafl.runs.format import RunLock

    return RunLock(run)


def test_a_networks_file_is_read_again(copied: Path, tmp_path: Path, counted: Counted) -> None:
    file = tmp_path / "ours.toml"
    text = "leaf.step_s = 1\n[[tier]]\nup_mbit_s = 8\n"
    file.write_text(text)
    live = Live([copied], [str(file)])

    def seconds() -> Any:
        return live.read()["settings"][0]["runs"][0]["curve"]["x"]["seconds on ours"]

    before, (names, _) = seconds(), counted.since()
    file.write_text(text.replace("step_s = 1", "step_s = 2"))
    assert seconds() != before and counted.since() == ([], len(names))
    file.write_text("tier = 3")
    assert "seconds on ours" not in live.read()["axes"] and "tier" in live.read()["unreadable"][0]
    file.write_text(text)
    assert seconds() == before


def test_a_sweeps_new_target_shows(copied: Path) -> None:
    live = Live([copied])
    assert live.read()["targets"]["accuracy"] != [0.25]
    note_target(copied, Goal("accuracy", 0.25))
    assert live.read()["targets"]["accuracy"] == [0.25]


def test_a_target_of_no_metric_is_told_on_the_page(copied: Path) -> None:
    result = Live([copied], targets=["f1=0.5"]).read()
    assert result["settings"] and "--target = 'f1=0.5': these runs have accuracy, loss" in result["unreadable"]
    json.dumps(result, allow_nan=False)
