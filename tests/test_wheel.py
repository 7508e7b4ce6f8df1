"""Plain installation from the wheel, without extras, used in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXTRAS = ("datasets", "flwr", "pandas", "sklearn", "tensorboard", "transformers")
"""Packages that a plain installation does not have."""
PIP_WHEEL = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--disable-pip-version-check"]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in the folder `STRATAFL_DIST`, or one built from a copy of the sources."""
    if os.environ.get("STRATAFL_DIST"):
        (path,) = (ROOT / os.environ["STRATAFL_DIST"]).glob("*.whl")
        return path
    pytest.importorskip("setuptools")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "stratafl", source / "stratafl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*PIP_WHEEL, "-w", built, source], check=True, timeout=300)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the papers, built from a copy."""
    pytest.importorskip("setuptools")
    source, built = tmp_path_factory.mktemp("source") / "papers", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "papers", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    subprocess.run([*PIP_WHEEL, "-w", built, source], check=True, timeout=300)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and this environment's dependencies, without extras."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    # a .pth file adds a folder to the path, but not the .pth files in that folder
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    for name in EXTRAS:
        (packages / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    subprocess.run([*pip, *options, wheel], check=True, timeout=300)
    return folder


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("stratafl/")}
    kept = [path for path in (ROOT / "stratafl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {str(path.relative_to(ROOT)) for path in kept}
    assert {
        "stratafl/py.typed",
        "stratafl/data/catalog/digits.npz",
        "stratafl/cli/init/template/study.toml.txt",
    } <= packed


def test_its_metadata_names_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(name).decode())
    needed = [requirement for requirement in about.get_all("Requires-Dist") if "extra ==" not in requirement]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(requirement.replace(" ", "") for requirement in needed) == sorted(declared)
    assert not any(requirement.startswith(EXTRAS) for requirement in needed)
    assert about["Description-Content-Type"] == "text/markdown" and len(about.get_payload()) > 1000


def test_a_plain_installation_runs_from_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    home, empty = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    empty.mkdir()
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STRATAFL", "XDG"))}
    variables |= {"HOME": str(home), "COLUMNS": "80"}

    def stratafl(*words: str, folder: Path = empty) -> str:
        command = [str(environment / "bin" / "stratafl"), *words]
        process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    code = "import stratafl; print(stratafl.__file__)"
    command = [str(environment / "bin" / "python"), "-c", code]
    path = subprocess.run(
        command, cwd=empty, env=variables, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert Path(path.strip()).is_relative_to(environment)

    assert "MTGC" in stratafl("demo", "--quiet")
    assert (empty / "demo.png").read_bytes().startswith(b"\x89PNG")
    stratafl("init", "study")
    study = empty / "study"
    assert "accuracy" in stratafl("run", "study.toml", "--quiet", folder=study)
    assert "mtgc" in stratafl("runs", "list", folder=study)
    stratafl("report", folder=study)
    assert "<html" in (study / "report.html").read_text()[:1000]


def test_the_wheel_of_the_papers_has_every_paper_and_the_command(papers: Path) -> None:
    with zipfile.ZipFile(papers) as archive:
        packed = {name for name in archive.namelist() if name.startswith("papers/")}
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        declared = archive.read(name).decode()
    written = {path.relative_to(ROOT) for path in (ROOT / "papers").rglob("*.py")}
    assert packed == {str(path) for path in written if "build" not in path.parts}
    assert "[stratafl.commands]\nreproduce = papers.harness.cli:reproduce_command" in declared


def test_the_papers_add_their_command(environment: Path, papers: Path, tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STRATAFL", "XDG"))}
    command = [environment / "bin" / "stratafl", "reproduce", "search", "--report-only", "--runs", tmp_path]

    def reproduce() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)

    before = reproduce()
    assert before.returncode == 2 and before.stderr.count("\n") == 1 and "pip install ./papers" in before.stderr
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--disable-pip-version-check", papers], check=True, timeout=300)
    after = reproduce()
    assert after.returncode == 0 and "written to reproduced" in after.stdout, after.stderr
