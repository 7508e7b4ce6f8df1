"""The arrows between modules, read from their imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stratafl

PACKAGE = Path(stratafl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
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
    path = PACKAGE.parent.joinpath(*source.split("."), alias.name)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


IMPORTS = {module_name(path): imports_of(path) for path in FILES}


def within(name: str, *parents: str) -> bool:
    full = [f"stratafl.{parent}" for parent in parents]
    return any(name == parent or name.startswith(parent + ".") for parent in full)


def modules(*parents: str) -> dict[str, set[str]]:
    chosen = {name: found for name, found in IMPORTS.items() if within(name, *parents)}
    assert chosen, f"no module is called {parents}"
    return chosen


def test_the_reader_sees_imports() -> None:
    assert "stratafl.federation" in IMPORTS["stratafl.simulate"]
    assert "stratafl.checks" in IMPORTS["stratafl.simulate"], "from stratafl import checks"
    assert "stratafl.simulate" in IMPORTS["stratafl"]


@pytest.mark.parametrize("base", ["tree", "rule", "flat", "state", "streams", "errors", "placing"])
def test_the_base_stands_alone(base: str) -> None:
    for name, found in modules(base).items():
        others = {each for each in found if not within(each, "errors", "streams", "placing")}
        assert not others, f"{name} imports {others}"


@pytest.mark.parametrize(
    ("modules_of", "forbidden"),
    [
        (("rules", "local", "schedule", "registry"), ("engine", "simulate", "federation")),
        (("rules",), ("tree",)),
        (("engine",), ("simulate", "config", "cli", "deploy")),
        (("federation",), ("simulate", "config", "cli", "deploy", "ranks")),
        (("simulate", "experiment", "launch"), ("deploy",)),
        (
            ("deploy.job", "deploy.messages", "deploy.upward", "deploy.downward", "deploy.node", "deploy.wire"),
            (
                "federation",
                "simulate",
                "config",
                "experiment",
                "store",
                "engine.loop",
                "engine.stacked",
                "engine.choose",
            ),
        ),
        (("ranks",), ("federation", "simulate", "engine", "config", "experiment", "launch", "cli")),
        (("report",), ("engine", "simulate", "federation", "config", "experiment", "launch", "cli")),
        (("drift",), ("engine", "rules", "simulate", "federation")),
        (("simulate",), ("config", "recipes", "cli", "experiment", "store")),
        (("store.folder", "store.checkpoint", "store.signals"), ("launch", "sweep", "cli", "runs_cli", "progress")),
        (
            ("store.read", "store.files", "store.layout", "store.lock"),
            ("state", "config", "engine", "simulate", "federation", "experiment"),
        ),
        (("recipes",), ("reproduce", "launch", "sweep", "cli", "reproduce_cli", "plots")),
        (("reproduce",), ("cli", "reproduce_cli", "progress")),
        (("sweep",), ("recipes", "reproduce", "cli")),
        (("data", "metrics"), ("tree", "rule", "engine", "simulate", "federation")),
    ],
    ids=str,
)
def test_arrows_point_one_way(modules_of: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    for name, found in modules(*modules_of).items():
        wrong = {each for each in found if within(each, *forbidden)}
        assert not wrong, f"{name} imports {wrong}"
        assert "stratafl" not in found, f"{name} imports the whole package"


def test_a_deployed_node_meets_the_engine_at_its_seam_only() -> None:
    for name, found in modules("deploy").items():
        wrong = {each for each in found if within(each, "engine") and not within(each, "engine.work", "engine.spread")}
        assert not wrong, f"{name} imports {wrong}"


def test_models_know_nothing_of_federations() -> None:
    for name, found in IMPORTS.items():
        if within(name, "models"):
            wrong = {each for each in found if within(each, "tree", "rule", "engine", "simulate", "federation")}
            assert not wrong, f"{name} imports {wrong}"


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


def test_the_core_needs_torch_and_numpy_only() -> None:
    code = "import sys, stratafl; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    loaded = set(ran.stdout.split())
    assert {"torch", "numpy", "stratafl"} <= loaded
    extras = {"matplotlib", "sklearn", "typer", "rich", "datasets", "flwr", "tensorboard", "plotly", "pandas"}
    assert not loaded & extras


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 400
