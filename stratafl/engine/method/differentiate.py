"""What gives many clients' gradients at once: what it is given, and the losses it starts from.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from stratafl.core.objective.losses import Loss, bare
from stratafl.data.inputs import Inputs, mapped
from stratafl.engine import ops
from stratafl.engine.draws.stream import Stream
from stratafl.engine.rows import ALONE, Gradients, Wanted
from stratafl.engine.trace.layout import Layout


class Batch(NamedTuple):
    """One step's samples of all clients, padded to a common length."""

    inputs_CB: Inputs
    targets_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """The clients' own lengths, on the host."""
    stream: Stream | None = None
    """Where what the module draws comes from."""

    def some(self, mine: slice | list[int], length: int) -> Batch:
        """Some of the clients, whose batches have this length."""
        stream = self.stream
        if stream is not None:
            own = stream.step[mine] if isinstance(stream.step, Tensor) and stream.step.dim() else stream.step
            assert isinstance(stream.client, Tensor)
            stream = stream._replace(client=stream.client[mine], step=own)
        targets, mask = (each[mine, :length] for each in (self.targets_CB, self.mask_CB))
        return Batch(self.inputs_CB[mine, :length], targets, mask, self.length_C[mine], stream)


class Differentiate(Protocol):
    """The gradient of each client's mean loss, with what is wanted added; where training changes
    the module's buffers, these are changed in their rows."""

    layout: Layout
    """How the rows lie that it takes and gives."""
    even: bool
    """Whether it reads the batches' lengths on the host, so that these must not change in a CUDA
    graph."""
    compute: ops.Compute
    """What products are really computed in."""

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients: ...


class Losses:
    """The loss of each client's own samples, from the outputs for all of them."""

    def __init__(self, loss: Loss, dtype: torch.dtype, functions: ops.Table, labels: bool):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.loss, self._dtype, self._ops = bare(loss), dtype, functions
        self.even = not (labels and self.loss is F.cross_entropy)
        self._maps = True

    def __call__(self, outputs_CB: Tensor, batch: Batch) -> Tensor:
        if not self.even:
            op = self._ops.functions["cross_entropy"] if batch.targets_CB.dim() == 2 else ops.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        outputs_CB = outputs_CB.to(self._dtype)
        losses = []
        for length, mine in by_length(batch.length_C):
            # copies: a loss may write into what it is given
            outputs, targets = outputs_CB[mine, :length].clone(), batch.targets_CB[mine, :length].clone()
            losses.append(self._own_losses(outputs, targets))
        return torch.cat(losses)

    def _own_losses(self, outputs_CB: Tensor, targets_CB: Tensor) -> Tensor:
        """A user's loss of each client, none of whose batches is padded."""
        if self._maps:
            try:
                with by_rules():
                    return vmap(lambda *pair: self.loss(*pair).reshape(()))(outputs_CB, targets_CB)
            except RuntimeError:
                # it looks at values or does what cannot be mapped; this shows when the engine first
                # tries it
                self._maps = False
        return torch.stack([self.loss(*pair).reshape(()) for pair in zip(outputs_CB, targets_CB, strict=True)])


def widened(inputs_CB: Inputs, dtype: torch.dtype) -> Inputs:
    """Images that were fetched in 16 bits as wide as the module's own numbers."""
    halves = tuple(ops.HALF.values())
    return mapped(lambda each: each.to(dtype) if each.dtype in halves else each, inputs_CB)


def by_length(length_C: np.ndarray) -> list[tuple[int, slice | list[int]]]:
    """Each length there is and who has it."""
    lengths = np.unique(length_C)
    if len(lengths) == 1:
        return [(int(lengths[0]), slice(None))]
    return [(int(length), np.flatnonzero(length_C == length).tolist()) for length in lengths]


@contextmanager
def by_rules() -> Iterator[None]:
    """What the library has no rule for is refused, rather than done one by one with a warning."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
