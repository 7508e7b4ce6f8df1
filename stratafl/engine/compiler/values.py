"""Stacked values of a captured program, and the context in which batching rules compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stratafl.engine import kernels
from stratafl.engine.kernels import reference
from stratafl.engine.precision import Precision
from stratafl.engine.random_streams import RandomOverride, RandomSource


class PerClient:
    """Stacked value: one tensor with the client dimension in front, (C, *shape of one client's).

    A plain tensor among the operands of a batching rule is a value that all clients share.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def rank(self) -> int:
        """Number of dimensions of one client's value."""
        return self.tensor.dim() - 1


Operand = PerClient | Tensor


class GradientPlaces(NamedTuple):
    """Memory for the gradients of the clients' parameters; all mappings are by parameter name."""

    gradients: Mapping[str, Tensor]
    corrections: Mapping[str, Tensor]
    """Corrections to add to the gradients."""
    squared_norms: list[Tensor] | None
    """Kernels append parts (C, n) of the squared norms of what they write, unless None."""
    loss_scale: float
    """Factor by which gradients of activations are larger than the true ones."""
    written: set[str]
    """Parameters whose gradients kernels have written in the backward pass."""

    def buffers(self, names: Sequence[str | None]) -> reference.GradientBuffers:
        """Memory for the gradients of a layer's weight and bias; one name: without a bias."""
        views: list[Any] = [
            values.get(name or "") for values in (self.gradients, self.corrections) for name in (*names, None)[:2]
        ]
        return reference.GradientBuffers(*views)._replace(squared_norms=self.squared_norms)


@dataclass
class Context:
    """State of one execution of a program, except for its values."""

    clients: int
    source: RandomSource | None
    """Random numbers of the clients; None if the module is not random."""
    result_shape: Any = None
    """Shape of one client's result of the current operation, or a list for several results."""
    unbatched_ops: set[str] = field(default_factory=set)
    """Names of operations that were called for one client after another."""
    channels_last: bool = False
    """Whether convolutions return channels-last images."""
    backend: kernels.Backend = field(default_factory=lambda: kernels.TORCH_BACKEND)
    precision: Precision = "fp32"
    places: GradientPlaces | None = None
    """Memory where kernels write gradients; None leaves gradients to autograd."""

    def kernel(self, name: str, parameters: Sequence[str | None], shared: bool) -> Callable[..., Tensor]:
        """Kernel that writes the gradients of these parameters to their place, if it can.

        `shared`: whether other operations use the parameters, too. Then autograd must add up
        gradients, and the kernel may not write them.
        """
        places = self.places
        if places is None or name not in self.backend.writes_gradients:
            return self.backend.ops[name]
        if shared:
            return reference.REFERENCE_OPS[name]

        def call(*args: Any) -> Tensor:
            y = self.backend.ops[name](*args, gradient_buffers=places.buffers(parameters), loss_scale=places.loss_scale)
            if y.requires_grad:
                # gradients are written only if the loss depends on y, so that the backward pass
                # reaches it; a hook that held the context would keep all activations alive
                written, names = places.written, [parameter for parameter in parameters if parameter is not None]
                y.register_hook(lambda _: written.update(names))
            return y

        return call

    def stack_images(self, images: list[Tensor]) -> PerClient:
        """Stack the clients' images (B, K, ...) in the memory format of this program."""
        if not self.channels_last:
            return PerClient(torch.stack(images))
        return PerClient(torch.stack([image.movedim(1, -1) for image in images]).movedim(-1, 2))

    def stacked(self, value: Operand) -> Tensor:
        """Tensor with the client dimension in front: of a shared value, an expanded view."""
        return value.tensor if isinstance(value, PerClient) else value.expand(self.clients, *value.shape)

    def random_source(self) -> RandomSource:
        """The clients' random numbers."""
        assert self.source is not None, "a random operation without random streams"
        return self.source

    def client_rng(self) -> AbstractContextManager[Any]:
        """Context in which random operations on stacked tensors use the clients' streams."""
        return RandomOverride(self.random_source())


BatchingRule = Callable[..., Any]
"""(context, operation, *arguments) -> one or several `PerClient`, or NotImplemented where the
operation must be mapped over the clients: by vmap, or one after another."""


def is_channels_last(x: Tensor) -> bool:
    """Whether stacked images (C, B, K, H, W) are channels-last in memory, as kernels return."""
    return x.dim() == 5 and x.shape[2] > 1 and x.movedim(2, -1).is_contiguous()


def rank_of(value: Operand) -> int:
    """Number of dimensions of one client's value."""
    return value.rank if isinstance(value, PerClient) else value.dim()


def align_rank(value: Any, rank: int) -> Any:
    """Tensor of an operand that broadcasts from the right: dimensions of size 1 are inserted behind
    the client dimension until one client's value has `rank` dimensions."""
    if not isinstance(value, PerClient):
        return value
    missing = rank - value.rank
    return value.tensor if missing <= 0 else value.tensor[(slice(None), *[None] * missing)]


def wrap(result: Any) -> Any:
    """Result of an operation on stacked tensors, with every tensor as `PerClient`."""
    if isinstance(result, Tensor):
        return PerClient(result)
    return tuple(map(wrap, result)) if isinstance(result, tuple | list) else result


def tensor_arguments(arguments: Any) -> list[Operand]:
    """Tensors and stacked values in nested arguments of an operation."""
    return [value for value in pytree.tree_leaves(arguments) if isinstance(value, Operand)]
