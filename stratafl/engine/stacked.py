"""The fast engine: all clients at once, as rows of one matrix. It gives the loop engine's result,
up to rounding.

Clients are taken in chunks that fit the memory at hand. On a GPU one step of a chunk is captured as
a CUDA graph and replayed, so that the host has nothing to do between steps.

Shape suffixes: N leaves, A leaves that take part, C clients of a chunk, P parameters, Z buffer
values, H steps, B places in a batch.
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
from stratafl.engine.batches import ClientBatches, augment_per_client, image_tensor, supports_stacked_batches
from stratafl.engine.chunk import (
    PLAIN_REQUEST,
    ChunkState,
    ClientGradients,
    GradientRequest,
    apply_step,
    fused_step_config,
    max_chunk_size,
)
from stratafl.engine.cuda_graphs import CapturedStep, CapturePolicy, ChunkIndices, StaticInputs
from stratafl.engine.gradients import BatchedGradients, CompiledGradients, Stacked, in_module_order
from stratafl.engine.loop import LoopEngine, limit_threads
from stratafl.engine.module_profile import PROBE_SAMPLES
from stratafl.engine.ops import table
from stratafl.engine.precision import Precision, effective_precision, float32_matmul_precision
from stratafl.engine.random_streams import ClientStream
from stratafl.engine.selection import GradientMethodName, select_gradient_method

MAX_CUDA_GRAPHS = 2
"""Captured steps kept: enough for two sizes of chunk."""


class BatchIndices(NamedTuple):
    """The samples of all clients that take part, and how long their batches are, on the host."""

    samples: ChunkIndices
    length_AH: np.ndarray


class Chunk(NamedTuple):
    """Some of the clients that take part, with the samples of their steps."""

    first: int
    """Where they stand among all that take part."""
    leaves: list[int]
    steps_C: np.ndarray
    """Of each: where they are unequal, the first has the most."""
    samples: ChunkIndices
    length_CH: np.ndarray
    """How long their batches are, on the host."""
    longest_H: np.ndarray
    """The longest of all clients' in each step: what a step is padded to must not depend on who is
    in the chunk."""


class StackedEngine:
    """`how` says which way the model allows: "stacked", or "vmap: why" or "loop: why" where it has
    no stacked form."""

    def __init__(
        self,
        training: ClientTraining,
        *,
        chunk: int | None = None,
        precision: Precision = "fp32",
        capture: bool = True,
        ways: Sequence[GradientMethodName] = ("stacked", "vmap"),
    ):
        """chunk: clients at once, as many as fit unless given; precision: what products are
        computed in;
        capture: whether a GPU's steps become a CUDA graph; ways: to get gradients, the first that
        the model allows."""
        self.training, self.leaf = training, training.client_update
        flat, supply, augment = training.flat, training.samples, training.augment
        device = self._device = supply.device
        self._capture = capture and device.type == "cuda" and supply.resident
        self._sizes = [len(part) for part in training.partition]
        longest = max(self._sizes)
        self._places = longest if training.batch_size is None else min(longest, training.batch_size)
        self._start_N = torch.as_tensor(np.cumsum([0, *self._sizes[:-1]]), device=device)
        self._samples = torch.cat(list(training.partition)).to(device)
        self._ops = table(device, flat.dtype)
        self._clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._captured: dict[object, CapturedStep] = {}
        self._recurring = CapturePolicy()
        self._ahead: tuple[object, BatchIndices] | None = None
        self._last_active: list[int] = []
        self._loop = LoopEngine(training, precision=precision)

        few = self._samples[:PROBE_SAMPLES]
        inputs, few_targets = supply.batch(few, BatchKey(training.seed, 0, 0))
        self._sample_bytes = sample_bytes(inputs)
        with preserve_rng(device):
            sample = inputs if augment is None else augment(inputs, training.seed, 0, 0)
        self._augments = augment is not None and supports_stacked_batches(augment, inputs, training.seed)
        # flips and crops have a kernel that also gathers the samples and lays them out
        self._images = image_tensor(supply, flat.dtype) if augment is flip_and_crop and self._ops.fetch else None
        with float32_matmul_precision("fp32", device):
            # a label below zero is one to ignore, and one that is read anew may become so
            targets = supply.targets_N
            classes = not (targets.is_floating_point() or targets.is_complex())
            labels = supply.resident and classes and int(targets.min()) >= 0
            found, self.description = select_gradient_method(
                flat, training.loss, sample, few_targets, precision, labels, ways
            )
        reads = augment is not None or not supply.resident
        if found is not None and training.client_update.epochs is not None and reads:
            found, self.description = None, "loop: clients that make passes of their own read or augment one by one"
        self._differentiate: BatchedGradients | None = found
        self._ordered = None if found is None else in_module_order(found, flat)
        computes = self._loop.precision if found is None else found.compute
        self.precision = effective_precision(computes, self._device, flat.dtype, casts=True)
        self.chunk: int | None = chunk or self._fitting()

    @property
    def name(self) -> str:
        """What trains: "stacked", "vmap" or "loop"."""
        return self.description.partition(":")[0]

    @property
    def by_length(self) -> bool:
        """Whether only clients whose batches are as long train at once, since none is padded."""
        return isinstance(self._differentiate, CompiledGradients) and not self._differentiate.pads

    @property
    def clipped(self) -> int:
        return self._loop.clipped if self._differentiate is None else int(self._clipped)

    def train(self, work: TrainRequest) -> TrainResult:
        if self._differentiate is None:
            self._loop.leaf = self.leaf
            return self._loop.train(work)
        # the busiest first, so that those who are done earlier stand behind the others
        order_A = None if self.leaf.epochs is None else np.argsort(-self._steps(work.clients, 1), kind="stable")
        if order_A is not None:
            work = replace(work, clients=[work.clients[place] for place in order_A])
        done = TrainResult.empty_for(work)
        lr = float(self.leaf.lr(work.round))
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(work, work.steps):
                rows = self._trained(work, chunk, lr)
                self._restore(rows, done, slice(chunk.first, chunk.first + len(chunk.leaves)))
        if work.wants_sgd_path and self.leaf.epochs is not None:
            each_A = self._steps(work.clients, 1)
            done.path_AP.div_(to_device(each_A, self._device, done.path_AP.dtype)[:, None])
        self._look_ahead(work)
        return done if order_A is None else done.reorder(np.argsort(order_A))

    def _steps(self, clients: Sequence[int], count: int) -> np.ndarray:
        """Of each of these clients, its own steps of so many that a schedule counts."""
        if self.leaf.epochs is None:
            return np.full(len(clients), count)
        return np.array([self.training.steps(self.leaf, client, count) for client in clients])

    def _step_of(self, work: TrainRequest, clients: Sequence[int], number: int = 0) -> int | Tensor:
        """Which of these clients' own steps it is, of the work's."""
        if self.leaf.epochs is None:
            return work.first_step + number
        return to_device(self._steps(clients, work.first_step) + number, self._device)

    def _restore(self, rows: ChunkState, done: TrainResult, mine: slice) -> None:
        """Copy a chunk's rows to where all clients' are, in the module's order."""
        layout = self._way(rows).layout
        done.buffers_AB[mine].copy_(rows.b_CZ)
        layout.restore(rows.x_CP, done.model_AP[mine])
        if rows.path_CP is not None:
            layout.restore(rows.path_CP, done.path_AP[mine])
        for name, out_AP in done.client_rows.items():
            layout.restore(rows.state[name], out_AP[mine])

    def gradients(self, work: TrainRequest) -> Tensor:
        if self._differentiate is None:
            return self._loop.gradients(work)
        g_AP = work.model.rows_MP.new_empty(len(work.clients), work.model.rows_MP.shape[1])
        work = replace(work, client_rows={}, wants_sgd_path=False)
        self.training.flat.train()
        with limit_threads(self.training.flat.parameters), float32_matmul_precision(self.precision, self._device):
            for chunk in self._chunks(work, 1):
                rows = ChunkState.holding(work, len(chunk.leaves), replace(self.leaf, optimiser=PLAIN))
                rows.load(work, chunk.leaves, self._way(rows).layout)
                g_CP = self._gradients(rows, chunk, 0, self._step_of(work, chunk.leaves)).g_CP
                self._way(rows).layout.restore(g_CP, g_AP[chunk.first : chunk.first + len(chunk.leaves)])
        return g_AP

    def _way(self, rows: ChunkState) -> BatchedGradients:
        """How these rows' gradients are computed. A rule's own direction and a user's stages may
        treat one parameter unlike another, so that they see rows in the module's order."""
        way = self._ordered if fused_step_config(rows) is None else self._differentiate
        assert way is not None
        return way

    # -- one chunk ---------------------------------------------------------------------------------

    def _chunks(self, work: TrainRequest, steps: int) -> Iterator[Chunk]:
        """The active leaves in chunks, each with its samples and the lengths of its batches."""
        active = work.clients
        if not active:
            return
        drawn = self._drawn(active, work.first_step, steps)
        # as many chunks as needed and as even as can be, so that they look alike to a CUDA graph
        count = -(-len(active) // (self.chunk or len(active)))
        size = -(-len(active) // count)
        for first in range(0, len(active), size):
            mine = slice(first, first + size)
            steps_C = self._steps(active[mine], steps)
            client_C, index_CHB, mask_CHB = (each[mine] for each in drawn.samples)
            samples = ChunkIndices(client_C, index_CHB[:, : steps_C[0]], mask_CHB[:, : steps_C[0]])
            yield Chunk(first, active[mine], steps_C, samples, drawn.length_AH[mine], drawn.length_AH.max(axis=0))

    def _drawn(self, active: list[int], step: int, steps: int) -> BatchIndices:
        """The samples of all that take part."""
        key = (tuple(active), step, steps)
        if self._ahead is not None and self._ahead[0] == key:
            return self._ahead[1]
        given, sizes = self.training, [self._sizes[leaf] for leaf in active]
        numbers = [given.first_client + leaf for leaf in active]
        first, most = self._steps(active, step), int(self._steps(active, steps).max(initial=0))
        stack = padded_batches(
            given.seed, numbers, sizes, first, most, given.batch_size, given.sampling, self._device, self._places
        )
        start_A = self._start_N[to_device(active, self._device)]
        index_AHB = self._samples[start_A[:, None, None] + stack.position_CHB]
        return BatchIndices(ChunkIndices(to_device(numbers, self._device), index_AHB, stack.mask_CHB), stack.length_CH)

    def _look_ahead(self, work: TrainRequest) -> None:
        """Draw the next samples while a GPU is busy with these, if the same clients may be expected
        again."""
        if self._device.type == "cuda" and work.clients == self._last_active:
            following = work.first_step + work.steps
            drawn = self._drawn(work.clients, following, work.steps)
            self._ahead = (tuple(work.clients), following, work.steps), drawn
        self._last_active = work.clients

    def _trained(self, work: TrainRequest, chunk: Chunk, lr: float) -> ChunkState:
        """The chunk's rows after all steps."""
        captured = self._captured_for(work, chunk)
        rows = captured.rows if captured else ChunkState.holding(work, len(chunk.leaves), self.leaf)
        rows.load(work, chunk.leaves, self._way(rows).layout)
        if captured:
            # all of them have done as many steps
            captured.run(chunk.samples, int(self._steps(chunk.leaves[:1], work.first_step)[0]), lr)
            return rows
        for number in range(int(chunk.steps_C[0])):
            some = chunk.leaves[: int((chunk.steps_C > number).sum())]
            busy = rows.among(len(some))

            def gradients(wanted: GradientRequest) -> ClientGradients:
                return self._gradients(busy, chunk, number, self._step_of(work, some, number), wanted)

            apply_step(busy, gradients, lr, self._ops, self._clipped)
        return rows

    def _gradients(
        self, rows: ChunkState, chunk: Chunk, number: int, step: int | Tensor, wanted: GradientRequest = PLAIN_REQUEST
    ) -> ClientGradients:
        longest, some = int(chunk.longest_H[number]), slice(len(rows.x_CP))
        index_CB, mask_CB = (each[some, number, :longest] for each in (chunk.samples.index_CHB, chunk.samples.mask_CHB))
        client_C, length_C = chunk.samples.client_C[some], chunk.length_CH[some, number]
        return self._differentiated(rows, client_C, index_CB, mask_CB, length_C, step, wanted)

    def _differentiated(
        self,
        rows: ChunkState,
        client_C: Tensor,
        index_CB: Tensor,
        mask_CB: Tensor,
        length_C: np.ndarray,
        step: int | Tensor,
        wanted: GradientRequest,
    ) -> ClientGradients:
        inputs_CB, targets_CB = self._samples_of(client_C, index_CB, length_C, step)
        stream = ClientStream(self.training.seed, client_C, step)
        return self._way(rows)(
            rows.x_CP, rows.b_CZ, ClientBatches(inputs_CB, targets_CB, mask_CB, length_C, stream), wanted
        )

    def _samples_of(
        self, client_C: Tensor, index_CB: Tensor, length_C: np.ndarray, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        """The samples as the clients train on them."""
        given = self.training
        if self._images is not None and self._ops.fetch is not None:
            images_CB = self._ops.fetch(self._images, index_CB, given.seed, client_C, step, self.precision)
            return images_CB, given.samples.targets_N[index_CB]
        inputs_CB, targets_CB = given.samples.stack(index_CB, length_C, given.seed, client_C, step)
        if given.augment is None:
            return inputs_CB, targets_CB
        if self._augments:
            return given.augment(inputs_CB, given.seed, client_C, step), targets_CB
        return augment_per_client(given.augment, inputs_CB, given.seed, client_C, step, length_C), targets_CB

    def _fitting(self) -> int:
        """As many clients as the memory holds."""
        clients = len(self._sizes)
        if self._differentiate is None:
            return clients
        flat = self.training.flat
        x_P, b_Z = (row.to(self._device) for row in flat.flatten_module(flat.module))
        whose_N = np.zeros(clients, dtype=np.int64)
        x, b = IndexedRows(x_P[None], whose_N), IndexedRows(b_Z[None], whose_N)

        uncounted = torch.zeros_like(self._clipped)

        def attempt(few: int) -> None:
            work = TrainRequest(model=x, buffers=b, corrections=(x,), clients=list(range(few)))
            for chunk in self._chunks(work, 1):
                rows = ChunkState.holding(work, few, self.leaf)
                rows.load(work, chunk.leaves, self._way(rows).layout)

                def gradients(wanted: GradientRequest) -> ClientGradients:
                    return self._gradients(rows, chunk, 0, 0, wanted)

                apply_step(rows, gradients, 0.0, self._ops, uncounted)

        self.chunk, way = clients, self._differentiate
        batch_bytes = self._places * self._sample_bytes
        # a recorded module's activations are looked after where they are computed
        value_bytes = self._places * way.program.sample_bytes if isinstance(way, Stacked) else 0
        with preserve_rng(x_P.device), float32_matmul_precision(self.precision, x_P.device):
            return max_chunk_size(x_P.device, clients, x_P.nbytes, batch_bytes, value_bytes, attempt)

    def _captured_for(self, work: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        """A CUDA graph of a step of such a chunk, if there can be one."""
        assert self._differentiate is not None
        if not self._capture or (self.training.augment is not None and not self._augments):
            return None
        if self._differentiate.even and (chunk.length_CH != self._places).any():
            return None
        if chunk.steps_C[-1] < chunk.steps_C[0]:
            return None
        pulls = tuple((pull.local, pull.correction is None) for pull in work.local_rules)
        key = (
            len(chunk.leaves),
            bool(work.corrections),
            pulls,
            self.leaf.stages,
            self.leaf.optimiser,
            work.wants_sgd_path,
            chunk.samples.mask_CHB.shape[2],
        )
        comes_often = self._recurring.comes(key)
        if key not in self._captured and len(self._captured) >= MAX_CUDA_GRAPHS and not comes_often:
            return None
        known = self._captured.pop(key, None)
        if known is None or known.steps < chunk.steps_C[0]:
            known = None  # gives its memory back first
            known = self._new_captured(work, chunk)
            if known is None:
                return None
        while len(self._captured) >= MAX_CUDA_GRAPHS:
            self._captured.pop(next(iter(self._captured)))
        self._captured[key] = known
        return known

    def _new_captured(self, work: TrainRequest, chunk: Chunk) -> CapturedStep | None:
        length_C = chunk.length_CH[:, 0]

        def take(fixed: StaticInputs) -> tuple[object, ...]:
            held = fixed.samples
            index_CB = held.index_CHB.index_select(1, fixed.number_1)[:, 0]
            mask_CB = held.mask_CHB.index_select(1, fixed.number_1)[:, 0]

            def gradients(wanted: GradientRequest) -> ClientGradients:
                return self._differentiated(fixed.rows, held.client_C, index_CB, mask_CB, length_C, fixed.step, wanted)

            return apply_step(fixed.rows, gradients, fixed.lr, self._ops, self._clipped)

        rows = ChunkState.holding(work, len(chunk.leaves), self.leaf)
        rows.load(work, chunk.leaves, self._way(rows).layout)
        before = self._clipped.clone()
        try:
            return CapturedStep(rows, chunk.samples, take)
        except RuntimeError as problem:
            self._capture = False
            line = str(problem).strip().partition("\n")[0]
            warnings.warn(f"a step could not be captured as a CUDA graph and runs without: {line}", stacklevel=5)
            return None
        finally:
            # trying it out does not count
            self._clipped.copy_(before)
