"""Files and names that pages and docstrings mention exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate

import pytest

import stratafl
from tests.docs.blocks import PAGES, ROOT
from tests.test_architecture import FILES, LAYERS

MADE_BY_THE_READER = {"stratafl/models/lenet.py", "stratafl/cli/tree.py"}
"""What CONTRIBUTING tells its reader to write."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_of_the_repository_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:stratafl|tests|benchmarks|examples)/[\w/]+\.(?:py|toml)\b", page.read_text())
    assert [name for name in named if name not in MADE_BY_THE_READER and not (ROOT / name).exists()] == []


def references() -> Iterator[tuple[str, str]]:
    """Dotted names in backquotes that begin with a package, each with the file they stand in."""
    for path in FILES:
        for name in re.findall(r"`(?:stratafl\.)?([a-z_]+(?:\.\w+)+)`", path.read_text()):
            if name.partition(".")[0] in LAYERS:
                yield path.relative_to(ROOT).as_posix(), name


def test_what_docstrings_send_to_is_there() -> None:
    told = list(references())
    assert len(told) > 5
    assert [(place, name) for place, name in told if locate(f"stratafl.{name}") is None] == []


def test_help_describes_every_field_of_what_users_get() -> None:
    kinds = [each for each in (getattr(stratafl, name) for name in stratafl.__all__) if hasattr(each, "_fields")]
    assert kinds
    for kind in kinds:
        for field in kind._fields:
            assert "Alias for" not in getattr(kind, field).__doc__, f"{kind.__name__}.{field}"
