"""Gradients of many clients at once: by a captured program or by torch.func."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stratafl.base.errors import pass_on_no_room
from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import Loss, LossOnScores, check_loss_value, map_outputs, output_tensors, unwrap_loss
from stratafl.core.rows import IndexedRows
from stratafl.data.inputs import Inputs, call_arguments, map_tensors, tensors_of
from stratafl.engine import ops, precision
from stratafl.engine.batches import ClientBatches, group_by_length, upcast_inputs
from stratafl.engine.chunk import CPU_ACTIVATION_BYTES, PLAIN_REQUEST, ClientGradients, GradientRequest, empty_rows
from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.compiler.program import BatchedProgram, vmap_fallback_disabled
from stratafl.engine.parameter_layout import ParameterLayout
from stratafl.engine.precision import MixedPrecision, loss_scale
from stratafl.engine.random_streams import RandomOverride, RandomSource
from stratafl.engine.trace.lowering import Sinks
from stratafl.engine.trace.program import TracedProgram
from stratafl.engine.validation import EmbeddingRangeCheck


class BatchedGradients(Protocol):
    """The gradient of each client's mean loss, with what is wanted added; where training changes
    the module's buffers, these are changed in their rows."""

    layout: ParameterLayout
    """How the rows lie that it takes and gives."""
    even: bool
    """Whether it reads the batches' lengths on the host, so that these must not change in a CUDA
    graph."""
    compute: precision.Precision
    """What products are really computed in."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients: ...


class PerClientLoss:
    """The loss of each client's own samples, from the outputs for all of them."""

    def __init__(self, loss: Loss, dtype: torch.dtype, functions: ops.Table, labels: bool):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.loss, self._dtype, self._ops = loss, dtype, functions
        self.even = not (labels and unwrap_loss(loss) is F.cross_entropy)
        self._maps = True

    def __call__(self, outputs_CB: Any, batch: ClientBatches, drawn: int = 0) -> Tensor:
        """`outputs_CB`: scores, or whatever a module returned, with the clients in front of every
        tensor; `drawn`: how many draws of the step came before."""
        if not self.even:
            op = self._ops.functions["cross_entropy"] if batch.targets_CB.dim() == 2 else ops.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        losses, longest = [], batch.mask_CB.shape[1]
        for length, mine in group_by_length(batch.length_C):
            # what has no entry for each sample is never padded
            outputs = self._some(outputs_CB, mine if length == longest else (mine, slice(length)))
            losses.append(self._own_losses(outputs, batch.some(mine, length), drawn))
        return torch.cat(losses)

    def _some(self, outputs_CB: Any, where: Any) -> Any:
        """Copies, since a loss may write into what it is given."""

        def own(each: Tensor) -> Tensor:
            return (each.to(self._dtype) if each.is_floating_point() else each)[where].clone()

        return map_outputs(outputs_CB, own)

    def _own_losses(self, outputs_CB: Any, batch: ClientBatches, drawn: int) -> Tensor:
        """A user's loss of each client, none of whose batches is padded."""
        targets_CB, rows_CB = batch.targets_CB.clone(), output_tensors(outputs_CB)

        def one(targets_B: Tensor, *rows_B: Tensor) -> Tensor:
            rows = iter(rows_B)
            return self.loss(map_outputs(outputs_CB, lambda _: next(rows)), targets_B)

        def number(*given: Tensor) -> Tensor:
            value = one(*given)
            is_number = isinstance(value, Tensor) and value.numel() == 1
            return (value if is_number else check_loss_value(self.loss, value)).reshape(())

        if self._maps:
            try:
                with vmap_fallback_disabled():
                    losses_C = vmap(number)(targets_CB, *rows_CB)
                check_loss_value(self.loss, losses_C[0])
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
            with nullcontext() if stream is None else RandomOverride(RandomSource(stream, drawn)):
                losses.append(check_loss_value(self.loss, one(*own)).reshape(()))
        return torch.stack(losses)


KEPT = 64
"""Programs kept, one for each length of a batch."""


