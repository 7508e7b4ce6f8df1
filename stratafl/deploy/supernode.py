"""`flower-supernode` that looks for messages more often: Flower's waits three seconds between two looks, and half a
second between two looks for a reply, which a tree pays at every level."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that this file alone, started by its path, does not load the package and torch with it
    from stratafl.deploy.site import Site

REPLY = 0.05
"""Seconds between two looks for the reply of the site's own process, which cost nothing."""


def run(site: Site) -> None:
    """Be the SuperNode of a leaf or an aggregator, in its folder."""
    from flwr.supernode import start_client_internal

    from stratafl.deploy.pace import Pace, look_sooner_for_parts

    look_sooner_for_parts()
    pace = Pace()

    def sleep(seconds: float) -> None:
        if seconds < 1:
            time.sleep(REPLY)
            pace.begin()
        else:
            pace.pause()

    vars(start_client_internal)["time"] = SimpleNamespace(**{**vars(time), "sleep": sleep})
    tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    main([
        "--superlink", site.parent,
        "--root-certificates", "ca.pem",
        "--auth-supernode-private-key", "node.key",
        "--host", "127.0.0.1", "--port", str(site.inner_port), *tls,
        "--isolation", "process", "--superexec-auth-secret-file", "inner.key",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    from flwr.supernode.cli import flower_supernode

    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
