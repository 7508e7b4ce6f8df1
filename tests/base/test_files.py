"""Files that are written atomically and read within limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl.base import files
from stratafl.base.errors import InvalidInput


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small limit for texts, so that a file beyond it is quickly written."""
    monkeypatch.setattr(files, "LARGEST_TEXT", 100)
    return files.LARGEST_TEXT


def test_json_that_nobody_could_read_is_not_written(tmp_path: Path, narrow: int) -> None:
    path = tmp_path / "status.json"
    files.write_json(path, "x" * (narrow - 3))  # with its quotes and the end of the line
    assert path.stat().st_size == narrow and files.read_json(path) == "x" * (narrow - 3)
    with pytest.raises(InvalidInput, match="cannot be written: 101 bytes, more than the 100 "):
        files.write_json(path, "y" * (narrow - 2))
    assert files.read_json(path) == "x" * (narrow - 3), "the one before stays"
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_text_is_held_to_its_limit_and_plain_bytes_to_none(tmp_path: Path, narrow: int) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"1" * (narrow + 1))
    for read in (files.read_json, files.read_bounded):
        with pytest.raises(InvalidInput, match="cannot be read: 101 bytes, more than the 100 "):
            read(path)
    assert len(files.read_bytes(path)) == narrow + 1
