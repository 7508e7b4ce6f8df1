"""A thousand malformed messages at a leaf, an aggregator and the root: none ends a node or harms
but its sender."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from stratafl.deploy.flower import inbox, pace, process
from stratafl.deploy.flower.process import GridLink
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.bounds import largest_message
from stratafl.deploy.protocol.children import meet
from stratafl.deploy.protocol.downward import Downward
from stratafl.deploy.protocol.messages import Bundle, Parcel
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import _ssh_public as ssh_public
from stratafl.deploy.sites.provision import flower_key
from tests.deploy.flower.malformed import broken, changed, records
from tests.deploy.trees import Deployed, Written, simulation

EACH = 334
"""Messages at a leaf, at an aggregator and at the root: a thousand and two."""
ROOM = 64 << 10
"""Kilobytes by which the process may grow meanwhile."""


class Grid:
    """Children in this process; what one of them says can be exchanged on its way."""

    def __init__(self, children: dict[str, Callable[[bytes], bytes]], publics: dict[str, bytes]):
        self.children, self.names = children, list(children)
        self.publics, self.came, self.exchange = publics, {}, {}

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(public_key=flower_key(self.publics[name]), node_id=i, last_activated_at="", status="online")
            for i, name in enumerate(self.names)
        ]

    def push_messages(self, messages: list[Message]) -> list[str]:
        (message,) = messages
        name = self.names[message.metadata.dst_node_id]
        message.metadata.__dict__["_message_id"] = number = f"message {len(self.came)}"
        request = message.content[inbox.RECORD]["data"]
        answer = {"refused": False, "data": self.children[name](request)}
        content = self.exchange[name](request, answer) if name in self.exchange else answer
        if isinstance(content, dict):
            content = RecordDict({inbox.RECORD: ConfigRecord(content)})
        self.came[number] = content
        if isinstance(content, RecordDict):
            self.came[number] = Message(content, reply_to=message)
        return [number]

    def look(self, numbers: list[str]) -> list[Any]:
        return [(number, self.came[number]) for number in numbers]

    def withdraw(self, numbers: list[str]) -> None: ...

    def hurry(self, until: float) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(process, "LOOK_AROUND", 0.0)
    monkeypatch.setattr(pace, "SHORTEST", 0.0)


@pytest.fixture(scope="module")
def keys() -> dict[str, tuple[bytes, bytes]]:
    """Of the edge, and of the node."""
    return {name: (seal.new_key(), ssh_public(ec.generate_private_key(ec.SECP384R1()))) for name in ("0", "1", "2")}


def sealed(deployed: Deployed, name: str, key: bytes, folder: Path) -> Callable[[bytes], bytes]:
    """A node as it takes sealed bytes."""
    (folder / name).mkdir()
    (folder / name / "up.key").write_bytes(key)
    here = Assembled(folder / name, None, None, deployed.job, Written(), None)  # type: ignore[arg-type]
    return here.sealed(deployed.nodes[name], lambda: None)


def link_of(depth: int) -> str:
    """The parent of three in a tree of this depth."""
    return "root" if depth == 1 else "1"


def parent_of_three(depth: int, keys: Any, folder: Path) -> tuple[Deployed, Grid, GridLink, str]:
    """A tree, and the node in it that has three children over a grid: the root, or an
    aggregator."""
    deployed = Deployed(simulation("mtgc", depth), by_samples=True)
    parent = link_of(depth)
    names = list(deployed.links[parent].children)
    mine = dict(zip(names, keys.values(), strict=True))
    slugs = {name: name.replace("/", "_") for name in names}
    for name in names:
        deployed.nodes[slugs[name]] = deployed.nodes[name]
    children = {name: sealed(deployed, slugs[name], mine[name][0], folder) for name in names}
    grid = Grid(children, {name: public for name, (_, public) in mine.items()})
    edges = {name: key for name, (key, _) in mine.items()}
    link = GridLink(grid, deployed.job, depth, edges, grid.publics)  # type: ignore[arg-type]
    return deployed, grid, link, names[1]


def exchanged(chance: random.Random, key: bytes, largest: int) -> Callable[[bytes, dict[str, Any]], Any]:
    """What a child sends instead of its answer."""

    def exchange(request: bytes, answer: dict[str, Any]) -> Any:
        data = seal.WORK.open_reply(key, request, answer["data"])
        kind = chance.choice(["field"] * 6 + ["bytes"] * 2 + ["records", "seal", "other request", "flower"])
        if kind == "records":
            return records(chance, answer, largest)
        if kind == "flower":
            return chance.choice([KeyError("head"), ValueError("no object"), AttributeError("metadata")])
        if kind == "seal":
            return {**answer, "data": broken(chance, answer["data"])}
        if kind == "other request":
            return {**answer, "data": seal.WORK.seal_reply(key, request + b"x", data)}
        made = changed(chance, data) if kind == "field" else broken(chance, data)
        return {**answer, "data": seal.WORK.seal_reply(key, request, made)}

    return exchange


def grown(before: int) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("depth", [1, 2], ids=["root", "aggregator"])
def test_malformed_replies(depth: int, keys: Any, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    deployed, grid, link, liar = parent_of_three(depth, keys, tmp_path)
    job, chance, (level, number) = deployed.job, random.Random(depth), deployed.job.tree.find(link_of(depth))
    deployed.root.greet()
    deployed.root.one_round()
    before, size = encode(deployed.kept[link_of(depth)]), grid.exchange
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def one_more() -> tuple[tuple[str, ...], tuple[str, ...], torch.Tensor]:
        """The same meeting again, of a parent that knows what it knew before it."""
        kept = decode(before, NodeState)
        assert kept.below is not None
        link._strangers.clear()  # they are told of once
        down = Downward(job, level, number, kept.below)
        down.take(Parcel(kept.below.held, kept.below.buffers, {}), job.every[0], False)
        meet(job, level, down, link, None, relayed=False)
        return down.now.refused, down.now.absent, down.now.held

    size[liar] = lambda request, answer: ValueError("nothing of it can be read")
    *_, without = one_more()
    largest = largest_message(deployed.job) + seal.SEAL
    key = link._keys[liar]
    size[liar] = exchanged(chance, key, largest)
    harmless = 0
    for _ in range(EACH if depth == 1 else EACH // 2):
        capsys.readouterr(), caplog.clear()
        refused, absent, model = one_more()
        told = capsys.readouterr().err + "".join(record.getMessage() for record in caplog.records)
        assert set(refused) | set(absent) <= {liar}
        assert told.replace("\n", "").isprintable()
        if liar in refused + absent:
            assert torch.equal(model, without)
            assert liar in told or liar in absent
        else:
            harmless += 1
        assert bool(model.isfinite().all()) and model.abs().max() < 100
    assert harmless < EACH // 5, "fields that are not known, or that may be missing"
    del size[liar]
    assert one_more()[:2] == ((), ())
    assert grown(started) < ROOM


@pytest.mark.parametrize("depth", [1, 2], ids=["leaf", "aggregator"])
def test_malformed_requests(depth: int, tmp_path: Path) -> None:
    deployed, key, chance = Deployed(simulation("mtgc", depth)), seal.new_key(), random.Random(depth)
    name, sent = ("1" if depth == 1 else "0"), []
    node = deployed.nodes[name]
    handle = node.handle
    node.handle = lambda bundle: sent.append(bundle) or handle(bundle)
    deployed.root.greet()
    deployed.root.one_round()
    node.handle, bundle = handle, deployed.root.down.bundles([name], None)[name]
    said: list[str] = []
    largest = largest_message(deployed.job) + seal.SEAL
    app = inbox.client_app(sealed(deployed, name, key, tmp_path), largest, lambda _, why: said.append(str(why)))
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def ask(content: RecordDict) -> dict[str, Any]:
        message = Message(content, 1, "train", ttl=10.0)
        message.metadata.__dict__["_message_id"] = "message"
        return dict(app(message, None).content[inbox.RECORD])  # type: ignore[arg-type]

    def one_more(made: bytes) -> dict[str, Any]:
        return ask(RecordDict({inbox.RECORD: ConfigRecord({"data": made})}))

    good = encode(bundle)
    refused = 0
    for _ in range(EACH if depth == 1 else EACH - EACH // 2):
        before = encode(node._kept)
        kind = chance.choice(["field"] * 6 + ["bytes"] * 2 + ["records", "seal", "old"])
        if kind == "records":
            answer = ask(records(chance, {"data": b""}, largest))
        elif kind == "old":
            answer = one_more(seal.WORK.seal_request(key, encode(chance.choice([each for each in sent if each.begin]))))
        elif kind == "seal":
            answer = one_more(broken(chance, seal.WORK.seal_request(key, good)))
        else:
            made = changed(chance, good) if kind == "field" else broken(chance, good)
            answer = one_more(seal.WORK.seal_request(key, made))
        if answer["refused"]:
            refused += 1
            assert encode(node._kept) == before
            assert 0 < len(answer["data"]) < 1000 and answer["data"].decode().isprintable()
    assert refused > EACH // 3 and len(said) == refused
    assert all(line.isprintable() for line in said)
    assert not one_more(seal.WORK.seal_request(key, encode(Bundle("test", name))))["refused"]
    assert grown(started) < ROOM
