"""Connections, before and while anything is read from them: how many, for how long, and who goes
when it is full.

Whoever has not said who he is has a stranger's place, of which there are few and each for a short
while: when they are full, the oldest goes, of the address that has most of them. Who has shown by a
request that he is one of those the port is for (callers.py) has a place of his own, which strangers
cannot take. Each port has its own places, and all together leave some of the process's descriptors
for everything else.

This is in front of uvicorn's server, and accepts in its stead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stratafl.deploy.door.doors import LARGEST_HEAD, VERDICT, Doors
from stratafl.deploy.door.places import Allowance, Refusals, place_of

WAITING = 1024
"""Connections that may wait to be accepted; the kernel may allow fewer."""
AT_ONCE = 64
"""Accepted before anything else gets its turn."""
STRANGER = 15.0
"""Seconds from the first packet to a request whose headers say who sends it: handshake, headers,
everything."""
HEAD = 15.0
"""Seconds for the headers of a later request, from the first byte."""
WINDOW, LEAST = 30.0, 30 << 10
"""A body or an answer on its way moves by so many bytes in as many seconds, or nobody is at the
other end."""
CLOSING = 2.0
"""Seconds for saying goodbye."""
SWEEP = 0.5
"""Seconds between two looks at all that."""
RESERVED = 128
"""Descriptors for what is not a connection."""
RESET = struct.pack("ii", 1, 0)
"""What SO_LINGER is set to: the other side learns at once that it is to try again, where an end in
the middle of a handshake is an error that Flower does not try again after."""


class Limits(NamedTuple):
    """How many connections one port takes."""

    strangers: int
    """Connections that have not said who they are."""
    at_a_place: int
    """How many of these may come from one address."""
    of_a_caller: int
    """Connections of each caller who has said so."""

    @staticmethod
    def of(callers: int, descriptors: int) -> Limits:
        """callers: for whom the port is, who may all be behind one address; descriptors: what it
        may use of them."""
        at_a_place = 64 + 4 * callers
        strangers = min(4 * at_a_place, descriptors // 3)
        each = min(32, (descriptors - strangers) // callers)
        return Limits(strangers, min(at_a_place, strangers // 2), max(4, each))


def descriptors() -> int:
    """All that this process may have, as many as it is allowed to ask for, without those
    reserved."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, (1 << 20 if soft == resource.RLIM_INFINITY else soft) - RESERVED)


class Visit:
    """One connection, from its first packet on."""

    def __init__(self, sock: socket.socket, place: str):
        self.sock, self.place, self.since = sock, place, time.monotonic()
        self.who: str | None = None
        """Who it is, once a request has shown that."""
        self.handshake: asyncio.Task[None] | None = None
        self.talk: Talk | None = None

    def end(self) -> None:
        """Now, wherever it is."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if self.talk is not None:
            self.talk.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()
        else:
            self.sock.close()

    def overdue(self, now: float) -> str | None:
        """Why it has to end, if it has to; empty where nobody needs to know."""
        if self.who is None and now - self.since > STRANGER:
            return f"a connection that did not say who it is within {STRANGER:g} s"
        return None if self.talk is None else self.talk.overdue(now)


class Gate:
    """The places behind one port."""

    def __init__(self, limits: Limits, refusals: Refusals):
        self._limits, self._refusals = limits, refusals
        self._strangers: dict[str, dict[Visit, None]] = {}
        """Connections that have not said who they are, by address, the oldest first."""
        self._callers: dict[str, dict[Visit, None]] = {}
        """Connections of known callers, by name, the oldest first."""
        self._homes: dict[str, None] = {}
        """Addresses that callers were at, the latest last."""
        room = limits.at_a_place
        self._new, self._new_at_home = Allowance(room / 8, room), Allowance(room * 2, room * 4)

    def __iter__(self) -> Iterator[Visit]:
        for group in (*self._strangers.values(), *self._callers.values()):
            yield from group

    def enter(self, sock: socket.socket, place: str) -> Visit | None:
        """Who has connected, if there is a place for him, or one can be made."""
        visit = Visit(sock, place)
        if not (self._new_at_home if place in self._homes else self._new).take(place):
            self._refusals.add(place, "more connections a second than are taken from one address")
            visit.end()
            return None
        if len(self._strangers.get(place, ())) >= self._limits.at_a_place:
            self.make_room(place)
        elif sum(map(len, self._strangers.values())) >= self._limits.strangers:
            self.make_room()
        self._strangers.setdefault(place, {})[visit] = None
        return visit

    def make_room(self, place: str | None = None) -> None:
        """End the oldest stranger of a place, or of that which has most of them; homes come
        last."""
        if place is None:
            if not self._strangers:
                return
            place = max(self._strangers, key=lambda each: (each not in self._homes, len(self._strangers[each])))
        oldest = next(iter(self._strangers[place]))
        self._refusals.add(place, "too many connections that do not say who they are")
        self.leave(oldest)
        oldest.end()

    def know(self, visit: Visit, who: str) -> None:
        """A visitor has shown who he is."""
        if visit.who == who:
            return
        self.leave(visit)
        visit.who = who
        own = self._callers.setdefault(who, {})
        own[visit] = None
        self._homes.pop(visit.place, None)
        self._homes[visit.place] = None
        if len(self._homes) > 4 * len(self._callers):
            del self._homes[next(iter(self._homes))]
        if len(own) > self._limits.of_a_caller:
            oldest = next(iter(own))
            self._refusals.add(oldest.place, f"more than {self._limits.of_a_caller} connections", who)
            self.leave(oldest)
            oldest.end()

    def leave(self, visit: Visit) -> None:
        table, key = (self._strangers, visit.place) if visit.who is None else (self._callers, visit.who)
        group = table.get(key, {})
        group.pop(visit, None)
        if not group and visit.who is None:
            table.pop(key, None)

    def sweep(self) -> None:
        """End what takes too long."""
        now = time.monotonic()
        for visit in list(self):
            why = visit.overdue(now)
            if why is not None:
                if why:
                    self._refusals.add(visit.place, why, visit.who or "")
                self.leave(visit)
                visit.end()


class Talk(HttpToolsProtocol):
    """What is said on a connection, as uvicorn takes it, with an end to everything."""

    def __init__(self, visit: Visit, gate: Gate, doors: Doors, **named: Any):
        super().__init__(**named)
        self._visit, self._gate, self._doors = visit, gate, doors
        self._head_since: float | None = None
        self._head, self._came = 0, 0
        self._in_body = self._is_refused = False
        self._closing_since: float | None = None
        self._look: tuple[float, Any, int, int] = (time.monotonic(), None, 0, 0)

    def connection_made(self, transport: Any) -> None:
        self._visit.talk = self
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self._visit)
        self._visit.talk = None  # each has the other, and its buffers would wait to be found as garbage
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._came += len(data)
        if self._head_since is not None:
            self._head += len(data)
        if self._head > LARGEST_HEAD:
            self._turn_away(f"more than {LARGEST_HEAD} bytes of headers")
            return
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._turn_away("something that is not HTTP")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since, self._head = time.monotonic(), 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_since, self._head, self._in_body = None, 0, True
        scope = cast(MutableMapping[str, Any], self.scope)
        verdict = scope[VERDICT] = self._doors.judge(scope, self._visit.who)
        self._is_refused = verdict.status != 0
        if verdict.who is not None:
            self._gate.know(self._visit, verdict.who)
        if verdict.who is None or self._is_refused:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def overdue(self, now: float) -> str | None:
        """Why this has to end, if it has to; a goodbye that takes too long is nobody's business."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            return "" if now - self._closing_since > CLOSING else None
        if self._head_since is not None and now - self._head_since > HEAD:
            return f"headers that took more than {HEAD:g} s"
        since, cycle, came, left = self._look
        if now - since < WINDOW:
            return None
        leaves = self.transport.get_write_buffer_size()
        self._look = now, self.cycle, self._came, leaves
        if cycle is None or cycle is not self.cycle:
            return None
        is_stuck = self._in_body and not self.flow.read_paused and self._came - came < LEAST
        is_unread = bool(left and leaves) and left - leaves < LEAST
        return f"less than {LEAST >> 10} kB within {WINDOW:g} s" if is_stuck or is_unread else None

    def _turn_away(self, why: str) -> None:
        self._doors.refusals.add(self._visit.place, why, self._visit.who or "")
        self.send_400_response(f"{why}\n")


