"""Structure of the package that linters do not check: lazy imports, unique names, no repetition.

Layers and import cycles are contracts of import-linter, in pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratafl

PACKAGE = Path(stratafl.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = ("benchmarks", "papers")
"""Packages that are in a checkout only."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAYERS: list[str] = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
"""Layers of import-linter's contract, highest first."""
NAMED_TWICE = {
    *("Candidate", "Case", "Column", "Columns", "Draw", "Limits", "Network"),
    *("Rates", "Recorder", "Row", "Shown", "Table", "Task"),
}
"""Class names that are used more than once; names are only removed from this set."""


def loaded_by(code: str) -> set[str]:
    """Packages that a new interpreter has loaded after running this code."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    return set(ran.stdout.split())


def test_public_names_need_torch_and_numpy_only() -> None:
    """Also if modules with the same names as public objects were imported before."""
    clashing = "import stratafl.experiment.experiment, stratafl.core.client_update, stratafl.rules"
    code = f"{clashing}; from stratafl import *; import stratafl as s; assert callable(s.simulate)"
    loaded = loaded_by(f"{code}; assert all(hasattr(s, name) for name in s.__all__)")
    assert {"torch", "numpy", "stratafl"} <= loaded
    assert not loaded & {"matplotlib", "sklearn", "typer", "rich", "datasets", "flwr", "tensorboard", "pandas"}


def test_the_package_alone_loads_nothing_heavy() -> None:
    assert not loaded_by("import stratafl; stratafl.__version__") & {"torch", "numpy"}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    assert set(stratafl.__all__) <= set(dir(stratafl))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        getattr(stratafl, "simulat")  # noqa: B009


def test_the_command_line_imports_only_dependencies() -> None:
    """Direct dependencies alone: recent versions of Typer, for example, do not need Click."""
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    allowed = names | {"stratafl"} | set(sys.stdlib_module_names)
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        imported = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
        assert imported <= allowed, path


def test_the_package_imports_nothing_from_the_checkout() -> None:
    imported = {
        name.partition(".")[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert "torch" in imported and not imported & {*OUTSIDE, "tests"}


def test_class_names_are_unique_in_the_package() -> None:
    """Except in deployment and configuration, which are to be rewritten."""
    paths = [path for path in FILES if path.relative_to(PACKAGE).parts[0] not in ("deploy", "config")]
    places = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: of for name, of in places.items() if len(of) > 1 and name not in NAMED_TWICE} == {}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Functions and methods of the checkout, with their places."""
    for folder in ("stratafl", "tests", *OUTSIDE):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, Function):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


class Anonymous(ast.NodeTransformer):
    """Replaces a function's local names by numbers, so that renamed copies are found."""

    def __init__(self, function: Function):
        names = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
        names += [
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self.own, self.numbers = set(names), dict[str, str]()

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id not in self.own:
            return node
        return ast.Name(self.numbers.setdefault(node.id, f"name {len(self.numbers)}"), node.ctx)


def test_nothing_is_written_twice() -> None:
    """No two functions of four statements or more are the same up to the names of variables."""
    alike = defaultdict(list)
    for place, function in functions():
        body = function.body if ast.get_docstring(function) is None else function.body[1:]
        kinds = tuple(type(node) for statement in body for node in ast.walk(statement))
        if sum(issubclass(kind, ast.stmt) for kind in kinds) >= 4:
            alike[kinds].append((place, function, body))
    assert len(alike) > 500
    places = defaultdict(list)
    for group in alike.values():
        for place, function, body in group if len(group) > 1 else ():
            anonymous = Anonymous(function)
            places[tuple(ast.dump(anonymous.visit(statement)) for statement in body)].append(place)
    assert not [same for same in places.values() if len(same) > 1]
