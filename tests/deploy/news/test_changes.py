"""What an operator is told of the news: each thing once, soon, and never as a flood."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("flwr")

from stratafl.base.version import __version__
from stratafl.deploy.news import changes, entries
from stratafl.deploy.news.changes import Changes
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import log, waiting
from stratafl.deploy.notes.boards import Board
from tests.deploy.news.conftest import WELL

TREE = {"root": "", "paris": "root", "rome": "root", "paris/0": "paris", "paris/1": "paris", "rome/0": "rome"}


def test_waiting_is_said_soon_then_less_and_less_often(
    clock: list[float], board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    asking = waiting.Waiting(lambda name: "no data" if name == "a" else "")
    asking.begin()
    for _ in range(1000):
        clock[0] += 0.1
        asking.look({"a": waiting.UNCONNECTED, "b": waiting.BUSY, "c": waiting.UNCONNECTED})
    said = capfd.readouterr().err.splitlines()
    assert [line.split(" WARNING ")[1] for line in said if "a," in line][:2] == [
        "waiting for a, for 5 s: not connected; it says: no data",
        "waiting for a, for 10 s: not connected; it says: no data",
    ]
    assert len([line for line in said if "for a," in line]) == 5
    assert all("INFO" in line and "at work" in line for line in said if "for b," in line)
    assert (board.read() or {})["waits"]["c"] == [1000.0, "not connected"]
    asking.over()
    assert (board.read() or {})["waits"] == {}


def watched(clock: list[float]) -> tuple[Changes, dict[str, Entry]]:
    found, sites = Changes(TREE, whole=True), dict.fromkeys(TREE, WELL)
    assert found.lines(sites) == []
    clock[0] += 20
    return found, sites


def said(lines: list[changes.Line]) -> list[str]:
    return [text for text, _ in lines]


def test_who_was_never_heard_is_missing_soon_and_back_when_it_comes(clock: list[float]) -> None:
    found = Changes(TREE, whole=True)
    assert found.lines({}) == []
    sites = dict.fromkeys(TREE, WELL) | {"rome/0": Entry()}
    assert found.lines(sites) == []
    clock[0] += changes.GRACE + 1
    assert said(found.lines(sites)) == ["rome/0 is missing: nothing was heard from it in 11 s"]
    assert found.lines(sites) == []
    clock[0] += 5
    assert found.lines(sites | {"rome/0": WELL}) == [("rome/0 is back after 5 s", log.INFO)]


def test_a_site_that_falls_silent_takes_those_below_with_it(clock: list[float]) -> None:
    found, sites = watched(clock)
    for name in ("paris", "paris/0", "paris/1"):
        sites[name] = dataclasses.replace(WELL, age=entries.SILENT + 1, round=4)
    (text,) = said(found.lines(sites))
    assert text.startswith("paris is missing: nothing was heard from it in 9 s") and "with it paris/0, paris/1" in text
    assert said(found.lines(sites | dict.fromkeys(("paris", "paris/0", "paris/1"), WELL)))[0].startswith(
        "paris is back"
    )


def test_problems_restarts_clocks_and_warnings_are_each_said_once(clock: list[float]) -> None:
    found, sites = watched(clock)
    entry = dataclasses.replace(
        WELL, state="failing", problem="no data", restarts={"node": 1}, clock=8.0, said=((1, "refused"),)
    )
    assert said(found.lines(sites | {"paris/0": entry})) == [
        "paris/0: no data",
        "paris/0: its node was started again, once in 100 s",
        "the clock of paris/0 is 8.0 s ahead of that of paris",
        "paris/0: refused",
    ]
    assert found.lines(sites | {"paris/0": dataclasses.replace(entry, clock=8.5)}) == []
    assert said(found.lines(sites)) == ["paris/0 is back after 0 s", "the clock of paris/0 is right again"]


def test_another_version_of_the_package_is_said_once(clock: list[float]) -> None:
    found, sites = watched(clock)
    entry = dataclasses.replace(WELL, version="9.9")
    (text,) = said(found.lines(sites | {"paris/0": entry}))
    assert text == f"paris/0 works with stratafl 9.9, this site with {__version__}"
    assert found.lines(sites | {"paris/0": entry}) == []
    assert found.lines(sites | {"paris/0": dataclasses.replace(WELL, version=__version__)}) == []


def test_what_goes_on_for_long_is_no_flood(clock: list[float]) -> None:
    found, sites = watched(clock)
    lines = []
    for number in range(1, 1001):
        clock[0] += 2
        texts = tuple((4 * number + each, f"refused {4 * number + each}") for each in range(4))
        entry = dataclasses.replace(WELL, state="failing", problem="no data", restarts={"node": number}, said=texts)
        lines += said(found.lines(sites | {"paris/0": entry}))
    assert len([text for text in lines if "no data" in text]) == 1
    assert len([text for text in lines if "started again" in text]) == 10
    assert len([text for text in lines if "refused" in text]) <= changes.MOST * (2000 / changes.AGAIN + 1)


def test_who_is_heard_and_does_not_come_to_its_parent_is_named_with_the_reason(clock: list[float]) -> None:
    found, sites = watched(clock)
    late = dataclasses.replace(WELL, waited=5.0, why=waiting.UNCONNECTED)
    assert found.lines(sites | {"rome/0": late}) == []
    late = dataclasses.replace(late, waited=12.0)
    assert said(found.lines(sites | {"rome/0": late})) == ["rome/0: waited for, for 12 s: not connected"]
    other = dataclasses.replace(late, waited=1.0, why="client.lr is 0.2 there and 0.1 here")
    assert said(found.lines(sites | {"rome/0": other})) == [
        "rome/0: waited for, for 1 s: client.lr is 0.2 there and 0.1 here"
    ]


def test_a_refusal_is_said_once_though_both_sides_tell_of_it(clock: list[float]) -> None:
    found, sites = watched(clock)
    late = dataclasses.replace(WELL, waited=1.0, why="no space left")
    assert said(found.lines(sites | {"rome/0": late})) == ["rome/0: waited for, for 1 s: no space left"]
    own = dataclasses.replace(late, state="failing", problem="refused: no space left")
    assert found.lines(sites | {"rome/0": own}) == []
    assert said(found.lines(sites)) == ["rome/0 is back after 0 s"]


def test_a_supervisor_that_began_anew_is_said(clock: list[float]) -> None:
    found, sites = watched(clock)
    assert said(found.lines(sites | {"paris": dataclasses.replace(WELL, up=1.0)})) == [
        "paris: it was started again as a whole"
    ]
