"""A valid call of `simulate`, in which one value is replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.flat import simulate

NAN, INF = float("nan"), float("inf")
PARTS = [[0, 1], [2, 3], [4, 5], [6, 7]]
INPUTS, LABELS = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2


def study(**changes) -> object:
    call = {
        "model": lambda: nn.Linear(3, 2),
        "data": (INPUTS, LABELS),
        "partition": PARTS,
        "tree": "2x2",
        "method": "mtgc",
        "periods": [2, 2],
        "rounds": 1,
        **changes,
    }
    return simulate(**call)


def parts(last: object) -> list:
    return [*PARTS[:3], last]


def deep(levels: int) -> list:
    shape: list = [1]
    for _ in range(levels):
        shape = [shape]
    return shape


def raising(*given: object) -> Tensor:
    raise KeyError("not there")


Wrong = tuple[str, Callable[[], object], str, str, str]
"""A label, the call, the field, and two parts of the message: the value and what is accepted."""
