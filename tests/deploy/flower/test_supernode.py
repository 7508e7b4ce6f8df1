"""A SuperNode takes the place of the one before it, where that is surely dead, and gives every
request its own reply."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from stratafl.base import files
from stratafl.deploy.flower.supernode import BEFORE, _each_with_its_own, _kept, _succeeding, _whole_or_not_at_all


class Parent:
    """What a SuperLink was asked, in order."""

    def __init__(self, problem: Exception | None = None):
        self.asked: list[Any] = []
        self._problem = problem

    def DeactivateNode(self, request: Any) -> None:
        self.asked.append(request.node_id)
        if self._problem is not None:
            raise self._problem

    def activate(self, request: str) -> SimpleNamespace:
        self.asked.append(request)
        return SimpleNamespace(node_id=2**64 - 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BEFORE.parent.mkdir()
    for name in ("_task_id", "_run_id", "_node_id"):  # as whom this process writes messages
        monkeypatch.setattr(TaskIdentity, name, 1)


def let_in(parent: Parent) -> list[Any]:
    assert _succeeding(Parent.activate)(parent, "in").node_id == 2**64 - 1
    return parent.asked


def test_the_first_has_nobody_to_sign_off_and_the_second_the_first() -> None:
    assert let_in(Parent()) == ["in"]
    assert let_in(Parent()) == [2**64 - 1, "in"]


def test_a_copy_of_the_folder_on_another_host_does_not_drive_the_first_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(Parent())
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert let_in(Parent()) == ["in"]


@pytest.mark.parametrize("stored", [[], {}, {"host": True}, {"node": "5"}, {"node": -1}, {"node": 1 << 64}])
def test_what_another_version_noted_keeps_nobody_out(stored: Any) -> None:
    told = {"host": socket.gethostname(), **stored} if isinstance(stored, dict) else stored
    files.write_json(BEFORE, told)
    assert let_in(Parent()) == ["in"]


def test_a_parent_that_does_not_know_the_one_before_lets_the_next_one_in() -> None:
    files.write_json(BEFORE, {"host": socket.gethostname(), "node": 5})
    refusal = httpx.HTTPStatusError("401", request=httpx.Request("POST", "https://a"), response=httpx.Response(401))
    assert let_in(Parent(refusal)) == [5, "in"]


def test_a_parent_that_does_not_answer_is_asked_from_the_start_again() -> None:
    files.write_json(BEFORE, {"host": socket.gethostname(), "node": 5})
    parent = Parent(httpx.ConnectError("nobody there"))
    with pytest.raises(httpx.ConnectError):
        let_in(parent)
    assert parent.asked == [5]


def test_of_a_run_that_ends_while_a_request_is_read_nothing_is_left() -> None:
    """Flower takes it for a failure, which ends the task, rather than for a message to be
    ignored."""

    def pull(*given: Any, **named: Any) -> Any:
        raise RunNotRunningException

    with pytest.raises(ObjectPullError, match="run it belongs to is over"):
        _whole_or_not_at_all(pull)(["part"], None)


class Beside:
    """A SuperNode's own memory and Flower's own work on it, between a parent whose first run ends
    while its request is read, and a node that answers one request after another."""

    def __init__(self, kept: Any = lambda pull: pull, each: Any = lambda push: push):
        self._state = NodeStateFactory(ObjectStoreFactory()).state()
        self._state.set_node_id(7)
        self._pull = kept(start_client_internal._pull_and_store_message)
        self._push = each(start_client_internal._push_messages)
        self.requests = [_request(run) for run in (1, 2)]
        for run in (1, 2):
            self._state.store_run(Run.create_empty(run))
        self._coming, self._asked = list(self.requests), list(self.requests)
        self.sent: list[str] = []

    def look(self) -> None:
        """What `start_client_internal` does, until there is nothing to do."""
        store = self._state.object_store
        while True:
            run = self._pull(
                state=self._state, object_store=store, node_config={}, receive=self._receive, get_run=None,
                get_fab=None, pull_object=self._part, confirm_message_received=self._confirm, trusted_entities=None,
            )  # fmt: skip
            if run is not None:
                self._push(state=self._state, object_store=store, send=self._send, push_object=lambda *part: None)
            elif not self._coming:
                return

    def answer(self, seconds: float) -> None:
        """The node beside: the next reply is there."""
        request = self._asked.pop(0)
        reply = Message(RecordDict({"r": ConfigRecord({"to": request.metadata.run_id})}), reply_to=request)
        start_client_internal._insert_message(reply, self._state, self._state.object_store)

    def _receive(self) -> Any:
        if not self._coming:
            return None
        request = self._coming.pop(0)
        bare = Message(RecordDict(), 7, "train")
        bare.metadata.__dict__.update(request.metadata.__dict__)
        return bare, get_object_tree(request)

    def _part(self, run: int, part: str) -> bytes:
        return get_all_nested_objects(self.requests[run - 1])[part].deflate()

    def _confirm(self, run: int, message: str) -> None:
        if run == 1:
            raise RunNotRunningException

    def _send(self, reply: Message, tree: Any, seconds: float) -> Any:
        if reply.metadata.run_id == 1:
            raise RunNotRunningException
        self.sent.append(reply.metadata.reply_to_message_id)
        return set(), "session"


def _request(run: int) -> Message:
    message = Message(RecordDict({"r": ConfigRecord({"run": run})}), 7, "train")
    message.metadata.__dict__.update(_run_id=run, _src_node_id=1)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.mark.parametrize(
    ("kept", "each"), [(_kept, lambda push: push), (lambda pull: pull, _each_with_its_own), (_kept, _each_with_its_own)]
)
def test_a_run_that_ends_while_a_request_is_read_costs_the_next_one_nothing(
    kept: Any, each: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(kept, each)
    monkeypatch.setitem(vars(start_client_internal), "time", SimpleNamespace(sleep=beside.answer))
    beside.look()
    assert beside.sent == [beside.requests[1].metadata.message_id]


def test_that_is_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Flower's own, the reply to the second request stays where it is."""
    beside = Beside()
    monkeypatch.setitem(vars(start_client_internal), "time", SimpleNamespace(sleep=beside.answer))
    beside.look()
    assert beside.sent == []


@pytest.mark.parametrize(
    ("problem", "ends"),
    [
        (httpx.ConnectError("SSL: UNEXPECTED_EOF"), True),
        (httpx.HTTPStatusError("", request=httpx.Request("POST", "https://a"), response=httpx.Response(500)), True),
        (httpx.HTTPStatusError("", request=httpx.Request("POST", "https://a"), response=httpx.Response(413)), False),
    ],
)
def test_a_reply_that_cannot_be_handed_in_is_asked_for_again(
    problem: httpx.HTTPError, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever takes the place of this process; but not where it would be refused for ever."""
    beside = Beside(_kept, _each_with_its_own)
    monkeypatch.setitem(vars(start_client_internal), "time", SimpleNamespace(sleep=beside.answer))

    def send(*reply: Any) -> Any:
        raise problem

    monkeypatch.setattr(beside, "_send", send)
    if ends:
        with pytest.raises(SystemExit):
            beside.look()
    else:
        beside.look()
