"""What one global round did, and how it is put together from what each part of the tree saw of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from stratafl.drift import Levels, Taken, levels
from stratafl.errors import InvalidInput
from stratafl.metrics import Tally, metrics
from stratafl.tree import Tree


@dataclass(frozen=True)
class RoundResult:
    """What one global round did."""

    round: int
    """Counted from 1."""
    steps: int
    """Local steps per client since the start of the run."""
    lr: float
    metrics: dict[str, float]
    """The root's loss and accuracy on the test data; empty where this round was not evaluated."""
    nodes: dict[str, dict[str, float]]
    """The same for each node of the levels asked for, by its model just before its parent's replaced it."""
    refused: tuple[str, ...]
    """Nodes whose update was not finite, once for each time."""
    bytes_per_client: float
    """Sent and received by a client since the start of the run, mean over the clients."""
    seconds: float
    drift: Levels = field(default_factory=dict)
    """What pulled the tree apart, by level and by name of the quantity: see docs/diagnostics.md."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> RoundResult:
        """From what `dataclasses.asdict` made of one, also by way of JSON."""
        names = {f.name for f in fields(RoundResult)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise InvalidInput("record", values, f"must have exactly {', '.join(sorted(names))}")
        real = int | float
        kinds: dict[str, Any] = {"round": int, "steps": int, "metrics": dict, "nodes": dict, "drift": dict}
        for name, kind in {**kinds, "lr": real, "bytes_per_client": real, "seconds": real}.items():
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise InvalidInput(f"record.{name}", values[name], "is of the wrong kind")
        for each in (values["metrics"], *values["nodes"].values(), *values["drift"].values()):
            if not isinstance(each, dict) or not all(isinstance(value, real) for value in each.values()):
                raise InvalidInput("record.metrics", each, "must be numbers by name")
        refused = values["refused"]
        if not isinstance(refused, list | tuple) or not all(isinstance(name, str) for name in refused):
            raise InvalidInput("record.refused", refused, "must be names of nodes")
        return RoundResult(**{**values, "refused": tuple(refused)})


@dataclass(frozen=True)
class Seen:
    """What one part of the tree saw of a round: plain data, so that it can be sent."""

    refused: list[list[str]]
    """At each meeting, the nodes whose update was not finite."""
    tally: Tally | None
    """The root on this part's share of the test data; None where it was not evaluated."""
    nodes: list[dict[str, dict[str, float]]]
    """Per level that was asked for, the metrics of the nodes this part answers for."""
    client_bytes: int
    """Sent and received by its clients since the start of the run."""
    drift: Taken | None
    clipped: int | None
    """Steps that a clip shortened; None where nothing clips."""
    client_steps: int


def record(tree: Tree, parts: Sequence[Seen], round: int, steps: int, lr: float, seconds: float) -> RoundResult:
    """The round as the whole tree saw it."""
    tallies = [Tally(*part.tally) for part in parts if part.tally is not None]
    refused = [
        name for at_once in zip(*(part.refused for part in parts), strict=True) for name in _in_order(tree, at_once)
    ]
    return RoundResult(
        round=round,
        steps=steps,
        lr=lr,
        metrics=metrics(tallies) if tallies else {},
        nodes={
            name: found
            for level in zip(*(part.nodes for part in parts), strict=True)
            for part in level
            for name, found in part.items()
        },
        refused=tuple(refused),
        bytes_per_client=sum(part.client_bytes for part in parts) / tree.leaves,
        seconds=seconds,
        drift=_diagnosis(tree, parts, refused),
    )


def _in_order(tree: Tree, parts: Sequence[list[str]]) -> list[str]:
    """Names from several parts as one process would have them: from the leaves up, each level in its order."""
    names = [name for part in parts for name in part]
    if sum(map(bool, parts)) < 2:
        return names

    def place(name: str) -> tuple[int, int]:
        level, number = tree.find(name)
        return -level, number

    return sorted(names, key=place)


def _diagnosis(tree: Tree, parts: Sequence[Seen], refused: Sequence[str]) -> Levels:
    """What the meetings showed, and who was refused or clipped."""
    taken = [part.drift for part in parts if part.drift is not None]
    if not taken:
        return {}
    found = levels(tree.depth, taken)
    for name in refused:
        mine = found[str(tree.find(name)[0])]
        mine["refused"] = mine.get("refused", 0) + 1
    counts = [part.clipped for part in parts if part.clipped is not None]
    client_steps = sum(part.client_steps for part in parts)
    if len(counts) == len(parts) and client_steps:
        found[str(tree.depth)]["clipped"] = sum(counts) / client_steps
    return found
