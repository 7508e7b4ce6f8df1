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
from stratafl.data.inputs import Inputs, as_type, call_arguments, map_tensors, tensors_of
from stratafl.engine import kernels, precision
from stratafl.engine.batches import ClientBatches, group_by_length, upcast_inputs
from stratafl.engine.chunk import CPU_ACTIVATION_BYTES, PLAIN_REQUEST, ClientGradients, GradientRequest, empty_rows
from stratafl.engine.compiler.program import BatchedProgram, vmap_fallback_disabled
from stratafl.engine.compiler.values import GradientPlaces
from stratafl.engine.kernels import reference
from stratafl.engine.parameter_layout import ParameterLayout
from stratafl.engine.precision import MixedPrecision
from stratafl.engine.random_streams import RandomOverride, RandomSource
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

    def __init__(self, loss: Loss, dtype: torch.dtype, functions: kernels.Backend, labels: bool):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.loss, self._dtype, self._ops = loss, dtype, functions
        self.even = not (labels and unwrap_loss(loss) is F.cross_entropy)
        self._maps = True

    def __call__(self, outputs_CB: Any, batch: ClientBatches, drawn: int = 0) -> Tensor:
        """`outputs_CB`: scores, or whatever a module returned, with the clients in front of every
        tensor; `drawn`: how many draws of the step came before."""
        if not self.even:
            op = self._ops.ops["cross_entropy"] if batch.targets_CB.dim() == 2 else reference.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        losses, longest = [], batch.mask_CB.shape[1]
        for length, mine in group_by_length(batch.length_C):
            # what has no entry for each sample is never padded
            outputs = self._some(outputs_CB, mine if length == longest else (mine, slice(length)))
            losses.append(self._own_losses(outputs, batch.select(mine, length), drawn))
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
            stream = None if batch.stream is None else batch.stream.select(slice(client, client + 1))
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
        inputs: Inputs,
        compute: precision.Precision = "fp32",
        labels: bool = False,
        pads: bool = False,
        apart: bool = False,
        use_kernels: bool = True,
    ):
        """`inputs`: samples of the kind the module will see; `labels`: every target is a class
        number; `pads`: batches of other lengths may be padded to the longest; `apart`: functions
        whose gradient is their own are called for one client after another; `use_kernels`: whether
        the device's kernels take the place of operations."""
        self._casting = MixedPrecision(compute, inputs.device, flat.dtype, cache_casts=False)
        self.flat, self.compute, self.pads = flat, self._casting.precision, pads
        self.use_kernels = use_kernels
        self._table = kernels.backend_for(inputs.device, flat.dtype) if use_kernels else None
        self._losses = PerClientLoss(loss, flat.dtype, self._table or kernels.TORCH_BACKEND, labels)
        self._whole, self._apart = not isinstance(loss, LossOnScores), apart
        self._filters: set[str] | None = None
        self.layout = ParameterLayout(flat)
        if self._table is not None and self._table.convert_filters is not None:
            # filters lie as kernels want them, in the programs of all lengths alike
            filters = BatchedProgram(flat, as_type(inputs, flat.dtype), self._whole, apart, self._table).filters
            self._filters, self.layout = filters, ParameterLayout(flat, filters, self._table.convert_filters)
        self.even = not pads or self._losses.even
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""
        self._programs: dict[object, BatchedProgram] = {}
        self.mapped: set[str] = set()
        """Operations that were called for one client after another."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        whole = batch.mask_CB.shape[1]
        groups = [(whole, slice(None))] if self.pads else group_by_length(batch.length_C)
        programs = []
        squares: list[Tensor] | None = (
            [] if wanted.squared_norms and (self._table or kernels.TORCH_BACKEND).returns_squared_norms else None
        )
        for length, mine in groups:
            some = batch.select(mine, length)
            program = self.program(some)
            programs.append(program)
            if isinstance(mine, slice):
                self._some(program, x_CP, b_CZ, some, wanted.add_CP, g_CP, squares)
                continue
            squares = None  # of some clients alone they would have to be put together
            x, b, g = x_CP[mine], b_CZ[mine], torch.empty_like(g_CP[mine])
            correction = None if wanted.add_CP is None else wanted.add_CP[mine]
            self._some(program, x, b, some, correction, g, None)
            g_CP[mine] = g
            if program.graph.mutated_buffers:
                b_CZ[mine] = b
        return ClientGradients(g_CP, tuple(squares or ()), reads=tuple(programs))

    def program(self, batch: ClientBatches) -> BatchedProgram:
        """For batches of this length; those that were used last are kept."""
        key = tuple((name, each.shape[1:], each.dtype) for name, each in tensors_of(batch.inputs_CB).items())
        known = self._programs.pop(key, None)
        if known is None:
            while len(self._programs) >= KEPT:
                self._programs.pop(next(iter(self._programs)))
            one = upcast_inputs(map_tensors(lambda each: each[0], batch.inputs_CB), self.flat.dtype)
            known = BatchedProgram(self.flat, one, self._whole, self._apart, self._table, self._filters)
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
        squares: list[Tensor] | None,
    ) -> None:
        """On a CPU as many clients at a time as its nearer memory holds an activation of."""
        length = batch.mask_CB.shape[1]
        few = (
            len(x_CP)
            if x_CP.device.type != "cpu"
            else max(1, CPU_ACTIVATION_BYTES // max(1, program.graph.max_value_bytes))
        )
        for first in range(0, len(x_CP), few):
            mine = slice(first, first + few)
            correction = None if correction_CP is None else correction_CP[mine]
            self._together(program, x_CP[mine], b_CZ[mine], batch.select(mine, length), correction, g_CP[mine], squares)

    def _together(
        self,
        program: BatchedProgram,
        x_CP: Tensor,
        b_CZ: Tensor,
        batch: ClientBatches,
        correction_CP: Tensor | None,
        g_CP: Tensor,
        squares: list[Tensor] | None,
    ) -> None:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        written = {name: named[name].clone() for name in program.graph.mutated_buffers}
        own = {**dict(self.flat.module.named_parameters()), **dict(self.flat.module.named_buffers())}
        device = x_CP.device
        shared = {name: value.detach().to(device) for name, value in own.items() if name not in named}
        scale = self._casting.scale
        source = None if batch.stream is None else RandomSource(batch.stream)
        places = GradientPlaces(
            self._views(g_CP, b_CZ), {} if correction_CP is None else self._views(correction_CP, b_CZ), squares, scale,
            set(),
        )  # fmt: skip
        inputs_CB = batch.inputs_CB if program.casts_inputs else upcast_inputs(batch.inputs_CB, self.flat.dtype)
        with torch.enable_grad(), self._casting.autocast():
            outputs_CB = program(
                {**named, **written}, shared, inputs_CB.clone() if program.graph.mutates_inputs else inputs_CB,
                source, self.compute, places,
            )  # fmt: skip
        with torch.enable_grad():
            losses_C = self._losses(outputs_CB, batch, 0 if source is None else source.count)
            losses_C.backward(torch.full_like(losses_C, scale))
        self.mapped |= program.unbatched_ops
        for name, weight in weights.items():
            if name not in places.written:
                part = torch.zeros_like(weight) if weight.grad is None else weight.grad
                place = places.gradients[name]
                reference.write_gradient(part, place, places.corrections.get(name), scale)
                if squares is not None:
                    squares.append(place.flatten(1).square().sum(dim=1, keepdim=True))
        for name, value in written.items():
            named[name].copy_(value)

    def _views(self, rows_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        views = self.layout.named(rows_CP, b_CZ)
        return {name: views[name] for name in self.flat.names}


class VmapGradients:
    """`torch.func` over the clients whose batches have the same length."""

    even = True

    def __init__(self, flat: FlatModule, loss: Loss, device: torch.device, compute: precision.Precision = "fp32"):
        self.flat, self.layout = flat, ParameterLayout(flat)
        self._casting = MixedPrecision(compute, device, flat.dtype, cache_casts=False)
        self.compute = self._casting.precision
        self.loss = self._casting.scale_loss(loss)
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
                EmbeddingRangeCheck.raise_if_out_of_range(beyond)
            else:
                EmbeddingRangeCheck.mark(some_CP, beyond)
            g_CP[mine] = some_CP
        g_CP = self._casting.unscale_(g_CP)
        return ClientGradients(g_CP if wanted.add_CP is None else g_CP.add_(wanted.add_CP))

    def _one(
        self, x_P: Tensor, b_Z: Tensor, positional: tuple[Tensor, ...], keywords: dict[str, Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        values = self.flat.unflatten(x_P, b_Z)
        with EmbeddingRangeCheck() as vocabulary, self._casting.autocast():
            loss = self.loss(functional_call(self._module, values, positional, keywords), targets).reshape(())
        return loss, vocabulary.out_of_range


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
        inner.restore(found.grads_CP, g_CP)
        g_CP = g_CP if wanted.add_CP is None else g_CP.add_(wanted.add_CP)
        return ClientGradients(g_CP, reads=found.reads)


def in_module_order(method: BatchedGradients, flat: FlatModule) -> BatchedGradients:
    """The same for rows in the module's order."""
    return method if method.layout.plain else InModuleOrder(method, flat)
