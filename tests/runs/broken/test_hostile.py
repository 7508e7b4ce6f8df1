"""Configs, run directories and checkpoints made to do harm, or broken by accident: each gets one
clear line, or is harmless; nothing is written outside the run's own folder, and nobody sees a
traceback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stratafl import InvalidInput, SyncSchedule
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment
from stratafl.runs import list_runs, read_run
from stratafl.runs.format import slug
from stratafl.runs.session import RunSession
from stratafl.sweeps import Sweep
from tests.runs.broken.nested import changed, paths
from tests.runs.stopped import CONFIG, stopped_after

NASTY: list[Any] = [
    None, True, -1, 0, 1e308, float("nan"), float("-inf"), 1 << 70, "", "../../escape", "/etc/passwd", "a\nb", "\x00",
    "💥" * 3, [], [[]], [None], ["x", 1], {}, {"name": "x"}, {"name": None}, {"": ""}, {"../x": 1}, [[["deep"]]],
]  # fmt: skip


def outside(folder: Path) -> dict[str, bytes | None]:
    """Contents of a folder, to detect changes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def harmless(call) -> bool:
    """Whether it worked; a complaint is one line, and nothing else may be raised."""
    try:
        call()
    except InvalidInput as problem:
        text = str(problem)
    else:
        return True
    assert text and "\n" not in text and len(text) < 2000
    return False


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_after(4, tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def place(stopped: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run that was stopped, and a folder beside it that must stay as it is."""
    run, other = tmp_path / "runs" / "study", tmp_path / "elsewhere"
    shutil.copytree(stopped, run)
    (other / "000004").mkdir(parents=True)
    (other / "file").write_text("mine")
    return run, other


def some(items: list, count: int, start: int = 0) -> list:
    """Choose `count` items, spread evenly."""
    return [items[(start + i * max(len(items) // count, 1)) % len(items)] for i in range(count)]


def thinned(cases: list[tuple]) -> list[Any]:
    """Mark two of three cases as slow."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, case in enumerate(cases)]


# -- configs ---------------------------------------------------------------------------------------

FIELDS = [where for where in paths(Experiment.from_table(CONFIG).to_table()) if where[0] != "data" or len(where) < 3]


@pytest.mark.parametrize("where", FIELDS, ids=lambda where: ".".join(map(str, where)))
def test_a_config_with_a_wrong_value(where: tuple, tmp_path: Path) -> None:
    values = Experiment.from_table(CONFIG).to_table()
    for new in NASTY:
        config = changed(json.loads(json.dumps(values)), where, new)
        runs = tmp_path / "runs"

        def launch() -> None:
            launched = RunSession.start(Experiment.from_table(config), "study", runs)
            # whatever it says: this is not about patience
            launched.simulation.rounds = 1
            launched.simulation.schedule = SyncSchedule((1, 1))
            launched.run()

        before = outside(tmp_path)
        harmless(launch)
        grown = {name for name in outside(tmp_path) if name not in before}
        assert all(name == "runs" or name.startswith(f"runs{os.sep}study-") for name in grown)


@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "/tmp/x", "a/b", "a\\b", "", " ", "-rf", "a\nb", "a\x00b", "x" * 101, "é", "$(x)", ".x"]
)
def test_a_name_that_is_no_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--name"):
        RunSession.start(Experiment.from_table(CONFIG), name, tmp_path / "runs")
    assert not list(tmp_path.iterdir())
    folder_name = slug(name)
    assert folder_name and "/" not in folder_name and not folder_name.startswith((".", "-"))


# -- run directories -------------------------------------------------------------------------------


def json_cases(name: str) -> list[tuple[str, tuple, Any]]:
    run = {
        "run.json": [("format",), ("name",), ("id",), ("created",), ("config",), ("engine",), ("data",),
                     ("environment",), ("config", "storage"), ("config", "rounds"), ("environment", "threads")],
        "status.json": [("status",), ("reason",), ("round",), ("rounds",), ("pid",), ("updated",)],
        "tree.json": [("levels",), ("classes",)],
    }[name]  # fmt: skip
    return [(name, where, new) for where in run for new in [KeyError, *some(NASTY, 7, start=len(where[-1]))]]


