"""Values of all clients, and what one run of a program has besides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratafl.engine import kernels
from stratafl.engine.kernels import reference
from stratafl.engine.precision import Precision
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


class GradientPlaces(NamedTuple):
    """Where parameters' gradients are wanted, by name."""

    gradients: Mapping[str, Tensor]
    corrections: Mapping[str, Tensor]
    """What is to be added to them."""
    squares: list[Tensor] | None
    """Collects parts (C, n) of the sums of squares of what was written."""
    scale: float
    """How much larger than they are the gradients of activations arrive."""
    written: set[str]
    """The parameters whose gradients the backward pass, as far as it has come, has written."""

    def sink(self, names: Sequence[str | None]) -> reference.GradientBuffers:
        """Those of a layer's two parameters."""
        views: list[Any] = [
            values.get(name or "") for values in (self.gradients, self.corrections) for name in (*names, None)[:2]
        ]
        return reference.GradientBuffers(*views)._replace(squared_norms=self.squares)


@dataclass
class Context:
    """What one run of a program has besides its values."""

    clients: int
    source: RandomSource | None
    """Where draws come from."""
    shape: Any = None
    """One client's result of the operation that is next: its shape, or those of several."""
    mapped: set[str] = field(default_factory=set)
    """Operations that were called for one client after another."""
    channels_last: bool = False
    """Whether convolutions leave their images so."""
    table: kernels.Backend = field(default_factory=lambda: kernels.TORCH_BACKEND)
    """What this device computes with."""
    compute: Precision = "fp32"
    places: GradientPlaces | None = None
    """Where kernels write gradients; None leaves them to autograd."""

    def kernel(self, name: str, parameters: Sequence[str | None], shared: bool) -> Callable[..., Tensor]:
        """A kernel that writes the gradients of these parameters where they are wanted, if it can;
        `shared`: whether something else uses them, too, whose gradient autograd must add."""
        places = self.places
        if places is None or name not in self.table.writes_gradients:
            return self.table.ops[name]
        if shared:
            return reference.REFERENCE_OPS[name]
        names = [each for each in parameters if each is not None]

        def call(*args: Any) -> Tensor:
            sink, scale = places.sink(parameters), places.scale
            y = self.table.ops[name](*args, gradient_buffers=sink, loss_scale=scale)
            if y.requires_grad:
                # what comes out may be cut off from the loss: its gradients are written only if it
                # is reached (a hook that knew the context would keep all values alive)
                written = places.written
                y.register_hook(lambda _: written.update(names))
            return y

        return call

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
"""(frame, operation, arguments) -> a `PerClient`, several, or NotImplemented."""


def is_channels_last(x: Tensor) -> bool:
    """Whether clients' images lie channels-last, as kernels leave them."""
    return x.dim() == 5 and x.shape[2] > 1 and x.movedim(2, -1).is_contiguous()


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
