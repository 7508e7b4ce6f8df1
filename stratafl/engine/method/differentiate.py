"""What gives many clients' gradients at once: what it is given, and the losses it starts from.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import PROCESS
from stratafl.core.losses import Loss, bare, checked, replaced, tensors_in
from stratafl.data.inputs import Inputs, mapped
from stratafl.engine import ops
from stratafl.engine.draws.mode import Draws
from stratafl.engine.draws.stream import Source, Stream
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
        stream = None if self.stream is None else self.stream.some(mine)
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
        self.loss, self._dtype, self._ops = loss, dtype, functions
        self.even = not (labels and bare(loss) is F.cross_entropy)
        self._maps = True

    def __call__(self, outputs_CB: Any, batch: Batch, drawn: int = 0) -> Tensor:
        """`outputs_CB`: scores, or whatever a module returned, with the clients in front of every
        tensor; `drawn`: how many draws of the step came before."""
        if not self.even:
            op = self._ops.functions["cross_entropy"] if batch.targets_CB.dim() == 2 else ops.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        losses, longest = [], batch.mask_CB.shape[1]
        for length, mine in by_length(batch.length_C):
            # what has no entry for each sample is never padded
            outputs = self._some(outputs_CB, mine if length == longest else (mine, slice(length)))
            losses.append(self._own_losses(outputs, batch.some(mine, length), drawn))
        return torch.cat(losses)

    def _some(self, outputs_CB: Any, where: Any) -> Any:
        """Copies, since a loss may write into what it is given."""

        def own(each: Tensor) -> Tensor:
            return (each.to(self._dtype) if each.is_floating_point() else each)[where].clone()

        return replaced(outputs_CB, own)

    def _own_losses(self, outputs_CB: Any, batch: Batch, drawn: int) -> Tensor:
        """A user's loss of each client, none of whose batches is padded."""
        targets_CB, rows_CB = batch.targets_CB.clone(), tensors_in(outputs_CB)

        def one(targets_B: Tensor, *rows_B: Tensor) -> Tensor:
            rows = iter(rows_B)
            return self.loss(replaced(outputs_CB, lambda _: next(rows)), targets_B)

        def number(*given: Tensor) -> Tensor:
            value = one(*given)
            is_number = isinstance(value, Tensor) and value.numel() == 1
            return (value if is_number else checked(self.loss, value)).reshape(())

        if self._maps:
            try:
                with by_rules():
                    losses_C = vmap(number)(targets_CB, *rows_CB)
                checked(self.loss, losses_C[0])
                return losses_C
            except RuntimeError as problem:
                pass_on_no_room(problem)
                # it looks at values, draws or does what cannot be mapped; this shows when the
                # engine first tries it
                self._maps = False
        losses = []
        for client, own in enumerate(zip(targets_CB, *rows_CB, strict=True)):
            # a slice: to choose by a list, a GPU waits for the host
            stream = None if batch.stream is None else batch.stream.some(slice(client, client + 1))
            with nullcontext() if stream is None else Draws(Source(stream, drawn)):
                losses.append(checked(self.loss, one(*own)).reshape(()))
        return torch.stack(losses)


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
    with PROCESS:
        before = functorch._is_vmap_fallback_enabled()
        functorch._set_vmap_fallback_enabled(False)
        try:
            yield
        finally:
            functorch._set_vmap_fallback_enabled(before)
