"""Malformed messages, made from good ones by a random change anywhere: of Flower's records, of the
seal, of the bytes, of any field, of any array."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, MetricRecord, RecordDict
from safetensors.torch import load, save

from stratafl.deploy.flower import inbox

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
