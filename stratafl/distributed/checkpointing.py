"""The state of a federation on several ranks, as that of the whole one: put together on the first
rank, or dealt out.

So a checkpoint is the same whatever number of ranks wrote it, and any number can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.state_dict import StateDict, from_json_and_tensors, to_json_and_tensors
from stratafl.base.topology import Tree
from stratafl.distributed.communicator import Communicator
from stratafl.distributed.subtree import Branch, held_nodes

Rows = Tensor | np.ndarray
Merge = Callable[[int, Sequence[Any]], Any]


def gather_state(ranks: Communicator, tree: Tree, state: StateDict) -> StateDict:
    """The state of the whole federation on the first rank, nothing on the others. All must call
    it."""
    if not isinstance(tree, Branch):
        return state
    mine = _mapped([state], lambda level, rows: rows[0][_of_part(tree.owned(level))])
    if not ranks.is_first:
        _send(ranks, mine, 0)
        return {}
    parts = [mine, *(_received(ranks, rank) for rank in range(1, ranks.count))]
    joined: dict[tuple, Tensor] = {}

    def join(level: int, rows: Sequence[Rows]) -> Rows:
        tensors = [each for each in rows if isinstance(each, Tensor)]
        if not tensors:
            return np.concatenate(rows)
        # what is one tensor on every rank is one tensor again
        key = tuple((each.data_ptr(), each.shape, each.stride()) for each in tensors)
        if key not in joined:
            joined[key] = _concatenated(tensors)
        return joined[key]

    return _mapped(parts, join)


def scatter_state(ranks: Communicator, tree: Tree, state: StateDict) -> StateDict:
    """This rank's part of a state that the first rank has. All must call it."""
    if not isinstance(tree, Branch):
        return state
    if not ranks.is_first:
        return _received(ranks, 0)
    for rank in reversed(range(ranks.count)):
        cut: dict[tuple[int, int], Rows] = {}

        def part(level: int, rows: Sequence[Rows]) -> Rows:
            span = held_nodes(tree.full, tree.cuts, rank, level)
            key = id(rows[0]), span.start
            if key not in cut:
                cut[key] = rows[0][span]
            return cut[key]

        mine = _mapped([state], part)
        if rank:
            _send(ranks, mine, rank)
    return mine


def check_full_state(tree: Tree, state: StateDict) -> None:
    """Refuse a state whose rows are not those of the whole tree."""

    def look(level: int, rows: Sequence[Rows]) -> None:
        if not 0 <= level <= tree.depth or rows[0].ndim == 0 or len(rows[0]) != tree.whole.sizes[level]:
            raise InvalidInput("state.federation", tuple(rows[0].shape), f"does not fit {tree.whole}, level {level}")

    _mapped([state], look)


def _mapped(states: Sequence[StateDict], change: Merge) -> StateDict:
    """The states as one, their rows changed by a function that is told which level they belong
    to."""

    def value(given: Sequence[Any], level: int | None = None) -> Any:
        first = given[0]
        if isinstance(first, dict):
            return {key: value([each[key] for each in given], level) for key in first}
        if isinstance(first, list):
            # the outermost list has an entry for each level
            return [value([each[i] for each in given], i if level is None else level) for i in range(len(first))]
        return change(level or 0, given) if isinstance(first, Tensor | np.ndarray) else first

    return value(states)


def _of_part(counted_N: np.ndarray) -> slice:
    where = np.flatnonzero(counted_N)
    return slice(int(where[0]), int(where[-1]) + 1) if len(where) else slice(0, 0)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    parts = [part.cpu() for part in parts if len(part)]
    first = parts[0][:1]
    if all(part.stride(0) == 0 and torch.equal(part[:1], first) for part in parts):
        return first.expand(sum(map(len, parts)), *first.shape[1:])
    return torch.cat(parts)


def _send(ranks: Communicator, state: StateDict, to: int) -> None:
    packed, tensors = to_json_and_tensors(state)
    forms = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
    text = torch.frombuffer(bytearray(json.dumps([packed, forms]).encode()), dtype=torch.uint8)
    ranks.send(torch.tensor([len(text)]), to)
    ranks.send(text, to)
    for each in tensors.values():
        ranks.send(each, to)


def _received(ranks: Communicator, source: int) -> StateDict:
    length = int(ranks.receive(torch.empty(1, dtype=torch.int64), source))
    text = ranks.receive(torch.empty(length, dtype=torch.uint8), source)
    packed, forms = json.loads(text.numpy().tobytes())
    tensors = {
        name: ranks.receive(torch.empty(shape, dtype=getattr(torch, dtype)), source)
        for name, (dtype, shape) in forms.items()
    }
    return from_json_and_tensors(packed, tensors)
