"""Vectorised engine: all clients at once, as rows of one matrix.

It gives the loop engine's result, up to rounding. Clients are taken in chunks that fit into memory.
On a GPU one step of a chunk is captured as a CUDA graph and replayed, so that the host has nothing
to do between steps.

Shape suffixes: N clients, A clients that take part, C clients of a chunk, P parameters, Z buffer
values, H steps, B samples of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.rng import preserve_rng
from stratafl.core.client_training import ClientTraining, TrainRequest, TrainResult
from stratafl.core.client_update import PLAIN
from stratafl.data.batches import padded_batches
from stratafl.data.dataset import BatchKey
from stratafl.data.inputs import Inputs, sample_bytes
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels
from stratafl.engine.batches import (
    ChunkIndices,
    ClientBatches,
    StepBatch,
    augment_per_client,
    image_tensor,
    supports_stacked_batches,
)
from stratafl.engine.chunk import (
    PLAIN_REQUEST,
    ChunkState,
    ClientGradients,
    GradientRequest,
    max_chunk_size,
    probe_request,
)
from stratafl.engine.cuda_graphs import CapturedStep, CapturePolicy
from stratafl.engine.gradients import BatchedGradients, in_module_order
from stratafl.engine.loop import limit_threads
from stratafl.engine.module_profile import PROBE_SAMPLES, ModuleProfile
from stratafl.engine.parameter_layout import ParameterLayout
from stratafl.engine.precision import float32_matmul_precision
from stratafl.engine.random_streams import ClientStream

MAX_CUDA_GRAPHS = 2
"""Captured steps kept: enough for two sizes of chunk."""


class Chunk(NamedTuple):
    """Some of the participating clients, with the sample indices of their steps."""

    rows: slice
    """Rows of the chunk among those of all participating clients."""
    clients: list[int]
    steps_C: np.ndarray
    """Steps of each client; where they differ, the first client has most."""
    indices: ChunkIndices
    padded_length_H: np.ndarray
    """Longest batch of all participating clients in each step. A step is padded to it, so that the
    padding does not depend on the clients in the chunk."""

    def step_batch(self, number: int, step: int | Tensor, clients: int | None = None) -> StepBatch:
        """Batch of the first clients in step `number` of the request, step `step` of the run."""
        rows, length = slice(clients), int(self.padded_length_H[number])
        client_C, index_CHB, mask_CHB, length_CH = self.indices
        index_CB, mask_CB = index_CHB[rows, number, :length], mask_CHB[rows, number, :length]
        return StepBatch(client_C[rows], index_CB, mask_CB, length_CH[rows, number], step)


class StackedEngine:
    """Trains all clients at once.

    `how` says by which method: "stacked", or "vmap: reason" where the module has no batching rules.
    """

    def __init__(
        self,
        training: ClientTraining,
        gradients: BatchedGradients,
        *,
        how: str,
        profile: ModuleProfile,
        chunk_size: int | None = None,
        cuda_graphs: bool = True,
    ):
        """gradients: method that computes them, which has passed its trial; how: sentence for the
        user on this method; profile: of the module; chunk_size: number of clients at once, by
        default as many as fit; cuda_graphs: whether a GPU's steps become CUDA graphs."""
        self.training, self.client_update = training, training.client_update
        self.how, self.profile = how, profile
        flat, supply, augment = training.flat, training.samples, training.augment
        device = self._device = supply.device
        self._gradients, self._gradients_in_module_order = gradients, in_module_order(gradients, flat)
        self.precision = gradients.precision
        self._uses_cuda_graphs = cuda_graphs and device.type == "cuda" and supply.is_on_device
        self._sizes = training.clients.sizes.tolist()
        longest = max(self._sizes)
        self._batch_capacity = longest if training.batch_size is None else min(longest, training.batch_size)
        self._first_sample_N = torch.as_tensor(training.clients.offsets[:-1], device=device)
        self._sample_indices = training.clients.order.to(device)
        self._backend = kernels.backend_for(device, flat.dtype)
        self._clipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._captured_steps: dict[object, CapturedStep] = {}
        self._capture_policy = CapturePolicy()
        self._prefetched: tuple[object, ChunkIndices] | None = None
        self._last_active: list[int] = []

        inputs, _ = supply.batch(self._sample_indices[:PROBE_SAMPLES], BatchKey(training.seed, 0, 0))
        self._sample_bytes = sample_bytes(inputs)
        self._augments_stacked = augment is not None and supports_stacked_batches(augment, inputs, training.seed)
        loads_images = augment is flip_and_crop and self._backend.load_images is not None
        self._image_data = image_tensor(supply, flat.dtype) if loads_images else None
        self.chunk_size: int | None = chunk_size or self._choose_chunk_size()

    @property
    def name(self) -> str:
        """Method that trains: "stacked" or "vmap"."""
        return self.how.partition(":")[0]

    @property
    def clipped_steps(self) -> int:
        return int(self._clipped_steps)

    def train(self, request: TrainRequest) -> TrainResult:
        order_A = None
        if self.client_update.epochs is not None:
            # clients with most steps first, so that those still training are the first rows
            order_A = np.argsort(-self._steps_per_client(request.clients, 1), kind="stable")
            request = replace(request, clients=[request.clients[index] for index in order_A])
        result = TrainResult.empty_for(request)
        lr = float(self.client_update.lr(request.round))
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(request, request.steps):
                state = self._train_chunk(request, chunk, lr)
                self._write_back(state, result, chunk.rows)
        if request.wants_sgd_path and self.client_update.epochs is not None:
            steps_A = self._steps_per_client(request.clients, 1)
            result.path_AP.div_(to_device(steps_A, self._device, result.path_AP.dtype)[:, None])
        self._prefetch(request)
        return result if order_A is None else result.reorder(np.argsort(order_A))

    def gradients(self, request: TrainRequest) -> Tensor:
        g_AP = request.model.rows_MP.new_empty(len(request.clients), request.model.rows_MP.shape[1])
        request = replace(request, client_rows={}, wants_sgd_path=False)
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(request, 1):
                state = ChunkState.allocate(request, len(chunk.clients), replace(self.client_update, optimizer=PLAIN))
                layout = self._load(state, request, chunk)
                batch = chunk.step_batch(0, self._step_index(request, chunk.clients))
                layout.restore(self._batch_gradients(state, batch, PLAIN_REQUEST).grads_CP, g_AP[chunk.rows])
        return g_AP

    def _gradients_for(self, state: ChunkState) -> BatchedGradients:
        """Gradient method for these rows.

        Local terms and transforms of a user need rows in the module's order of parameters, since
        they may treat one parameter unlike another.
        """
        return self._gradients_in_module_order if state.fused_chain is None else self._gradients

    def _load(self, state: ChunkState, request: TrainRequest, chunk: Chunk) -> ParameterLayout:
        """Load a chunk's initial rows into its state, and return the layout they have there."""
        layout = self._gradients_for(state).layout
        state.load(request, chunk.clients, layout)
        return layout

    def _write_back(self, state: ChunkState, result: TrainResult, rows: slice) -> None:
        """Copy a chunk's rows to the result, in the module's order of parameters."""
        layout = self._gradients_for(state).layout
        result.buffers_AB[rows].copy_(state.b_CZ)
        layout.restore(state.x_CP, result.model_AP[rows])
        if state.path_CP is not None:
            layout.restore(state.path_CP, result.path_AP[rows])
        for name, out_AP in result.client_rows.items():
            layout.restore(state.state[name], out_AP[rows])

    def _steps_per_client(self, clients: Sequence[int], count: int) -> np.ndarray:
        """Steps of each client for a count of a schedule, which may count epochs."""
        if self.client_update.epochs is None:
            return np.full(len(clients), count)
        return np.array([self.training.steps(self.client_update, client, count) for client in clients])

    def _step_index(self, request: TrainRequest, clients: Sequence[int], number: int = 0) -> int | Tensor:
        """Number in the run of the clients' step `number` of the request."""
        if self.client_update.epochs is None:
            return request.first_step + number
        return to_device(self._steps_per_client(clients, request.first_step) + number, self._device)

    # -- batches -----------------------------------------------------------------------------------

    def _chunks(self, request: TrainRequest, steps: int) -> Iterator[Chunk]:
        """Participating clients in chunks, with their sample indices."""
        active = request.clients
        if not active:
            return
        indices = self._draw_batches(active, request.first_step, steps)
        padded_length_H = indices.length_CH.max(axis=0)
        if self._device.type == "cuda" and not self._gradients.reads_lengths:
            # as in a CUDA graph: a product's last bits may depend on its padding
            padded_length_H = np.full_like(padded_length_H, indices.mask_CHB.shape[2])
        # as many chunks as needed and as even as can be, so that few sizes need a CUDA graph
        count = -(-len(active) // (self.chunk_size or len(active)))
        size = -(-len(active) // count)
        for offset in range(0, len(active), size):
            rows = slice(offset, offset + size)
            steps_C = self._steps_per_client(active[rows], steps)
            yield Chunk(rows, active[rows], steps_C, indices.select(rows, int(steps_C[0])), padded_length_H)

    def _draw_batches(self, active: list[int], step: int, steps: int) -> ChunkIndices:
        """Sample indices of all participating clients."""
        key = (tuple(active), step, steps)
        if self._prefetched is not None and self._prefetched[0] == key:
            return self._prefetched[1]
        training = self.training
        clients = [training.first_client + client for client in active]
        batches = padded_batches(
            training.seed,
            clients,
            [self._sizes[client] for client in active],
            self._steps_per_client(active, step),
            int(self._steps_per_client(active, steps).max(initial=0)),
            training.batch_size,
            training.sampling,
            self._device,
            self._batch_capacity,
        )
        start_A = self._first_sample_N[to_device(active, self._device)]
        index_AHB = self._sample_indices[start_A[:, None, None] + batches.position_CHB]
        return ChunkIndices(to_device(clients, self._device), index_AHB, batches.mask_CHB, batches.length_CH)

    def _prefetch(self, request: TrainRequest) -> None:
        """Draw the next batches while a GPU is busy, if the same clients are likely to take part
        again."""
        if self._device.type == "cuda" and request.clients == self._last_active:
            next_step = request.first_step + request.steps
            batches = self._draw_batches(request.clients, next_step, request.steps)
            self._prefetched = (tuple(request.clients), next_step, request.steps), batches
        self._last_active = request.clients

    def _load_samples(self, batch: StepBatch) -> tuple[Inputs, Tensor]:
        """Samples of a batch, augmented."""
        training, supply, seed = self.training, self.training.samples, self.training.seed
        if self._image_data is not None and self._backend.load_images is not None:
            images_CB = self._backend.load_images(
                self._image_data, batch.index_CB, seed, batch.client_C, batch.step, self.precision
            )
            return images_CB, supply.targets_N[batch.index_CB]
        inputs_CB, targets_CB = supply.client_batches(batch.index_CB, batch.length_C, seed, batch.client_C, batch.step)
        if training.augment is None:
            return inputs_CB, targets_CB
        if self._augments_stacked:
            return training.augment(inputs_CB, seed, batch.client_C, batch.step), targets_CB
        augmented_CB = augment_per_client(training.augment, inputs_CB, seed, batch.client_C, batch.step, batch.length_C)
        return augmented_CB, targets_CB

    # -- steps -------------------------------------------------------------------------------------

    def _batch_gradients(self, state: ChunkState, batch: StepBatch, extras: GradientRequest) -> ClientGradients:
        inputs_CB, targets_CB = self._load_samples(batch)
        stream = ClientStream(self.training.seed, batch.client_C, batch.step)
        batches = ClientBatches(inputs_CB, targets_CB, batch.mask_CB, batch.length_C, stream)
        return self._gradients_for(state)(state.x_CP, state.b_CZ, batches, extras)

    def _train_step(
        self, clipped_steps: Tensor, state: ChunkState, batch: StepBatch, lr: float | Tensor
    ) -> tuple[object, ...]:
        """Take one step in place, and return the objects that a CUDA graph of it has to keep."""
        gradients = self._batch_gradients(state, batch, state.gradient_request())
        state.apply(gradients, lr, self._backend, clipped_steps)
        return gradients.reads

    def _train_chunk(self, request: TrainRequest, chunk: Chunk, lr: float) -> ChunkState:
        """State of a chunk after all steps of the request."""
        captured = self._cuda_graph(request, chunk)
        state = captured.state if captured else ChunkState.allocate(request, len(chunk.clients), self.client_update)
        self._load(state, request, chunk)
        if captured:
            # all clients of the chunk have taken as many steps
            captured.run(chunk.indices, int(self._steps_per_client(chunk.clients[:1], request.first_step)[0]), lr)
            return state
        for number in range(int(chunk.steps_C[0])):
            clients = chunk.clients[: int((chunk.steps_C > number).sum())]
            batch = chunk.step_batch(number, self._step_index(request, clients, number), len(clients))
            self._train_step(self._clipped_steps, state.first(len(clients)), batch, lr)
        return state

    def _choose_chunk_size(self) -> int:
        """Number of clients that fit into memory at once."""
        clients, device = len(self._sizes), self._device
        probe = probe_request(self.training, clients)
        uncounted = torch.zeros_like(self._clipped_steps)

        def run_step(count: int) -> None:
            request = replace(probe, clients=probe.clients[:count])
            for chunk in self._chunks(request, 1):
                state = ChunkState.allocate(request, count, self.client_update)
                self._load(state, request, chunk)
                self._train_step(uncounted, state, chunk.step_batch(0, 0), 0.0)

        self.chunk_size = clients
        with preserve_rng(device), float32_matmul_precision(self.precision, device):
            return max_chunk_size(
                device,
                clients,
                row_bytes=probe.model.rows_MP.nbytes,
                batch_bytes=self._batch_capacity * self._sample_bytes,
                run_step=run_step,
            )

    # -- CUDA graphs -------------------------------------------------------------------------------

    def _cuda_graph(self, request: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        """CUDA graph of a step of such a chunk, if there can be one."""
        if not self._uses_cuda_graphs or (self.training.augment is not None and not self._augments_stacked):
            return None
        if self._gradients.reads_lengths and (chunk.indices.length_CH != self._batch_capacity).any():
            return None
        if chunk.steps_C[-1] < chunk.steps_C[0]:
            return None
        local_terms = tuple((rule.local, rule.correction is None) for rule in request.local_rules)
        key = (
            len(chunk.clients),
            bool(request.corrections),
            local_terms,
            self.client_update.transforms,
            self.client_update.optimizer,
            request.wants_sgd_path,
            chunk.indices.mask_CHB.shape[2],
        )
        is_frequent = self._capture_policy.should_capture(key)
        if key not in self._captured_steps and len(self._captured_steps) >= MAX_CUDA_GRAPHS and not is_frequent:
            return None
        captured = self._captured_steps.pop(key, None)
        if captured is None or captured.steps < chunk.steps_C[0]:
            captured = None  # frees its memory first
            captured = self._capture_step(request, chunk)
            if captured is None:
                return None
        while len(self._captured_steps) >= MAX_CUDA_GRAPHS:
            self._captured_steps.pop(next(iter(self._captured_steps)))
        self._captured_steps[key] = captured
        return captured

    def _capture_step(self, request: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        state = ChunkState.allocate(request, len(chunk.clients), self.client_update)
        self._load(state, request, chunk)
        before = self._clipped_steps.clone()
        try:
            return CapturedStep(state, chunk.indices, partial(self._train_step, self._clipped_steps))
        except RuntimeError as problem:
            self._uses_cuda_graphs = False
            line = str(problem).strip().partition("\n")[0]
            warnings.warn(f"a step could not be captured as a CUDA graph and runs without: {line}", stacklevel=5)
            return None
        finally:
            # the steps taken for the capture do not count
            self._clipped_steps.copy_(before)
