"""Saved runs of a Python program on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.conftest import on_ranks
from tests.runs.conftest import contents


@pytest.mark.slow
def test_run_interrupted_within_a_round_is_resumed(tmp_path: Path) -> None:
    uninterrupted, run = tmp_path / "whole", tmp_path / "run"
    on_ranks(2, "-m", "tests.distributed.program", uninterrupted, 0)
    on_ranks(2, "-m", "tests.distributed.program", run, 3, codes=[130, 130])
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["round"], status["meetings"]) == ("interrupted", 1, 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000001-000001"]
    on_ranks(2, "-m", "tests.distributed.program", run, 0)
    assert contents(run) == contents(uninterrupted)


@pytest.mark.slow
def test_finished_run_without_state_is_opened_on_all_ranks(tmp_path: Path) -> None:
    arguments = "-m", "tests.distributed.program", tmp_path / "run", 0, "without-state"
    on_ranks(2, *arguments)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    on_ranks(2, *arguments)
    assert [path.read_bytes() for path in files] == before
