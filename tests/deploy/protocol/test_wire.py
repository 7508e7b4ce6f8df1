"""Messages as bytes: nothing is lost, and what is not a message of this run is refused by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from stratafl import InvalidInput
from stratafl.deploy.protocol.messages import Answer, Begin, Bundle, Parcel, Reply, Report
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode, receive_bundle, receive_reply
from tests.deploy.trees import Deployed, simulation

NAMES = frozenset({"model"})


@pytest.fixture(scope="module")
def deployed() -> Deployed:
    return Deployed(simulation("scaffold", 2)).run()


def row(width: int = 15, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1, width), value, dtype=dtype)


def bundle(**changes: Any) -> Bundle:
    parcel = Parcel(**{"model": row(), "buffers": row(0), "note": {"c": row()}, **changes})
    return Bundle("test", "0/0", Answer(4, 0.5, parcel), Begin(4, 4, None, row()))


def reply(**changes: Any) -> Reply:
    report = Report(**{"step": 2, "rate": 0.1, "message": {"model": row()}, "buffers": row(0), **changes})
    return Reply("test", "0/0", 7, report)


def same(one: Any, other: Any) -> bool:
    return encode(one) == encode(other)


def test_a_round_trip_loses_nothing(deployed: Deployed) -> None:
    assert same(receive_bundle(encode(bundle()), deployed.job), bundle())
    assert same(receive_reply(encode(reply()), deployed.job, NAMES), reply())
    for kept in deployed.kept.values():
        assert same(decode(encode(kept), NodeState), kept)


def test_a_tree_that_speaks_in_bytes_ends_where_one_in_memory_does() -> None:
    class Spoken:
        def __init__(self, node: Any):
            self.node = node

        def handle(self, bundle: Bundle) -> Reply:
            answer = self.node.handle(receive_bundle(encode(bundle), self.node.job))
            return receive_reply(encode(answer), self.node.job, frozenset({"model"}))

    sim = simulation("mtgc", 3)
    spoken, quiet = Deployed(sim, wrap=Spoken).run(), Deployed(sim).run()
    assert torch.equal(spoken.model(), quiet.model())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": row(14)},
        {"model": row(dtype=torch.float64)},
        {"model": row(value=float("nan"))},
        {"note": {"c": row(value=float("inf"))}},
        {"buffers": row(3)},
    ],
    ids=["too short", "wrong type", "NaN", "infinite note", "too many buffers"],
)
def test_a_parent_s_bad_arrays_are_refused(deployed: Deployed, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="answer"):
        receive_bundle(encode(bundle(**changes)), deployed.job)


def test_a_mask_among_the_buffers_may_be_infinite() -> None:
    job = dataclasses.replace(Deployed(simulation("mtgc", 1)).job, buffers=2)
    masked = bundle(buffers=torch.tensor([[0.0, -torch.inf]]))
    assert same(receive_bundle(encode(masked), job), masked)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"message": {"model": row(16)}}, "report.model"),
        ({"message": {"model": row().double()}}, "report.model"),
        ({"message": {"other": row()}}, "report.message"),
        ({"message": {}}, "report.message"),
        ({"buffers": row(1)}, "report.buffers"),
        ({"rate": -1.0}, "report.rate"),
    ],
)
def test_a_child_s_malformed_report_is_refused(deployed: Deployed, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        receive_reply(encode(reply(**changes)), deployed.job, NAMES)


def test_bytes_that_are_no_message_are_refused(deployed: Deployed) -> None:
    good = encode(bundle())
    for data in [b"", b"x" * 100, good[:-1], good[:40], pickle.dumps(bundle()), save({"a": row()})]:
        with pytest.raises(InvalidInput):
            receive_bundle(data, deployed.job)
    with pytest.raises(InvalidInput, match="must be 'Bundle'"):
        receive_bundle(encode(reply()), deployed.job)


def rewritten(data: bytes, **fields: Any) -> bytes:
    """A message with other fields: those that are None are left out."""
    with_arrays = {name: rows.clone() for name, rows in load(data).items()}
    plain = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["message"])
    plain = {name: value for name, value in {**plain, **fields}.items() if value is not None}
    return save(with_arrays, metadata={"message": json.dumps(plain)})


def test_fields_of_another_version_are_no_reason_to_refuse(deployed: Deployed) -> None:
    newer = rewritten(encode(bundle()), priority=3, hint=["a"])
    assert same(receive_bundle(newer, deployed.job), bundle())
    older = rewritten(encode(reply()), made_of=None, _kind=None, _format=None)
    assert same(receive_reply(older, deployed.job, NAMES), reply())
    with pytest.raises(InvalidInput, match=r"must have.*samples"):
        receive_reply(rewritten(encode(reply()), samples=None), deployed.job, NAMES)


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", 3), ("end", 0), ("protocol", "1"), ("begin", []), ("site", None), ("protocol", True)],
)
def test_a_field_of_the_wrong_kind_is_named(deployed: Deployed, field: str, value: Any) -> None:
    plain = {f.name: getattr(Bundle("test", "0/0"), f.name) for f in dataclasses.fields(Bundle)}
    data = save({}, metadata={"message": json.dumps({**plain, field: value})})
    with pytest.raises(InvalidInput, match=f"bundle.{field}"):
        receive_bundle(data, deployed.job)
