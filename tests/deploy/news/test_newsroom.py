"""What a supervisor makes of the news of its processes and of its children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from stratafl.base.version import __version__
from stratafl.deploy.host.newsroom import NEWS, Newsroom
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import boards, log
from stratafl.deploy.notes.boards import Board
from stratafl.deploy.sites.site import Site


def test_a_process_that_was_killed_has_told_its_supervisor_why_it_failed(tmp_path: Path) -> None:
    shared = Board()

    def work() -> None:
        boards.use(shared, shared)
        log.fail("the disk\x1b[2J is full")
        os.kill(os.getpid(), signal.SIGKILL)

    process = Forked(work, tmp_path / "log", tmp_path)
    process.wait(20)
    found = shared.read()
    assert found is not None and found["problem"] == "the disk\\x1b[2J is full" and not found["well"]


def test_an_exception_that_ends_a_process_is_its_problem(tmp_path: Path) -> None:
    shared = Board()

    def work() -> None:
        boards.use(shared, shared)
        raise MemoryError("no room")

    assert Forked(work, tmp_path / "log", tmp_path).wait(20) == 1
    assert (shared.read() or {})["problem"].startswith("MemoryError in the function work of test_newsroom.py, line ")


def test_a_problem_stays_until_the_process_does_its_work(sites: Path) -> None:
    room = Newsroom(sites / "paris_0", Site.load(sites / "paris_0"))

    def own() -> Entry:
        room._looked = 0.0
        room.look({})
        return Entry.of((room.telling.read() or {})["sites"]["paris/0"])

    assert own().state == "starting"
    room.boards["node"].put(problem="no data", since=time.monotonic(), well=False)
    room.ended("node", 2)
    room.starts("node")
    entry = own()
    assert (entry.state, entry.problem, entry.restarts) == ("failing", "no data", {"node": 1})
    alive = Forked(lambda: time.sleep(60), sites / "log", sites)
    try:
        room.boards["node"].put(well=True, shown={"doing": "waiting", "round": 3, "bytes_in": 7})
        room._looked = 0.0
        room.look({"node": alive})
        entry = Entry.of((room.telling.read() or {})["sites"]["paris/0"])
        assert (entry.state, entry.problem, entry.round, entry.bytes_in) == ("waiting", "", 3, 7)
    finally:
        alive.signal(signal.SIGKILL)
        alive.wait()
    room.ended("node", -9)
    room.starts("node")
    assert own().problem == "its node was ended by signal 9; see logs/node.log"


def test_a_parent_adds_what_it_knows_of_its_children(sites: Path, clock: list[float]) -> None:
    room = Newsroom(sites / "paris", Site.load(sites / "paris"))
    there = Entry(state="round", round=2, age=0.5, took_part=False)
    room.boards["superlink"].put(heard={"paris/0": {"at": 995.0, "clock": -3.0, "sites": {"paris/0": there.as_dict()}}})
    room.boards["node"].put(waits={"paris/0": [990.0, "not connected"]}, took_part=["paris/0"])
    room.look({})
    found = {name: Entry.of(each) for name, each in (room.telling.read() or {})["sites"].items()}
    assert set(found) == {"paris", "paris/0", "paris/1"}
    heard = found["paris/0"]
    assert (heard.age, heard.clock, heard.waited, heard.why, heard.took_part) == (
        5.5,
        -3.0,
        10.0,
        "not connected",
        True,
    )
    assert found["paris/1"].age is None and found["paris/1"].state == "unknown"
    # whose update once counted took part, whatever is forgotten later
    room.look({}, stopping=True)
    again = Newsroom(sites / "paris", Site.load(sites / "paris"))
    again.look({})
    assert (again.telling.read() or {})["sites"]["paris/0"]["took_part"]
    assert (sites / "paris" / NEWS).stat().st_mode & 0o777 == 0o600


def test_that_a_child_took_part_only_its_parent_knows(sites: Path) -> None:
    claims = Entry(state="waiting", age=0.0, took_part=True, out="no", waited=3.0, why="nothing").as_dict()
    room = Newsroom(sites / "root", Site.load(sites / "root"))
    told = {"paris": claims, "paris/0": claims, "rome": claims}
    room.boards["superlink"].put(heard={"paris": {"at": time.monotonic(), "clock": 0.0, "sites": told}})
    room.look({})
    found = {name: Entry.of(each) for name, each in (room.telling.read() or {})["sites"].items()}
    assert not found["paris"].took_part and not found["rome"].took_part and found["paris/0"].took_part
    assert (found["paris"].out, found["paris"].waited, found["paris"].why) == ("", None, "")


def test_what_was_heard_before_a_reset_is_of_another_run(sites: Path, clock: list[float]) -> None:
    room = Newsroom(sites / "root", Site.load(sites / "root"))
    told = {"paris/0": Entry(age=0.0, took_part=True).as_dict()}
    room.boards["superlink"].put(heard={"paris": {"at": 1000.0, "clock": 0.0, "sites": told}})
    room.boards["node"].put(took_part=["rome"])

    def took_part() -> set[str]:
        clock[0] += 10
        room.look({})
        found = (room.telling.read() or {})["sites"]
        return {name for name in found if found[name]["took_part"]}

    assert took_part() == {"root", "rome", "paris/0"}
    room.begin_anew()
    room.starts("node")
    assert took_part() == {"root"}


def test_how_long_ago_a_process_was_started_again_is_told(sites: Path, clock: list[float]) -> None:
    room = Newsroom(sites / "paris_0", Site.load(sites / "paris_0"))
    room.ended("node", 1)
    clock[0] += 30
    room.look({})
    entry = Entry.of((room.telling.read() or {})["sites"]["paris/0"])
    assert entry.restarted == 30 and entry.older(5).restarted == 35 and entry.version == __version__
