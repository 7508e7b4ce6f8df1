"""The example with texts end to end: from Python and from a config, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PYTHON = [sys.executable, str(EXAMPLES / "own_text.py")]
CONFIG = [sys.executable, "-m", "stratafl", "run"]
LIMIT = 300

pytestmark = pytest.mark.slow


def run_to_end(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done


def killed(command: list[str], folder: Path, after: int) -> None:
    """Start a command, and kill it after a number of recorded rounds."""
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + LIMIT
    while sum(text.count("\n") for text in map(Path.read_text, folder.glob("runs/*/rounds.jsonl"))) < after:
        assert started.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL


def model_of(folder: Path) -> bytes:
    (model,) = folder.glob("runs/*/model.safetensors")
    return model.read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_to_end(PYTHON, folder)
    return folder


def test_the_example_is_short() -> None:
    assert len((EXAMPLES / "own_text.py").read_text().splitlines()) <= 60


def test_a_program_killed_twice_ends_with_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    for rounds in (3, 11):
        killed(PYTHON, tmp_path, rounds)
    run_to_end(PYTHON, tmp_path)
    assert model_of(tmp_path) == model_of(uninterrupted)
    run_to_end([sys.executable, "-m", "stratafl", "report"], tmp_path)
    assert any("f1" in page.read_text() for page in tmp_path.rglob("*.html"))


def test_a_minimal_config_is_the_same_run(uninterrupted: Path, tmp_path: Path) -> None:
    killed([*CONFIG, str(EXAMPLES / "own_text.toml")], tmp_path, 5)
    (run,) = (tmp_path / "runs").iterdir()
    run_to_end([*CONFIG, "--resume", str(run)], tmp_path)
    assert model_of(tmp_path) == model_of(uninterrupted)
    last = json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["metrics"]["f1"] > 0.8
