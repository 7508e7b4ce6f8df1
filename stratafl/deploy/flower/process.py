"""A node on Flower: a site's own process, and a parent's way to its children over a grid."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.logger import LOGGER_NAME
from torch import Tensor

from stratafl.base.errors import LONGEST_WORDS, InvalidInput, error_message, join_names, one_line
from stratafl.deploy.flower.grid import RUN_IS_OVER, PromptGrid
from stratafl.deploy.flower.inbox import RECORD, Inbox, contents
from stratafl.deploy.flower.pace import Pace
from stratafl.deploy.flower.tasks import SERVER_APP, Tasks
from stratafl.deploy.news.door import heard_from
from stratafl.deploy.notes import log
from stratafl.deploy.notes.log import say, warn
from stratafl.deploy.notes.outward import outward, share_texts
from stratafl.deploy.notes.waiting import BUSY, UNCONNECTED, Waiting
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.bounds import largest_message
from stratafl.deploy.protocol.children import is_lost
from stratafl.deploy.protocol.downward import Below
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import Bundle, Refused, Reply
from stratafl.deploy.protocol.node import Aggregator, LeafNode, Root
from stratafl.deploy.protocol.wire import encode, receive_reply
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.fingerprint import differences
from stratafl.deploy.sites.provision import flower_key
from stratafl.deploy.sites.rounds import RootRun
from stratafl.deploy.sites.site import Site
from stratafl.deploy.sites.state_file import DAMAGED, Damaged
from stratafl.deploy.sites.topology import LONGEST_DEADLINE
from stratafl.metrics.records import DeployedRound, by_level
from stratafl.simulation.deployed import RootSetup, root_of

LOOK_AROUND = 1.0
"""Seconds between two looks for nodes that came or came back."""
LONGEST_PAUSE = 60.0
"""Seconds before a child that refused is asked again, at most: each refusal doubles them, and a
reply ends that. It is sent everything each time, and may have done the work of a round."""
LIFETIME = float(LONGEST_DEADLINE)
"""Seconds a message may wait at a SuperLink, which wants to know, where the level has no
deadline."""
TRIES = 5
"""How often a child is asked for the same in a round, where what came could be anybody's and is no
reply."""


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
    refused: str = ""
    """Why what last came of it does not count."""
    stranger: Reply | None = None
    """What came of it, where that is from one that is made of something else: asked again when it
    comes up again."""


class GridLink:
    """Children by their registered node keys. A child that restarts is asked again, which it can
    bear."""

    def __init__(self, grid: PromptGrid, job: Job, edge: int, keys: Mapping[str, bytes], nodes: Mapping[str, bytes]):
        self._grid, self._job, self._keys = grid, job, keys
        self._names, self._largest = job.report_names[edge - 1], seal.SEAL + largest_message(job)
        self._sites = {flower_key(public): name for name, public in nodes.items()}
        self._here: dict[str, tuple[int, str]] = {}
        self._looked = 0.0
        self._is_silent = False
        """Whether the SuperLink beside did not answer when it was last asked for anything."""
        self.contact: dict[str, float] = {}
        """When each child last replied."""
        self._strangers: dict[str, str] = {}
        """Who was refused for what it is made of, and why."""
        self._pauses: dict[str, float] = {}
        """Seconds that each child which refused what it last got was left in peace."""
        self._waiting = Waiting(heard_from)

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply | Refused]:
        waiting = {name: Asked(seal.WORK.seal_request(self._keys[name], encode(b))) for name, b in bundles.items()}
        came: dict[str, Reply | Refused] = {}
        pace = Pace()
        self._waiting.begin()
        until = math.inf if deadline is None else time.monotonic() + deadline
        self._grid.hurry(until)
        # a stranger alone is waited for: with nobody else, rounds would pass with nothing done
        while waiting and time.monotonic() < until and not (came and all(a.stranger for a in waiting.values())):
            for name, message in self._look(waiting, until):
                reply = self._reply(name, waiting[name], message)
                if reply is None:
                    self._pauses[name] = min(2 * self._pauses.get(name, LOOK_AROUND / 2), LONGEST_PAUSE)
                    waiting[name].message = None
                    waiting[name].again = time.monotonic() + self._pauses[name]
                elif isinstance(reply, Reply) and reply.fingerprint != self._job.fingerprint:
                    self._refuse(name, reply)
                    waiting[name].message, waiting[name].stranger = "", reply
                else:
                    came[name] = reply
                    del waiting[name]
                    self._pauses.pop(name, None)
                    if is_lost(bundles[name], reply):
                        warn(f"{name} has lost its state: it is sent everything, and begins anew")
            self._waiting.look({name: self._why(name, asked) for name, asked in waiting.items()})
            if waiting:
                pace.wait()
        self._grid.withdraw([asked.message for asked in waiting.values() if asked.message])
        self._waiting.over()
        came |= {name: asked.stranger for name, asked in waiting.items() if asked.stranger}
        for name in [name for name in waiting if name not in came]:
            say(f"{name} is left out: no reply within {deadline:g} s", log.WARNING)
        return came

    def _look(self, waiting: Mapping[str, Asked], until: float) -> list[tuple[str, Message | Exception]]:
        """Ask whoever is there and has not been asked; what came from whom, or why that cannot be
        read."""
        try:
            self._look_around()
            for name, asked in waiting.items():
                if time.monotonic() < until:
                    self._send(name, asked, min(until - time.monotonic(), LIFETIME))
            on_their_way = {asked.message: name for name, asked in waiting.items() if asked.message}
            came = [(on_their_way[each], message) for each, message in self._grid.look(on_their_way)]
        except httpx.HTTPError as problem:
            if isinstance(problem, httpx.HTTPStatusError) and problem.response.status_code in RUN_IS_OVER:
                say("the SuperLink beside has ended this run, as it heard nothing of this process for too long")
                sys.exit(1)
            if not self._is_silent:
                say(f"the SuperLink beside does not answer: {error_message(problem)}")
            self._is_silent = True
            return []
        self._is_silent = False
        return came

    def _refuse(self, name: str, stranger: Reply) -> None:
        why = one_line(differences(self._job.made_of, stranger.made_of), LONGEST_WORDS)
        if self._strangers.get(name) != why:
            warn(f"{name} is refused: it does not work with what this site does: {why}")
        self._strangers[name] = why

    def _why(self, name: str, asked: Asked) -> str:
        """Why a child is still waited for, as far as is known here."""
        if name not in self._here:
            return UNCONNECTED
        return self._strangers[name] if asked.stranger is not None else asked.refused or BUSY

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
        is_asked = asked.message is not None or time.monotonic() < asked.again
        if node is None or (is_asked and asked.since == since):
            return
        record = ConfigRecord({"data": asked.request})
        message = Message(RecordDict({RECORD: record}), node, "train", ttl=max(seconds, 1.0))
        before, asked.message = asked.message, None
        self._grid.withdraw([before] if before else [])
        try:
            (sent,) = self._grid.push_messages([message])
        except httpx.HTTPError as problem:
            self._grid.withdraw([message.metadata.message_id])
            if not isinstance(problem, httpx.HTTPStatusError) or problem.response.status_code in RUN_IS_OVER:
                raise
            sent = None  # of this one, which holds up nobody else
        asked.message, asked.since = sent or None, since
        if asked.message is None:  # it went offline just now, or whatever else
            asked.again = time.monotonic() + LOOK_AROUND

    def _reply(self, name: str, asked: Asked, message: Message | Exception) -> Reply | Refused | None:
        """The child's reply; None where it has to be asked again. No shape of a message does more
        harm than that."""
        sealed = False
        try:
            if isinstance(message, Exception):
                raise message
            if message.has_error():
                asked.refused = one_line(str(message.error.reason or "its app failed"), LONGEST_WORDS)
                say(f"{name}: {asked.refused}; asking again", log.WARNING)
                return None
            refused, data = contents(message, {"refused": bool, "data": bytes}, self._largest)
            if refused:
                asked.refused = one_line(data.decode(errors="replace"), LONGEST_WORDS)
                say(f"{name} refuses what it was sent: {asked.refused}", log.WARNING)
                return None
            opened = seal.WORK.open_reply(self._keys[name], asked.request, data)
            sealed = True
            reply = receive_reply(opened, self._job, self._names)
        except Exception as problem:
            asked.tries += 1
            if not sealed and asked.tries < TRIES:
                asked.refused = f"its message is refused: {outward(problem)}"
                warn(f"{name} is asked again, its message is refused", problem)
                return None
            say(f"{name}: its message cannot be used: {error_message(problem)}", log.WARNING)
            return Refused(outward(problem), sealed)
        self.contact[name] = time.time()
        return reply


def live(folder: Path) -> None:
    """A site's own process: be its node until the run is over."""
    log.listen("stratafl.deploy", travels=True)
    log.listen(LOGGER_NAME)
    try:
        site = Site.load(folder)
        share_texts(site.share_errors or site.is_root)  # there is nobody above the root
        here = Assembled.of(folder)
        try:
            if here.site.is_leaf:
                follow(here, here.leaf())
            else:
                serve(here)
        finally:
            here.durable.close()
    except InvalidInput as problem:
        log.fail("", problem)
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


