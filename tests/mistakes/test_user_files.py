"""Errors in user files on the command line: message, user frames and exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl.base.files import read_json
from stratafl.experiment.experiment import Experiment
from stratafl.rules import registry
from stratafl.sweeps import run_all
from tests.commands import command
from tests.sweeps.inline import Inline

CONFIG = """
rounds = 3
plugins = {plugins}

[tree]
shape = "2x2"

[model]
name = "{model}"

[method]
name = "{method}"

[schedule]
periods = [2, 2]
"""
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, classes), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > {after}:
            raise ValueError("no more")
        return self.layer(x.flatten(1))
"""
RULE = """
from stratafl import average, register

@register("mine")
def mine():
    "A rule of my own."
    def merge(memory, start, mean, share):
        return memory, [1, 2, 3]
    return average()._replace(merge=merge)
"""
FILES: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "a rule": ({"mine.py": RULE}, {"method": "mine", "plugins": '["mine.py"]'}, [
        "error: rule 'mine': merge returned a list of 3 as the model, "
        "must be a tensor of shape (2, 650) like mean['model']",
        "  {here}/mine.py, line 7, in merge", "    def merge(memory, start, mean, share):"]),
    "a syntax error": ({"mine.py": "def (:\n"}, {"plugins": '["mine.py"]'}, [
        "error: plugins = '{here}/mine.py': cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)",
        "  {here}/mine.py, line 1, in <module>", "    def (:"]),
    "a failing import": ({"mine.py": "1 / 0\n"}, {"plugins": '["mine.py"]'}, [
        "error: plugins = '{here}/mine.py': cannot be imported: ZeroDivisionError: division by zero",
        "  {here}/mine.py, line 1, in <module>", "    1 / 0"]),
    "a model at set-up": ({"net.py": MODEL.format(after=0)}, {"model": "net.py:Net"}, [
        "error: model = 'Net': cannot take data.source inputs of shape (1, 8, 8): ValueError: no more",
        "  {here}/net.py, line 13, in forward", '    raise ValueError("no more")']),
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the rules that a test registers, which others would find."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def told_by(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    return command(monkeypatch, *arguments), capsys.readouterr().err.splitlines()


def written(folder: Path, files: dict[str, str], **changes: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    values = {"model": "logistic", "method": "hfedavg", "plugins": "[]", **changes}
    (folder / "c.toml").write_text(CONFIG.format(**values))
    return folder / "c.toml"


@pytest.mark.parametrize(("files", "changes", "lines"), FILES.values(), ids=FILES.keys())
def test_the_command_line_shows_the_line_and_the_users_frames(
    files: dict, changes: dict, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, files, **changes)
    code, said = told_by(capsys, monkeypatch, "run", path.name)
    assert code == 4
    here = Path(tmp_path).resolve()
    assert said == [each.replace("{here}", str(here)) for each in lines]


def test_a_run_folder_has_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"net.py": MODEL.format(after=30)}, model="net.py:Net")
    code, said = told_by(capsys, monkeypatch, "run", "c.toml", "--quiet")
    assert code == 4
    line = "model 'Net': Net.forward raised ValueError: no more, in round 2"
    assert said[0] == f"error: {line}"
    assert len(said) == 3
    (folder,) = (tmp_path / "runs").iterdir()
    status = read_json(folder / "status.json")
    assert (status["status"], status["reason"]) == ("failed", line)


def test_a_run_of_a_sweep_tells_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, {"net.py": MODEL.format(after=30)}, model="net.py:Net")
    (outcome,) = run_all({"a": Experiment.from_toml(path)}, "runs", executor=Inline())
    assert (outcome.status, outcome.reason) == (
        "failed",
        "model 'Net': Net.forward raised ValueError: no more, in round 2",
    )
