"""A site's own processes ask its SuperLink and its SuperNode for tasks, with a secret that only they have.

Flower would start a process for each. Both can also leave that to others (`--isolation process`); what this calls is
not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
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
from flwr.superlink.grid import HttpGrid

from stratafl.deploy import proxies
from stratafl.deploy.pace import Pace, look_sooner_for_parts

CLIENT_APP, SERVER_APP = TaskType.CLIENT_APP, TaskType.SERVER_APP
Say = Callable[[str], None]


class Tasks:
    """Those of one kind, at the SuperLink or SuperNode that listens on this port of this machine."""

    def __init__(self, kind: str, port: int, authority: bytes, secret: bytes, say: Say):
        look_sooner_for_parts()
        proxies.ignore()
        self._kind, self._say = kind, say
        self._where: dict[str, Any] = {
            "server_address": f"127.0.0.1:{port}",
            "insecure": False,
            "root_certificates": authority,
        }
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        self._signed = self._client(
            version, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        )
        # one connection for all tasks: the handshake of a new one would be paid with every message
        self._token = RuntimeTokenHttpInterceptor("none yet")
        self._own = self._client(RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), self._token)

    def _client(self, *interceptors: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            **self._where, interceptors=list(interceptors), retry_invoker=make_simple_http_retry_invoker()
        )

    def next(self, go_on: Callable[[], bool]) -> str | None:
        """The token of the next task; None when there is none to wait for."""
        pace = Pace()
        while go_on():
            try:
                found = self._signed.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind]))
                if found.HasField("task") and found.token:
                    return str(found.token)
            except httpx.HTTPError as problem:
                # it is starting, or starting again; a task it lost is asked for again from above
                self._say(f"no answer to a request for tasks: {problem}")
                time.sleep(1.0)
            pace.wait()
        return None

    @contextlib.contextmanager
    def client(self, token: str) -> Iterator[RuntimeHttpClient]:
        """A way to what belongs to a task, kept alive meanwhile."""
        self._token._token = token
        with _alive(self._own):
            yield self._own

    @contextlib.contextmanager
    def grid(self, token: str) -> Iterator[HttpGrid]:
        """A ServerApp's way to its nodes, kept alive meanwhile."""
        where = self._where
        grid = HttpGrid(where["server_address"], where["insecure"], where["root_certificates"], token=token)
        with _alive(grid._runtime_client):
            given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id = given.task_id
            TaskIdentity.run_id = given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid.set_run(run_from_proto(given.run))
            yield grid
        grid.close()


@contextlib.contextmanager
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    beating = HeartbeatSender(make_task_heartbeat_fn_http(client))
    beating.start()
    try:
        yield
    finally:
        beating.stop()
