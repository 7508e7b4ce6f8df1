"""What `make` does to an environment that is there already."""

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
    """A target, with a Python and a pip that only note that they were called."""
    noting = checkout / "noting"
    noting.write_text('#!/bin/sh\necho called "$@"\n')
    noting.chmod(0o755)
    command = ["make", "demo", f"PYTHON={noting}", *words]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_an_environment_of_the_user_s_own_stays_as_it_is(checkout: Path) -> None:
    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(checkout / "noting")
    made = make(checkout)
    assert made.returncode != 0 and "called" not in made.stdout
    assert "make VENV=.venv-make demo" in made.stderr
    subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, timeout=60, check=True)
    assert own.exists() and not (checkout / ".venv" / ".ready").exists()


@pytest.mark.parametrize("mark", [".made_by_make", ".ready"])
def test_one_that_make_began_is_brought_up_to_date(checkout: Path, mark: str) -> None:
    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(checkout / "noting")
    (checkout / ".venv" / mark).touch()
    subprocess.run(["touch", "-d", "2000-01-01", checkout / ".venv" / mark], check=True)
    made = make(checkout)
    assert "called -m pip install" in made.stdout and (checkout / ".venv" / ".ready").exists()
    subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, timeout=60, check=True)
    assert not (checkout / ".venv").exists()


def test_one_that_is_not_there_is_made(checkout: Path) -> None:
    made = make(checkout, "VENV=other")
    assert "called -m venv other" in made.stdout
