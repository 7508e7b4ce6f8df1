"""What the tests of real trees share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("flwr")
    from tests.deploy.real import Run

    started: list[Run] = []

    def make(**settings: Any) -> Run:
        # another range of ports for each worker and each run
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Run(folder, 20000 + 1000 * worker + os.getpid() % 10 * 100 + 50 * len(started), **settings))
        return started[-1]

    yield make
    for each in started:
        each.close()
