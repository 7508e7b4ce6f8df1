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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.rng import preserve_rng
from stratafl.core.client_training import ClientTraining, TrainRequest, TrainResult
from stratafl.core.client_update import PLAIN
from stratafl.core.rows import IndexedRows
from stratafl.data.batches import padded_batches
from stratafl.data.dataset import BatchKey
from stratafl.data.inputs import Inputs, sample_bytes
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels
from stratafl.engine.batches import (
    ClientBatches,
    StepBatch,
    augment_per_client,
    image_tensor,
    supports_stacked_batches,
)
from stratafl.engine.chunk import PLAIN_REQUEST, ChunkState, ClientGradients, GradientRequest, max_chunk_size
from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.cuda_graphs import CapturedStep, CapturePolicy, ChunkIndices, StaticInputs
from stratafl.engine.gradients import BatchedGradients, CompiledGradients, in_module_order
from stratafl.engine.loop import limit_threads
from stratafl.engine.module_profile import PROBE_SAMPLES, ModuleProfile, profile_module
from stratafl.engine.precision import Precision, effective_precision, float32_matmul_precision
from stratafl.engine.random_streams import ClientStream
from stratafl.engine.selection import GradientMethodName, select_gradient_method

MAX_CUDA_GRAPHS = 2
"""Captured steps kept: enough for two sizes of chunk."""


class BatchIndices(NamedTuple):
    """Sample indices of every step for all participating clients, with their batch lengths."""

    samples: ChunkIndices
    length_AH: np.ndarray


class Chunk(NamedTuple):
    """Some of the participating clients, with the samples of their steps."""

    offset: int
    """Of the first client among all that take part."""
    clients: list[int]
    steps_C: np.ndarray
    """Steps of each client: where they are unequal, the first has the most."""
    samples: ChunkIndices
    length_CH: np.ndarray
    """Lengths of their batches, on the host."""
    padded_length_H: np.ndarray
    """The longest batch of all clients in each step: what a step is padded to must not depend on
    the clients in the chunk."""

    @property
    def rows(self) -> slice:
        """Rows of the chunk among those of all participating clients."""
        return slice(self.offset, self.offset + len(self.clients))


