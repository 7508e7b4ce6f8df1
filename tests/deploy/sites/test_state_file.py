"""A node's state on its disk: what is written there is read again, however large it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stratafl import InvalidInput
from stratafl.base import files
from stratafl.deploy.protocol import wire
from stratafl.deploy.protocol.downward import Below, Child
from stratafl.deploy.protocol.messages import Parcel
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites.state_file import STATE, Durable


def state(parameters: int = 1, line: str = "") -> NodeState:
    rows = torch.ones(1, parameters)
    given = Parcel(rows, torch.zeros(1, 0), {})
    return NodeState(below=Below(rows, given.buffers, {}, given, (Child(),)), line=line)


def read_again(folder: Path, kept: NodeState) -> NodeState | None:
    durable = Durable(folder, "job")
    try:
        durable.write(kept)
        return durable.read()
    finally:
        durable.close()


def test_a_state_is_larger_than_any_text_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT", 1000)
    found = read_again(tmp_path, state(parameters=1000))
    assert (tmp_path / STATE).stat().st_size > 4000
    assert found is not None and found.below is not None and torch.equal(found.below.held, torch.ones(1, 1000))


def test_a_state_has_a_longer_header_than_any_message(tmp_path: Path) -> None:
    """A parent of very many children keeps the name of each, and something of it."""
    line = "x" * (1 << 25)
    found = read_again(tmp_path, state(line=line))
    assert found is not None and found.line == line


def test_what_could_not_be_read_again_is_not_written() -> None:
    assert wire.encode(state(), largest_header=5000) == wire.encode(state())
    with pytest.raises(InvalidInput, match="at most 5,000"):
        wire.encode(state(line="x" * 5000), largest_header=5000)
