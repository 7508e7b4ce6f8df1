"""What the tests of real sites in one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process runs as Flower lets an app run, with no pause between two looks for nodes."""
    from stratafl.deploy.flower import inbox, process

    monkeypatch.setattr(process, "LOOK_AROUND", 0.0)
    before = inbox._identity()
    inbox._become((1, 1, 1))
    yield
    inbox._become(before)
