"""A thousand malformed messages at a leaf, an aggregator and the root: none ends a node or harms
but its sender.

They are made from good ones, by a random change anywhere: of Flower's records, of the seal, of the
bytes, of any field, of any array.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load, save

from stratafl.deploy.door.doors import ENVELOPE, FLEET, RUNTIME, Doors
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
from tests.deploy.trees import Deployed, simulation

EACH = 334
"""Messages at a leaf, at an aggregator and at the root: a thousand and two."""
ROOM = 64 << 10
"""Kilobytes by which the process may grow meanwhile."""
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**15, 10**30, 10**400, 1.5, -0.5, 1.7e308, float("nan"), float("inf"),
    -float("inf"), "", "x", "y" * 10_000, "\x1b[2J\x07", "root", [], {}, ["root"], [[]], {"a": {}}, [None] * 1000,
]  # fmt: skip
ROWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda row: row[:, :-1], lambda row: row[0], lambda row: row.repeat(3, 1), lambda row: row.double(),
    lambda row: row.int(), lambda row: row.half(), lambda row: torch.full_like(row, torch.nan), lambda row: row[:0],
    lambda row: torch.full_like(row, -torch.inf), lambda row: torch.full_like(row, 1e30),
    lambda row: torch.zeros(1, 10_000),
]  # fmt: skip


# -- what is sent ----------------------------------------------------------------------------------


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a message, however deep."""
    if isinstance(plain, dict):
        for key, each in plain.items():
            yield (*path, key)
            yield from places(each, (*path, key))


def changed(chance: random.Random, data: bytes) -> bytes:
    """A message with one field or one array that is not what it was."""
    length = int.from_bytes(data[:8], "little")
    plain, rows = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"]), load(data)
    made = copy.deepcopy(plain)
    *way, last = chance.choice(list(places(plain)))
    inside = made
    for key in way:
        inside = inside[key]
    kind = chance.choice(["value", "value", "value", "missing", "more", "rows", "rows"])
    if kind == "value":
        inside[last] = chance.choice(VALUES)
    elif kind == "missing":
        del inside[last]
    elif kind == "more":
        inside["more"] = chance.choice(VALUES)
    else:
        name = chance.choice([name for name, row in rows.items() if row.numel()])
        rows[name] = chance.choice(ROWS)(rows[name]).contiguous()
    return save(rows, metadata={"message": json.dumps(made)})


def broken(chance: random.Random, data: bytes) -> bytes:
    """Bytes that are no message any more."""
    kind = chance.choice(["short", "flipped", "header", "none", "noise", "deep", "shape"])
    if kind == "short":
        return data[: chance.randrange(len(data))]
    if kind == "flipped":
        place = chance.randrange(min(len(data), 300))
        return data[:place] + bytes([data[place] ^ (1 + chance.randrange(255))]) + data[place + 1 :]
    if kind == "header":
        return chance.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    if kind == "shape":
        head = {"a": {"dtype": "F32", "shape": [1, 10**12], "data_offsets": [0, 4 * 10**12]}}
        text = json.dumps({**head, "__metadata__": {"message": "{}"}}).encode()
        return len(text).to_bytes(8, "little") + text + bytes(64)
    if kind == "deep":
        text = json.dumps({"__metadata__": {"message": "[" * 20_000}}).encode()
        return len(text).to_bytes(8, "little") + text
    return b"" if kind == "none" else chance.randbytes(chance.randrange(5000))


def records(chance: random.Random, fields: dict[str, Any], largest: int) -> RecordDict:
    """Records that are not ours, whoever made them."""
    wrong = {"data": chance.choice(["text", 3, 1.5, [1, 2], [b"a"], b"", bytes(largest + 1)])}
    made: list[dict[str, Any]] = [
        {},
        {"other": ConfigRecord(fields)},
        {inbox.RECORD: MetricRecord({"data": 1})},
        {inbox.RECORD: ConfigRecord({})},
        {inbox.RECORD: ConfigRecord({**fields, **wrong})},
        {inbox.RECORD: ConfigRecord({**fields, "more": 1})},
        {inbox.RECORD: ConfigRecord({**fields, "refused": chance.choice([0, "no", b"", [True]])})},
    ]
    return RecordDict(chance.choice(made))


# -- where it arrives ------------------------------------------------------------------------------


