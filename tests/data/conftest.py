"""Fixtures of the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data root, used by default, without original files in reach."""
    folder = tmp_path / "root"
    monkeypatch.setenv("STRATAFL_DATA", str(folder))
    monkeypatch.delenv("STRATAFL_REAL_DATA", raising=False)
    return folder
