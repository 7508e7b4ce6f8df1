"""Progress of a run on terminals of any width, in notebooks and in pipes, and switched off."""

from __future__ import annotations

import functools
import io
import sys
from types import SimpleNamespace

import pytest
import rich.console
import torch
from torch import nn

from stratafl import RoundResult, Simulation
from stratafl.cli.display import SweepDisplay
from stratafl.simulation import progress
from stratafl.simulation.progress import ProgressBar
from tests.flat import simulate

RECORD = RoundResult(3, 60, 0.1, {"loss": 0.123456, "accuracy": 0.98765}, {}, ("0/1",), 10.0, 1.25)


def study() -> Simulation:
    data = torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    return simulate(lambda: nn.Linear(2, 2), data, parts, "2x2", periods=[3, 1], rounds=2, test=data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_a_bar_is_one_line_and_moves_inside_a_round(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = functools.partial(rich.console.Console, file=io.StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr(rich.console, "Console", terminal)
    display = ProgressBar("a [name] that is rather long for a run", 20, done=2)
    display.show(RECORD)
    shown = [drawn(display)]
    display.on_sync(12, 30)
    shown.append(drawn(display))
    assert all(len(line) <= width for line in shown)
    assert shown[0] != shown[1]
    (task,) = display._bar.tasks
    assert task.completed == pytest.approx(3.4) and task.total == 20
    if width < 60:
        assert all(line.startswith("round 3/20 ") for line in shown)
    if width >= 120:
        assert "round 3/20" in shown[1] and "sync 12/30" in shown[1] and "[name]" in shown[1]
        assert "sync" not in shown[0]


def drawn(display: ProgressBar) -> str:
    console = display._bar.console
    (line,) = console.render_lines(display._bar.make_tasks_table(display._bar.tasks), pad=False)
    return "".join(segment.text for segment in line)


def test_plain_lines_on_a_terminal_that_cannot_write_over_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("study", 20) as display:
        display.show(RECORD)
    assert capsys.readouterr().err.startswith("study: round 3/20  accuracy 0.9877")
    assert not SweepDisplay("sweep", 3).live


def test_plain_lines_elsewhere(capsys: pytest.CaptureFixture) -> None:
    with ProgressBar("study", 20) as display:
        display.on_sync(12, 30)
        display.show(RECORD)
        display.print_line("something")
    out, said = capsys.readouterr()
    assert out == ""
    assert said == "study: round 3/20  accuracy 0.9877  loss 0.1235  refused 0/1  1.2s\nstudy: something\n"


def test_nothing_at_all(capsys: pytest.CaptureFixture) -> None:
    with ProgressBar("study", 20, quiet=True) as display:
        display.on_sync(12, 30)
        display.show(RECORD)
        display.print_line("something")
    study().run()
    assert capsys.readouterr() == ("", ""), "a pipe is no terminal"


def test_one_line_in_a_notebook(notebook: None, capsys: pytest.CaptureFixture) -> None:
    study().run()
    out, said = capsys.readouterr()
    assert said == "" and out.count("\n") == 1 and out.endswith("\n")
    lines = [line.strip() for line in out.split("\r")[1:]]
    assert [line.split("  ")[:2] for line in lines[:3]] == [
        ["run: round 0/2", "sync 1/3"],
        ["run: round 0/2", "sync 2/3"],
        ["run: round 1/2", lines[2].split("  ")[1]],
    ]
    assert len(lines) == 6 and lines[-1].startswith("run: round 2/2")


def test_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(progress, "_bar", lambda: None)
    monkeypatch.setattr(progress, "is_interactive", lambda: True)
    with ProgressBar("study", 20) as display:
        display.on_sync(1, 2)
        display.print_line("something")
        display.show(RECORD)
    assert capsys.readouterr().err.split("\n")[1] == "study: something"


def test_shown_where_asked_for(capsys: pytest.CaptureFixture) -> None:
    simulation = study()
    on_sync = simulation.on_sync
    simulation.run(progress=True)
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert simulation.on_sync is on_sync
