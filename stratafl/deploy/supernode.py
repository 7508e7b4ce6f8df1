"""`flower-supernode` in more of a hurry.

Flower's waits three seconds between two looks for messages, and half a second between two looks for a reply, which a
tree pays at every level; and a SuperLink waits a minute for a sign of life before it takes a dead one for dead, and its
successor for the same. What this changes is not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode

from stratafl.deploy.pace import Pace, look_sooner_for_parts
from stratafl.deploy.site import Site

BESIDE = 0.02
"""Seconds between two looks into this process's own memory."""
HEARTBEAT = 10
"""Seconds, the least that a SuperLink takes; it has patience for two of them."""


def run(site: Site) -> None:
    """Be the SuperNode of a leaf or an aggregator, in its folder."""
    look_sooner_for_parts()
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
