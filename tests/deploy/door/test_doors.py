"""A message before it is read: its size, and the doors it may go through."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")


from stratafl.deploy.door.doors import ENVELOPE, FLEET, RUNTIME, Doors
from stratafl.deploy.protocol.bounds import largest_message
from stratafl.deploy.protocol.messages import Bundle
from stratafl.deploy.protocol.wire import encode
from tests.deploy.trees import Deployed, simulation


class Inside:
    """What is behind the doors: it reads a body to its end, and says yes."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise RuntimeError("gone")
            self.read += len(event["body"])
            more = event.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def knock(inside: Inside, path: str, body: list[bytes], announced: int | None, largest: int = 10_000) -> int:
    """The status of the answer to a request."""
    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    statuses: list[int] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(event: Any) -> None:
        if "status" in event:
            statuses.append(event["status"])

    scope = {"type": "http", "server": ("127.0.0.1", 1), "path": path, "headers": headers, "client": ("10.0.0.9", 5)}
    asyncio.run(Doors(inside, {1: FLEET}, largest)(scope, receive, send))
    (status,) = statuses
    return status


def test_a_message_is_refused_from_its_announced_size(capsys: Any) -> None:
    inside = Inside()
    assert knock(inside, f"{FLEET}push-object", [b"x" * 300], 300 << 20) == 413
    assert inside.read == 0
    assert "10.0.0.9" in capsys.readouterr().err
    assert knock(inside, f"{FLEET}push-object", [b"x" * 300], 300) == 200
    assert inside.read == 300


@pytest.mark.parametrize("announced", [None, 5])
def test_a_body_that_grows_beyond_its_size_is_cut(announced: int | None) -> None:
    inside = Inside()
    assert knock(inside, f"{FLEET}push-object", [bytes(10_000)] * 100, announced) == 413
    assert inside.read <= 10_000 + ENVELOPE


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/health", "/v1/control/start-run", RUNTIME])
def test_nothing_else_is_behind_a_door(path: str) -> None:
    inside = Inside()
    assert knock(inside, path, [b""], 0) == 403 and inside.read == 0


def test_the_inner_port_describes_nothing() -> None:
    from flwr.supernode.main import create_app

    from stratafl.deploy.flower.supernode import _behind_a_door as behind_a_door

    no_tasks = SimpleNamespace(state=dict)
    for path, status in (("/docs", 403), ("/openapi.json", 403), (f"{RUNTIME}acquire-task", 401)):
        statuses: list[int] = []

        async def send(event: Any, statuses: list[int] = statuses) -> None:
            if "status" in event:
                statuses.append(event["status"])

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "GET", "server": ("127.0.0.1", 7), "path": path, "headers": [],
                 "query_string": b"", "client": ("127.0.0.1", 1), "raw_path": path.encode(), "scheme": "https",
                 "root_path": "", "http_version": "1.1"}  # fmt: skip
        asyncio.run(behind_a_door(create_app, 7, 100)(no_tasks, b"secret")(scope, receive, send))
        assert statuses == [status]


def test_the_largest_message_of_a_run_is_let_through() -> None:
    sizes: list[int] = []

    class Measured:
        def __init__(self, node: Any):
            self.node = node

        def handle(self, bundle: Bundle) -> Any:
            reply = self.node.handle(bundle)
            sizes.extend((len(encode(bundle)), len(encode(reply))))
            return reply

    deployed = Deployed(simulation("scaffold", 3), wrap=Measured).run()
    assert 0 < max(sizes) < largest_message(deployed.job)
