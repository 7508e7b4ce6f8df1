"""A node on Flower: a site's own process, and a parent's way to its children over a grid."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from stratafl.deploy import seal
from stratafl.deploy.assemble import Assembled, study_of
from stratafl.deploy.bounds import largest_message
from stratafl.deploy.downward import Below
from stratafl.deploy.durable import DAMAGED, Damaged
from stratafl.deploy.fingerprint import differences
from stratafl.deploy.inbox import RECORD, Inbox, contents
from stratafl.deploy.job import Job
from stratafl.deploy.messages import Bundle, Refused, Reply
from stratafl.deploy.node import Aggregator, Leaf, Root, is_lost
from stratafl.deploy.pace import Pace
from stratafl.deploy.provision import flower_key
from stratafl.deploy.rounds import Rounds
from stratafl.deploy.tasks import SERVER_APP, Tasks
from stratafl.deploy.wire import encode, receive_reply
from stratafl.errors import LONGEST_WORDS, InvalidInput, line, told
from stratafl.experiment import Study
from stratafl.metrics import evaluate
from stratafl.record import listed
from stratafl.store import files
from stratafl.store.tensors import write_tensors

LOOK_AROUND = 1.0
"""Seconds between two looks for nodes that came or came back."""
LIFETIME = 24 * 3600.0
"""Seconds a message may wait at a SuperLink where the level has no deadline."""
TRIES = 5
"""How often a child is asked for the same in a round, where what came could be anybody's and is no reply."""


