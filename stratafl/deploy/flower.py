"""A node on Flower: a site's own process, and a parent's way to its children over a grid."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from stratafl.deploy import seal
from stratafl.deploy.assemble import Assembled, report_names, study_of
from stratafl.deploy.downward import Below
from stratafl.deploy.durable import DAMAGED, Damaged
from stratafl.deploy.inbox import RECORD, Inbox
from stratafl.deploy.job import Job
from stratafl.deploy.messages import Bundle, Reply
from stratafl.deploy.node import Aggregator, Leaf
from stratafl.deploy.pace import Pace
from stratafl.deploy.provision import flower_key
from stratafl.deploy.rounds import Rounds
from stratafl.deploy.tasks import SERVER_APP, Tasks
from stratafl.deploy.wire import encode, receive_reply
from stratafl.errors import InvalidInput
from stratafl.experiment import Study
from stratafl.metrics import evaluate
from stratafl.record import listed
from stratafl.store import files
from stratafl.store.tensors import write_tensors

LOOK_AROUND = 1.0
"""Seconds between two looks for nodes that came or came back."""
LIFETIME = 24 * 3600.0
"""Seconds a message may wait at a SuperLink where the level has no deadline."""


def say(text: str) -> None:
    """Into the log; that it cannot be written, as the disk is full, ends nobody."""
    with contextlib.suppress(OSError):
        print(f"stratafl {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass
class Asked:
    """A request on its way."""

    request: bytes
    since: str = ""
    """When the SuperNode it went to had last come up: one that came up again has lost it."""
    message: str | None = None


class GridLink:
    """Children by their registered node keys. A child that restarts is asked again, which it can bear."""

    def __init__(self, grid: Grid, job: Job, edge: int, keys: Mapping[str, bytes], nodes: Mapping[str, bytes]):
        self._grid, self._job, self._keys = grid, job, keys
        self._names = report_names(job, edge)
        self._sites = {flower_key(public): name for name, public in nodes.items()}
        self._here: dict[str, tuple[int, str]] = {}
        self._looked = 0.0
        self.contact: dict[str, float] = {}
        """When each child last replied."""

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply]:
        waiting = {name: Asked(seal.seal_request(self._keys[name], encode(b))) for name, b in bundles.items()}
        replies: dict[str, Reply] = {}
        pace = Pace()
        until = time.monotonic() + (LIFETIME if deadline is None else deadline)
        while waiting and time.monotonic() < until:
            self._look_around()
            for name, asked in waiting.items():
                self._send(name, asked, until - time.monotonic())
            on_their_way = {asked.message: name for name, asked in waiting.items() if asked.message}
            for message in self._grid.pull_messages(list(on_their_way)):
                name = on_their_way[message.metadata.reply_to_message_id]
                reply = self._reply(name, waiting[name], message)
                if reply is None:
                    waiting[name].message = None
                else:
                    replies[name] = reply
                    del waiting[name]
                    if reply.report is None and bundles[name].begin is not None:
                        say(f"{name} has lost its state: it is sent everything, and begins anew")
            if waiting:
                pace.wait()
        for name in waiting:
            say(f"{name} is left out: no reply within {deadline or LIFETIME:g} s")
        return replies

    def _look_around(self) -> None:
        if time.monotonic() - self._looked < LOOK_AROUND:
            return
        self._looked = time.monotonic()
        found: Any = self._grid.get_nodes()
        self._here = {
            self._sites[node.public_key]: (node.node_id, node.last_activated_at)
            for node in found
            if node.public_key in self._sites and node.status == "online"
        }

    def _send(self, name: str, asked: Asked, seconds: float) -> None:
        node, since = self._here.get(name, (None, ""))
        if node is None or (asked.message is not None and asked.since == since):
            return
        record = ConfigRecord({"data": asked.request})
        message = Message(RecordDict({RECORD: record}), node, "train", ttl=max(seconds, 1.0))
        (asked.message,) = self._grid.push_messages([message])
        asked.since = since

    def _reply(self, name: str, asked: Asked, message: Message) -> Reply | None:
        """The child's reply; None where it has to be asked again."""
        if message.has_error():
            say(f"{name}: {message.error.reason or 'its app failed'}; asking again")
            time.sleep(LOOK_AROUND)
            return None
        record: Any = message.content[RECORD]
        try:
            if record["refused"]:
                raise InvalidInput("refused", record["data"].decode(errors="replace"), "said by the site itself")
            reply = receive_reply(
                seal.open_reply(self._keys[name], asked.request, record["data"]), self._job, self._names
            )
            if (reply.job, reply.site) != (self._job.name, name):
                raise InvalidInput("reply", (reply.job, reply.site), f"must be from {name} for {self._job.name}")
        except InvalidInput as problem:
            say(f"{name}: its message is refused: {problem}")
            time.sleep(LOOK_AROUND)
            return None
        self.contact[name] = time.time()
        return reply


