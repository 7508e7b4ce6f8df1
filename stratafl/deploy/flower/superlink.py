"""A site's SuperLink with two doors: Flower serves all its interfaces on one port, and without
accounts.

public    the children's hosts reach it: the Fleet interface, which asks for a registered node key
runtime   loopback only: the Runtime interface, which asks for the site's own secret

The Control interface, which could register a node or start an app, is behind neither. What it is
needed for, the children's registration and the run of this site's ServerApp, is done here, in the
SuperLink's own process. What this calls is not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import HTTPException
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import NODE_ID_NUM_BYTES, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.server.superlink.linkstate import in_memory_linkstate
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.logger import LOGGER_NAME
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers

from stratafl.base import files
from stratafl.deploy.door.callers import Children, OwnProcesses
from stratafl.deploy.door.doors import FLEET, RUNTIME, Doors
from stratafl.deploy.door.gate import Limits, Server, descriptors
from stratafl.deploy.flower.clock import Stamp
from stratafl.deploy.flower.supernode import HEARTBEAT
from stratafl.deploy.news import door
from stratafl.deploy.notes import log
from stratafl.deploy.sites.address import bound, joined
from stratafl.deploy.sites.provision import flower_key
from stratafl.deploy.sites.site import Site, slug, subtrees

PARTS = 3
"""Objects that a message of ours is made of, as Flower takes it apart: the message, its records,
and our record."""
AGAIN = signal.SIGUSR1
"""Asks for a new run of the ServerApp, whose process ended."""
# A run needs an app; the ServerApp it names is run by the site's own process, which stays: see
# deploy/flower/process.py
APP = {
    "pyproject.toml": b"""\
[project]
name = "stratafl-site"
version = "1.0.0"
description = "One node of a stratafl tree"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stratafl"

[tool.flwr.app.components]
serverapp = "stratafl_site:server"
clientapp = "stratafl_site:client"
""",
    "stratafl_site.py": b"""\
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()
""",
}


class Desk:
    """What a person would do with Flower's commands: register the children, start the run."""

    def __init__(self, state: Any):
        self._state = state
        self._account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
        self._app, _ = build_fab_from_files(APP)
        self._run: int | None = None
        self._one_at_a_time = threading.Lock()

    def register(self, name: str, public: bytes) -> None:
        """Register the run under the same number in every SuperLink's life: one that came with
        another would refuse its SuperNode."""
        number = int.from_bytes(sha256(public).digest()[:NODE_ID_NUM_BYTES])
        random = in_memory_linkstate.generate_rand_int_from_bytes
        vars(in_memory_linkstate)["generate_rand_int_from_bytes"] = lambda *given, **named: number
        try:
            request = RegisterNodeRequest(public_key=public, name=name)
            control_handlers.register_node(request, self._account, self._state)
        finally:
            vars(in_memory_linkstate)["generate_rand_int_from_bytes"] = random

    def start(self) -> None:
        """A run, instead of the one before if there was one."""
        with self._one_at_a_time:
            if self._run is not None:
                with contextlib.suppress(FlowerError):  # it may have ended by itself
                    control_handlers.stop_run(StopRunRequest(run_id=self._run), self._account, self._state)
            request = StartRunRequest(fab=Fab(content=self._app))
            self._run = control_handlers.start_run(request, self._account, self._state, None).run_id


def run(folder: Path) -> None:
    """Be the SuperLink of a root or an aggregator."""
    log.listen(LOGGER_NAME, "uvicorn")
    site = Site.load(folder)
    outer, runtime = map(_listen, site.addresses[:2])
    tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    inner = ["--isolation", "process", "--superexec-auth-secret-file", "inner.key"]
    offline = "--disable-runtime-dependency-installation"
    sys.argv = ["flower-superlink", *tls, *inner, "--enable-supernode-auth", offline]
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    vars(fleet_handlers)["push_messages"] = _in_few_parts(fleet_handlers.push_messages)
    vars(fleet_handlers)["pull_messages"] = _is_there(fleet_handlers.pull_messages)
    desk = Desk(app.state.linkstate_factory.state())
    known = {}
    for child in site.children:
        key = flower_key(files.read_bytes(folder / "down" / f"{slug(child)}.pub"))
        desk.register(slug(child), key)
        known[b64encode(key).decode()] = child, key
    desk.start()
    # in a thread: the signal may come while the state is being used
    signal.signal(AGAIN, lambda number, frame: threading.Thread(target=desk.start).start())
    public, own = (sock.getsockname()[1] for sock in (outer, runtime))
    assert config.superexec_auth_secret is not None
    callers = {
        public: Children(known),
        own: OwnProcesses(config.superexec_auth_secret, app.state.linkstate_factory.state),
    }
    available = descriptors()
    limits = {public: Limits.of(len(known), available * 3 // 4), own: Limits.of(1, available // 4)}
    if len(known) * limits[public].of_a_caller > available * 3 // 4:
        words = f"{len(known)} children need more than the {available} descriptors left to this process (ulimit -n)"
        log.warn(words)
    news = door.door(app, public, site, folder, subtrees(folder, site))
    stamp = Stamp({key: name for key, (name, _) in known.items()}, log.say)
    server = Server(
        uvicorn.Config(
            Doors(news, {public: FLEET, own: RUNTIME}, site.largest, callers, {door.PATH: news.largest}, stamp),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        ),
        limits,
    )
    server.run(sockets=[outer, runtime])


def _in_few_parts(push: Any) -> Any:
    """Let nobody announce a message in more parts than ours have, each of which could be as large
    as one."""

    def pushed(request: Any, state: Any) -> Any:
        parts = [each for tree in request.message_object_trees for each in iterate_object_tree(tree)]
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1 or len(parts) > PARTS:
            raise HTTPException(413, f"a message of this run has {PARTS} parts")
        return push(request=request, state=state)

    return pushed


def _is_there(pull: Any) -> Any:
    """Who looks for messages is there, also where that is all this SuperLink knows of it as it has
    just begun."""

    def pulled(request: Any, state: Any, store: Any) -> Any:
        (node,) = state.get_node_info(node_ids=[request.node.node_id])
        if node.status != NodeStatus.ONLINE:
            state.acknowledge_node_heartbeat(node.node_id, HEARTBEAT)
        return pull(request=request, state=state, store=store)

    return pulled


def _listen(address: str) -> socket.socket:
    sock = bound(address)
    sock.listen()
    log.say(f"listens on {joined(*sock.getsockname()[:2])}")
    return sock
