"""The gradients of many clients at once, and which way of getting them a module allows.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stratafl.engine import ops
from stratafl.engine.layout import Layout
from stratafl.engine.lowering import Sinks, Unsupported
from stratafl.engine.program import Program
from stratafl.engine.rows import ALONE, Gradients, Wanted, room
from stratafl.engine.spread import Spread
from stratafl.flat import Flat

Loss = Callable[[Tensor, Tensor], Tensor]
Way = Literal["stacked", "vmap"]
FP16_SCALE = 4096.0
"""Gradients in fp16 are held this much larger, which keeps the small ones from vanishing."""


class Batch(NamedTuple):
    """One step's samples of all clients, padded to a common length."""

    inputs_CB: Tensor
    targets_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """The clients' own lengths, on the host."""


class Differentiate(Protocol):
    """The gradient of each client's mean loss, with what is wanted added."""

    layout: Layout
    """How the rows lie that it takes and gives."""
    even: bool
    """Whether it reads the batches' lengths on the host, so that these must not change in a CUDA graph."""

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients: ...


class Stacked:
    """One pass forward and one back for all clients, through the module's client-batched program."""

    def __init__(self, flat: Flat, loss: Loss, inputs: Tensor, compute: ops.Compute = "fp32", labels: bool = False):
        """`labels`: every target is a class number, so that the library's cross-entropy has a stacked form."""
        self.flat, self.loss, self.compute = flat, loss, compute
        self.program = Program(flat, inputs)
        self.ops = ops.table(inputs.device, flat.dtype)
        reorder = self.ops.reorder
        self.layout = Layout(flat) if reorder is None else Layout(flat, self.program.filters, reorder)
        self.even = not (labels and loss is F.cross_entropy)
        self._maps = True

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        sinks = Sinks(
            self._views(g_CP, b_CZ),
            {} if wanted.correction_CP is None else self._views(wanted.correction_CP, b_CZ),
            [] if wanted.squares and self.ops.squares else None,
        )
        scale = FP16_SCALE if self.compute == "fp16" else 1.0
        with torch.enable_grad():
            outputs_CB, sunk = self.program(named, batch.inputs_CB, self.ops, self.compute, sinks, scale)
            losses_C = self._losses(outputs_CB, batch)
            losses_C.backward(torch.full_like(losses_C, scale))
        for name, weight in weights.items():
            if name not in sunk:
                part = torch.zeros_like(weight) if weight.grad is None else weight.grad
                sink = sinks.gradients[name]
                ops.settle(part, sink, sinks.corrections.get(name), scale)
                if sinks.squares is not None:
                    sinks.squares.append(sink.flatten(1).square().sum(dim=1, keepdim=True))
        return Gradients(g_CP, tuple(sinks.squares or ()))

    def _views(self, rows_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        views = self.layout.named(rows_CP, b_CZ)
        return {name: views[name] for name in self.flat.names}

    def _losses(self, outputs_CB: Tensor, batch: Batch) -> Tensor:
        if not self.even:
            op = self.ops.functions["cross_entropy"] if batch.targets_CB.dim() == 2 else ops.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        outputs_CB = outputs_CB.to(self.flat.dtype)
        losses = []
        for length, mine in _by_length(batch.length_C):
            outputs, targets = outputs_CB[mine, :length], batch.targets_CB[mine, :length]
            losses.append(self._own_losses(outputs, targets))
        return torch.cat(losses)

    def _own_losses(self, outputs_CB: Tensor, targets_CB: Tensor) -> Tensor:
        """A user's loss of each client, none of whose batches is padded."""
        if self._maps:
            try:
                return vmap(lambda *pair: self.loss(*pair).reshape(()))(outputs_CB, targets_CB)
            except RuntimeError:
                # it looks at values or does what cannot be mapped; this shows when the engine first tries it
                self._maps = False
        return torch.stack([self.loss(*pair).reshape(()) for pair in zip(outputs_CB, targets_CB, strict=True)])


class Mapped:
    """`torch.func` over the clients whose batches have the same length."""

    even = True

    def __init__(self, flat: Flat, loss: Loss):
        self.flat, self.loss, self.layout = flat, loss, Layout(flat)
        self._gradient = vmap(grad(self._one), randomness="error")

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        for length, mine in _by_length(batch.length_C):
            inputs, targets = batch.inputs_CB[mine, :length], batch.targets_CB[mine, :length]
            g_CP[mine] = self._gradient(x_CP[mine], b_CZ[mine], inputs, targets)
        return Gradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))

    def _one(self, x_P: Tensor, b_Z: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        values = self.flat.named(x_P, b_Z)
        return self.loss(functional_call(self.flat.module, values, (inputs,)), targets).reshape(())


class Ordered:
    """Another way's gradients, of rows in the module's order and in that order."""

    def __init__(self, way: Differentiate, flat: Flat):
        self.way, self.layout, self.even = way, Layout(flat), way.even

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        inner = self.way.layout
        own_CP, g_CP = (room(len(x_CP), x_CP.shape[1], x_CP) for _ in range(2))
        inner.into(own_CP, Spread(x_CP), range(len(x_CP)))
        inner.restore(self.way(own_CP, b_CZ, batch).g_CP, g_CP)
        return Gradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))


