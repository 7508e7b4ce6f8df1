"""`flower-supernode` in more of a hurry.

Flower's waits three seconds between two looks for messages, and half a second between two looks for a reply, which a
tree pays at every level; and a SuperLink waits a minute for a sign of life before it takes a dead one for dead, and
refuses its successor for as long. What this changes is not Flower's public interface: the version is pinned.
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
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore import heartbeat
from flwr.supercore.retry import http_retry
from flwr.supernode import fleet_http_connection, main, start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from stratafl.deploy import proxies
from stratafl.deploy.doors import RUNTIME, Doors
from stratafl.deploy.pace import Pace, look_sooner_for_parts
from stratafl.deploy.site import Site
from stratafl.errors import InvalidInput
from stratafl.store import files

BESIDE = 0.02
"""Seconds between two looks into this process's own memory."""
HEARTBEAT = 10
"""Seconds, the least that a SuperLink takes; it has patience for two of them."""
AGAIN = 2
"""Seconds, the most between two tries to reach a parent that does not answer; Flower's are up to 20."""
BEFORE = Path("flower", "before.json")
"""In the site's folder: as which node, from which host, its SuperNode was last let in."""


def run(site: Site) -> None:
    """Be the SuperNode of a leaf or an aggregator, in its folder."""
    look_sooner_for_parts()
    if proxies.is_loopback(site.parent):
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


def _behind_a_door(create: Any, port: int, largest: int) -> Any:
    """Without the page that describes the interface, and what else is served beside it."""
    return lambda *given, **named: Doors(create(*given, **named), {port: RUNTIME}, largest)


def _succeeding(activate: Any) -> Any:
    """Sign the SuperNode before off, if it was killed and could not do so itself: else its parent takes it for alive.

    It is surely dead, as this folder has one supervisor. On another host the folder may be a copy, and the one before
    alive: there Flower's rule stays, that the first keeps its place for as long as it lives.
    """

    def activated(client: Any, request: Any) -> Any:
        here = socket.gethostname()
        with contextlib.suppress(InvalidInput):  # there was none
            before = files.read_json(BEFORE)
            if before["host"] == here:
                with contextlib.suppress(httpx.HTTPStatusError):  # the parent knows, or is itself a new one
                    client.DeactivateNode(DeactivateNodeRequest(node_id=before["node"]))
        answer = activate(client, request)
        with contextlib.suppress(InvalidInput):  # the disk is full; the next one has to wait until this one is missed
            files.write_json(BEFORE, {"host": here, "node": answer.node_id})
        return answer

    return activated
