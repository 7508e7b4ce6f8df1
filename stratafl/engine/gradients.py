"""Gradients of many clients at once: by a captured program, or by torch.func.

Shape suffixes: C clients, P parameters, Z buffer values, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stratafl.base.errors import reraise_out_of_memory
from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import Loss, LossOnScores, check_loss_value, map_outputs, output_tensors, unwrap_loss
from stratafl.core.rows import IndexedRows
from stratafl.data.inputs import Inputs, as_type, call_arguments, map_tensors, tensors_of
from stratafl.engine import kernels
from stratafl.engine.batches import ClientBatches, group_by_length, upcast_inputs
from stratafl.engine.chunk import CPU_ACTIVATION_BYTES, PLAIN_REQUEST, ClientGradients, GradientRequest, empty_rows
from stratafl.engine.compiler.program import BatchedProgram, vmap_fallback_disabled
from stratafl.engine.compiler.values import GradientPlaces
from stratafl.engine.kernels import reference
from stratafl.engine.parameter_layout import ParameterLayout
from stratafl.engine.precision import MixedPrecision, Precision
from stratafl.engine.random_streams import RandomOverride, RandomSource
from stratafl.engine.validation import IndexRangeCheck

MAX_PROGRAMS = 64
"""Programs kept, one for each batch length."""


@dataclass(frozen=True, eq=False)
class GradientTask:
    """Gradients that an engine needs: of which model and loss, on which samples, how precise."""

    flat: FlatModule
    loss: Loss
    inputs: Inputs
    """Some samples of the run, as the module gets them."""
    targets: Tensor
    precision: Precision = "fp32"
    class_indices: bool = False
    """Whether every target of the run is a class index, none of them to be ignored."""


class BatchedGradients(Protocol):
    """Computes the gradient of each client's mean loss, plus the requested correction.

    Buffers that training changes are changed in their rows.
    """

    layout: ParameterLayout
    """Layout of the rows that it takes and returns."""
    reads_lengths: bool
    """Whether it reads the lengths of batches on the host. A CUDA graph of it is then right for
    these lengths only."""
    precision: Precision
    """Precision in which products are really computed."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, request: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients: ...


