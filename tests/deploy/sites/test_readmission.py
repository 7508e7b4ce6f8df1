"""A site that is out, and the command that takes it back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.cli.main import app
from stratafl.deploy.host.newsroom import Newsroom
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import boards
from stratafl.deploy.protocol.bounds import OFFENCES
from stratafl.deploy.sites.readmission import REQUESTS
from stratafl.deploy.sites.site import Site
from stratafl.deploy.sites.state_file import Durable, stored
from tests.deploy.sites.one_process import OneProcess

pytestmark = pytest.mark.usefixtures("in_a_task")
WHY = "out since round 2: 20 of its messages broke the bounds, the last: samples"


@pytest.fixture
def tree(tmp_path: Path) -> OneProcess:
    """A run in its middle, in which the site 0/1 is out."""
    made = OneProcess.begun(tmp_path)
    folder = made.folders["0"]
    state = stored(folder / "state", Site.load(folder).job)
    assert state is not None and state.below is not None
    first, second = state.below.children
    second = dataclasses.replace(second, offences=OFFENCES, offence="samples", out_round=2)
    state.below = dataclasses.replace(state.below, children=(first, second))
    durable = Durable(folder / "state", Site.load(folder).job)
    durable.write(state)
    durable.close()
    return made


def readmit(tree: OneProcess, *names: str) -> object:
    """What the command raised, or its output."""
    ran = CliRunner().invoke(app, ["deploy", "readmit", *names, "--out", str(tree.folders["0"].parent)])
    return ran.exception or ran.output


def test_one_that_is_out_is_asked_no_more(tree: OneProcess) -> None:
    tree.run()
    assert [set(line["refused"]) for line in tree.rounds[2:]] == [{"0/1"}, {"0/1"}]


def test_one_that_is_readmitted_takes_part_from_the_next_round_on(tree: OneProcess) -> None:
    requests = tree.folders["0"] / "state" / REQUESTS
    assert "0/1: 0 asks it again" in str(readmit(tree, "0/1"))
    assert [each.name for each in requests.iterdir()] == ["0_1"]
    tree.run()
    assert [line["refused"] for line in tree.rounds[2:]] == [[], []]
    assert not list(requests.iterdir()), "it is done, and is not done again"


def test_only_one_that_is_out_is_readmitted_and_at_its_parent_s_host(tree: OneProcess) -> None:
    for names, said in (
        (["0/0", "0/1"], "'0/0': is not out: 0 asks it"),
        (["0/2"], "did you mean"),
        (["root"], "root"),
    ):
        problem = readmit(tree, *names)
        assert isinstance(problem, InvalidInput) and said in str(problem)
    assert not (tree.folders["0"] / "state" / REQUESTS).exists()


def test_status_names_who_is_out_since_when_and_why(tree: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree.folders["0"]
    room = Newsroom(folder, Site.load(folder))
    monkeypatch.setattr(boards, "own", room.boards["node"])
    here = tree.open("0")
    here.aggregator(tree.link(here, {}))
    tree.close()
    room.look({}, stopping=True)
    assert Entry.of((room.telling.read() or {})["sites"]["0/1"]).out == WHY
    shown = CliRunner().invoke(app, ["deploy", "status", "--out", str(folder.parent)], env={"COLUMNS": "160"}).output
    assert f"0/1: {WHY} (`stratafl deploy readmit` takes it back)" in shown