def live(folder: Path) -> None:
    """A site's own process: be its node until the run is over."""
    try:
        here = Assembled.of(folder)
        if here.site.is_leaf:
            follow(here, here.leaf())
        else:
            serve(here)
    except InvalidInput as problem:
        say(str(problem))
        sys.exit(DAMAGED if isinstance(problem, Damaged) else 2)
    here.durable.close()


def serve(here: Assembled) -> None:
    """The root's or an aggregator's life, as the ServerApp of the SuperLink beside."""
    tasks = Tasks(SERVER_APP, here.site.runtime_port, here.key("ca.pem"), here.key("inner.key"), say)
    token = tasks.next(lambda: True)
    assert token is not None
    with tasks.grid(token) as grid:
        link = GridLink(grid, here.job, here.site.level + 1, here.child_keys(), here.child_nodes())
        if here.site.is_root:
            _lead(here, link)
        else:
            follow(here, here.aggregator(link))


def follow(here: Assembled, node: Leaf | Aggregator) -> None:
    """A leaf's or an aggregator's life: do what the parent asks for."""
    over: list[bool] = []
    handle = here.sealed(node, lambda: over.append(True))
    here.durable.show(doing="waiting")
    inbox = Inbox(here.site.inner_port, here.key("ca.pem"), here.key("inner.key"), say)
    inbox.serve(handle, lambda: not over)


def _lead(here: Assembled, link: GridLink) -> None:
    """The root's life."""
    made = study_of(here.config)
    root = here.root(made, link)
    rounds = Rounds(here.folder, root.line)
    if root.round == 0:
        root.greet()
    while root.round < here.job.rounds:
        number, began, before = root.round + 1, time.perf_counter(), root.down.now.held
        here.durable.show(doing="round", round=number, contacts=link.contact)
        refused, _ = root.one_round(partial(_told, made, number, began))
        rounds.add(root.line)
        say(f"round {number}: {json.loads(root.line)['metrics']}")
        if refused and root.down.now.held is before:
            say(f"round {number}: every update was refused, so the model stays as it was: {listed(refused)}")
    root.end()
    now = root.down.now
    with files.writing(here.folder / "model.safetensors") as file:
        write_tensors(
            file, {k: v.contiguous() for k, v in made.simulation.flat.named(now.held[0], now.buffers[0]).items()}
        )
    accounts = {name: vars(now.children[i].account) for i, name in enumerate(root.down.names)}
    here.durable.show(doing="done", round=root.round, contacts=link.contact, accounts=accounts)


def _told(made: Study, number: int, began: float, now: Below, refused: tuple[str, ...], absent: tuple[str, ...]) -> str:
    """A round's line in the record."""
    line = {"round": number, "metrics": _metrics(made, now), "refused": refused, "absent": absent}
    return json.dumps({**line, "seconds": time.perf_counter() - began})


def _metrics(made: Study, now: Below) -> dict[str, float]:
    simulation = made.simulation
    if simulation.test is None:
        return {}
    simulation.flat.eval()
    x_P, b_B = now.held[0], now.buffers[0].clone()
    return evaluate(lambda inputs: simulation.flat.call(x_P, b_B, inputs), F.cross_entropy, *simulation.test)