class PerClientLoss:
    """Computes each client's loss from the outputs of all clients."""

    def __init__(self, loss: Loss, dtype: torch.dtype, backend: kernels.Backend, class_indices: bool):
        """`class_indices`: whether every target is a class index, as the batched cross-entropy
        needs."""
        self.loss, self._dtype, self._backend = loss, dtype, backend
        self.reads_lengths = not (class_indices and unwrap_loss(loss) is F.cross_entropy)
        self._uses_vmap = True

    def __call__(self, outputs_CB: Any, batch: ClientBatches, draws: int = 0) -> Tensor:
        """Losses (C).

        `outputs_CB`: what the module returned, with the clients as the first axis of every tensor;
        `draws`: number of random operations in the step so far.
        """
        if not self.reads_lengths:
            cross_entropy = self._backend.ops["cross_entropy"]
            if batch.targets_CB.dim() != 2:
                cross_entropy = reference.cross_entropy
            return cross_entropy(outputs_CB, batch.targets_CB, batch.mask_CB)
        losses, longest = [], batch.mask_CB.shape[1]
        for length, clients in group_by_length(batch.length_C):
            # outputs without an entry per sample cannot be cut, and are never padded
            index = clients if length == longest else (clients, slice(length))
            outputs_CL = map_outputs(outputs_CB, partial(self._copy, index))
            losses.append(self._custom_losses(outputs_CL, batch.select(clients, length), draws))
        return torch.cat(losses)

    def _copy(self, index: Any, output: Tensor) -> Tensor:
        """Copy a part of an output, since a loss may write to its arguments."""
        return (output.to(self._dtype) if output.is_floating_point() else output)[index].clone()

    def _custom_losses(self, outputs_CB: Any, batch: ClientBatches, draws: int) -> Tensor:
        """Losses by a user's function, of clients with batches of the same length."""
        targets_CB, tensors_CB = batch.targets_CB.clone(), output_tensors(outputs_CB)

        def client_loss(targets_B: Tensor, *tensors_B: Tensor) -> Tensor:
            tensors = iter(tensors_B)
            return self.loss(map_outputs(outputs_CB, lambda _: next(tensors)), targets_B)

        def mapped_loss(*args: Tensor) -> tuple[Tensor, list[Tensor]]:
            with IndexRangeCheck() as indices:
                value = client_loss(*args)
            is_number = isinstance(value, Tensor) and value.numel() == 1
            return (value if is_number else check_loss_value(self.loss, value)).reshape(()), indices.out_of_range

        if self._uses_vmap:
            try:
                with vmap_fallback_disabled():
                    losses_C, out_of_range = vmap(mapped_loss)(targets_CB, *tensors_CB)
                check_loss_value(self.loss, losses_C[0])
                if not out_of_range:
                    return losses_C
                is_invalid_C = torch.stack(out_of_range).any(dim=0)
                if losses_C.device.type != "cpu":
                    return losses_C * torch.where(is_invalid_C, torch.nan, 1.0).to(losses_C.dtype)
                if not bool(is_invalid_C.any()):
                    return losses_C
                # the library's own error follows, from the client that has the index
            except RuntimeError as problem:
                reraise_out_of_memory(problem)
                # the loss decides by values, draws random numbers, or has an operation without a
                # rule; the trial of the gradient method is the first to meet this
                self._uses_vmap = False
        losses = []
        for client, args in enumerate(zip(targets_CB, *tensors_CB, strict=True)):
            # a slice rather than a list, for which a GPU would wait for the host
            stream = None if batch.stream is None else batch.stream.select(slice(client, client + 1))
            with nullcontext() if stream is None else RandomOverride(RandomSource(stream, draws)):
                losses.append(check_loss_value(self.loss, client_loss(*args)).reshape(()))
        return torch.stack(losses)


class _Part(NamedTuple):
    """Rows and batches of some clients."""

    x_CP: Tensor
    b_CZ: Tensor
    add_CP: Tensor | None
    """Correction to add to the gradients."""
    g_CP: Tensor
    """Memory for the gradients."""
    batch: ClientBatches

    def select(self, clients: slice | list[int], length: int) -> _Part:
        """Some of these clients: views of their rows for a slice, copies for a list."""
        add_CP = None if self.add_CP is None else self.add_CP[clients]
        batch = self.batch.select(clients, length)
        return _Part(self.x_CP[clients], self.b_CZ[clients], add_CP, self.g_CP[clients], batch)


