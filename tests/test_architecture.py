"""The shape of the package: arrows between modules; and of all code: sizes, and nothing written
twice."""

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
"""What a checkout has beside the package."""
EVERYWHERE = [path for folder in ("stratafl", "tests", *OUTSIDE) for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Everything a file imports from the package, also inside functions, as full names."""
    here = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                # `from package import module` means the module, anything else what it comes from
                found.add(f"{source}.{alias.name}" if is_module(source, alias) else source)
    return {name for name in found if name.split(".")[0] == "stratafl"}


def is_module(source: str, alias: ast.alias) -> bool:
    path = ROOT.joinpath(*source.split("."), alias.name)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


IMPORTS = {module_name(path): imports_of(path) for path in FILES}
LAYERS = (
    "base",
    "data",
    "models",
    "core",
    "federation",
    "metrics",
    "network",
    "rules",
    "engine",
    "distributed",
    "simulation",
    "config",
    "runs",
    "cost",
    "deploy.protocol",
    "deploy.notes",
    "deploy.sites",
    "deploy.news",
    "deploy.door",
    "deploy.flower",
    "deploy.host",
    "report",
    "tune",
    "cli",
)
"""Lowest first: what is above in the house imports what is below, and nothing else."""
GATHERED = ("stratafl", "stratafl.__main__", "stratafl.deploy")
"""What is no room itself: the package's face, its command, and what is around rooms of several
layers."""


def within(name: str, room: str) -> bool:
    return name == f"stratafl.{room}" or name.startswith(f"stratafl.{room}.")


def layer(name: str) -> int:
    """Where a module is, lowest 0."""
    (found,) = (number for number, room in enumerate(LAYERS) if within(name, room))
    return found


def test_the_reader_sees_imports() -> None:
    assert "stratafl.federation.federation" in IMPORTS["stratafl.simulation.prepare"]
    assert "stratafl.core.flat_module" in IMPORTS["stratafl.simulation.prepare"], "from stratafl.core import checks"
    assert "stratafl.runs.python.simulate" in IMPORTS["stratafl"]


@pytest.mark.parametrize("name", sorted(set(IMPORTS) - set(GATHERED)))
def test_every_import_points_down(name: str) -> None:
    here = layer(name)
    wrong = {each for each in IMPORTS[name] if each not in GATHERED and layer(each) > here}
    assert not wrong, f"{name} imports {wrong}"
    assert "stratafl" not in IMPORTS[name], f"{name} imports the whole package"


def test_the_package_imports_nothing_that_only_a_checkout_has() -> None:
    imported = {
        name.partition(".")[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert "torch" in imported and not imported & {*OUTSIDE, "tests"}


def test_no_module_lies_at_the_top() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


ROOMS = sorted({path.parent for room in (PACKAGE, ROOT / "tests") for path in room.rglob("*.py")})


@pytest.mark.parametrize("folder", ROOMS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_room_is_so_full_that_nothing_is_found_in_it(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 15


def test_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done and name in IMPORTS:
            for each in IMPORTS[name] - {name, "stratafl"}:
                # a module imports its own package's __init__ without depending on what it gathers
                if not name.startswith(each + "."):
                    visit(each, (*path, name))
            done.add(name)

    for name in IMPORTS:
        visit(name, ())
    assert done == set(IMPORTS)


def loaded_by(code: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after this."""
    shown = f"{code}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", shown]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    return set(ran.stdout.split())


def test_the_core_needs_torch_and_numpy_only() -> None:
    loaded = loaded_by("from stratafl import *")
    assert {"torch", "numpy", "stratafl"} <= loaded
    extras = {"matplotlib", "sklearn", "typer", "rich", "datasets", "flwr", "tensorboard", "pandas"}
    assert not loaded & extras


def test_the_package_alone_loads_nothing_heavy() -> None:
    assert not loaded_by("import stratafl; stratafl.__version__") & {"torch", "numpy"}


def test_public_names_are_theirs_whatever_was_imported_before() -> None:
    """Some are those of modules, too."""
    code = "import stratafl.runs.python.simulate, stratafl.core.client_update, stratafl.rules; import stratafl as s"
    assert "stratafl" in loaded_by(f"{code}; assert all(hasattr(s, n) for n in s.__all__) and callable(s.simulate)")
    assert set(stratafl.__all__) <= set(dir(stratafl))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        getattr(stratafl, "simulat")  # noqa: B009


@pytest.mark.parametrize("path", EVERYWHERE, ids=module_name)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Every function and method, with where it is."""
    for path in EVERYWHERE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{module_name(path)}.{node.name}, line {node.lineno}", node


def body_of(function: Function) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body if ast.get_docstring(function) is None else function.body[1:]


def test_functions_stay_short() -> None:
    lengths = {place: function.end_lineno - function.lineno + 1 for place, function in functions()}  # type: ignore[operator]
    assert {place: lines for place, lines in lengths.items() if lines > 60} == {}


class Anonymous(ast.NodeTransformer):
    """Numbers a function's own names in their order, so that renaming them hides no repetition."""

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
    """Two functions of four statements or more never do the same, whatever their variables are
    called."""
    places = defaultdict(list)
    for place, function in functions():
        body = body_of(function)
        if sum(isinstance(node, ast.stmt) for statement in body for node in ast.walk(statement)) >= 4:
            anonymous = Anonymous(function)
            places[tuple(ast.dump(anonymous.visit(statement)) for statement in body)].append(place)
    assert len(places) > 500
    assert not [same for same in places.values() if len(same) > 1]


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").rglob("*.py")), ids=module_name)
def test_the_command_line_imports_what_the_package_depends_on(path: Path) -> None:
    """Not what a dependency of it happens to bring: recent versions of Typer do without Click."""
    told = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    allowed = {re.split(r"[^\w-]", each)[0] for each in told} | {"stratafl"} | set(sys.stdlib_module_names)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    assert found <= allowed
