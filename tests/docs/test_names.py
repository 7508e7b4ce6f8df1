"""Files, rooms and functions that pages and docstrings name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate

import pytest

import stratafl
from tests.docs.blocks import PAGES, ROOT
from tests.test_architecture import FILES, LAYERS, PACKAGE

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
MADE_BY_THE_READER = {"stratafl/models/lenet.py", "stratafl/cli/tree.py"}
"""What CONTRIBUTING tells its reader to write."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_of_the_repository_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:stratafl|tests|benchmarks|examples)/[\w/]+\.(?:py|toml)\b", page.read_text())
    assert [name for name in named if name not in MADE_BY_THE_READER and not (ROOT / name).exists()] == []


def found(name: str) -> Path:
    """The one file of the package that a path means, which may leave out folders that a reader is
    in already."""
    fitting = [path for path in FILES if f"/{path.relative_to(PACKAGE)}".endswith(f"/{name}")]
    assert fitting, f"{name} is nowhere in the package"
    return min(fitting, key=lambda path: len(path.parts))


def definitions(path: Path) -> set[str]:
    """The names of all functions, methods and classes of a file, and of what its NamedTuples
    hold."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    kinds = ast.FunctionDef | ast.ClassDef
    fields = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return fields | {node.name for node in nodes if isinstance(node, kinds)}


def test_the_walks_name_files_and_what_is_in_them() -> None:
    files = re.findall(r"[\w/]+\.py", ARCHITECTURE.partition("\n## ")[2])
    assert len(files) > 90 and all(map(found, files))
    beside = re.findall(r"([\w/]+\.py) +(\w+(?:, \w+)*)(?=\s)", ARCHITECTURE.partition("## The life")[2])
    assert len(beside) > 30
    for file, names in beside:
        assert set(names.split(", ")) <= definitions(found(file)), f"{file}: {names}"


def test_the_table_has_every_room_in_the_order_of_the_layers() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", ARCHITECTURE, flags=re.MULTILINE)
    rooms = [re.findall(r"`([\w.]+)`", first) for first, _ in rows]
    layers = [name.strip("()") for name in reversed(LAYERS)]
    assert [room for together in rooms for room in together] == [name for name in layers if (PACKAGE / name).exists()]
    for together, (_, told) in zip(rooms, rows, strict=True):
        inside = {path.stem for room in together for path in (PACKAGE / room.replace(".", "/")).rglob("*")}
        assert {name for name in re.findall(r"`([a-z_]+)`", told) if name not in inside} == set(), together


def references() -> Iterator[tuple[str, str]]:
    """Dotted names in backquotes that begin with a room, each with the file they stand in."""
    rooms = {name.strip("()") for name in LAYERS}
    for path in FILES:
        for name in re.findall(r"`(?:stratafl\.)?([a-z_]+(?:\.\w+)+)`", path.read_text()):
            if name.partition(".")[0] in rooms:
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