class CompiledGradients:
    """Gradients by the captured program: one forward and one backward pass for all clients with
    batches of the same length, or for all clients where batches may be padded."""

    def __init__(
        self, task: GradientTask, pads: bool = False, opaque_functions: bool = False, use_kernels: bool = True
    ):
        """`pads`: whether batches are padded to the longest; `opaque_functions`: whether autograd
        functions of a user are called for one client after another; `use_kernels`: whether the
        device's kernels replace operations."""
        flat, device = task.flat, task.inputs.device
        self._mixed_precision = MixedPrecision(task.precision, device, flat.dtype, cache_casts=False)
        self.flat, self.precision, self.pads = flat, self._mixed_precision.precision, pads
        self.use_kernels = use_kernels
        self._kernels = kernels.backend_for(device, flat.dtype) if use_kernels else None
        self._backend = self._kernels or kernels.TORCH_BACKEND
        self._losses = PerClientLoss(task.loss, flat.dtype, self._backend, task.class_indices)
        self._all_outputs, self._opaque_functions = not isinstance(task.loss, LossOnScores), opaque_functions
        self._filters: set[str] | None = None
        self.layout = ParameterLayout(flat)
        if self._backend.convert_filters is not None:
            # one layout for the programs of all batch lengths
            self._filters = self._capture(as_type(task.inputs, flat.dtype)).filters
            self.layout = ParameterLayout(flat, self._filters, self._backend.convert_filters)
        self.reads_lengths = not pads or self._losses.reads_lengths
        self.fills_with_nan = False
        """Whether the memory for gradients is filled with NaN first, so that a trial shows whether
        all of it is written."""
        self._programs: dict[object, BatchedProgram] = {}
        self.mapped: set[str] = set()
        """Operations that were called for one client after another."""

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, request: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        if self.fills_with_nan:
            g_CP.fill_(torch.nan)
        everyone = _Part(x_CP, b_CZ, request.add_CP, g_CP, batch)
        groups = [(batch.mask_CB.shape[1], slice(None))] if self.pads else group_by_length(batch.length_C)
        # the norms of several groups would have to be put together
        has_norms = request.squared_norms and self._backend.collects_squared_norms and len(groups) == 1
        squared_norms: list[Tensor] | None = [] if has_norms else None
        programs = []
        for length, clients in groups:
            group = everyone.select(clients, length)
            program = self.program(group.batch)
            programs.append(program)
            # on a CPU, only as many clients at a time as have an activation in its caches
            size = len(group.x_CP)
            if x_CP.device.type == "cpu":
                size = max(1, CPU_ACTIVATION_BYTES // max(1, program.graph.max_value_bytes))
                if "aten.lstm.input" in program.graph.op_names:
                    # as many LSTM layers for each thread, see `recurrent_rules`
                    threads = torch.get_num_threads()
                    size = -(-size // threads) * threads
            for first in range(0, len(group.x_CP), size):
                self._run(program, group.select(slice(first, first + size), length), squared_norms)
            if isinstance(clients, list):
                g_CP[clients] = group.g_CP
                if program.graph.mutated_buffers:
                    b_CZ[clients] = group.b_CZ
        return ClientGradients(g_CP, tuple(squared_norms or ()), reads=tuple(programs))

    def program(self, batch: ClientBatches) -> BatchedProgram:
        """Program for batches of this length. The programs used last are kept."""
        key = tuple((name, samples.shape[1:], samples.dtype) for name, samples in tensors_of(batch.inputs_CB).items())
        program = self._programs.pop(key, None)
        if program is None:
            while len(self._programs) >= MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            first_client = map_tensors(lambda samples_CB: samples_CB[0], batch.inputs_CB)
            program = self._capture(upcast_inputs(first_client, self.flat.dtype))
        self._programs[key] = program
        return program

    def _capture(self, inputs_B: Inputs) -> BatchedProgram:
        return BatchedProgram(
            self.flat, inputs_B, self._all_outputs, self._opaque_functions, self._kernels, self._filters
        )

    def _run(self, program: BatchedProgram, part: _Part, squared_norms: list[Tensor] | None) -> None:
        """Write the gradients of these clients, and what becomes of their buffers."""
        batch, scale = part.batch, self._mixed_precision.scale
        named = {name: view.detach() for name, view in self.layout.named(part.x_CP, part.b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        written = {name: named[name].clone() for name in program.graph.mutated_buffers}
        own = {**dict(self.flat.module.named_parameters()), **dict(self.flat.module.named_buffers())}
        shared = {name: value.detach().to(part.x_CP.device) for name, value in own.items() if name not in named}
        source = None if batch.stream is None else RandomSource(batch.stream)
        corrections = {} if part.add_CP is None else self._weight_views(part.add_CP, part.b_CZ)
        places = GradientPlaces(self._weight_views(part.g_CP, part.b_CZ), corrections, squared_norms, scale, set())
        inputs_CB = batch.inputs_CB if program.casts_inputs else upcast_inputs(batch.inputs_CB, self.flat.dtype)
        if program.graph.mutates_inputs:
            inputs_CB = inputs_CB.clone()
        with torch.enable_grad():
            with self._mixed_precision.autocast():
                outputs_CB = program({**named, **written}, shared, inputs_CB, source, self.precision, places)
            losses_C = self._losses(outputs_CB, batch, 0 if source is None else source.count)
            losses_C.backward(torch.full_like(losses_C, scale))
        self.mapped |= program.unbatched_ops
        for name, weight in weights.items():
            if name not in places.written:
                gradient, place = weight.grad, places.gradients[name]
                gradient = torch.zeros_like(weight) if gradient is None else gradient
                reference.write_gradient(gradient, place, places.corrections.get(name), scale)
                if squared_norms is not None:
                    squared_norms.append(place.flatten(1).square().sum(dim=1, keepdim=True))
        for name, value in written.items():
            named[name].copy_(value)

    def _weight_views(self, rows_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        views = self.layout.named(rows_CP, b_CZ)
        return {name: views[name] for name in self.flat.names}


class VmapGradients:
    """Gradients by `torch.func`, for all clients with batches of the same length at once."""

    reads_lengths = True

    def __init__(self, task: GradientTask):
        self.flat, self.layout = task.flat, ParameterLayout(task.flat)
        self._mixed_precision = MixedPrecision(task.precision, task.inputs.device, task.flat.dtype, cache_casts=False)
        self.precision = self._mixed_precision.precision
        self._loss = self._mixed_precision.scale_loss(task.loss)
        # a copy in training mode: a module may keep what it computed, which is of no use outside
        # the mapping
        self.flat.train()
        self._module = copy_module(self.flat.module, shared=self.flat.module.parameters())
        self._gradient: Callable[..., Any] = vmap(grad(self._client_loss, has_aux=True), randomness="error")

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, request: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        g_CP = empty_rows(len(x_CP), x_CP.shape[1], x_CP)
        for length, clients in group_by_length(batch.length_C):
            inputs = upcast_inputs(batch.inputs_CB[clients, :length], self.flat.dtype)
            targets = batch.targets_CB[clients, :length]
            group_CP, out_of_range = self._gradient(x_CP[clients], b_CZ[clients], *call_arguments(inputs), targets)
            if x_CP.device.type == "cpu":
                IndexRangeCheck.raise_if_out_of_range(out_of_range)
            else:
                IndexRangeCheck.mark(group_CP, out_of_range)
            g_CP[clients] = group_CP
        g_CP = self._mixed_precision.unscale_(g_CP)
        return ClientGradients(g_CP if request.add_CP is None else g_CP.add_(request.add_CP))

    def _client_loss(
        self, x_P: Tensor, b_Z: Tensor, positional: tuple[Tensor, ...], keywords: dict[str, Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        values = self.flat.unflatten(x_P, b_Z)
        with IndexRangeCheck() as lookups, self._mixed_precision.autocast():
            loss = self._loss(functional_call(self._module, values, positional, keywords), targets).reshape(())
        return loss, lookups.out_of_range


class InModuleOrder:
    """Gradients by another method, for rows in the module's own order of parameters."""

    def __init__(self, method: BatchedGradients, flat: FlatModule):
        self.method, self.layout = method, ParameterLayout(flat)
        self.reads_lengths, self.precision = method.reads_lengths, method.precision

    def __call__(
        self, x_CP: Tensor, b_CZ: Tensor, batch: ClientBatches, request: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        inner = self.method.layout
        reordered_CP, g_CP = (empty_rows(len(x_CP), x_CP.shape[1], x_CP) for _ in range(2))
        inner.into(reordered_CP, IndexedRows(x_CP), range(len(x_CP)))
        gradients = self.method(reordered_CP, b_CZ, batch)
        inner.restore(gradients.grads_CP, g_CP)
        return gradients._replace(grads_CP=g_CP if request.add_CP is None else g_CP.add_(request.add_CP))


def in_module_order(method: BatchedGradients, flat: FlatModule) -> BatchedGradients:
    """The method itself if it takes rows in the module's order, or else a wrapper that does."""
    return method if method.layout.plain else InModuleOrder(method, flat)