class Written:
    """Stands where a node's disk is."""

    def show(self, **facts: object) -> None:
        self.facts = facts


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
        data = seal.open_reply(key, request, answer["data"])
        kind = chance.choice(["field"] * 6 + ["bytes"] * 2 + ["records", "seal", "other request", "flower"])
        if kind == "records":
            return records(chance, answer, largest)
        if kind == "flower":
            return chance.choice([KeyError("head"), ValueError("no object"), AttributeError("metadata")])
        if kind == "seal":
            return {**answer, "data": broken(chance, answer["data"])}
        if kind == "other request":
            return {**answer, "data": seal.seal_reply(key, request + b"x", data)}
        made = changed(chance, data) if kind == "field" else broken(chance, data)
        return {**answer, "data": seal.seal_reply(key, request, made)}

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
    assert harmless < EACH // 10
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
    app = inbox.client_app(sealed(deployed, name, key, tmp_path), largest, said.append)
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
            answer = one_more(seal.seal_request(key, encode(chance.choice([each for each in sent if each.begin]))))
        elif kind == "seal":
            answer = one_more(broken(chance, seal.seal_request(key, good)))
        else:
            made = changed(chance, good) if kind == "field" else broken(chance, good)
            answer = one_more(seal.seal_request(key, made))
        if answer["refused"]:
            refused += 1
            assert encode(node._kept) == before
            assert 0 < len(answer["data"]) < 1000 and answer["data"].decode().isprintable()
    assert refused > EACH // 3 and len(said) == refused
    assert all(line.isprintable() for line in said)
    assert not one_more(seal.seal_request(key, encode(Bundle("test", name))))["refused"]
    assert grown(started) < ROOM


# -- before it is read -----------------------------------------------------------------------------


class Inside:
    """What is behind the doors: it reads a body to its end, and says yes."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise RuntimeError("gone")
            self.read += len(event["body"])
            more = event.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def knock(inside: Inside, path: str, body: list[bytes], announced: int | None, largest: int = 10_000) -> int:
    """The status of the answer to a request."""
    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    statuses: list[int] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(event: Any) -> None:
        if "status" in event:
            statuses.append(event["status"])

    scope = {"type": "http", "server": ("127.0.0.1", 1), "path": path, "headers": headers, "client": ("10.0.0.9", 5)}
    asyncio.run(Doors(inside, {1: FLEET}, largest)(scope, receive, send))
    (status,) = statuses
    return status


def test_a_message_is_refused_from_its_announced_size(capsys: Any) -> None:
    inside = Inside()
    assert knock(inside, f"{FLEET}push-object", [b"x" * 300], 300 << 20) == 413
    assert inside.read == 0
    assert "10.0.0.9" in capsys.readouterr().err
    assert knock(inside, f"{FLEET}push-object", [b"x" * 300], 300) == 200
    assert inside.read == 300


@pytest.mark.parametrize("announced", [None, 5])
def test_a_body_that_grows_beyond_its_size_is_cut(announced: int | None) -> None:
    inside = Inside()
    assert knock(inside, f"{FLEET}push-object", [bytes(10_000)] * 100, announced) == 413
    assert inside.read <= 10_000 + ENVELOPE


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/health", "/v1/control/start-run", RUNTIME])
def test_nothing_else_is_behind_a_door(path: str) -> None:
    inside = Inside()
    assert knock(inside, path, [b""], 0) == 403 and inside.read == 0


def test_the_inner_port_describes_nothing() -> None:
    from flwr.supernode.main import create_app

    from stratafl.deploy.flower.supernode import _behind_a_door as behind_a_door

    no_tasks = SimpleNamespace(state=dict)
    for path, status in (("/docs", 403), ("/openapi.json", 403), (f"{RUNTIME}acquire-task", 401)):
        statuses: list[int] = []

        async def send(event: Any, statuses: list[int] = statuses) -> None:
            if "status" in event:
                statuses.append(event["status"])

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "GET", "server": ("127.0.0.1", 7), "path": path, "headers": [],
                 "query_string": b"", "client": ("127.0.0.1", 1), "raw_path": path.encode(), "scheme": "https",
                 "root_path": "", "http_version": "1.1"}  # fmt: skip
        asyncio.run(behind_a_door(create_app, 7, 100)(no_tasks, b"secret")(scope, receive, send))
        assert statuses == [status]


def test_the_largest_message_of_a_run_is_let_through() -> None:
    sizes: list[int] = []

    class Measured:
        def __init__(self, node: Any):
            self.node = node

        def handle(self, bundle: Bundle) -> Any:
            reply = self.node.handle(bundle)
            sizes.extend((len(encode(bundle)), len(encode(reply))))
            return reply

    deployed = Deployed(simulation("scaffold", 3), wrap=Measured).run()
    assert 0 < max(sizes) < largest_message(deployed.job)
