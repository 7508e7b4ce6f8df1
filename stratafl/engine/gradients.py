"""The gradients of many clients at once, by a program of a module's layers or by `torch.func`.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stratafl.core.flat_module import Flat, copied
from stratafl.core.losses import Loss, OnScores
from stratafl.core.rows import Spread
from stratafl.data.inputs import Inputs, arguments
from stratafl.engine import ops
from stratafl.engine.draws.stream import Source
from stratafl.engine.method.differentiate import Batch, Differentiate, Losses, by_length, widened
from stratafl.engine.method.unsupported import Unsupported
from stratafl.engine.precision import Casting, scale_of
from stratafl.engine.rows import ALONE, Gradients, Wanted, room
from stratafl.engine.trace.layout import Layout
from stratafl.engine.trace.lowering import Sinks
from stratafl.engine.trace.program import Program
from stratafl.engine.vocabulary import Vocabulary


class Stacked:
    """One pass forward and one back for all clients, through the module's client-batched
    program."""

    def __init__(self, flat: Flat, loss: Loss, inputs: Inputs, compute: ops.Compute = "fp32", labels: bool = False):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.flat, self.compute = flat, compute
        self.program = Program(flat, inputs)
        if self.program.gives_more and not isinstance(loss, OnScores):
            raise Unsupported("a loss of one's own, of an output that is no tensor")
        self.ops = ops.table(inputs.device, flat.dtype)
        reorder = self.ops.reorder
        self.layout = Layout(flat) if reorder is None else Layout(flat, self.program.filters, reorder)
        self._losses = Losses(loss, flat.dtype, self.ops, labels)
        self.even = self._losses.even
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        sinks = Sinks(
            self._views(g_CP, b_CZ),
            {} if wanted.correction_CP is None else self._views(wanted.correction_CP, b_CZ),
            [] if wanted.squares and self.ops.squares else None,
        )
        scale = scale_of(self.compute)
        with torch.enable_grad():
            source = None if batch.stream is None else Source(batch.stream)
            outputs_CB, sunk = self.program(named, batch.inputs_CB, self.ops, self.compute, sinks, scale, source)
            losses_C = self._losses(outputs_CB, batch, 0 if source is None else source.count)
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


class Mapped:
    """`torch.func` over the clients whose batches have the same length."""

    even = True

    def __init__(self, flat: Flat, loss: Loss, device: torch.device, compute: ops.Compute = "fp32"):
        self.flat, self.layout = flat, Layout(flat)
        self._casting = Casting(compute, device, flat.dtype, keeps=False)
        self.compute = self._casting.compute
        self.loss = self._casting.scaled(loss)
        # of its own, in training mode: a module may keep what it computed, which is of no use
        # outside the mapping
        flat.train()
        self._module = copied(flat.module, shared=flat.module.parameters())
        self._gradient = vmap(grad(self._one, has_aux=True), randomness="error")

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        for length, mine in by_length(batch.length_C):
            inputs = widened(batch.inputs_CB[mine, :length], self.flat.dtype)
            targets = batch.targets_CB[mine, :length]
            some_CP, beyond = self._gradient(x_CP[mine], b_CZ[mine], *arguments(inputs), targets)
            if x_CP.device.type == "cpu":
                Vocabulary.check(beyond)
            else:
                Vocabulary.mark(some_CP, beyond)
            g_CP[mine] = some_CP
        g_CP = self._casting.unscaled(g_CP)
        return Gradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))

    def _one(
        self, x_P: Tensor, b_Z: Tensor, positional: tuple[Tensor, ...], keywords: dict[str, Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        values = self.flat.named(x_P, b_Z)
        with Vocabulary() as vocabulary, self._casting.forward():
            loss = self.loss(functional_call(self._module, values, positional, keywords), targets).reshape(())
        return loss, vocabulary.beyond


class ModuleOrder:
    """Another method's gradients, of rows in the module's order and in that order."""

    def __init__(self, method: Differentiate, flat: Flat):
        self.method, self.layout = method, Layout(flat)
        self.even, self.compute = method.even, method.compute

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        inner = self.method.layout
        own_CP, g_CP = (room(len(x_CP), x_CP.shape[1], x_CP) for _ in range(2))
        inner.into(own_CP, Spread(x_CP), range(len(x_CP)))
        found = self.method(own_CP, b_CZ, batch)
        inner.restore(found.g_CP, g_CP)
        g_CP = g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP)
        return Gradients(g_CP, reads=found.reads)


def ordered(method: Differentiate, flat: Flat) -> Differentiate:
    """The same for rows in the module's order."""
    return method if method.layout.plain else ModuleOrder(method, flat)
