"""A parent never waits longer than its deadline, whatever a child does, and nobody else's reply is
delayed by it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from stratafl.deploy.flower import supernode
from stratafl.deploy.flower.grid import PromptGrid
from stratafl.deploy.flower.inbox import RECORD
from stratafl.deploy.sites.site import Site
from tests.deploy.real import Run, wired

pytestmark = pytest.mark.deploy
DEADLINE = 4.0
LATE = 1.5
"""Seconds after the deadline, on a machine that is busy with other things."""


class Announcing:
    """A child with its keys, which is asked, announces a reply and then does what it likes."""

    def __init__(self, folder: Path, deeds: list[Callable[[Announcing, Message, str], None]]):
        site = Site.load(folder)
        key: Any = load_ssh_private_key((folder / "node.key").read_bytes(), None)
        self.client = FleetHttpClient.from_server_address(
            site.parent, False, (folder / "ca.pem").read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())],
        )  # fmt: skip
        self.public, self.deeds, self.done = public_key_to_bytes(key.public_key()), deeds, 0
        self.node, self._stop = Node(), threading.Event()
        self._thread = threading.Thread(target=self.live)
        self._thread.start()

    def live(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self.look()
            except httpx.HTTPError:
                continue

    def look(self) -> None:
        if not self.node.node_id:
            answer = self.client.ActivateNode(ActivateNodeRequest(public_key=self.public, heartbeat_interval=600))
            self.node = Node(node_id=answer.node_id)
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        for each in found.messages_list:
            deed = self.deeds[self.done % len(self.deeds)]
            self.done += 1
            deed(self, message_from_proto(each), each.metadata.message_id)

    def announce(self, reply: Message, tree: ObjectTree) -> Any:
        shown = message_to_proto(remove_content_from_message(reply))
        shown.metadata.message_id = tree.object_id
        return self.client.PushMessages(
            PushMessagesRequest(node=self.node, messages_list=[shown], message_object_trees=[tree])
        )

    def upload(self, run: int, session: str, name: str, content: bytes) -> None:
        self.client.PushObject(
            PushObjectRequest(node=self.node, run_id=run, session_id=session, object_id=name, object_content=content)
        )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.client.close()


def reply_to(message: Message, number: str) -> Message:
    message.metadata.__dict__["_message_id"] = number
    reply = Message(RecordDict({RECORD: ConfigRecord({"refused": False, "data": b"x" * 100})}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def and_die(child: Announcing, message: Message, number: str) -> None:
    reply = reply_to(message, number)
    child.announce(reply, get_object_tree(reply))


def send_all_but_one(child: Announcing, message: Message, number: str) -> None:
    reply = reply_to(message, number)
    parts = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
    session = child.announce(reply, get_object_tree(reply)).session_id
    for name in list(parts)[:-1]:
        child.upload(reply.metadata.run_id, session, name, parts[name])


def announce_other_parts(child: Announcing, message: Message, number: str) -> None:
    """Names of parts that no part has."""
    names = [hashlib.sha256(name).hexdigest() for name in (number.encode(), b"a", b"b")]
    child.announce(reply_to(message, number), ObjectTree(object_id=names[0], children=[ObjectTree(object_id=names[1])]))


def send_what_does_not_inflate(child: Announcing, message: Message, number: str) -> None:
    """Parts that are what they are called, and together no message."""
    reply = reply_to(message, number)
    content = ConfigRecord({"number": number}).deflate()
    name = hashlib.sha256(content).hexdigest()
    session = child.announce(reply, ObjectTree(object_id=name)).session_id
    child.upload(reply.metadata.run_id, session, name, content)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, 21000 + os.getpid() % 900, shape="3", periods=[2], rounds=5, deadline=DEADLINE)
    yield made
    made.close()


def test_a_reply_that_never_becomes_whole_delays_nobody(run: Run) -> None:
    """Of three leaves one announces replies; the deadline is that of a round without it."""
    deeds = [and_die, send_all_but_one, announce_other_parts, send_what_does_not_inflate]
    run.start("root", "0", "1")
    child = Announcing(run.folders["2"], deeds)
    try:
        run.wait()
    finally:
        child.stop()
    assert child.done >= len(deeds)
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4, 5]
    for line in run.rounds:
        assert set(line["absent"]) | set(line["refused"]) == {"2"}
        assert line["seconds"] < DEADLINE + LATE, run.rounds
    said = (run.folders["root"] / "logs" / "node.log").read_text()
    assert "2 is left out" in said and "Traceback" not in said
    assert "node ended" not in (run.folders["root"] / "logs" / "site.log").read_text()


def test_a_superlink_that_hangs_does_not_hold_its_parent_up(run: Run) -> None:
    run.start("root", apart=[["0", "1", "2"]])
    run.wait(lambda: run.is_inside(2))
    superlink = run.processes("root")["superlink"]
    os.kill(superlink, signal.SIGSTOP)
    run.wait(lambda: len(run.rounds) >= 3)
    os.kill(superlink, signal.SIGCONT)
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4, 5]
    assert all(line["seconds"] < DEADLINE + LATE for line in run.rounds), run.rounds
    assert set(run.rounds[2]["absent"]) == {"0", "1", "2"} and not run.rounds[4]["absent"]
    assert "the SuperLink beside does not answer" in (run.folders["root"] / "logs" / "node.log").read_text()


# -- downwards -------------------------------------------------------------------------------------


def push_half(grid: PromptGrid, message: Message) -> None:
    """As a parent does that dies before it has sent the parts."""
    message.metadata.__dict__["_message_id"] = message.object_id
    grid._runtime_client.PushMessages(
        PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_a_request_that_never_becomes_whole_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SuperNode comes up again, which its parent sees, and takes the next request."""
    monkeypatch.setattr(supernode, "REST", 2.0)
    with wired(run.folders) as (_, below, grid):
        run.wait(lambda: len(list(grid.get_nodes())) == 1)
        (node,) = grid.get_nodes()
        push_half(grid, Message(RecordDict({RECORD: ConfigRecord({"data": b"x"})}), node.node_id, "train"))
        began, process = time.monotonic(), below._running["supernode"]
        run.wait(lambda: process.poll() is not None)
        assert process.returncode == 1 and time.monotonic() - began < 15
        assert not list(grid.get_nodes())
