"""The state of a run as plain nested data, and how one is put back: only where it fits, and copied.

A state is made of dicts with text keys, lists, tensors, NumPy arrays, numbers, texts, truth values
and None. Two places that hold the same tensor still do so after it was put back, so that what
shared memory shares it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput

State = dict[str, Any]
LARGEST = 1 << 53
"""Of whole numbers: counts of rounds and bytes, to which others are added."""


def fitted(like: Any, saved: Any, where: str, _copies: dict[int, Tensor] | None = None) -> Any:
    """A copy of `saved` on the devices of `like`, whose structure, shapes and kinds of number it
    must have."""
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
        return {key: fitted(value, saved[key], f"{where}.{key}", copies) for key, value in like.items()}
    if isinstance(like, list):
        _check(where, len(saved) if isinstance(saved, list) else type(saved).__name__, len(like))
        return [fitted(each, saved[i], f"{where}.{i}", copies) for i, each in enumerate(like)]
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


def _check(where: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise InvalidInput(f"state.{where}", found, f"does not fit this run, which has {wanted}")
