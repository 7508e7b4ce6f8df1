"""Recognition of user files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stratafl
from stratafl.base import tracebacks
from stratafl.base.tracebacks import is_user_file


@pytest.fixture(autouse=True)
def cleared_caches() -> Iterator[None]:
    """Clear the caches, which depend on the search path."""
    for each in (tracebacks.is_user_file, tracebacks._library_folders):
        each.cache_clear()
    yield
    for each in (tracebacks.is_user_file, tracebacks._library_folders):
        each.cache_clear()


def test_neither_this_package_nor_python_nor_a_library_is(tmp_path: Path) -> None:
    assert is_user_file(str(tmp_path / "study.py"))
    assert not any(map(is_user_file, (stratafl.__file__, torch.__file__, pytest.__file__, tracebacks.os.__file__)))


def test_a_search_path_folder_is_unless_libraries_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of `pip install --target`, which is then named in PYTHONPATH."""
    mine, installed = tmp_path / "mine", tmp_path / "installed"
    mine.mkdir()
    (installed / "library-1.0.dist-info").mkdir(parents=True)
    for folder in (mine, installed, tmp_path / "gone"):
        monkeypatch.syspath_prepend(folder)
    assert str(installed) in sys.path
    assert is_user_file(str(mine / "study.py")) and not is_user_file(str(installed / "library" / "main.py"))
