"""What is let in, before anybody reads it: one interface behind each port, to those it is for, and
nothing larger than the run's messages.

Flower serves all its interfaces on one port, with a page that describes them, and reads a body of
any size before it asks whose it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from stratafl.deploy.door.callers import Callers, Unknown
from stratafl.deploy.door.places import Allowance, Refusals, place_of

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
ENVELOPE = 1 << 16
"""Bytes that Flower may add to a message of ours."""
LARGEST_HEAD = 16 << 10
"""Bytes of a request's headers."""
AT_ONCE = 3
"""Messages of the largest size that one caller may have on their way in: one, and what is left of
tries before."""
REQUESTS, RESERVE = 500.0, 1000.0
"""Requests that one caller may send, per second and at once: several times what Flower manages to
answer."""
VERDICT = "stratafl.verdict"
"""The key under which a request's scope has the verdict, once somebody has judged."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Verdict(NamedTuple):
    """What is made of a request, from its headers."""

    who: str | None = None
    """Who sends the request; None where nobody knows."""
    status: int = 0
    """The HTTP status of the answer, if the request is not let in."""
    why: str = ""
    largest: int = 0
    """Bytes of its body, at most."""


class Doors:
    """Lets through each port only what belongs there, of those it is for, and of no more than
    `largest` bytes.

    open_to_all: paths of the children's port that take a body from anybody, and the most bytes of
        it, which must be announced. Such a request has its connection for itself, and what it says
        is for the one behind the door to doubt.
    """

    def __init__(
        self,
        inside: Any,
        behind: Mapping[int, str],
        largest: int,
        callers: Mapping[int, Callers] | None = None,
        open_to_all: Mapping[str, int] | None = None,
        stamp: Callable[[Scope, Send], Send] = lambda scope, send: send,
    ):
        self._inside, self._behind, self._largest, self._stamp = inside, behind, largest + ENVELOPE, stamp
        self._callers, self._open = callers or {}, open_to_all or {}
        self._requests = Allowance(REQUESTS, RESERVE)
        self._on_their_way: Counter[str | None] = Counter()
        self.refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inside(scope, receive, send)
        elif scope["type"] == "http":
            send = self._stamp(scope, send)
            verdict = scope[VERDICT] if VERDICT in scope else self.judge(scope)
            if verdict.status:
                await _answer(send, verdict.status)
            else:
                await self._carried(verdict, scope, receive, send)

    def judge(self, scope: Scope, proven: str | None = None) -> Verdict:
        """Whether to let a request in. `proven`: who sent those before it on its connection."""
        verdict = self._judged(scope, proven)
        if verdict.status:
            self.refusals.add(_place(scope), verdict.why, verdict.who or "")
        return verdict

    def _judged(self, scope: Scope, proven: str | None) -> Verdict:
        port, path = scope["server"][1], scope["path"]
        behind, announced = self._behind.get(port), _announced(scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > LARGEST_HEAD:
            return Verdict(None, 431, f"more than {LARGEST_HEAD} bytes of headers")
        if behind == FLEET and path in self._open:
            fits = announced is not None and announced <= self._open[path]
            return Verdict(largest=self._open[path]) if fits else Verdict(None, 413, f"a body too large for {path}")
        if behind is None or not path.startswith(behind):
            return Verdict(None, 403, "a request for what is not behind this port")
        who, callers = None, self._callers.get(port)
        if callers is not None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                who = callers.name(path, headers, proven)
            except Unknown as problem:
                return Verdict(None, 401, str(problem))
            if not self._requests.take(who):
                return Verdict(who, 503, f"more than {REQUESTS:g} requests a second")
        if announced is not None and announced > self._largest:
            return Verdict(who, 413, f"a message of {announced} bytes, larger than any of this run ({self._largest})")
        return Verdict(who, largest=self._largest)

    async def _carried(self, verdict: Verdict, scope: Scope, receive: Receive, send: Send) -> None:
        """Bodies are in memory while they come, so the sum of a caller's is bounded."""
        announced = _announced(scope)
        size = verdict.largest if announced is None else announced
        if verdict.who is not None and self._on_their_way[verdict.who] + size > AT_ONCE * self._largest:
            self.refusals.add(_place(scope), "more messages at once than it has to send", verdict.who)
            await _answer(send, 503)
            return
        self._on_their_way[verdict.who] += size
        try:
            await self._watched(verdict, scope, receive, send)
        finally:
            self._on_their_way[verdict.who] -= size

    async def _watched(self, verdict: Verdict, scope: Scope, receive: Receive, send: Send) -> None:
        """A body whose length was not announced, or not truly, ends where it is too long."""
        came, answered = 0, False

        async def counted() -> Any:
            nonlocal came
            event = await receive()
            came += len(event.get("body", b""))
            return {"type": "http.disconnect"} if came > verdict.largest else event

        async def noted(event: Any) -> None:
            nonlocal answered
            if came <= verdict.largest:
                answered = True
                await send(event)

        try:
            await self._inside(scope, counted, noted)
        except Exception:
            if came <= verdict.largest:
                raise
        if came > verdict.largest and not answered:
            why = f"a message of more than {verdict.largest} bytes, larger than any of this run"
            self.refusals.add(_place(scope), why, verdict.who or "")
            await _answer(send, 413)


WORDS = {
    401: b"nobody of this run\n",
    403: b"not through this door\n",
    413: b"larger than any message of this run\n",
    431: b"too many headers\n",
    503: b"too much at once\n",
}


def _place(scope: Scope) -> str:
    return place_of((scope.get("client") or ("",))[0])


def _announced(scope: Scope) -> int | None:
    """Bytes of the body that is to come; None where that is not said."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    said = headers.get(b"content-length", b"")
    return int(said[:20]) if said.isdigit() else 0


async def _answer(send: Send, status: int) -> None:
    body = WORDS[status]
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
