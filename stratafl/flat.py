"""A module's parameters as one row, and its floating buffers as another.

Rules see the parameters only. Floating buffers (a batch norm's running statistics) are averaged like weights at
every meeting but never corrected, and integer buffers stay as the user's module had them. Parameters that do not
require a gradient are part of the module, not of the row: they are never sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from stratafl.errors import InvalidInput, unknown


class Flat:
    """How one architecture lies in rows: P parameters, B floating buffer values."""

    def __init__(self, module: nn.Module):
        if not isinstance(module, nn.Module):
            raise InvalidInput("model", module, "must be an nn.Module or a function that builds one")
        self.module = copy.deepcopy(module)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if any(is_lazy(p) for p in parameters.values()):
            raise InvalidInput("model", type(module).__name__, "run it once so that its lazy layers have shapes")
        if not parameters:
            raise InvalidInput("model", type(module).__name__, "has no trainable parameters")
        buffers = {n: b for n, b in self.module.named_buffers() if b.is_floating_point()}
        dtypes = {t.dtype for t in [*parameters.values(), *buffers.values()]}
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            raise InvalidInput("model", sorted(map(str, dtypes)), "parameters and buffers must share one floating type")
        self.dtype: torch.dtype = dtypes.pop()
        self._shapes = {n: p.shape for n, p in parameters.items()}
        self._buffer_shapes = {n: b.shape for n, b in buffers.items()}
        self._whole = [name for name, _ in self.module.named_buffers() if name not in buffers]
        self._tied = len(list(self.module.named_parameters(remove_duplicate=False))) > len(
            list(self.module.named_parameters())
        )
        self.parameters = sum(p.numel() for p in parameters.values())
        self.buffers = sum(b.numel() for b in buffers.values())

    def row(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The module's parameters (P) and buffers (B)."""
        return self.row_of({**dict(module.named_parameters()), **dict(module.named_buffers())})

    def start(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a state dict, whose frozen parameters and integer buffers the module takes over."""
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name in values:
            if name not in own:
                raise unknown("initial key", name, own)
        rows = self.row_of(values)
        with torch.no_grad():
            for name in values.keys() - self._shapes.keys() - self._buffer_shapes.keys():
                own[name].copy_(values[name])
        return rows

    def row_of(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a state dict."""
        for name, shape in {**self._shapes, **self._buffer_shapes}.items():
            if name not in values:
                raise InvalidInput("initial", sorted(values), f"lacks {name!r}")
            if values[name].shape != shape:
                raise InvalidInput(f"initial.{name}", tuple(values[name].shape), f"must have the shape {tuple(shape)}")

        def joined(shapes: Mapping[str, torch.Size]) -> Tensor:
            parts = [values[name].detach().reshape(-1).to(self.dtype) for name in shapes]
            return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

        return joined(self._shapes), joined(self._buffer_shapes)

    def named(self, x_P: Tensor, b_B: Tensor) -> dict[str, Tensor]:
        """Views of the two rows under the module's names; matrices of rows give views with the clients in front."""
        return {**_views(self._shapes, x_P), **_views(self._buffer_shapes, b_B)}

    @property
    def names(self) -> list[str]:
        """The parameters' names, in the order of the row."""
        return list(self._shapes)

    def call(self, x_P: Tensor, b_B: Tensor, inputs: Tensor) -> Tensor:
        """The module's output under these rows; a buffer the module updates is updated in `b_B`."""
        # a counter that the module moves on (batch norm has one) is a copy, so that no call sees another's
        whole = {name: self.module.get_buffer(name).clone() for name in self._whole}
        values = {**self.named(x_P, b_B), **whole}
        outputs = functional_call(self.module, values, (inputs,), tie_weights=self._tied)
        for name, view in _views(self._buffer_shapes, b_B).items():
            if values[name].data_ptr() != view.data_ptr():
                view.copy_(values[name].detach())
        return outputs

    def gradient(
        self,
        x_P: Tensor,
        b_B: Tensor,
        inputs: Tensor,
        targets: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        x_P = x_P.detach().requires_grad_()
        (g_P,) = torch.autograd.grad(loss(self.call(x_P, b_B, inputs), targets), x_P)
        return g_P

    def build(self, x_P: Tensor, b_B: Tensor) -> nn.Module:
        """A module of its own with these values."""
        module = copy.deepcopy(self.module)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, view in self.named(x_P, b_B).items():
                own[name].copy_(view)
        return module.eval()


def _views(shapes: Mapping[str, torch.Size], row: Tensor) -> dict[str, Tensor]:
    if not shapes:
        return {}
    parts = row.split([shape.numel() for shape in shapes.values()], dim=-1)
    clients = row.shape[:-1]
    return {name: part.view(clients + shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
