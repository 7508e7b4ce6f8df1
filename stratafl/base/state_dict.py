"""Nested state as JSON and tensors, and loading into a state of the same structure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput

BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_ROWS = 1 << 32
AT_ONCE = 1 << 26
"""Approximate number of values that are compared in one operation."""


def to_json_and_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into JSON data and the tensors that it refers to."""
    tensors: dict[str, Tensor] = {}
    stored: dict[tuple, list] = {}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            key = value.device, value.data_ptr(), value.shape, value.stride(), value.dtype
            if value.numel() == 0 or key not in stored:
                rows = _repeat_count(value)
                tensors[name] = value[:1] if rows else value
                stored[key] = ["tensor", name, rows]
            return stored[key]
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value)
            return ["array", name]
        if isinstance(value, dict):
            return {key: plain(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return ["list", *(plain(item, f"{name}.{i}") for i, item in enumerate(value))]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise InvalidInput(f"state.{name}", type(value).__name__, "is nothing a checkpoint can hold")

    return plain(state, ""), tensors


def from_json_and_tensors(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Build the state again; rows that were stored once are expanded without a copy."""
    expanded: dict[tuple[str, int], Tensor] = {}

    def value(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: value(item) for key, item in part.items()}
        if not isinstance(part, list):
            return part
        match part:
            case ["list", *inside]:
                return [value(item) for item in inside]
            case ["array", str(name)] if name in tensors:
                return tensors[name].numpy()
            case ["tensor", str(name), int(rows)] if name in tensors and not isinstance(rows, bool):
                if (name, rows) not in expanded:
                    stored = tensors[name]
                    if rows and (stored.dim() == 0 or len(stored) != 1 or not 0 < rows < MOST_ROWS):
                        raise InvalidInput("checkpoint", part, "is no repeated row")
                    expanded[name, rows] = stored.expand(rows, *stored.shape[1:]) if rows else stored
                return expanded[name, rows]
        raise InvalidInput("checkpoint", part, "is no part of a state")

    return value(packed)


def _repeat_count(rows_NP: Tensor) -> int:
    """Number of rows of a tensor if all of them have the same bits, otherwise 0."""
    if rows_NP.dim() != 2 or len(rows_NP) < 2 or rows_NP.dtype.itemsize not in BY_SIZE:
        return 0
    if rows_NP.stride(0) == 0:  # one row, seen several times
        return len(rows_NP)
    bits_NP = rows_NP.contiguous().view(BY_SIZE[rows_NP.dtype.itemsize])
    # the last one first: where rows differ at all, it mostly does; then many at a time, since a GPU
    # is waited for at every answer
    parts = [bits_NP[-1:], *bits_NP.split(max(1, AT_ONCE // max(1, bits_NP.shape[1])))]
    return len(bits_NP) if all(torch.equal(part, bits_NP[:1].expand_as(part)) for part in parts) else 0


StateDict = dict[str, Any]

LARGEST = 1 << 53
"""Largest magnitude of an integer that is loaded; counts of rounds and bytes stay far below it."""


def load_like(like: Any, saved: Any, where: str, _copies: dict[int, Tensor] | None = None) -> Any:
    """Copy `saved` to the devices of `like`, whose structure, shapes and dtypes it must have."""
    copies: dict[int, Tensor] = {} if _copies is None else _copies
    if isinstance(like, Tensor):
        _check(where, _form(saved), _form(like))
        if id(saved) not in copies:
            # allocated anew rather than taken over: a mapped file may be aligned differently
            copies[id(saved)] = torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(saved)
        return copies[id(saved)]
    if isinstance(like, np.ndarray):
        _check(where, _form(saved), _form(like))
        return saved.copy()
    if isinstance(like, dict):
        _check(where, sorted(saved) if isinstance(saved, dict) else type(saved).__name__, sorted(like))
        return {key: load_like(value, saved[key], f"{where}.{key}", copies) for key, value in like.items()}
    if isinstance(like, list):
        _check(where, len(saved) if isinstance(saved, list) else type(saved).__name__, len(like))
        return [load_like(item, saved[i], f"{where}.{i}", copies) for i, item in enumerate(like)]
    if like is not None and not isinstance(like, bool | int | float | str):
        raise InvalidInput(where, type(like).__name__, "is nothing a state can hold")
    _check(where, type(saved).__name__, type(like).__name__)
    if isinstance(saved, int) and abs(saved) > LARGEST:
        raise InvalidInput(f"state.{where}", saved, f"does not fit any run: at most {LARGEST}")
    return saved


def _form(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return type(value).__name__


def _check(where: str, value: object, expected: object) -> None:
    if value != expected:
        raise InvalidInput(f"state.{where}", value, f"does not fit this run, which has {expected}")
