"""A site's ClientApp, run in a process that stays, with its data and its model loaded.

Flower would start a process for every message, which costs seconds. Its SuperNode can also leave that to others
(`--isolation process`), who ask it for tasks with a shared secret; this asks, and runs them where it stands. What it
calls is not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from stratafl.errors import InvalidInput

POLL = 0.1
"""Seconds between two looks for a task."""
COMPLETED = "completed"
RECORD = "stratafl"
Handle = Callable[[bytes], bytes]
Say = Callable[[str], None]


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

    def __init__(self, port: int, authority: bytes, secret: bytes):
        self._where: dict[str, Any] = {
            "server_address": f"127.0.0.1:{port}",
            "insecure": False,
            "root_certificates": authority,
        }
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        self._tasks = self._client(version, signed)

    def _client(self, *interceptors: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            **self._where, interceptors=list(interceptors), retry_invoker=make_simple_http_retry_invoker()
        )

    def serve(self, handle: Handle, go_on: Callable[[], bool], say: Say) -> None:
        """Run one task after another."""
        while go_on():
            try:
                found = self._tasks.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
                if found.HasField("task") and found.token:
                    self._run(handle, found.token, say)
                    continue
            except httpx.HTTPError as problem:
                # the SuperNode is starting, or starting again; a task it lost is asked for again from above
                say(f"the SuperNode beside does not answer: {problem}")
                time.sleep(1.0)
            time.sleep(POLL)

    def _run(self, handle: Handle, token: str, say: Say) -> None:
        outer = _identity()

        def handled(data: bytes) -> bytes:
            # the work itself may send messages of its own, as the ServerApp this process is
            inner = _identity()
            _become(outer)
            try:
                return handle(data)
            finally:
                _become(inner)

        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = self._client(version, RuntimeTokenHttpInterceptor(token))
        alive = HeartbeatSender(make_task_heartbeat_fn_http(client))
        alive.start()
        try:
            message, context, _, _ = pull_task_input(client)
            push_message(client, client_app(handled, say)(message, context), context)
            push_task_output(client, context, COMPLETED, "")
        finally:
            alive.stop()
            client.close()
            _become(outer)


def _identity() -> tuple[Any, Any, Any]:
    """As whom this process sends messages: Flower has one such identity per process."""
    return TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id


def _become(identity: tuple[Any, Any, Any]) -> None:
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = identity