def say(text: str) -> None:
    """Into the log; that it cannot be written, as the disk is full, ends nobody."""
    with contextlib.suppress(OSError):
        print(f"stratafl {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Said(logging.Handler):
    """What a node has to tell, said as everything else is."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@dataclass
class Asked:
    """A request on its way."""

    request: bytes
    since: str = ""
    """When the SuperNode it went to had last come up: one that came up again has lost it."""
    message: str | None = None
    tries: int = 0
    """How often something came of it that is no reply."""
    again: float = 0.0
    """When it may be asked again."""
    stranger: Reply | None = None
    """What came of it, where that is from one that is made of something else: asked again when it comes up again."""


class GridLink:
    """Children by their registered node keys. A child that restarts is asked again, which it can bear."""

    def __init__(self, grid: Grid, job: Job, edge: int, keys: Mapping[str, bytes], nodes: Mapping[str, bytes]):
        self._grid, self._job, self._keys = grid, job, keys
        self._names, self._largest = job.report_names[edge - 1], seal.SEAL + largest_message(job)
        self._sites = {flower_key(public): name for name, public in nodes.items()}
        self._here: dict[str, tuple[int, str]] = {}
        self._looked = 0.0
        self.contact: dict[str, float] = {}
        """When each child last replied."""
        self._strangers: dict[str, str] = {}
        """Who was refused for what it is made of, and why."""

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply | Refused]:
        waiting = {name: Asked(seal.seal_request(self._keys[name], encode(b))) for name, b in bundles.items()}
        came: dict[str, Reply | Refused] = {}
        pace = Pace()
        until = time.monotonic() + (LIFETIME if deadline is None else deadline)
        # a stranger alone is waited for: with nobody else, rounds would pass with nothing done
        while waiting and time.monotonic() < until and not (came and all(a.stranger for a in waiting.values())):
            self._look_around()
            for name, asked in waiting.items():
                self._send(name, asked, until - time.monotonic())
            on_their_way = {asked.message: name for name, asked in waiting.items() if asked.message}
            for answered, message in self._pull(list(on_their_way)):
                name = on_their_way[answered]
                reply = self._reply(name, waiting[name], message)
                if reply is None:
                    waiting[name].message = None
                    waiting[name].again = time.monotonic() + LOOK_AROUND
                elif isinstance(reply, Reply) and reply.fingerprint != self._job.fingerprint:
                    self._refuse(name, reply)
                    waiting[name].message, waiting[name].stranger = "", reply
                else:
                    came[name] = reply
                    del waiting[name]
                    if is_lost(bundles[name], reply):
                        say(f"{name} has lost its state: it is sent everything, and begins anew")
            if waiting:
                pace.wait()
        came |= {name: asked.stranger for name, asked in waiting.items() if asked.stranger}
        for name in [name for name in waiting if name not in came]:
            say(f"{name} is left out: no reply within {deadline or LIFETIME:g} s")
        return came

    def _pull(self, asked: list[str]) -> list[tuple[str, Message | Exception]]:
        """What came of these messages; where reading it fails, why it does, and for which."""
        try:
            pulled = [(message.metadata.reply_to_message_id, message) for message in self._grid.pull_messages(asked)]
            return [(answered, message) for answered, message in pulled if answered in asked]
        except httpx.TransportError:  # it is the SuperLink that does not answer
            raise
        except Exception as problem:
            if len(asked) == 1:
                return [(asked[0], problem)]
            return [each for one in asked for each in self._pull([one])]

    def _refuse(self, name: str, stranger: Reply) -> None:
        why = line(differences(self._job.made_of, stranger.made_of), LONGEST_WORDS)
        if self._strangers.get(name) != why:
            say(f"{name} is refused: it does not work with what this site does: {why}")
        self._strangers[name] = why

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
        if node is None or (asked.message is not None and asked.since == since) or time.monotonic() < asked.again:
            return
        record = ConfigRecord({"data": asked.request})
        message = Message(RecordDict({RECORD: record}), node, "train", ttl=max(seconds, 1.0))
        (asked.message,) = self._grid.push_messages([message])
        asked.since = since

    def _reply(self, name: str, asked: Asked, message: Message | Exception) -> Reply | Refused | None:
        """The child's reply; None where it has to be asked again. No shape of a message does more harm than that."""
        sealed = False
        try:
            if isinstance(message, Exception):
                raise message
            if message.has_error():
                say(f"{name}: {line(str(message.error.reason or 'its app failed'), LONGEST_WORDS)}; asking again")
                return None
            refused, data = contents(message, {"refused": bool, "data": bytes}, self._largest)
            if refused:
                say(f"{name} refuses what it was sent: {line(data.decode(errors='replace'), LONGEST_WORDS)}")
                return None
            opened = seal.open_reply(self._keys[name], asked.request, data)
            sealed = True
            reply = receive_reply(opened, self._job, self._names)
        except Exception as problem:
            asked.tries += 1
            if not sealed and asked.tries < TRIES:
                say(f"{name}: its message is refused: {told(problem)}; asking again")
                return None
            return Refused(told(problem), sealed)
        self.contact[name] = time.time()
        return reply


def live(folder: Path) -> None:
    """A site's own process: be its node until the run is over."""
    logging.getLogger("stratafl.deploy").addHandler(Said())
    try:
        here = Assembled.of(folder)
        try:
            if here.site.is_leaf:
                follow(here, here.leaf())
            else:
                serve(here)
        finally:
            here.durable.close()
    except InvalidInput as problem:
        say(str(problem))
        sys.exit(DAMAGED if isinstance(problem, Damaged) else 2)


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
    largest = largest_message(here.job) + seal.SEAL
    inbox = Inbox(here.site.inner_port, here.key("ca.pem"), here.key("inner.key"), largest, say)
    inbox.serve(handle, lambda: not over)


def _lead(here: Assembled, link: GridLink) -> None:
    """The root's life."""
    made = study_of(here.config)
    root = here.root(made, link)
    rounds = Rounds(here.folder, root.line)
    if root.round == 0:
        root.greet()
    while not _is_over(made, root):
        number, began, before = root.round + 1, time.perf_counter(), root.down.now.held
        here.durable.show(doing="round", round=number, contacts=link.contact)
        refused, _ = root.one_round(partial(_told, made, number, began))
        rounds.add(root.line)
        say(f"round {number}: {json.loads(root.line)['metrics']}")
        if refused and root.down.now.held is before:
            say(f"round {number}: every update was refused, so the model stays as it was: {listed(refused)}")
    if root.round < here.job.rounds:
        say(f"round {root.round}: the accuracy to stop at is reached")
    root.end()
    now = root.down.now
    with files.writing(here.folder / "model.safetensors") as file:
        write_tensors(
            file, {k: v.contiguous() for k, v in made.simulation.flat.named(now.held[0], now.buffers[0]).items()}
        )
    accounts = {name: vars(now.children[i].account) for i, name in enumerate(root.down.names)}
    here.durable.show(doing="done", round=root.round, contacts=link.contact, accounts=accounts)


def _is_over(made: Study, root: Root) -> bool:
    """As a simulation is: all rounds were done, or the last one reached the accuracy to stop at."""
    if root.round >= made.simulation.rounds:
        return True
    wanted = made.simulation.stop_at
    return bool(wanted is not None and root.line and json.loads(root.line)["metrics"].get("accuracy", -1.0) >= wanted)


def _told(made: Study, number: int, began: float, now: Below, refused: tuple[str, ...], absent: tuple[str, ...]) -> str:
    """A round's line in the record."""
    told = {"round": number, "metrics": _metrics(made, number, now), "refused": refused, "absent": absent}
    return json.dumps({**told, "seconds": time.perf_counter() - began})


def _metrics(made: Study, number: int, now: Below) -> dict[str, float]:
    simulation = made.simulation
    due = number % simulation.evaluate_every == 0 or number == simulation.rounds
    if simulation.test is None or not due:
        return {}
    simulation.flat.eval()
    x_P, b_B = now.held[0], now.buffers[0].clone()
    return evaluate(lambda inputs: simulation.flat.call(x_P, b_B, inputs), F.cross_entropy, *simulation.test)
