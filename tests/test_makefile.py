"""The Makefile and existing environments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = ("Makefile", "pyproject.toml", "papers/pyproject.toml", "constraints.txt")
pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not (ROOT / "Makefile").exists(), reason="no make, or no checkout"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "papers").mkdir()
    for name in RECIPES:
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a target with a Python that only prints its arguments."""
    noting = checkout / "noting"
    noting.write_text('#!/bin/sh\necho called "$@"\n')
    noting.chmod(0o755)
    command = ["make", "demo", f"PYTHON={noting}", *words]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_an_environment_of_the_user_is_not_changed(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(checkout / "noting")
    process = make(checkout)
    assert process.returncode != 0 and "called" not in process.stdout
    assert "make VENV=.venv-make demo" in process.stderr
    subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, timeout=60, check=True)
    assert python.exists() and not (checkout / ".venv" / ".ready").exists()


@pytest.mark.parametrize("mark", [".made_by_make", ".ready"])
def test_an_environment_made_by_make_is_updated(checkout: Path, mark: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(checkout / "noting")
    (checkout / ".venv" / mark).touch()
    subprocess.run(["touch", "-d", "2000-01-01", checkout / ".venv" / mark], check=True)
    process = make(checkout)
    assert "called -m pip install" in process.stdout and (checkout / ".venv" / ".ready").exists()
    subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, timeout=60, check=True)
    assert not (checkout / ".venv").exists()


def test_a_missing_environment_is_created(checkout: Path) -> None:
    process = make(checkout, "VENV=other")
    assert "called -m venv other" in process.stdout
    assert "triton==" not in (checkout / "build" / "constraints.txt").read_text()