@pytest.mark.parametrize(
    ("name", "where", "new"),
    thinned([case for name in ("run.json", "status.json", "tree.json") for case in json_cases(name)]),
    ids=lambda part: repr(part)[:40],
)
def test_a_run_directory_with_a_wrong_value(name: str, where: tuple, new: Any, place, monkeypatch, capsys) -> None:
    run, other = place
    before = outside(other)
    path = run / name
    path.write_text(json.dumps(changed(json.loads(path.read_text()), where, new)))
    readable = harmless(lambda: read_run(run))
    assert len(list_runs(run.parent)) == int(readable)
    monkeypatch.setattr(sys, "argv", ["stratafl", "runs", "list", str(run.parent)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert ("unreadable" in capsys.readouterr().out) != readable

    def go_on() -> None:
        session = RunSession.resume(run)
        session.simulation.rounds = 5  # also where it says more
        session.run()

    harmless(go_on)
    assert outside(other) == before
    assert sorted(p.name for p in run.parent.iterdir()) == ["study"]


BROKEN = {
    "empty": b"", "half": b'{"format": 1, "na', "a list": b"[1, 2]", "binary": b"\x00\xff\xfe" * 50, "null": b"null",
    "deep": b"[" * 100_000, "a number": b"7", "twice": b"{}{}", "huge number": b'{"format": 1' + b"0" * 5000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("name", ["run.json", "status.json", "tree.json", "summary.json", "rounds.jsonl", "lock"])
def test_a_run_directory_with_a_broken_file(name: str, broken: bytes, place) -> None:
    run, other = place
    before = outside(other)
    (run / name).write_bytes(broken + b"\n")
    harmless(lambda: read_run(run))
    harmless(lambda: RunSession.resume(run).run())
    assert outside(other) == before


@pytest.mark.parametrize(
    "name",
    ["run.json", "status.json", "tree.json", "summary.json", "model.safetensors", "rounds.jsonl", "lock", "checkpoints",
     "checkpoints/000004", "checkpoints/000004/state.json", "checkpoints/000004/SHA256SUMS",
     "checkpoints/000004/tensors.safetensors", "checkpoints/000005", ".status.json.1.partial"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "link to nothing", "a pipe", "a folder"])
def test_something_else_in_the_place_of_a_file(name: str, kind: str, place) -> None:
    run, other = place
    before = outside(other)
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match kind:
        case "link to a file":
            path.symlink_to(other / "file")
        case "link to a folder":
            path.symlink_to(other)
        case "link to nothing":
            path.symlink_to(other / "new")
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
    harmless(lambda: read_run(run))
    harmless(lambda: RunSession.resume(run).run())
    assert outside(other) == before


# -- checkpoints -----------------------------------------------------------------------------------


FORGED = [
    KeyError, *NASTY, ["tensor", "nobody", 0], ["tensor", "federation.levels.0.model", 1 << 60], ["array", 7], ["list"],
    ["tensor", "federation.levels.2.model", -3], ["list", ["list", ["array", "federation.levels.0.rate_N"]]],
]  # fmt: skip


def sign(checkpoint: Path) -> None:
    """Make the checksums fit whatever is there: a hostile hand can do that, too."""
    names = ("state.json", "tensors.safetensors")
    sums = [f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


@pytest.mark.parametrize("number", thinned([(number,) for number in range(120)]))
def test_a_checkpoint_forged_with_good_checksums(number: int, place) -> None:
    run, other = place
    before = outside(other)
    checkpoint = run / "checkpoints" / "000004"
    state = json.loads((checkpoint / "state.json").read_text())
    places = list(paths(state))
    where = places[(number * len(places)) // 120]
    new = FORGED[number % len(FORGED)]
    (checkpoint / "state.json").write_text(json.dumps(changed(state, where, new)))
    sign(checkpoint)
    said: list[str] = []
    harmless(lambda: RunSession.resume(run, say=said.append).run())
    assert all("\n" not in line for line in said)
    assert outside(other) == before


# -- sweep files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["config", "base", "variants", "grid", "target", "other"])
def test_a_sweep_file_with_a_wrong_value(key: str, tmp_path: Path) -> None:
    for new in [*NASTY, {"client.lr": 1}, {"client": {"lr": []}}, {"a": {"b": {"c": [1]}}}, {"seed": 10**9}]:
        values = {"base": CONFIG, "grid": {"seed": 2}, key: new}
        if harmless(lambda: Sweep.of(values, "sweep", tmp_path)):
            names = [entry.name for entry in Sweep.of(values, "sweep", tmp_path).entries]
            assert all("/" not in name and not name.startswith(".") for name in names)
    assert not list(tmp_path.iterdir())
