"""What one global round did, and how it is put together from what each part of the tree saw of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any

import numpy as np

from stratafl.drift import Levels, Taken, levels
from stratafl.errors import InvalidInput
from stratafl.metrics import Tally, metrics
from stratafl.refusal import Refusal
from stratafl.tree import Tree

LOST_ROUNDS = 3
"""So many rounds in a row in which every update was refused end a run."""


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
    """Nodes whose update was left out, once for each time."""
    bytes_per_client: float
    """Sent and received by a client since the start of the run, mean over the clients."""
    seconds: float
    drift: Levels = field(default_factory=dict)
    """What pulled the tree apart, by level and by name of the quantity: see docs/diagnostics.md."""
    too_large: tuple[str, ...] = ()
    """Those of them whose update was finite, but far too large: see `refusal`."""
    renewed: bool = True
    """Whether the root's model is a new one: it is not where everything that came was refused, or nobody came."""

    @property
    def lost(self) -> bool:
        """Whether everything that came was refused."""
        return bool(self.refused) and not self.renewed

    @staticmethod
    def of(values: Mapping[str, Any]) -> RoundResult:
        """From what `dataclasses.asdict` made of one, also by way of JSON."""
        names = {f.name for f in fields(RoundResult)}
        later = {"too_large": (), "renewed": True}  # what records of earlier versions do not have
        values = {**later, **values} if isinstance(values, Mapping) else values
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
        named = {name: values[name] for name in ("refused", "too_large")}
        for name, refused in named.items():
            if not isinstance(refused, list | tuple) or not all(isinstance(each, str) for each in refused):
                raise InvalidInput(f"record.{name}", refused, "must be names of nodes")
        if not isinstance(values["renewed"], bool):
            raise InvalidInput("record.renewed", values["renewed"], "must be true or false")
        return RoundResult(**{**values, **{name: tuple(refused) for name, refused in named.items()}})


@dataclass(frozen=True)
class Seen:
    """What one part of the tree saw of a round: plain data, so that it can be sent."""

    refused: list[list[Refusal]]
    """At each meeting."""
    renewed: bool
    """Whether the root has a new model."""
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
    at_meetings = zip(*(part.refused for part in parts), strict=True)
    refusals = [refusal for at_once in at_meetings for refusal in _in_order(tree, at_once)]
    refused = [name for name, _ in refusals]
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
        too_large=tuple(name for name, too_large in refusals if too_large),
        renewed=parts[0].renewed,
    )


def _in_order(tree: Tree, parts: Sequence[list[Refusal]]) -> list[Refusal]:
    """What several parts refused as one process would have it: from the leaves up, each level in its order."""
    refusals = [refusal for part in parts for refusal in part]
    if sum(map(bool, parts)) < 2:
        return refusals

    def place(refusal: Refusal) -> tuple[int, int]:
        level, number = tree.find(refusal[0])
        return -level, number

    return sorted(refusals, key=place)


def _diagnosis(tree: Tree, parts: Sequence[Seen], refused: Sequence[str]) -> Levels:
    """What the meetings showed, and who was refused or clipped."""
    taken = [part.drift for part in parts if part.drift is not None]
    if not taken:
        return {}
    found = levels(tree.depth, taken)
    for level, count in Counter(tree.find(name)[0] for name in refused).items():
        found[str(level)]["refused"] = count
    counts = [part.clipped for part in parts if part.clipped is not None]
    client_steps = sum(part.client_steps for part in parts)
    if len(counts) == len(parts) and client_steps:
        found[str(tree.depth)]["clipped"] = sum(counts) / client_steps
    return found


def hopeless(tree: Tree, history: Sequence[RoundResult], aloud: bool) -> InvalidInput | None:
    """What is wrong with a run in which nothing is accepted any more; the first round that was lost is told of at once.

    It takes `LOST_ROUNDS` in a row, in which half of the clients or more were refused themselves or above them: where
    few take part at a time, the wrong ones may be drawn several times in a row.
    """
    last = history[-1]
    if not last.lost:
        return None
    row = list(takewhile(lambda result: result.lost, reversed(history)))
    if aloud and not any(result.lost for result in history[:-1]):
        told = f"round {last.round}: every update was refused, so the model stays as it was: {_why(last)}"
        print(told, file=sys.stderr, flush=True)
    if len(row) < LOST_ROUNDS:
        return None
    refused_N = [np.zeros(size, dtype=bool) for size in tree.sizes]
    for level, number in {tree.find(name) for result in row for name in result.refused}:
        refused_N[level][number] = True
    lost_N = np.any([mask_N[tree.ancestors(level)] for level, mask_N in enumerate(refused_N)], axis=0)
    if 2 * lost_N.sum() < tree.leaves:
        return None
    return InvalidInput("round", last.round, f"every update was refused, {len(row)} rounds in a row: {_why(last)}")


def _why(result: RoundResult) -> str:
    too_large = dict.fromkeys(result.too_large)
    not_finite = [name for name in dict.fromkeys(result.refused) if name not in too_large]
    words = {"not finite": not_finite, "far too large": list(too_large)}
    return "; ".join(f"{why}: {listed(names)}" for why, names in words.items() if names)


def listed(names: Sequence[str], most: int = 5) -> str:
    """A list of names in a line: the first of them, and how many there are more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
