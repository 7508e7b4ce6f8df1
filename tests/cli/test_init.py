"""`stratafl init`: what it writes runs as it is, and it overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stratafl.cli.init.command import project

ROOT = Path(__file__).parents[2]


def stratafl(*words: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stratafl", *words]
    ran = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=600)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


@pytest.mark.slow
def test_every_command_of_its_readme_works_as_it_is(tmp_path: Path) -> None:
    made = stratafl("init", "my study", folder=tmp_path).stdout
    folder = tmp_path / "my study"
    assert sorted(path.name for path in folder.iterdir()) == sorted(project("my study"))
    assert all(f"my study/{name}" in made for name in project("my study"))
    assert made.splitlines()[-1] == "next: cd 'my study' && stratafl run study.toml"
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# my study\n")
    commands = re.findall(r"^    stratafl (.+?)(?: +#.*)?$", readme, re.M)
    assert [command.split()[0] for command in commands] == ["data", "run", "sweep", "runs", "report"]
    for command in commands:
        stratafl(*command.split(), folder=folder)
    assert {"runs", "report.html"} <= {path.name for path in folder.iterdir()}
    runs = json.loads(stratafl("runs", "list", "--json", folder=folder).stdout)["runs"]
    assert [run["status"] for run in runs] == ["done"] * 7
    assert {run["method"] for run in runs} == {"hfedavg", "mtgc", "homesick"}
    assert min(run["final"]["accuracy"] for run in runs) > 0.7


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "data.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for words in (["init"], ["init", "file"]):
        told = stratafl(*words, folder=tmp_path, code=2)
        assert "nothing is overwritten" in told.stderr and told.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["data.py"]
    assert (tmp_path / "study" / "data.py").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_nothing_in_it_is_filled(tmp_path: Path) -> None:
    made = stratafl("init", ".", folder=tmp_path).stdout
    assert (tmp_path / "study.toml").is_file()
    assert made.splitlines()[-1] == "next: stratafl run study.toml"


@pytest.mark.parametrize("name", [name for name in project("x") if name.endswith(".py")])
def test_its_python_is_in_good_order(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(project("x")[name])
    settings = ["--config", str(ROOT / "pyproject.toml")]
    for words in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, *settings, name], cwd=tmp_path, check=True, timeout=60)
