"""A small run, and one that was stopped on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl.base.signals import Interrupted
from stratafl.experiment.experiment import Experiment
from stratafl.runs.session import RunSession

CONFIG = {
    "tree": {"shape": "2x2"},
    "data": {"source": "synthetic", "arguments": {"samples": 20, "features": 5, "classes": 3}},
    "model": {"name": "logistic"},
    "method": {"rules": ["mtgc", "scaffold"]},
    "schedule": {"periods": [2, 2], "participation": [1.0, 1]},
    "rounds": 6,
    "storage": {"checkpoint_every": 1, "keep_state": True},
}


def stopped_after(rounds: int, folder: Path) -> Path:
    """A run with checkpoints of the last two rounds it did."""
    session = RunSession.start(Experiment.from_table(CONFIG), "study", folder)

    def watch(record) -> None:
        if record.round == rounds + 1:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    return session.path


def names(run: Path) -> list[str]:
    """A run's checkpoints."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())
