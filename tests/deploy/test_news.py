"""News of a tree: who may tell what, what a parent makes of it, and what an operator is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from stratafl.base import files
from stratafl.cli.main import app
from stratafl.config.schema import Config
from stratafl.deploy.host import attendance, this_machine, view
from stratafl.deploy.host.newsroom import NEWS, Newsroom, parents
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.host.supervise import Supervisor
from stratafl.deploy.news import changes, entries
from stratafl.deploy.news.changes import Changes
from stratafl.deploy.news.door import PATH, WHO, NewsDoor, heard_from
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import boards, log, waiting
from stratafl.deploy.notes.boards import Board
from stratafl.deploy.protocol import seal
from stratafl.deploy.sites.provision import Topology, provision
from stratafl.deploy.sites.site import Site, tree_of
from stratafl.deploy.sites.state_file import Durable

PORT = 9400
KEY = seal.new_key()
TREE = {"root": "", "paris": "root", "rome": "root", "paris/0": "paris", "paris/1": "paris", "rome/0": "rome"}
WELL = Entry(state="waiting", age=0.0, up=100.0)


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    """A board of its own for each test."""
    fresh = Board()
    monkeypatch.setattr(boards, "own", fresh)
    monkeypatch.setattr(boards, "heard", fresh)
    return fresh


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, as modules of the deployment see them."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


# -- what may be told ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, [], {}, -1, 1e400, float("nan"), 10**400, "x" * 10**6, "\x1b[2J\n", [[[]]], True, {"a": {}}]
)
@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Entry)])
def test_whatever_a_field_holds_an_entry_is_small_and_printable(field: str, value: Any) -> None:
    entry = Entry.of({field: value})
    text = entries.encode({"x": entry}).decode()
    assert len(text) < entries.PER_SITE and text.isprintable()
    assert Entry.of(json.loads(json.dumps(entry.as_dict()))) == entry


def test_the_longest_entry_fits_into_a_message() -> None:
    worst = '"\U0001f600' * 10**4
    entry = Entry.of({**dict.fromkeys(("problem", "why"), worst), "said": [[n, worst + str(n)] for n in range(99)]})
    name = worst[:200]
    assert len(entry.said) == log.LAST
    assert len(entries.encode({name: entry}, at=1.0)) < entries.largest({name})


def posted(door: NewsDoor, body: bytes, site: str = "paris", path: str = PATH, port: int = PORT) -> tuple[int, bytes]:
    """What is answered to a request."""
    sent: list[Any] = []
    parts = [body[i : i + 1000] for i in range(0, len(body), 1000)] or [b""]
    events = iter([{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts])

    async def receive() -> Any:
        return next(events)

    async def send(event: Any) -> None:
        sent.append(event)

    async def call() -> None:
        headers = [(WHO.encode(), site.encode())]
        scope = {"type": "http", "path": path, "method": "POST", "server": ("", port), "headers": headers}
        await door(scope, receive, send)
        door._keep()

    asyncio.run(call())
    return sent[0]["status"], sent[1]["body"]


async def inside(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299})
    await send({"type": "http.response.body", "body": b""})


def new_door() -> NewsDoor:
    own = {"paris": frozenset({"paris", "paris/0"}), "rome": frozenset({"rome"})}
    return NewsDoor(inside, PORT, {"paris": KEY, "rome": seal.new_key()}, own)


def told(sites: dict[str, Entry], repeated: float, at: float | None = None) -> bytes:
    return seal.seal_news(KEY, entries.encode(sites, repeated=repeated, at=time.time() if at is None else at))


def test_a_child_speaks_for_itself_and_its_subtree_alone(board: Board) -> None:
    door, failing = new_door(), Entry(state="failing", problem="no data", age=0.0)
    first = told({"paris": WELL}, 0.0)
    status, answer = posted(door, first)
    assert status == 409 and not (board.read() or {}).get("heard")
    now = float(json.loads(seal.open_heard(KEY, first, answer)))
    body = told({"paris": WELL, **dict.fromkeys(("paris/0", "rome", "root", "x"), failing)}, now, time.time() + 8)
    assert posted(door, body)[0] == 200
    heard = (board.read() or {})["heard"]
    assert set(heard) == {"paris"} and set(heard["paris"]["sites"]) == {"paris", "paris/0"}
    assert heard["paris"]["clock"] == pytest.approx(8.0, abs=0.5)
    assert heard_from("paris") == "" and heard_from("nobody") == ""
    # the same once more is old
    assert posted(door, body)[0] == 409
    assert posted(door, body, site="rome")[0] == 403


@pytest.mark.parametrize("damage", ["seal", "key", "length", "site", "json", "sites", "nested", "empty"])
def test_what_is_no_news_of_a_child_is_refused_and_ends_nobody(damage: str, board: Board) -> None:
    good, site = told({"paris": WELL}, time.time()), "paris"
    body = {
        "seal": good[:-1] + bytes([good[-1] ^ 1]),
        "key": seal.seal_news(seal.new_key(), good),
        "length": seal.seal_news(KEY, b" " * 10**6),
        "json": seal.seal_news(KEY, b"{"),
        "sites": seal.seal_news(KEY, b'{"sites": 3}'),
        "nested": seal.seal_news(KEY, b"[" * 20000),
        "empty": b"",
    }.get(damage, good)
    assert posted(new_door(), body, site="elsewhere" if damage == "site" else site)[0] == 403
    assert not (board.read() or {}).get("heard")


def test_everything_else_goes_on_inside() -> None:
    assert posted(new_door(), b"", path="/v1/fleet/x")[0] == 299
    assert posted(new_door(), b"", port=PORT + 2)[0] == 299


# -- what a supervisor makes of it -----------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news")
    (folder / "run.toml").write_text(
        "[tree]\nshape = { paris = 2, rome = 1 }\n[model]\nname = 'mlp'\nhidden = [2]\n"
        "[schedule]\nperiods = [2, 1]\n[run]\nrounds = 4\n"
    )
    (folder / "topology.toml").write_text('config = "run.toml"\n')
    provision(Topology.load(folder / "topology.toml"), folder / "sites")
    return folder / "sites"


@pytest.fixture
def sites(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "sites")


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
    assert (shared.read() or {})["problem"] == "MemoryError: no room"


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


# -- what is said ----------------------------------------------------------------------------------


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
    other = dataclasses.replace(late, waited=1.0, why="leaf.lr is 0.2 there and 0.1 here")
    assert said(found.lines(sites | {"rome/0": other})) == [
        "rome/0: waited for, for 1 s: leaf.lr is 0.2 there and 0.1 here"
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


# -- what is seen ----------------------------------------------------------------------------------


def write_news(folder: Path, entries: dict[str, Entry]) -> None:
    files.write_json(
        folder / NEWS, {"at": time.time(), "sites": {name: each.as_dict() for name, each in entries.items()}}
    )


def test_status_shows_the_whole_tree_that_the_root_knows(sites: Path) -> None:
    failing = dataclasses.replace(
        WELL, state="failing", problem="no data\x07", problem_for=3.0, waited=6.0, why="not connected"
    )
    write_news(sites / "root", {"root": WELL, "paris": WELL, "paris/0": failing})
    for name in ("paris", "paris_0", "paris_1", "rome", "rome_0"):
        files.remove(sites / name)  # they are on other hosts
    ran = CliRunner().invoke(app, ["deploy", "status", "--out", str(sites)])
    assert ran.exit_code == 0, ran.exception
    assert (
        "paris/0: no data\\x07 (for 3 s)" in ran.output
        and "paris has waited for it for 6 s: not connected" in ran.output
    )
    assert "rome/0: nothing was heard from it" in ran.output
    document = json.loads(CliRunner().invoke(app, ["deploy", "status", "--json", "--out", str(sites)]).output)
    assert list(document["sites"]) == ["root", "paris", "rome", "paris/0", "paris/1", "rome/0"]
    seen = document["sites"]["paris/0"]
    fields = {each.name for each in dataclasses.fields(Entry)}
    assert set(seen) == fields | {"parent", "here", "missing"}
    assert seen["parent"] == "paris" and not seen["here"] and seen["problem"] == "no data\\x07"
    assert document["sites"]["rome/0"]["missing"] and document["sites"]["rome/0"]["age"] is None


def test_without_the_root_s_folder_status_shows_what_this_host_knows(sites: Path) -> None:
    files.remove(sites / "root")
    files.remove(sites / "paris_0")
    write_news(sites / "paris", {"paris": WELL, "paris/0": dataclasses.replace(WELL, state="round", round=2, age=1.0)})
    found = view.seen(this_machine.sites(sites))["sites"]
    assert found["paris/0"]["state"] == "round" and found["paris"]["state"] == "stopped"
    assert set(found) == {"paris", "paris/0", "paris/1", "rome", "rome/0"}


# -- who took part ---------------------------------------------------------------------------------


def record(root: Path, *rounds: tuple[list[str], list[str]]) -> None:
    lines = [json.dumps({"round": n, "absent": a, "refused": r}) for n, (a, r) in enumerate(rounds, 1)]
    (root / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_who_was_absent_or_refused_in_every_meeting_never_took_part(sites: Path) -> None:
    root = sites / "root"
    record(root, (["paris/0"] * 2, ["rome"]), (["paris/0", "paris/0"], ["rome"]))
    assert attendance.never(root) == ["rome", "paris/0", "rome/0"]
    record(root, (["paris/0"] * 2, ["rome"]), ([], ["rome"]))
    assert attendance.never(root) == ["rome", "rome/0"]
    # in some meetings of a round only: the news know
    record(root, (["paris/0"], []), (["paris/0"], []))
    assert attendance.never(root) == ["paris/0"]
    write_news(root, {"paris/0": Entry(took_part=True)})
    assert attendance.never(root) == []


def test_who_was_never_drawn_is_not_missed(sites: Path) -> None:
    root = sites / "root"
    config = (root / "config.toml").read_text().replace("periods = [2, 1]", "periods = [2, 1]\nparticipation = [1, 1]")
    (root / "config.toml").write_text(config)
    given = Config.load(root / "config.toml")
    tree = tree_of(given)
    above = {name: attendance._above(name, tree) for name in parents(tree, "root")}
    asked = next(attendance._drawn(given, tree, above))
    assert len(asked) < 5
    record(root, (sorted(asked), []))
    assert set(attendance.never(root)) == asked


def test_the_root_s_own_exit_code_says_that_a_site_never_took_part(sites: Path) -> None:
    durable = Durable(sites / "root" / "state", "run")
    durable.show(doing="done", round=1)
    durable.close()
    record(sites / "root", ([], []))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        told: list[str] = []
        assert Supervisor(sites / "root", told.append).run() == 0 and told == []
        record(sites / "root", (["paris/1"], ["rome"]))
        assert Supervisor(sites / "root", told.append).run() == attendance.INCOMPLETE
        assert told == ["never took part in this run: rome, paris/1, rome/0"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_up_of_a_run_that_is_over_says_again_who_never_took_part(sites: Path, made: Path) -> None:
    durable = Durable(sites / "root" / "state", files.read_json(sites / "root" / "site.json")["job"])
    durable.show(doing="done", round=1)
    durable.close()
    record(sites / "root", (["paris/0"] * 2, []))
    ran = CliRunner().invoke(app, ["deploy", "up", str(made.parent / "topology.toml"), "--local", "--out", str(sites)])
    assert ran.exit_code == attendance.INCOMPLETE, (ran.exception, ran.output)
    assert ran.output.splitlines()[-1].endswith("WARNING never took part in this run: paris/0")
