"""A site's ClientApp, run in a process that stays, with its data and its model loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from stratafl.base.errors import InvalidInput, error_message
from stratafl.deploy.flower.clock import date_as_its_request
from stratafl.deploy.flower.tasks import CLIENT_APP, Say, Tasks
from stratafl.deploy.notes import log
from stratafl.deploy.notes.outward import outward

COMPLETED = "completed"
RECORD = "stratafl"
Handle = Callable[[bytes], bytes]


def contents(message: Message, fields: Mapping[str, type], largest: int) -> list[Any]:
    """The fields of our record in a message, each of its type and all bytes within a size."""
    record: Any = message.content.get(RECORD)
    if not isinstance(record, Mapping) or not all(name in record for name in fields):
        raise InvalidInput("message", list(map(str, message.content)), f"has no record of {', '.join(fields)}")
    for name, kind in fields.items():
        if type(record[name]) is not kind:
            raise InvalidInput(f"message.{name}", type(record[name]).__name__, f"must be {kind.__name__}")
        if kind is bytes and len(record[name]) > largest:
            raise InvalidInput(f"message.{name}", f"{len(record[name])} bytes", f"at most {largest} of this run")
    return [record[name] for name in fields]


def client_app(handle: Handle, largest: int, fail: Callable[[str, Exception], None]) -> ClientApp:
    """Sealed bytes in, sealed bytes out, or the reason for a refusal, as it may leave the site:
    nothing that comes in ends this process."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            (data,) = contents(message, {"data": bytes}, largest)
            answer = ConfigRecord({"refused": False, "data": handle(data)})
            log.well()
        except Exception as problem:
            fail("refused", problem)
            answer = ConfigRecord({"refused": True, "data": outward(problem).encode(errors="replace")})
        return date_as_its_request(Message(RecordDict({RECORD: answer}), reply_to=message), message)

    return app


class Inbox:
    """The tasks of the SuperNode beside."""

    def __init__(self, port: int, authority: bytes, secret: bytes, largest: int, say: Say):
        self._tasks, self._largest, self._say = Tasks(CLIENT_APP, port, authority, secret, say), largest, say

    def serve(self, handle: Handle, go_on: Callable[[], bool]) -> None:
        """Run one task after another."""
        while (token := self._tasks.next(go_on)) is not None:
            try:
                self._run(handle, token)
            except httpx.HTTPStatusError:
                self._say(
                    "the SuperNode beside does not know this task any more; what was done is kept, and asked again"
                )
            except httpx.HTTPError as problem:
                self._say(f"the SuperNode beside does not answer: {error_message(problem)}")
            except Exception as problem:
                self._say(f"what the SuperNode beside has is no message of ours: {error_message(problem)}")

    def _run(self, handle: Handle, token: str) -> None:
        outer = _identity()

        def handled(data: bytes) -> bytes:
            # the work itself may send messages of its own, as the ServerApp this process is
            inner = _identity()
            _become(outer)
            try:
                return handle(data)
            finally:
                _become(inner)

        try:
            with self._tasks.client(token) as client:
                message, context, _, _ = pull_task_input(client)
                push_message(client, client_app(handled, self._largest, log.fail)(message, context), context)
                push_task_output(client, context, COMPLETED, "")
        finally:
            _become(outer)


def _identity() -> tuple[Any, Any, Any]:
    """The identity under which this process sends messages: Flower has one per process."""
    return TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id


def _become(identity: tuple[Any, Any, Any]) -> None:
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = identity
