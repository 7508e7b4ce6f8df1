"""Terminals and paths of all kinds: what is printed can be printed there, and pasted."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path

import pytest

from stratafl.experiment.experiment import Experiment
from stratafl.runs.session import RunSession
from tests.commands import command

SMALL = 'rounds = 1\n\n[tree]\nshape = "2x2"\n\n[model]\nname = "logistic"\n\n[schedule]\nperiods = [1, 1]\n'


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_can_show_a_table(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    assert command(monkeypatch, "list", "models") == 0
    heading, rule, *_ = written.getvalue().decode(encoding).splitlines()
    assert heading.startswith("name") and set(rule) == {"─" if encoding == "utf-8" else "-"}


def test_what_an_encoding_lacks_is_spelt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = io.BytesIO()
    (tmp_path / "run.toml").write_text(SMALL)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert command(monkeypatch, "run", "run.toml", "--runs", "läufe 日", "--quiet") == 0
    assert b"written to l\\xe4ufe \\u65e5/run-" in written.getvalue()


def test_a_command_to_go_on_with_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    session = RunSession.start(Experiment.from_toml(tmp_path / "run.toml"), "run", tmp_path / "my runs")
    assert shlex.split(session.driver.resumption(session.path))[-2:] == ["resume", str(session.run().path)]


def test_a_mark_at_the_beginning_of_a_config_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL, encoding="utf-8-sig")
    assert Experiment.from_toml(tmp_path / "run.toml").tree.shape == "2x2"


def test_too_many_processes_are_refused_before_they_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    monkeypatch.setattr("stratafl.distributed.launcher.launch", lambda *given: pytest.fail("they were started"))
    assert command(monkeypatch, "run", tmp_path / "run.toml", "--nproc", 99) == 2
    told = "error: --nproc = 99: the tree has 4 clients; every process needs one at least\n"
    assert capsys.readouterr().err == told
