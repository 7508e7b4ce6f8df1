"""The record has every round once, whenever the root dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load_file

from stratafl.config import Config
from stratafl.deploy import assemble, flower, rounds
from stratafl.deploy.assemble import Assembled, study_of
from stratafl.deploy.memory import MemoryLink
from stratafl.deploy.processes import Forked
from stratafl.deploy.provision import Topology, provision
from stratafl.deploy.rounds import Rounds, read_lines
from stratafl.store import files

ROUNDS = 2
CONFIG = f"""
[tree]
shape = "2"
[model]
name = "mlp"
hidden = [2]
[schedule]
periods = [1]
[run]
rounds = {ROUNDS}
"""


class Deadly:
    """The system, as files are written with it: the process is killed at one of the calls."""

    CALLS = ("open", "fsync", "replace", "unlink", "fdopen")

    def __init__(self, at: int):
        self.left = at

    def __getattr__(self, name: str) -> Any:
        if name not in self.CALLS:
            return getattr(os, name)
        return lambda *given, **named: self.call(lambda: getattr(os, name)(*given, **named))

    def call(self, work: Callable[[], Any]) -> Any:
        self.step()
        made = work()
        return Torn(made, self) if hasattr(made, "write") else made

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file that is written in two parts."""

    def __init__(self, file: Any, system: Deadly):
        self.file, self.system = file, system

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *problem: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.system.step()
        self.file.write(data[half:])
        return len(data)


class Here(MemoryLink):
    """The leaves, in the root's own process."""

    contact: ClassVar[dict[str, float]] = {}


def lead(folders: dict[str, Path], system: Any = os) -> None:
    """The root's process, with its leaves, which nobody kills, in it."""
    leaves = {name: Assembled.of(folder) for name, folder in folders.items() if name != "root"}
    link = Here({name: each.leaf() for name, each in leaves.items()})
    here = Assembled.of(folders["root"])
    ask = link.ask

    def undisturbed(*given: Any) -> Any:
        vars(files)["os"] = os
        try:
            return ask(*given)
        finally:
            vars(files)["os"] = system

    link.ask = undisturbed  # type: ignore[method-assign]
    vars(files)["os"] = vars(rounds)["os"] = system
    flower._lead(here, link)  # type: ignore[arg-type]


@pytest.mark.deploy
def test_a_root_killed_at_any_call_to_the_system_leaves_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n')
    made = provision(Topology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    wanted = study_of(Config.load(tmp_path / "run.toml")).simulation.run().module.state_dict()
    study = study_of(Config.load(tmp_path / "run.toml"))
    for module in (assemble, flower):
        monkeypatch.setattr(module, "study_of", lambda config: study)  # each process begins as a copy that has it
    log, at, code = tmp_path / "log", 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        at += 1
        shutil.copytree(tmp_path / "sites", tmp_path / str(at))
        folders = {name: tmp_path / str(at) / folder.name for name, folder in made.items()}
        code = Forked(partial(lead, folders, Deadly(at)), log, tmp_path).wait()
        if code:
            assert code == -signal.SIGKILL
            assert Forked(partial(lead, folders), log, tmp_path).wait() == 0
        assert [json.loads(line)["round"] for line in read_lines(folders["root"])] == [1, 2], at
        found = load_file(folders["root"] / "model.safetensors")
        assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-6
    assert at > 15 * ROUNDS


def test_a_line_that_was_cut_short_is_not_read_and_is_written_anew(tmp_path: Path) -> None:
    lines = [json.dumps({"round": number}) for number in (1, 2, 3)]
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(lines)[:-4])
    assert read_lines(tmp_path) == lines[:2]
    Rounds(tmp_path, lines[2]).add(json.dumps({"round": 4}))
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    Rounds(tmp_path, lines[2])
    assert read_lines(tmp_path) == lines
    Rounds(tmp_path, "")
    assert read_lines(tmp_path) == []
