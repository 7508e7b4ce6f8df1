"""The way of news from a site to its parent: beside Flower's messages, so that it needs none of the
site's processes.

A POST to the parent's SuperLink, sealed with the key of the edge. The answer is the parent's time,
sealed too, which the next message repeats: that tells old news from new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, describe_exception
from stratafl.deploy.news import entries
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import boards, log
from stratafl.deploy.protocol import seal
from stratafl.deploy.sites.address import is_loopback, parted
from stratafl.deploy.sites.site import Site, slug

PATH = "/v1/stratafl/news"
WHO = "stratafl-site"
"""The header that names the sender, by the name of its folder."""
FRESH = 60.0
"""Seconds after which a parent's time, as a message repeats it, is too old."""
PATIENCE = 5.0
"""Seconds for one message."""
LOOK, SOONEST = 0.25, 0.5
"""Seconds between two looks at what there is to tell, and the least between two messages."""


class NewsDoor:
    """Stands in front of everything else that a SuperLink serves: takes the children's news, and
    keeps the last of each."""

    def __init__(self, inside: Any, port: int, keys: Mapping[str, bytes], subtrees: Mapping[str, frozenset[str]]):
        """`keys`: of the edges, by child."""
        self._inside, self._port, self._subtrees = inside, port, subtrees
        self._children = {slug(name).encode(): (name, key) for name, key in keys.items()}
        self._last: dict[str, float] = {}
        """The parent's time that each child last repeated."""
        self._heard: dict[str, Any] = {}
        self._keeping = False

    @property
    def largest(self) -> int:
        """Bytes of any child's message."""
        return seal.SEAL + max(map(entries.largest, self._subtrees.values()))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["server"][1] != self._port:
            await self._inside(scope, receive, send)
            return
        headers = dict(scope["headers"])
        child, key = self._children.get(headers.get(WHO.encode(), b""), ("", b""))
        data = b""
        if child and scope["method"] == "POST":
            data = await _body(receive, seal.SEAL + entries.largest(self._subtrees[child]))
        try:
            status, answer = self._take(child, key, data)
            self._keep_soon()
        except InvalidInput:
            status, answer = 403, b""
        length = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": answer})

    def _take(self, child: str, key: bytes, sealed: bytes) -> tuple[int, bytes]:
        if not child or not sealed:
            raise InvalidInput("news", "", "not from a child")
        told, sites = entries.decode(seal.NEWS.open_request(key, sealed), self._subtrees[child])
        now, repeated, last = time.time(), told.get("repeated", 0.0), self._last.get(child, 0.0)
        answer = seal.NEWS.seal_reply(key, sealed, json.dumps(now).encode())
        if not now - FRESH < repeated <= now or (repeated <= last <= now):
            return 409, answer
        self._last[child] = repeated
        self._heard[child] = {
            "at": time.monotonic(),
            "clock": told.get("at", now) - now,
            "sites": {name: entry.as_dict() for name, entry in sites.items()},
        }
        return 200, answer

    def _keep_soon(self) -> None:
        """Where the site's other processes find it; not for each of many children apart."""
        if not self._keeping:
            self._keeping = True
            asyncio.get_running_loop().call_later(LOOK, self._keep)

    def _keep(self) -> None:
        self._keeping = False
        boards.own.put(heard=self._heard)


async def _body(receive: Any, largest: int) -> bytes:
    """What was sent; nothing, where it is too long."""
    parts, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return b""
        parts.append(event.get("body", b""))
        size, more = size + len(parts[-1]), event.get("more_body", False)
        if size > largest:
            return b""
    return b"".join(parts)


class Teller:
    """Tells a site's news to its parent."""

    def __init__(self, site: Site, folder: Path):
        import httpx  # comes with Flower

        self._site, self._key = site, files.read_bytes(folder / "up.key")
        trusted = ssl.create_default_context(cafile=folder / "ca.pem")
        # a connection for each message: one that stays would take a place that is for Flower's
        # messages
        self._client = httpx.Client(
            verify=trusted,
            trust_env=not is_loopback(parted(site.parent)[0]),
            timeout=PATIENCE,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._failures: type[Exception] = httpx.HTTPError
        self._parents_time = 0.0
        self._trouble = ""

    def tell(self, sites: Mapping[str, Entry]) -> bool:
        """Whether the parent has it; why not goes into the log, once."""
        try:
            # the first time its time is not known
            taken = self._post(sites) or self._post(sites)
            trouble = "" if taken else "what is told there is refused"
        except (InvalidInput, self._failures) as problem:
            taken, trouble = False, describe_exception(problem)
        if trouble != self._trouble:
            log.say(
                f"{self._site.parent}, the parent's: {trouble or 'hears this site'}",
                log.WARNING if trouble else log.INFO,
            )
        self._trouble = trouble
        return taken

    def _post(self, sites: Mapping[str, Entry]) -> bool:
        data = entries.encode(sites, repeated=self._parents_time, at=time.time())
        sealed = seal.NEWS.seal_request(self._key, data)
        headers = {WHO: slug(self._site.name)}
        answer = self._client.post(f"https://{self._site.parent}{PATH}", content=sealed, headers=headers)
        if answer.status_code not in (200, 409):
            raise InvalidInput("answer", answer.status_code, "the parent does not take news")
        self._parents_time = float(json.loads(seal.NEWS.open_reply(self._key, sealed, answer.content)))
        return answer.status_code == 200


def run(folder: Path, board: boards.Board) -> None:
    """Tell what is on a board, from time to time and when it has changed; once more when asked to
    end."""
    site, over = Site.load(folder), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGTERM, end)
    teller, told, at = Teller(site, folder), "", 0.0
    while True:
        is_last, now = over.is_set(), time.monotonic()
        found = board.read()
        if found and (is_last or now - at > entries.EVERY or (found["summary"] != told and now - at > SOONEST)):
            sites = {name: Entry.of(entry).older(now - found["at"]) for name, entry in found["sites"].items()}
            at = now
            if teller.tell(sites):
                told = found["summary"]
        if is_last:
            return
        over.wait(LOOK)


def door(inside: Any, port: int, site: Site, folder: Path, subtrees: Mapping[str, frozenset[str]]) -> NewsDoor:
    """The door in front of a site's SuperLink."""
    keys = {child: files.read_bytes(folder / "down" / f"{slug(child)}.key") for child in site.children}
    return NewsDoor(inside, port, keys, subtrees)


def heard_from(child: str) -> str:
    """What a child of this site last said to stand in its way."""
    found = (boards.heard.read() or {}).get("heard", {})
    with contextlib.suppress(KeyError, TypeError):
        return Entry.of(found[child]["sites"][child]).problem
    return ""
