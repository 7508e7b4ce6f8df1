"""A site's ClientApp, run in a process that stays, with its data and its model loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from stratafl.deploy.tasks import CLIENT_APP, Say, Tasks
from stratafl.errors import InvalidInput

COMPLETED = "completed"
RECORD = "stratafl"
Handle = Callable[[bytes], bytes]


def client_app(handle: Handle, say: Say) -> ClientApp:
    """Sealed bytes in, sealed bytes out, or the reason for a refusal."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record: Any = message.content[RECORD]
        try:
            answer = ConfigRecord({"refused": False, "data": handle(record["data"])})
        except InvalidInput as problem:
            say(f"refused: {problem}")
            answer = ConfigRecord({"refused": True, "data": str(problem).encode()})
        return Message(RecordDict({RECORD: answer}), reply_to=message)

    return app


class Inbox:
    """The tasks of the SuperNode beside."""

    def __init__(self, port: int, authority: bytes, secret: bytes, say: Say):
        self._tasks, self._say = Tasks(CLIENT_APP, port, authority, secret, say), say

    def serve(self, handle: Handle, go_on: Callable[[], bool]) -> None:
        """Run one task after another."""
        while (token := self._tasks.next(go_on)) is not None:
            try:
                self._run(handle, token)
            except httpx.HTTPError as problem:
                self._say(f"the SuperNode beside does not answer: {problem}")

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
                push_message(client, client_app(handled, self._say)(message, context), context)
                push_task_output(client, context, COMPLETED, "")
        finally:
            _become(outer)


def _identity() -> tuple[Any, Any, Any]:
    """As whom this process sends messages: Flower has one such identity per process."""
    return TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id


def _become(identity: tuple[Any, Any, Any]) -> None:
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = identity
