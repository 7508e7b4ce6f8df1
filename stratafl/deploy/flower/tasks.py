"""A site's own processes ask its SuperLink and its SuperNode for tasks, with a secret that only
they have.

Flower would start a process for each. Both can also leave that to others (`--isolation process`);
what this calls is not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, constant
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from stratafl.base.errors import error_message
from stratafl.deploy.flower import proxies
from stratafl.deploy.flower.grid import PromptGrid
from stratafl.deploy.flower.pace import Pace, look_sooner_for_parts

UNAUTHORIZED = httpx.codes.UNAUTHORIZED
CLIENT_APP, SERVER_APP = TaskType.CLIENT_APP, TaskType.SERVER_APP
TRIES = 3
"""How often one that does not answer is asked for the same: one that came up again has lost its
tasks."""
SOON = 0.5
"""Seconds between two tries, at most."""
Say = Callable[[str], None]


class Tasks:
    """The tasks of one kind, at the SuperLink or SuperNode that listens on this port of this
    machine."""

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
        # Flower's own tries for ever, and ends the process where its task is not known any more
        again = RetryInvoker(partial(constant, SOON), httpx.TransportError, max_tries=TRIES, max_time=None)
        return RuntimeHttpClient.from_server_address(
            **self._where, interceptors=list(interceptors), retry_invoker=again
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
                if isinstance(problem, httpx.HTTPStatusError) and problem.response.status_code == UNAUTHORIZED:
                    self._say("not let in: this is not the secret of the site whose port this is")
                    sys.exit(1)
                # it is starting, or starting again; a task it lost is asked for again from above
                self._say(f"no answer to a request for tasks: {error_message(problem)}")
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
    def grid(self, token: str) -> Iterator[PromptGrid]:
        """A ServerApp's way to its nodes, kept alive meanwhile."""
        where = self._where
        grid = PromptGrid(where["server_address"], where["insecure"], where["root_certificates"], token=token)
        with contextlib.closing(grid), _alive(grid._runtime_client):
            given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id = given.task_id
            TaskIdentity.run_id = given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid.set_run(run_from_proto(given.run))
            yield grid


@contextlib.contextmanager
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError:
            pass  # the task is not known any more: that is said where its output is handed in, and the work is not lost
        return True

    beating = HeartbeatSender(beat)
    beating.start()
    try:
        yield
    finally:
        beating.stop()