def ordered(way: Differentiate, flat: Flat) -> Differentiate:
    """The same for rows in the module's order."""
    return way if way.layout.plain else Ordered(way, flat)


def _by_length(length_C: np.ndarray) -> list[tuple[int, slice | list[int]]]:
    """Each length there is and who has it."""
    lengths = np.unique(length_C)
    if len(lengths) == 1:
        return [(int(lengths[0]), slice(None))]
    return [(int(length), np.flatnonzero(length_C == length).tolist()) for length in lengths]


def choose(
    flat: Flat,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    compute: ops.Compute = "fp32",
    labels: bool = False,
    ways: Sequence[Way] = ("stacked", "vmap"),
) -> tuple[Differentiate | None, str]:
    """The first of these ways that gives this module's own gradients, tried on a few samples; None if only a loop does.

    `labels` says that every target of the run is a class number, none to be ignored.
    """
    flat.module.train()
    x_P, b_Z = (row.to(inputs.device) for row in flat.row(flat.module))
    with torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []):
        try:
            reason = _peculiar(flat, loss, x_P, b_Z, inputs, targets)
            expected_P = flat.gradient(x_P, b_Z.clone(), inputs, targets, loss)
        except Exception as problem:
            reason = _line(problem)
    if reason:
        return None, f"loop: {reason}"
    x_CP, b_CZ = x_P.repeat(2, 1), b_Z.repeat(2, 1)
    count = len(inputs)
    two = Batch(
        inputs.expand(2, *inputs.shape),
        targets.expand(2, *targets.shape),
        torch.ones(2, count, dtype=torch.bool, device=inputs.device),
        np.full(2, count),
    )
    reasons = []
    for how in ways:
        try:
            made: Differentiate
            if how == "stacked":
                made = Stacked(flat, loss, inputs, compute, labels)
                exact: Differentiate = made if compute == "fp32" else Stacked(flat, loss, inputs, "fp32", labels)
            else:
                made = exact = Mapped(flat, loss)
            off = (ordered(exact, flat)(x_CP, b_CZ, two).g_CP - expected_P).norm() / expected_P.norm().clamp(min=1e-30)
        except Unsupported as problem:
            reasons.append(str(problem))
        except Exception as problem:
            reasons.append(f"{how} failed: {_line(problem)}")
        else:
            if not off > (1e-6 if flat.dtype == torch.float64 else 3e-2):
                return made, how if not reasons else f"{how}: {'; '.join(reasons)}"
            reasons.append(f"{how} does not give the module's own gradient")
    return None, f"loop: {'; '.join(reasons)}"


def _peculiar(flat: Flat, loss: Loss, x_P: Tensor, b_Z: Tensor, inputs: Tensor, targets: Tensor) -> str:
    """What makes a module's training depend on more than its parameters and batch, if anything does."""
    before = _drawn(inputs.device)
    buffers = {name: buffer.clone() for name, buffer in flat.module.named_buffers()}
    values = {**buffers, **flat.named(x_P, b_Z.clone())}
    with torch.no_grad():
        loss(functional_call(flat.module, values, (inputs,)), targets)
    if _drawn(inputs.device) != before:
        return "the module or loss draws random numbers"
    if any(not torch.equal(values[name], buffer) for name, buffer in flat.module.named_buffers()):
        return "training changes the module's buffers"
    return ""


def _drawn(device: torch.device) -> list[object]:
    """The state of everything a module may draw from."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return [state.numpy().tobytes(), random.getstate(), str(np.random.get_state())]


def _line(problem: BaseException) -> str:
    line = str(problem).strip().partition("\n")[0]
    return f"{type(problem).__name__}: {textwrap.shorten(line, 120)}"
