"""News on their way: what may be told, and who may tell what."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import pytest

pytest.importorskip("flwr")

from stratafl.deploy.news import entries
from stratafl.deploy.news.door import PATH, WHO, NewsDoor, heard_from
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import log
from stratafl.deploy.notes.boards import Board
from stratafl.deploy.protocol import seal
from tests.deploy.news.conftest import WELL

PORT = 9400
KEY = seal.new_key()


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
    return seal.NEWS.seal_request(KEY, entries.encode(sites, repeated=repeated, at=time.time() if at is None else at))


def test_a_child_speaks_for_itself_and_its_subtree_alone(board: Board) -> None:
    door, failing = new_door(), Entry(state="failing", problem="no data", age=0.0)
    first = told({"paris": WELL}, 0.0)
    status, answer = posted(door, first)
    assert status == 409 and not (board.read() or {}).get("heard")
    now = float(json.loads(seal.NEWS.open_reply(KEY, first, answer)))
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
        "key": seal.NEWS.seal_request(seal.new_key(), good),
        "length": seal.NEWS.seal_request(KEY, b" " * 10**6),
        "json": seal.NEWS.seal_request(KEY, b"{"),
        "sites": seal.NEWS.seal_request(KEY, b'{"sites": 3}'),
        "nested": seal.NEWS.seal_request(KEY, b"[" * 20000),
        "empty": b"",
    }.get(damage, good)
    assert posted(new_door(), body, site="elsewhere" if damage == "site" else site)[0] == 403
    assert not (board.read() or {}).get("heard")


def test_everything_else_goes_on_inside() -> None:
    assert posted(new_door(), b"", path="/v1/fleet/x")[0] == 299
    assert posted(new_door(), b"", port=PORT + 2)[0] == 299