def follow(here: Assembled, node: LeafNode | Aggregator) -> None:
    """A leaf's or an aggregator's life: do what the parent asks for."""
    over: list[bool] = []
    handle = here.sealed(node, lambda: over.append(True))
    here.durable.show(doing="waiting")
    log.well()
    largest = largest_message(here.job) + seal.SEAL
    inbox = Inbox(here.site.inner_port, here.key("ca.pem"), here.key("inner.key"), largest, say)
    inbox.serve(handle, lambda: not over)


def _lead(here: Assembled, link: GridLink) -> None:
    """Lead the tree from the root through all rounds."""
    made = root_of(here.experiment)
    root = here.root(made, link)
    run = here.run_folder(made, root)
    here.durable.show(doing="waiting", round=root.round, contacts=link.contact)
    log.well()
    if root.round == 0:
        root.greet()
    while not _is_over(made, root, run):
        number = root.round + 1
        tell = partial(_told, here.job, made, run.steps(number), root.down.now.held, time.perf_counter())
        here.durable.show(doing="round", round=number, contacts=link.contact)
        refused, _ = root.one_round(partial(tell, number))
        record = run.add(root.line)
        say(f"round {number}: {record.metrics}")
        if record.lost:
            warn(f"round {number}: every update was refused, so the model stays as it was: {join_names(refused)}")
    if root.round < here.job.rounds:
        say(f"round {root.round}: what the run is to stop at is reached")
    root.end()
    now = root.down.now
    accounts = {name: vars(now.children[i].account) for i, name in enumerate(root.down.names)}
    own_B = now.buffers[0, : here.job.buffers]
    whole = made.start.flat.build(*made.whole(now.held[0], own_B))
    totals = {1: _together(list(accounts.values()))}
    run.finish(whole.state_dict(), _bytes_per_client(here.job, now), totals)
    run.close()
    here.durable.show(doing="done", round=root.round, contacts=link.contact, accounts=accounts)