class Door:
    """A listening socket, as uvicorn expects a server to be."""

    def __init__(self, sock: socket.socket, gate: Gate, greet: Callable[[Gate, Visit], Any]):
        self._sock, self._gate, self._greet = sock, gate, greet
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(WAITING)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._gate.make_room()
                    self._pause()
                    return
                continue  # it had gone before it was taken
            sock.setblocking(False)
            visit = self._gate.enter(sock, place_of(address[0]))
            if visit is not None:
                visit.handshake = self._loop.create_task(self._greet(self._gate, visit))
                visit.handshake.add_done_callback(partial(self._greeted, visit))

    def _greeted(self, visit: Visit, handshake: asyncio.Task[None]) -> None:
        if visit.talk is None:
            self._gate.leave(visit)
            visit.sock.close()

    def _pause(self) -> None:
        """The socket stays ready, and asking it again at once would be all that is done."""
        self._loop.remove_reader(self._sock)
        self._again = self._loop.call_later(SWEEP, self._loop.add_reader, self._sock, self._accept)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock)
        for visit in list(self._gate):
            if visit.talk is None:
                visit.end()

    async def wait_closed(self) -> None:
        pass


class Server(uvicorn.Server):
    """uvicorn's, behind gates: `limits` says of each port how many may come in."""

    def __init__(self, config: uvicorn.Config, limits: Mapping[int, Limits]):
        config.ws = "none"
        config.proxy_headers = False  # nobody's address is what he says it is
        super().__init__(config)
        assert isinstance(config.app, Doors)
        self._doors, self._limits = config.app, limits
        self._sweeping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return
        gates = []
        self.servers: list[Any] = []
        for sock in sockets or [self.config.bind_socket()]:
            gates.append(Gate(self._limits[sock.getsockname()[1]], self._doors.refusals))
            self.servers.append(Door(sock, gates[-1], self._greet))
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(gates))
        self.started = True

    async def _greet(self, gate: Gate, visit: Visit) -> None:
        """A handshake, and then HTTP."""

        def talk() -> Talk:
            state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
            return Talk(visit, gate, self._doors, **state)

        loop, tls = asyncio.get_running_loop(), self.config.ssl
        limits = {"ssl_handshake_timeout": STRANGER, "ssl_shutdown_timeout": CLOSING} if tls else {}
        with contextlib.suppress(OSError, asyncio.CancelledError):  # gone, sent away, or not TLS
            await loop.connect_accepted_socket(talk, visit.sock, ssl=tls, **limits)

    async def _sweep(self, gates: list[Gate]) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            for gate in gates:
                gate.sweep()
            self._doors.refusals.tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        await super().shutdown(sockets)
