"""A table of wrong inputs with the line that each gives, as somebody has read and judged them.

`python -m tests.mistakes.test_lines` prints the lines as they are now, to be read before they are
put into lines.json. Names that are known are left out there: they grow.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from stratafl.base.errors import InvalidInput
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment

TABLE = Path(__file__).with_name("lines.json")
LINES: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
"""Lines of changes of a config, and of command lines."""
CONFIG = """rounds = 1

[tree]
shape = "2x3"

[model]
name = "logistic"

[data]
source = "digits"
partition = ["iid", "iid"]

[schedule]
periods = [1, 1]
"""
SWEEP = 'config = "run.toml"\n\n[grid]\nseed = 2\n"client.lr" = [0.1, "fast"]\n'


def write_project(folder: Path) -> None:
    """A config, a sweep with a wrong value, and a run that is done."""
    (folder / "run.toml").write_text(CONFIG)
    (folder / "grid.toml").write_text(SWEEP)
    Experiment.from_toml(folder / "run.toml").run(save=folder / "runs" / "done", progress=False)


def line_of_change(folder: Path, change: str) -> str:
    try:
        Experiment.from_toml(folder / "run.toml", [change]).start()
    except InvalidInput as problem:
        return _plain(str(problem), folder)
    return "accepted"


def line_of_command(folder: Path, words: str) -> str:
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["stratafl", *shlex.split(words)]),
        contextlib.chdir(folder),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()
    return _plain(errors.getvalue().strip(), folder)


def _plain(line: str, folder: Path) -> str:
    return line.replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "").partition(" known: ")[0]


def test_the_table_is_long_enough() -> None:
    assert len(LINES["changes"]) > 100
    assert len(LINES["commands"]) > 30


@pytest.mark.parametrize("section", sorted({key.partition("=")[0].partition(".")[0] for key in LINES["changes"]}))
def test_a_wrong_value_in_a_config_gives_its_line(tmp_path: Path, section: str) -> None:
    write_project(tmp_path)
    of_section = (f"{section}.", f"{section}=")
    lines = {change: line for change, line in LINES["changes"].items() if change.startswith(of_section)}
    assert {change: line_of_change(tmp_path, change) for change in lines} == lines


def test_a_wrong_command_gives_its_line(tmp_path: Path) -> None:
    write_project(tmp_path)
    lines = LINES["commands"]
    assert {words: line_of_command(tmp_path, words) for words in lines} == lines


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_project(Path(name))
        tell = {"changes": line_of_change, "commands": line_of_command}
        now = {kind: {key: tell[kind](Path(name), key) for key in LINES[kind]} for kind in tell}
    print(json.dumps(now, indent=1, ensure_ascii=False))