def _is_over(made: RootSetup, root: Root, run: RootRun) -> bool:
    """Whether the run has ended, as a simulation does: all rounds were done, or the last one
    reached what the run is to stop at."""
    reached = run.last is not None and run.last.reaches(made.objective.goals)
    return root.round >= made.experiment.rounds or reached


def _told(
    job: Job,
    made: RootSetup,
    steps: int,
    before: Tensor,
    began: float,
    number: int,
    now: Below,
    refused: tuple[str, ...],
    absent: tuple[str, ...],
) -> str:
    """A round's line in the record: a simulation's, and who was absent."""
    assert job.leaf is not None
    drift: dict[str, dict[str, float]] = {}
    for why, names in {"refused": refused, "absent": absent}.items():
        for level, count in by_level(job.tree, names).items():
            drift.setdefault(level, {})[why] = count
    record = DeployedRound(
        round=number,
        steps=steps,
        lr=float(job.leaf.lr(number - 1)),
        metrics=made.metrics(number, now.held[0], now.buffers[0, : job.buffers]),
        nodes={},
        refused=refused,
        bytes_per_client=_bytes_per_client(job, now),
        seconds=time.perf_counter() - began,
        drift=drift,
        renewed=now.held is not before,
        absent=absent,
    )
    return json.dumps(asdict(record))


def _bytes_per_client(job: Job, now: Below) -> float:
    """What a client sent and received so far, where its parent is the root; nobody tells the root
    of others."""
    if job.tree.depth > 1:
        return math.nan
    total = _together([vars(child.account) for child in now.children])
    return (total["bytes_up"] + total["bytes_down"]) / job.tree.leaves


def _together(accounts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Several edges' accounts as one."""
    return {name: sum(account[name] for account in accounts) for name in accounts[0]}
