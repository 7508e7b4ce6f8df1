"""What forms are written with: a value of every client, and what one run of a program has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stratafl.engine.random_streams import RandomOverride, RandomSource


class PerClient:
    """A tensor of every client, with the clients in front."""

    __slots__ = ("t",)

    def __init__(self, t: Tensor):
        self.t = t

    @property
    def rank(self) -> int:
        """Of one client's."""
        return self.t.dim() - 1


@dataclass
class Context:
    """What one run of a program has besides its values."""

    clients: int
    source: RandomSource | None
    """Where draws come from."""
    shape: Any = None
    """One client's result of the operation that is next: its shape, or those of several."""
    mapped: set[str] = field(default_factory=set)
    """Operations that had no form and were mapped over the clients."""
    channels_last: bool = False
    """Whether convolutions leave their images so."""

    def images(self, each: list[Tensor]) -> PerClient:
        """Every client's, as they are to lie."""
        if not self.channels_last:
            return PerClient(torch.stack(each))
        return PerClient(torch.stack([one.movedim(1, -1) for one in each]).movedim(-1, 2))

    def expanded(self, value: Any) -> Tensor:
        """With the clients in front, whether every one has its own or all share one."""
        if isinstance(value, PerClient):
            return value.t
        assert isinstance(value, Tensor)
        return value.expand(self.clients, *value.shape)

    def draws(self) -> RandomSource:
        assert self.source is not None, "draws without a stream"
        return self.source

    def drawing(self) -> AbstractContextManager[Any]:
        """While it is on, operations draw for all clients."""
        return RandomOverride(self.draws())


BatchingRule = Callable[..., Any]
"""(frame, operation, arguments) -> a `Stack`, several, or NotImplemented."""


def rank_of(value: Any) -> int:
    """Of one client's."""
    return value.rank if isinstance(value, PerClient) else value.dim()


def align_rank(value: Any, rank: int) -> Any:
    """A tensor with axes of one put in front of a client's own up to `rank`."""
    if not isinstance(value, PerClient):
        return value
    missing = rank - value.rank
    return value.t if missing <= 0 else value.t[(slice(None), *[None] * missing)]


def wrap(result: Any) -> Any:
    """Every tensor as a stack."""
    if isinstance(result, Tensor):
        return PerClient(result)
    if isinstance(result, tuple | list):
        return tuple(wrap(each) for each in result)
    return result


def tensor_arguments(value: Any) -> list[Any]:
    """Every tensor or stack in the arguments of an operation."""
    if isinstance(value, Tensor | PerClient):
        return [value]
    if isinstance(value, tuple | list):
        return [each for part in value for each in tensor_arguments(part)]
    if isinstance(value, dict):
        return [each for part in value.values() for each in tensor_arguments(part)]
    return []
