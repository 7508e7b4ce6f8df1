"""A Python program's run on two ranks, kept in a folder: interrupted within a round, it goes on to
the same bits."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.conftest import on_ranks
from tests.runs.conftest import contents


def test_interrupted_within_a_round(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    on_ranks(2, "-m", "tests.distributed.program", whole, 0)
    on_ranks(2, "-m", "tests.distributed.program", run, 3, codes=[130, 130])
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["round"], status["meetings"]) == ("interrupted", 1, 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000001-000001"]
    on_ranks(2, "-m", "tests.distributed.program", run, 0)
    assert contents(run) == contents(whole)
