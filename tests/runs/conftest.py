"""Commands as processes of their own, and what a run directory holds in a form that compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Command:
    """Started command."""

    def __init__(self, server: subprocess.Popen, output: Path, pid: int):
        self.server, self.output, self.pid = server, output, pid
        self._code: int | None = None

    def kill(self, signal_number: int) -> None:
        os.kill(self.pid, signal_number)

    def ends(self) -> int:
        """Wait; its exit code, or the negative number of the signal that ended it."""
        if self._code is None:
            assert self.server.stdout is not None
            self._code = int(self.server.stdout.readline())
        return self._code

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class Server:
    def __init__(self, folder: Path):
        self.folder = folder
        self._count = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._last: Command | None = None

    def start(self, *arguments: object, cwd: Path | None = None) -> Command:
        """Start a command, after the last one has ended."""
        if self._last is not None:
            self._last.ends()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._count += 1
        output = self.folder / f"output{self._count}.txt"
        self._process.stdin.write(json.dumps([str(output), str(cwd or self.folder), *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        self._last = Command(self._process, output, int(self._process.stdout.readline()))
        return self._last

    def run(self, *arguments: object, cwd: Path | None = None) -> tuple[int, str]:
        command = self.start(*arguments, cwd=cwd)
        return command.ends(), command.said()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    process = Server(tmp_path_factory.mktemp("commands"))
    yield process
    process.close()


def contents(run: Path) -> dict[str, Any]:
    """Files of a finished run, without its name, times and paths."""

    def timeless(records: list[dict]) -> list[dict]:
        return [{**record, "seconds": None} for record in records]

    (checkpoint,) = (run / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["records"]["size"] == (run / "rounds.jsonl").stat().st_size
    summary = json.loads((run / "summary.json").read_text())
    status = json.loads((run / "status.json").read_text())
    return {
        "files": sorted(path.name for path in run.iterdir()),
        "status": [status[key] for key in ("status", "reason", "round", "rounds")],
        "rounds": timeless([json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]),
        "state": {**state, "run": None, "created": None, "records": None},
        "tensors": (checkpoint / "tensors.safetensors").read_bytes(),
        "model": (run / "model.safetensors").read_bytes(),
        "summary": {**summary, "seconds": None},
    }


def records(run: Path | None) -> int:
    """Rounds that a run has written down, if there is a run yet."""
    path = None if run is None else run / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path is not None and path.exists() else 0


def wait(condition: Callable[[], bool], every: float = 0.0002) -> None:
    """Until something holds, looked at so often that a moment is seldom missed."""
    give_up = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(every)