class CompiledGradients:
    """One pass forward and one back for all clients whose batches are as long; for all clients
    where padding changes nothing."""

    def __init__(
        self,
        flat: FlatModule,
        loss: Loss,
        device: torch.device,
        compute: precision.Precision = "fp32",
        labels: bool = False,
        pads: bool = False,
        apart: bool = False,
    ):
        """`labels`: every target is a class number; `pads`: batches of other lengths may be padded
        to the longest; `apart`: functions whose gradient is their own are called for one client
        after another."""
        self._casting = MixedPrecision(compute, device, flat.dtype, keeps=False)
        self.flat, self.compute, self.pads = flat, self._casting.compute, pads
        self.layout = ParameterLayout(flat)
        self._losses = PerClientLoss(loss, flat.dtype, ops.PLAIN, labels)
        self._whole, self._apart = not isinstance(loss, LossOnScores), apart
        self.even = not pads or self._losses.even
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""
        self._programs: dict[object, BatchedProgram] = {}
        self.mapped: set[str] = set()
        """Operations that had no form and were mapped over the clients."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        whole = batch.mask_CB.shape[1]
        groups = [(whole, slice(None))] if self.pads else group_by_length(batch.length_C)
        programs = []
        for length, mine in groups:
            some = batch.some(mine, length)
            program = self.program(some)
            programs.append(program)
            if isinstance(mine, slice):
                self._some(program, x_CP, b_CZ, some, wanted.correction_CP, g_CP)
                continue
            x, b, g = x_CP[mine], b_CZ[mine], torch.empty_like(g_CP[mine])
            correction = None if wanted.correction_CP is None else wanted.correction_CP[mine]
            self._some(program, x, b, some, correction, g)
            g_CP[mine] = g
            if program.recording.written:
                b_CZ[mine] = b
        return ClientGradients(g_CP, reads=tuple(programs))

    def program(self, batch: ClientBatches) -> BatchedProgram:
        """For batches of this length; those that were used last are kept."""
        inputs_CB = upcast_inputs(batch.inputs_CB, self.flat.dtype)
        key = tuple((name, each.shape[1:], each.dtype) for name, each in tensors_of(inputs_CB).items())
        known = self._programs.pop(key, None)
        if known is None:
            while len(self._programs) >= KEPT:
                self._programs.pop(next(iter(self._programs)))
            one = map_tensors(lambda each: each[0], inputs_CB)
            known = BatchedProgram(self.flat, one, self._whole, self._apart)
        self._programs[key] = known
        return known

    def _some(
        self,
        program: BatchedProgram,
        x_CP: Tensor,
        b_CZ: Tensor,
        batch: ClientBatches,
        correction_CP: Tensor | None,
        g_CP: Tensor,
    ) -> None:
        """On a CPU as many clients at a time as its nearer memory holds an activation of."""
        length = batch.mask_CB.shape[1]
        few = (
            len(x_CP)
            if x_CP.device.type != "cpu"
            else max(1, CPU_ACTIVATION_BYTES // max(1, program.recording.largest))
        )
        for first in range(0, len(x_CP), few):
            mine = slice(first, first + few)
            correction = None if correction_CP is None else correction_CP[mine]
            self._together(program, x_CP[mine], b_CZ[mine], batch.some(mine, length), correction, g_CP[mine])

    def _together(
        self,
        program: BatchedProgram,
        x_CP: Tensor,
        b_CZ: Tensor,
        batch: ClientBatches,
        correction_CP: Tensor | None,
        g_CP: Tensor,
    ) -> None:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        written = {name: named[name].clone() for name in program.recording.written}
        own = {**dict(self.flat.module.named_parameters()), **dict(self.flat.module.named_buffers())}
        device = x_CP.device
        shared = {name: value.detach().to(device) for name, value in own.items() if name not in named}
        scale = self._casting.scale
        source = None if batch.stream is None else RandomSource(batch.stream)
        with torch.enable_grad(), self._casting.forward():
            # clones: a module may write into what it is given
            outputs_CB = program(
                {**named, **written}, shared, upcast_inputs(batch.inputs_CB, self.flat.dtype).clone(), source
            )
        with torch.enable_grad():
            losses_C = self._losses(outputs_CB, batch, 0 if source is None else source.count)
            losses_C.backward(torch.full_like(losses_C, scale))
        self.mapped |= program.mapped
        views, corrections = self.layout.named(g_CP, b_CZ), None
        if correction_CP is not None:
            corrections = self.layout.named(correction_CP, b_CZ)
        for name, weight in weights.items():
            part = torch.zeros_like(weight) if weight.grad is None else weight.grad
            ops.settle(part, views[name], None if corrections is None else corrections[name], scale)
        for name, value in written.items():
            named[name].copy_(value)


class Stacked:
    """One pass forward and one back for all clients, through the module's client-batched
    program."""

    def __init__(
        self, flat: FlatModule, loss: Loss, inputs: Inputs, compute: precision.Precision = "fp32", labels: bool = False
    ):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.flat, self.compute = flat, compute
        self.program = TracedProgram(flat, inputs)
        if self.program.gives_more and not isinstance(loss, LossOnScores):
            raise UnsupportedModule("a loss of one's own, of an output that is no tensor")
        self.ops = ops.table(inputs.device, flat.dtype)
        reorder = self.ops.reorder
        self.layout = ParameterLayout(flat) if reorder is None else ParameterLayout(flat, self.program.filters, reorder)
        self._losses = PerClientLoss(loss, flat.dtype, self.ops, labels)
        self.even = self._losses.even
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        sinks = Sinks(
            self._views(g_CP, b_CZ),
            {} if wanted.correction_CP is None else self._views(wanted.correction_CP, b_CZ),
            [] if wanted.squares and self.ops.squares else None,
        )
        scale = loss_scale(self.compute)
        with torch.enable_grad():
            source = None if batch.stream is None else RandomSource(batch.stream)
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
        return ClientGradients(g_CP, tuple(sinks.squares or ()))

    def _views(self, rows_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        views = self.layout.named(rows_CP, b_CZ)
        return {name: views[name] for name in self.flat.names}


class VmapGradients:
    """`torch.func` over the clients whose batches have the same length."""

    even = True

    def __init__(self, flat: FlatModule, loss: Loss, device: torch.device, compute: precision.Precision = "fp32"):
        self.flat, self.layout = flat, ParameterLayout(flat)
        self._casting = MixedPrecision(compute, device, flat.dtype, keeps=False)
        self.compute = self._casting.compute
        self.loss = self._casting.scaled(loss)
        # of its own, in training mode: a module may keep what it computed, which is of no use
        # outside the mapping
        flat.train()
        self._module = copy_module(flat.module, shared=flat.module.parameters())
        self._gradient = vmap(grad(self._one, has_aux=True), randomness="error")

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        for length, mine in group_by_length(batch.length_C):
            inputs = upcast_inputs(batch.inputs_CB[mine, :length], self.flat.dtype)
            targets = batch.targets_CB[mine, :length]
            some_CP, beyond = self._gradient(x_CP[mine], b_CZ[mine], *call_arguments(inputs), targets)
            if x_CP.device.type == "cpu":
                EmbeddingRangeCheck.check(beyond)
            else:
                EmbeddingRangeCheck.mark(some_CP, beyond)
            g_CP[mine] = some_CP
        g_CP = self._casting.unscaled(g_CP)
        return ClientGradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))

    def _one(
        self, x_P: Tensor, b_Z: Tensor, positional: tuple[Tensor, ...], keywords: dict[str, Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        values = self.flat.unflatten(x_P, b_Z)
        with EmbeddingRangeCheck() as vocabulary, self._casting.forward():
            loss = self.loss(functional_call(self._module, values, positional, keywords), targets).reshape(())
        return loss, vocabulary.beyond


class InModuleOrder:
    """Another method's gradients, of rows in the module's order and in that order."""

    def __init__(self, method: BatchedGradients, flat: FlatModule):
        self.method, self.layout = method, ParameterLayout(flat)
        self.even, self.compute = method.even, method.compute

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        inner = self.method.layout
        own_CP, g_CP = (empty_rows(len(x_CP), x_CP.shape[1], x_CP) for _ in range(2))
        inner.into(own_CP, IndexedRows(x_CP), range(len(x_CP)))
        found = self.method(own_CP, b_CZ, batch)
        inner.restore(found.g_CP, g_CP)
        g_CP = g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP)
        return ClientGradients(g_CP, reads=found.reads)


def in_module_order(method: BatchedGradients, flat: FlatModule) -> BatchedGradients:
    """The same for rows in the module's order."""
    return method if method.layout.plain else InModuleOrder(method, flat)