class StackedEngine:
    """Trains all clients at once.

    `how` says by which method: "stacked", or "vmap: reason" where the module has no batching rules.
    """

    def __init__(
        self,
        training: ClientTraining,
        *,
        chunk_size: int | None = None,
        precision: Precision = "fp32",
        cuda_graphs: bool = True,
        methods: Sequence[GradientMethodName] = ("stacked", "vmap"),
        profile: ModuleProfile | None = None,
    ):
        """chunk_size: clients at once, as many as fit unless given; precision: of the products;
        cuda_graphs: whether a GPU's steps become CUDA graphs; methods: of computing gradients, of
        which the first that reproduces the module's own is taken; profile: of the module, observed
        here unless it is known.

        Raises UnsupportedModule with the reason, "loop: ...", where none does.
        """
        self.training, self.leaf = training, training.client_update
        self.profile = profile_module(training) if profile is None else profile
        flat, supply, augment = training.flat, training.samples, training.augment
        device = self._device = supply.device
        self._uses_cuda_graphs = cuda_graphs and device.type == "cuda" and supply.is_on_device
        self._sizes = training.clients.sizes.tolist()
        longest = max(self._sizes)
        self._batch_capacity = longest if training.batch_size is None else min(longest, training.batch_size)
        self._first_sample_N = torch.as_tensor(np.cumsum([0, *self._sizes[:-1]]), device=device)
        self._sample_indices = training.clients.order.to(device)
        self._backend = kernels.backend_for(device, flat.dtype)
        self._clipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._captured_steps: dict[object, CapturedStep] = {}
        self._capture_policy = CapturePolicy()
        self._prefetched: tuple[object, BatchIndices] | None = None
        self._last_active: list[int] = []

        inputs, targets = supply.batch(self._sample_indices[:PROBE_SAMPLES], BatchKey(training.seed, 0, 0))
        self._sample_bytes = sample_bytes(inputs)
        with preserve_rng(device):
            augmented = inputs if augment is None else augment(inputs, training.seed, 0, 0)
        self._augments_stacked = augment is not None and supports_stacked_batches(augment, inputs, training.seed)
        loads_images = augment is flip_and_crop and self._backend.load_images is not None
        self._image_data = image_tensor(supply, flat.dtype) if loads_images else None
        with float32_matmul_precision("fp32", device):
            # a label below zero is one to ignore, and one that is read anew may become so
            labels = supply.targets_N
            are_classes = not (labels.is_floating_point() or labels.is_complex())
            class_indices = supply.is_on_device and are_classes and int(labels.min()) >= 0
            gradients, self.how = select_gradient_method(
                flat, training.loss, augmented, targets, precision, class_indices, methods, self.profile
            )
        if training.client_update.epochs is not None and (augment is not None or not supply.is_on_device):
            gradients, self.how = None, "loop: clients that make passes of their own read or augment one by one"
        if gradients is None:
            raise UnsupportedModule(self.how)
        self._gradients: BatchedGradients = gradients
        self._gradients_in_module_order = in_module_order(gradients, flat)
        self.precision = effective_precision(gradients.compute, device, flat.dtype, supports_half=True)
        self.chunk_size: int | None = chunk_size or self._choose_chunk_size()

    @property
    def name(self) -> str:
        """What trains: "stacked" or "vmap"."""
        return self.how.partition(":")[0]

    @property
    def groups_by_batch_length(self) -> bool:
        """Whether only clients with batches of the same length train at once, since none is
        padded."""
        return isinstance(self._gradients, CompiledGradients) and not self._gradients.pads

    @property
    def clipped_steps(self) -> int:
        return int(self._clipped_steps)

    def train(self, work: TrainRequest) -> TrainResult:
        # clients with most steps first, so that those that are done earlier stand behind the others
        order_A = None
        if self.leaf.epochs is not None:
            order_A = np.argsort(-self._steps_per_client(work.clients, 1), kind="stable")
            work = replace(work, clients=[work.clients[index] for index in order_A])
        result = TrainResult.empty_for(work)
        lr = float(self.leaf.lr(work.round))
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(work, work.steps):
                state = self._train_chunk(work, chunk, lr)
                self._write_back(state, result, chunk.rows)
        if work.wants_sgd_path and self.leaf.epochs is not None:
            steps_A = self._steps_per_client(work.clients, 1)
            result.path_AP.div_(to_device(steps_A, self._device, result.path_AP.dtype)[:, None])
        self._prefetch(work)
        return result if order_A is None else result.reorder(np.argsort(order_A))

    def gradients(self, work: TrainRequest) -> Tensor:
        g_AP = work.model.rows_MP.new_empty(len(work.clients), work.model.rows_MP.shape[1])
        work = replace(work, client_rows={}, wants_sgd_path=False)
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(work, 1):
                state = ChunkState.allocate(work, len(chunk.clients), replace(self.leaf, optimiser=PLAIN))
                method = self._gradients_for(state)
                state.load(work, chunk.clients, method.layout)
                batch = self._step_batch(chunk, 0, self._step_index(work, chunk.clients))
                method.layout.restore(self._batch_gradients(state, batch, PLAIN_REQUEST).grads_CP, g_AP[chunk.rows])
        return g_AP

    def _gradients_for(self, state: ChunkState) -> BatchedGradients:
        """Gradient method for these rows; local terms and stages of a user need rows in the
        module's
        order, since they may treat one parameter unlike another."""
        return self._gradients_in_module_order if state.fused_chain is None else self._gradients

    def _steps_per_client(self, clients: Sequence[int], count: int) -> np.ndarray:
        """Steps of each of these clients, of so many that a schedule counts."""
        if self.leaf.epochs is None:
            return np.full(len(clients), count)
        return np.array([self.training.steps(self.leaf, client, count) for client in clients])

    def _step_index(self, work: TrainRequest, clients: Sequence[int], number: int = 0) -> int | Tensor:
        """Number in the run of these clients' step `number` of the request."""
        if self.leaf.epochs is None:
            return work.first_step + number
        return to_device(self._steps_per_client(clients, work.first_step) + number, self._device)

    def _write_back(self, state: ChunkState, result: TrainResult, rows: slice) -> None:
        """Copy a chunk's rows to the result, in the module's order of parameters."""
        layout = self._gradients_for(state).layout
        result.buffers_AB[rows].copy_(state.b_CZ)
        layout.restore(state.x_CP, result.model_AP[rows])
        if state.path_CP is not None:
            layout.restore(state.path_CP, result.path_AP[rows])
        for name, out_AP in result.client_rows.items():
            layout.restore(state.state[name], out_AP[rows])

    # -- batches -----------------------------------------------------------------------------------

    def _chunks(self, work: TrainRequest, steps: int) -> Iterator[Chunk]:
        """The participating clients in chunks, each with its samples and the lengths of its
        batches."""
        active = work.clients
        if not active:
            return
        drawn = self._draw_batches(active, work.first_step, steps)
        # as many chunks as needed and as even as can be, so that they look alike to a CUDA graph
        count = -(-len(active) // (self.chunk_size or len(active)))
        size = -(-len(active) // count)
        for offset in range(0, len(active), size):
            rows = slice(offset, offset + size)
            steps_C = self._steps_per_client(active[rows], steps)
            client_C, index_CHB, mask_CHB = (indices[rows] for indices in drawn.samples)
            samples = ChunkIndices(client_C, index_CHB[:, : steps_C[0]], mask_CHB[:, : steps_C[0]])
            length_AH = drawn.length_AH
            yield Chunk(offset, active[rows], steps_C, samples, length_AH[rows], length_AH.max(axis=0))

    def _draw_batches(self, active: list[int], step: int, steps: int) -> BatchIndices:
        """Sample indices of all participating clients."""
        key = (tuple(active), step, steps)
        if self._prefetched is not None and self._prefetched[0] == key:
            return self._prefetched[1]
        training = self.training
        clients = [training.first_client + client for client in active]
        first, most = self._steps_per_client(active, step), int(self._steps_per_client(active, steps).max(initial=0))
        batches = padded_batches(
            training.seed,
            clients,
            [self._sizes[client] for client in active],
            first,
            most,
            training.batch_size,
            training.sampling,
            self._device,
            self._batch_capacity,
        )
        start_A = self._first_sample_N[to_device(active, self._device)]
        index_AHB = self._sample_indices[start_A[:, None, None] + batches.position_CHB]
        indices = ChunkIndices(to_device(clients, self._device), index_AHB, batches.mask_CHB)
        return BatchIndices(indices, batches.length_CH)

    def _prefetch(self, work: TrainRequest) -> None:
        """Draw the next batches while a GPU is busy, if the same clients are likely to take part
        again."""
        if self._device.type == "cuda" and work.clients == self._last_active:
            next_step = work.first_step + work.steps
            batches = self._draw_batches(work.clients, next_step, work.steps)
            self._prefetched = (tuple(work.clients), next_step, work.steps), batches
        self._last_active = work.clients

    def _step_batch(self, chunk: Chunk, number: int, step: int | Tensor, clients: int | None = None) -> StepBatch:
        """Batch of a chunk's first clients in step `number` of its samples."""
        rows, length = slice(clients), int(chunk.padded_length_H[number])
        return StepBatch(
            chunk.samples.client_C[rows],
            chunk.samples.index_CHB[rows, number, :length],
            chunk.samples.mask_CHB[rows, number, :length],
            chunk.length_CH[rows, number],
            step,
        )

    def _load_batch(self, batch: StepBatch) -> tuple[Inputs, Tensor]:
        """The samples as the clients train on them."""
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

    def _batch_gradients(self, state: ChunkState, batch: StepBatch, request: GradientRequest) -> ClientGradients:
        inputs_CB, targets_CB = self._load_batch(batch)
        stream = ClientStream(self.training.seed, batch.client_C, batch.step)
        batches = ClientBatches(inputs_CB, targets_CB, batch.mask_CB, batch.length_C, stream)
        return self._gradients_for(state)(state.x_CP, state.b_CZ, batches, request)

    def _train_step(
        self, state: ChunkState, batch: StepBatch, lr: float | Tensor, clipped_steps: Tensor
    ) -> tuple[object, ...]:
        """One step, in place. Returns what a CUDA graph of it has to keep."""
        gradients = self._batch_gradients(state, batch, state.gradient_request())
        state.apply(gradients, lr, self._backend, clipped_steps)
        return gradients.reads

    def _train_chunk(self, work: TrainRequest, chunk: Chunk, lr: float) -> ChunkState:
        """The chunk's state after all steps."""
        captured = self._cuda_graph(work, chunk)
        state = captured.state if captured else ChunkState.allocate(work, len(chunk.clients), self.leaf)
        state.load(work, chunk.clients, self._gradients_for(state).layout)
        if captured:
            # all of them have taken as many steps
            captured.run(chunk.samples, int(self._steps_per_client(chunk.clients[:1], work.first_step)[0]), lr)
            return state
        for number in range(int(chunk.steps_C[0])):
            clients = chunk.clients[: int((chunk.steps_C > number).sum())]
            batch = self._step_batch(chunk, number, self._step_index(work, clients, number), len(clients))
            self._train_step(state.first(len(clients)), batch, lr, self._clipped_steps)
        return state

    def _choose_chunk_size(self) -> int:
        """As many clients as the memory holds."""
        clients, flat = len(self._sizes), self.training.flat
        x_P, b_Z = (row.to(self._device) for row in flat.flatten_module(flat.module))
        of_N = np.zeros(clients, dtype=np.int64)
        x, b = IndexedRows(x_P[None], of_N), IndexedRows(b_Z[None], of_N)
        uncounted = torch.zeros_like(self._clipped_steps)

        def run_step(count: int) -> None:
            work = TrainRequest(model=x, buffers=b, corrections=(x,), clients=list(range(count)))
            for chunk in self._chunks(work, 1):
                state = ChunkState.allocate(work, count, self.leaf)
                state.load(work, chunk.clients, self._gradients_for(state).layout)
                self._train_step(state, self._step_batch(chunk, 0, 0), 0.0, uncounted)

        self.chunk_size = clients
        with preserve_rng(x_P.device), float32_matmul_precision(self.precision, x_P.device):
            return max_chunk_size(
                x_P.device,
                clients,
                row_bytes=x_P.nbytes,
                batch_bytes=self._batch_capacity * self._sample_bytes,
                run_step=run_step,
            )

    # -- CUDA graphs -------------------------------------------------------------------------------

    def _cuda_graph(self, work: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        """A CUDA graph of a step of such a chunk, if there can be one."""
        if not self._uses_cuda_graphs or (self.training.augment is not None and not self._augments_stacked):
            return None
        if self._gradients.even and (chunk.length_CH != self._batch_capacity).any():
            return None
        if chunk.steps_C[-1] < chunk.steps_C[0]:
            return None
        local_terms = tuple((pull.local, pull.correction is None) for pull in work.local_rules)
        key = (
            len(chunk.clients),
            bool(work.corrections),
            local_terms,
            self.leaf.stages,
            self.leaf.optimiser,
            work.wants_sgd_path,
            chunk.samples.mask_CHB.shape[2],
        )
        is_frequent = self._capture_policy.should_capture(key)
        if key not in self._captured_steps and len(self._captured_steps) >= MAX_CUDA_GRAPHS and not is_frequent:
            return None
        captured = self._captured_steps.pop(key, None)
        if captured is None or captured.steps < chunk.steps_C[0]:
            captured = None  # frees its memory first
            captured = self._capture_step(work, chunk)
            if captured is None:
                return None
        while len(self._captured_steps) >= MAX_CUDA_GRAPHS:
            self._captured_steps.pop(next(iter(self._captured_steps)))
        self._captured_steps[key] = captured
        return captured

    def _capture_step(self, work: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        length_C = chunk.length_CH[:, 0]

        def run_step(inputs: StaticInputs) -> tuple[object, ...]:
            samples = inputs.samples
            batch = StepBatch(
                samples.client_C,
                samples.index_CHB.index_select(1, inputs.step_index_1)[:, 0],
                samples.mask_CHB.index_select(1, inputs.step_index_1)[:, 0],
                length_C,
                inputs.step,
            )
            return self._train_step(inputs.state, batch, inputs.lr, self._clipped_steps)

        state = ChunkState.allocate(work, len(chunk.clients), self.leaf)
        state.load(work, chunk.clients, self._gradients_for(state).layout)
        before = self._clipped_steps.clone()
        try:
            return CapturedStep(state, chunk.samples, run_step)
        except RuntimeError as problem:
            self._uses_cuda_graphs = False
            line = str(problem).strip().partition("\n")[0]
            warnings.warn(f"a step could not be captured as a CUDA graph and runs without: {line}", stacklevel=5)
            return None
        finally:
            # the trial steps do not count
            self._clipped_steps.copy_(before)
