"""State of a federation on several ranks, gathered on the first rank or scattered from it.

The gathered state is that of a run on one rank. So a checkpoint does not depend on the number of
ranks that wrote it, and a run can be resumed on another number.
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
from stratafl.base.topology import Topology
from stratafl.distributed.communicator import Communicator
from stratafl.distributed.subtree import Branch, held_nodes

LevelRows = Tensor | np.ndarray
"""Values of the nodes of one level, on the first axis."""


def gather_state(ranks: Communicator, tree: Topology, state: StateDict) -> StateDict:
    """State of the whole federation on the first rank, and {} on the others; a collective call."""
    if not isinstance(tree, Branch):
        return state
    part = _map_rows([state], lambda level, rows: rows[0][_range_of(tree.owned(level))])
    if not ranks.is_first:
        _send(ranks, part, 0)
        return {}
    parts = [part, *(_receive(ranks, rank) for rank in range(1, ranks.count))]
    joined: dict[tuple, Tensor] = {}

    def join(level: int, rows: Sequence[LevelRows]) -> LevelRows:
        tensors = [part for part in rows if isinstance(part, Tensor)]
        if not tensors:
            return np.concatenate(rows)
        # entries that are one tensor on every rank become one tensor
        key = tuple((part.data_ptr(), part.shape, part.stride()) for part in tensors)
        if key not in joined:
            joined[key] = _concatenate(tensors)
        return joined[key]

    return _map_rows(parts, join)


def scatter_state(ranks: Communicator, tree: Topology, state: StateDict) -> StateDict:
    """Send each rank its part of the first rank's state, and return it; a collective call."""
    if not isinstance(tree, Branch):
        return state
    if not ranks.is_first:
        return _receive(ranks, 0)
    for rank in reversed(range(ranks.count)):
        slices: dict[tuple[int, int], LevelRows] = {}

        def select(level: int, rows: Sequence[LevelRows]) -> LevelRows:
            span = held_nodes(tree.full, tree.cuts, rank, level)
            # entries that are one tensor stay one tensor
            return slices.setdefault((id(rows[0]), span.start), rows[0][span])

        part = _map_rows([state], select)
        if rank:
            _send(ranks, part, rank)
    return part


def broadcast_state(ranks: Communicator, state: StateDict) -> StateDict:
    """State of the first rank, on all ranks; a collective call."""
    if not ranks.is_first:
        return _receive(ranks, 0)
    for rank in range(1, ranks.count):
        _send(ranks, state, rank)
    return state


def check_full_state(tree: Topology, state: StateDict) -> None:
    """Raise `InvalidInput` unless the rows of a state are those of the whole tree."""

    def check(level: int, rows: Sequence[LevelRows]) -> None:
        if not 0 <= level <= tree.depth or rows[0].ndim == 0 or len(rows[0]) != tree.whole.sizes[level]:
            raise InvalidInput("state.federation", tuple(rows[0].shape), f"does not fit {tree.whole}, level {level}")

    _map_rows([state], check)


def _map_rows(states: Sequence[StateDict], function: Callable[[int, Sequence[Any]], Any]) -> StateDict:
    """Merge states of one structure by a function of a level and the states' rows at one place."""

    def merge(values: Sequence[Any], level: int | None = None) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {key: merge([value[key] for value in values], level) for key in first}
        if isinstance(first, list):
            # the outermost list has one entry per level
            return [merge([value[i] for value in values], i if level is None else level) for i in range(len(first))]
        return function(level or 0, values) if isinstance(first, Tensor | np.ndarray) else first

    return merge(states)


def _range_of(mask_N: np.ndarray) -> slice:
    """Range from the first True to the last."""
    numbers = np.flatnonzero(mask_N)
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else slice(0, 0)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenation on the host; one repeated row stays a view of stride 0."""
    parts = [part.cpu() for part in parts if len(part)]
    first = parts[0][:1]
    if all(part.stride(0) == 0 and torch.equal(part[:1], first) for part in parts):
        return first.expand(sum(map(len, parts)), *first.shape[1:])
    return torch.cat(parts)


def _send(ranks: Communicator, state: StateDict, destination: int) -> None:
    """Send a state: the length of a JSON text, the text with types and shapes, and the tensors."""
    packed, tensors = to_json_and_tensors(state)
    formats = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    text = torch.frombuffer(bytearray(json.dumps([packed, formats]).encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([len(text)]), text, *tensors.values()):
        ranks.send(tensor, destination)


def _receive(ranks: Communicator, source: int) -> StateDict:
    length = int(ranks.receive(torch.empty(1, dtype=torch.int64), source))
    text = ranks.receive(torch.empty(length, dtype=torch.uint8), source)
    packed, formats = json.loads(text.numpy().tobytes())
    tensors = {
        name: ranks.receive(torch.empty(shape, dtype=getattr(torch, dtype)), source)
        for name, (dtype, shape) in formats.items()
    }
    return from_json_and_tensors(packed, tensors)
