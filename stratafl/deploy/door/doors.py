"""What is let in, before anybody reads it: one interface behind each port, and nothing larger than the run's messages.

Flower serves all its interfaces on one port, with a page that describes them, and reads a body of any size.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from stratafl.errors import LONGEST_WORDS, line

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
ENVELOPE = 1 << 16
"""Bytes that Flower may add to a message of ours."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Doors:
    """Lets through each port only what belongs there, and of no more than `largest` bytes."""

    def __init__(self, inside: Any, behind: Mapping[int, str], largest: int, known: Mapping[str, str] | None = None):
        self._inside, self._behind, self._largest = inside, behind, largest + ENVELOPE
        self._known = known or {}
        """Children by their public keys as a request names them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inside(scope, receive, send)
        elif scope["type"] == "http":
            if not self._belongs(scope):
                await _answer(send, 403, b"not through this door\n")
            elif _announced(scope) > self._largest:
                await self._refuse(scope, send, f"a message of {_announced(scope)} bytes")
            else:
                await self._watched(scope, receive, send)

    def _belongs(self, scope: Scope) -> bool:
        allowed = self._behind.get(scope["server"][1])
        return allowed is not None and scope["path"].startswith(allowed)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body whose length was not announced, or not truly, ends where it is too long."""
        came, answered = 0, False

        async def counted() -> Any:
            nonlocal came
            event = await receive()
            came += len(event.get("body", b""))
            return {"type": "http.disconnect"} if came > self._largest else event

        async def noted(event: Any) -> None:
            nonlocal answered
            if came <= self._largest:
                answered = True
                await send(event)

        try:
            await self._inside(scope, counted, noted)
        except Exception:
            if came <= self._largest:
                raise
        if came > self._largest and not answered:
            await self._refuse(scope, send, f"a message of more than {self._largest} bytes")

    async def _refuse(self, scope: Scope, send: Send, what: str) -> None:
        key = dict(scope["headers"]).get(b"flwr-public-key", b"").decode(errors="replace")
        who = self._known.get(key, "somebody unknown")
        host = (scope.get("client") or ("an unknown host",))[0]
        said = f"{what} from {host}, who says to be {who}, is refused: at most {self._largest}"
        print(f"stratafl {line(said, LONGEST_WORDS)}", file=sys.stderr, flush=True)
        await _answer(send, 413, b"larger than any message of this run\n")


def _announced(scope: Scope) -> int:
    """Bytes of the body that is to come; 0 where that is not said."""
    said = dict(scope["headers"]).get(b"content-length", b"")
    return int(said[:20]) if said.isdigit() else 0


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
