"""`flower-supernode` in more of a hurry.

Flower's waits three seconds between two looks for messages, and half a second between two looks for
a reply, which a tree pays at every level; and a SuperLink waits a minute for a sign of life before
it takes a dead one for dead, and refuses its successor for as long. What this changes is not
Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore import heartbeat
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.logger import LOGGER_NAME
from flwr.supercore.retry import http_retry
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection, main, start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from uvicorn.config import LOGGING_CONFIG

from stratafl.base import files
from stratafl.base.errors import InvalidInput, error_message
from stratafl.deploy.door.callers import OwnProcesses
from stratafl.deploy.door.doors import RUNTIME, Doors
from stratafl.deploy.door.gate import Limits, Server, descriptors
from stratafl.deploy.flower import proxies
from stratafl.deploy.flower.clock import ParentClock, sign_with
from stratafl.deploy.flower.pace import Pace, look_sooner_for_parts
from stratafl.deploy.notes import log
from stratafl.deploy.notes.log import say
from stratafl.deploy.sites.address import is_loopback, parted
from stratafl.deploy.sites.site import Site

BESIDE = 0.02
"""Seconds between two looks into this process's own memory."""
HEARTBEAT = 10
"""Seconds, the least that a SuperLink takes; it has patience for two of them."""
AGAIN = 2
"""Seconds, the most between two tries to reach a parent that does not answer; Flower's are up to
20."""
REST = 30.0
"""Seconds that the rest of a request gets to come, once it was announced: its parent puts it there
at once."""
BEFORE = Path("flower", "before.json")
"""The file in the site's folder that says as which node, and from which host, its SuperNode was
last let in."""


def run(site: Site) -> None:
    """Be the SuperNode of a leaf or an aggregator, in its folder."""
    log.listen(LOGGER_NAME, "uvicorn")
    LOGGING_CONFIG["loggers"].clear()  # uvicorn's own would take their place
    look_sooner_for_parts()
    sign_with(ParentClock(site, say))
    vars(start_client_internal)["pull_objects"] = _whole_or_not_at_all(start_client_internal.pull_objects)
    vars(start_client_internal)["_pull_and_store_message"] = _kept(start_client_internal._pull_and_store_message)
    vars(start_client_internal)["_push_messages"] = _each_with_its_own(start_client_internal._push_messages)
    if is_loopback(parted(site.parent)[0]):
        proxies.ignore()
    pace = Pace()

    def sleep(seconds: float) -> None:
        if seconds > 1:  # nothing came from above
            pace.wait()
        else:  # something did, and its reply is not ready
            time.sleep(BESIDE)
            pace.begin()

    vars(start_client_internal)["time"] = SimpleNamespace(**{**vars(time), "sleep": sleep})
    for module in (heartbeat, fleet_http_connection):
        vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT
    vars(http_retry)["MAX_RETRY_DELAY"] = AGAIN
    vars(main)["create_app"] = _behind_a_door(main.create_app, site.inner_port, site.largest)
    limits = {site.inner_port: Limits.of(1, descriptors() // 2)}
    server = SimpleNamespace(Config=uvicorn.Config, Server=lambda config: Server(config, limits))
    flower_supernode.__globals__["uvicorn"] = server
    FleetHttpClient.ActivateNode = _succeeding(FleetHttpClient.ActivateNode)
    tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    sys.argv = [
        "flower-supernode",
        "--superlink", site.parent,
        "--root-certificates", "ca.pem",
        "--auth-supernode-private-key", "node.key",
        "--host", "127.0.0.1", "--port", str(site.inner_port), *tls,
        "--isolation", "process", "--superexec-auth-secret-file", "inner.key",
    ]  # fmt: skip
    flower_supernode()


def _whole_or_not_at_all(pull: Any) -> Any:
    """Have this process end where the rest of a request never comes, since its parent died half
    way: nobody would be told that it was given up, and whoever is the parent now asks the next
    process again."""

    def pulled(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return pull(*given, **{**named, "max_time": REST})
        except RunNotRunningException as problem:
            # Flower would forget the message, but not the task of it, and this site's node wait for
            # it for ever
            raise ObjectPullError("", "the run it belongs to is over") from problem
        except ObjectPullError as problem:
            if time.monotonic() - began < REST:  # it was withdrawn: nobody waits for a reply
                raise
            say(f"a request never became whole: {error_message(problem)}")
            sys.exit(1)

    return pulled


def _kept(pull: Any) -> Any:
    """A request that is here whole is worked on, also where its run ended before that could be
    confirmed: Flower would go on without it, but the node beside has its task already, and its
    reply would be taken for that to the next request."""

    def pulled(*given: Any, confirm_message_received: Any, **named: Any) -> Any:
        def confirmed(*message: Any) -> None:
            with contextlib.suppress(RunNotRunningException):
                confirm_message_received(*message)

        return pull(*given, confirm_message_received=confirmed, **named)

    return pulled


def _each_with_its_own(push: Any) -> Any:
    """Go on when every request has its reply. Flower sends what is there and looks for the next
    request; where that was a reply to one given up before, the right one would never leave. And one
    that could not be handed in it forgets, while the parent waits: so this process ends, and the
    next one is asked again."""

    def pushed(*, state: Any, send: Any, push_object: Any, **named: Any) -> None:
        failed: list[httpx.HTTPError] = []

        def noted(call: Any) -> Any:
            def called(*given: Any) -> Any:
                try:
                    return call(*given)
                except httpx.HTTPError as problem:
                    failed.append(problem)
                    raise

            return called

        while True:
            push(state=state, send=noted(send), push_object=noted(push_object), **named)
            for problem in failed:
                if not isinstance(problem, httpx.HTTPStatusError) or problem.response.is_server_error:
                    say(f"a reply could not be handed in: {error_message(problem)}")
                    sys.exit(1)
            if not _is_asked(state):
                return

    return pushed


def _is_asked(state: Any) -> bool:
    with state.lock_msg_store:
        return any(not entry.message.metadata.reply_to_message_id for entry in state.msg_store.values())


def _behind_a_door(create: Any, port: int, largest: int) -> Any:
    """Without the page that describes the interface, and what else is served beside it; for this
    site's own alone."""

    def created(state_factory: Any, superexec_auth_secret: bytes) -> Doors:
        own = OwnProcesses(superexec_auth_secret, state_factory.state)
        return Doors(create(state_factory, superexec_auth_secret), {port: RUNTIME}, largest, {port: own})

    return created


def _succeeding(activate: Any) -> Any:
    """Sign the SuperNode before off, if it was killed and could not do so itself: else its parent
    takes it for alive.

    It is surely dead, as this folder has one supervisor. On another host the folder may be a copy,
    and the one before alive: there Flower's rule stays, that the first keeps its place for as long
    as it lives.
    """

    def activated(client: Any, request: Any) -> Any:
        here = socket.gethostname()
        with contextlib.suppress(InvalidInput):  # there was none
            before = files.read_json(BEFORE)
            # of what another version may have written there, nothing ends this process
            node = before.get("node") if isinstance(before, dict) and before.get("host") == here else None
            if type(node) is int and 0 <= node < 1 << 64:
                with contextlib.suppress(httpx.HTTPStatusError):  # the parent knows, or is itself a new one
                    client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        answer = activate(client, request)
        with contextlib.suppress(InvalidInput):  # the disk is full; the next one has to wait until this one is missed
            files.write_json(BEFORE, {"host": here, "node": answer.node_id})
        return answer

    return activated
