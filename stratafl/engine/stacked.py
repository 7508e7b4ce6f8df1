"""The fast engine: all clients at once, as rows of one matrix. It gives the loop engine's result, up to rounding.

Clients are taken in chunks that fit the memory at hand. On a GPU one step of a chunk is captured as a CUDA graph and
replayed, so that the host has nothing to do between steps.

Shape suffixes: N leaves, A leaves that take part, C clients of a chunk, P parameters, Z buffer values, H steps,
B places in a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.data.batches import stacked_batches
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels
from stratafl.engine.augmenting import one_by_one, takes_stacks
from stratafl.engine.differentiate import Batch, Differentiate, Way, choose, ordered
from stratafl.engine.graph import Captured, Fixed, Samples
from stratafl.engine.habits import FEW
from stratafl.engine.loop import LoopEngine
from stratafl.engine.memory import fitting
from stratafl.engine.ops import Compute, table
from stratafl.engine.precision import computing, honoured
from stratafl.engine.rows import ALONE, Chain, Gradients, Rows, Wanted, step
from stratafl.engine.spread import Spread
from stratafl.engine.work import Training, Work
from stratafl.placing import placed

KEPT = 2
"""Captured steps kept: enough for two sizes of chunk."""


class Drawn(NamedTuple):
    """The samples of all clients that take part, and how long their batches are, on the host."""

    samples: Samples
    length_AH: np.ndarray


class Chunk(NamedTuple):
    """Some of the clients that take part, with the samples of their steps."""

    first: int
    """Where they stand among all that take part."""
    leaves: list[int]
    samples: Samples
    length_CH: np.ndarray
    """How long their batches are, on the host."""
    longest_H: np.ndarray
    """The longest of all clients' in each step: what a step is padded to must not depend on who is in the chunk."""


class StackedEngine:
    """`how` says which way the model allows: "stacked", or "vmap: why" or "loop: why" where it has no stacked form."""

    def __init__(
        self,
        training: Training,
        *,
        chunk: int | None = None,
        precision: Compute = "fp32",
        capture: bool = True,
        ways: Sequence[Way] = ("stacked", "vmap"),
    ):
        """chunk: clients at once, as many as fit unless given; precision: what products are computed in;
        capture: whether a GPU's steps become a CUDA graph; ways: to get gradients, the first that the model allows."""
        self.training, self.leaf = training, training.leaf
        flat, inputs, augment = training.flat, training.inputs, training.augment
        self._device = inputs.device
        self._capture = capture and inputs.device.type == "cuda"
        self._sizes = [len(part) for part in training.partition]
        longest = max(self._sizes)
        self._places = longest if training.batch is None else min(longest, training.batch)
        self._start_N = torch.as_tensor(np.cumsum([0, *self._sizes[:-1]]), device=inputs.device)
        self._samples = torch.cat(list(training.partition)).to(inputs.device)
        self._ops = table(inputs.device, flat.dtype)
        self._clipped = torch.zeros((), dtype=torch.int64, device=inputs.device)
        self._captured: dict[object, Captured] = {}
        self._ahead: tuple[object, Drawn] | None = None
        self._last_active: list[int] = []
        self._loop = LoopEngine(training, precision=precision)

        few = self._samples[:FEW]
        sample = inputs[few] if augment is None else augment(inputs[few], training.seed, 0, 0)
        self._augments = augment is not None and takes_stacks(augment, inputs[few], training.seed)
        # flips and crops have a kernel that also gathers the samples and lays them out
        images = inputs.dim() == 4 and inputs.dtype == flat.dtype == torch.float32 and inputs.is_contiguous()
        self._fetches = augment is flip_and_crop and images and inputs.device.type == "cuda" and kernels.available()
        with computing("fp32", inputs.device):
            # to the library a label below zero means "ignore"
            targets = training.targets
            labels = not (targets.is_floating_point() or targets.is_complex()) and int(targets.min()) >= 0
            found, self.how = choose(flat, training.loss, sample, targets[few], precision, labels, ways)
        self._differentiate: Differentiate | None = found
        self._ordered = None if found is None else ordered(found, flat)
        self.precision = honoured(precision, self._device, flat.dtype, casts=self.name == "stacked")
        self.chunk: int | None = chunk or self._fitting()

    @property
    def name(self) -> str:
        """What trains: "stacked", "vmap" or "loop"."""
        return self.how.partition(":")[0]

    @property
    def clipped(self) -> int:
        return self._loop.clipped if self._differentiate is None else int(self._clipped)

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        if self._differentiate is None:
            self._loop.leaf = self.leaf
            return self._loop.train(work)
        x_AP = work.x.rows_MP.new_empty(len(work.active), work.x.rows_MP.shape[1])
        lr = self.leaf.lr(work.round)
        self.training.flat.train()
        with computing(self.precision, self._device):
            for chunk in self._chunks(work, work.steps):
                rows = self._trained(work, chunk, lr)
                self._way(rows).layout.restore(rows.x_CP, x_AP[chunk.first : chunk.first + len(chunk.leaves)])
        self._look_ahead(work)
        return x_AP, work.b.some(work.active).clone()

    def gradients(self, work: Work) -> Tensor:
        if self._differentiate is None:
            return self._loop.gradients(work)
        g_AP = work.x.rows_MP.new_empty(len(work.active), work.x.rows_MP.shape[1])
        self.training.flat.train()
        with computing(self.precision, self._device):
            for chunk in self._chunks(work, 1):
                rows = Rows.holding(work, len(chunk.leaves), replace(self.leaf, momentum=0.0))
                rows.load(work, chunk.leaves, self._way(rows).layout)
                g_CP = self._gradients(rows, chunk, 0, work.step).g_CP
                self._way(rows).layout.restore(g_CP, g_AP[chunk.first : chunk.first + len(chunk.leaves)])
        return g_AP

    def _way(self, rows: Rows) -> Differentiate:
        """How these rows' gradients are computed. A rule's own direction and a user's stages may treat one parameter
        unlike another, so that they see rows in the module's order."""
        way = self._ordered if Chain.of(rows) is None else self._differentiate
        assert way is not None
        return way

    # -- one chunk ----------------------------------------------------------------------------------------------------

    def _chunks(self, work: Work, steps: int) -> Iterator[Chunk]:
        """The active leaves in chunks, each with its samples and the lengths of its batches."""
        active = work.active
        if not active:
            return
        drawn = self._drawn(active, work.step, steps)
        # as many chunks as needed and as even as can be, so that they look alike to a CUDA graph
        count = -(-len(active) // (self.chunk or len(active)))
        size = -(-len(active) // count)
        for first in range(0, len(active), size):
            mine = slice(first, first + size)
            samples = Samples(*(each[mine] for each in drawn.samples))
            yield Chunk(first, active[mine], samples, drawn.length_AH[mine], drawn.length_AH.max(axis=0))

    def _drawn(self, active: list[int], step: int, steps: int) -> Drawn:
        """The samples of all that take part."""
        key = (tuple(active), step, steps)
        if self._ahead is not None and self._ahead[0] == key:
            return self._ahead[1]
        given, sizes = self.training, [self._sizes[leaf] for leaf in active]
        numbers = [given.first + leaf for leaf in active]
        stack = stacked_batches(
            given.seed, numbers, sizes, step, steps, given.batch, given.sampling, self._device, self._places
        )
        start_A = self._start_N[placed(active, self._device)]
        index_AHB = self._samples[start_A[:, None, None] + stack.position_CHB]
        return Drawn(Samples(placed(numbers, self._device), index_AHB, stack.mask_CHB), stack.length_CH)

    def _look_ahead(self, work: Work) -> None:
        """Draw the next samples while a GPU is busy with these, if the same clients may be expected again."""
        if self._device.type == "cuda" and work.active == self._last_active:
            following = work.step + work.steps
            drawn = self._drawn(work.active, following, work.steps)
            self._ahead = (tuple(work.active), following, work.steps), drawn
        self._last_active = work.active

    def _trained(self, work: Work, chunk: Chunk, lr: float) -> Rows:
        """The chunk's rows after all steps."""
        captured = self._captured_for(work, chunk)
        rows = captured.rows if captured else Rows.holding(work, len(chunk.leaves), self.leaf)
        rows.load(work, chunk.leaves, self._way(rows).layout)
        if captured:
            captured.run(chunk.samples, work.step, lr)
            return rows
        for number in range(work.steps):

            def gradients(wanted: Wanted) -> Gradients:
                return self._gradients(rows, chunk, number, work.step + number, wanted)

            step(rows, gradients, self.leaf, lr, self._ops, self._clipped)
        return rows

    def _gradients(self, rows: Rows, chunk: Chunk, number: int, step: int, wanted: Wanted = ALONE) -> Gradients:
        longest = int(chunk.longest_H[number])
        index_CB, mask_CB = (each[:, number, :longest] for each in (chunk.samples.index_CHB, chunk.samples.mask_CHB))
        client_C, length_C = chunk.samples.client_C, chunk.length_CH[:, number]
        return self._differentiated(rows, client_C, index_CB, mask_CB, length_C, step, wanted)

    def _differentiated(
        self,
        rows: Rows,
        client_C: Tensor,
        index_CB: Tensor,
        mask_CB: Tensor,
        length_C: np.ndarray,
        step: int | Tensor,
        wanted: Wanted,
    ) -> Gradients:
        inputs_CB = self._inputs(client_C, index_CB, length_C, step)
        batch = Batch(inputs_CB, self.training.targets[index_CB], mask_CB, length_C)
        return self._way(rows)(rows.x_CP, rows.b_CZ, batch, wanted)

    def _inputs(self, client_C: Tensor, index_CB: Tensor, length_C: np.ndarray, step: int | Tensor) -> Tensor:
        """The samples as the clients train on them."""
        given = self.training
        if self._fetches:
            return kernels.fetch(given.inputs, index_CB, given.seed, client_C, step, self.precision)
        inputs_CB = given.inputs[index_CB]
        if given.augment is None:
            return inputs_CB
        if self._augments:
            return given.augment(inputs_CB, given.seed, client_C, step)
        return one_by_one(given.augment, inputs_CB, given.seed, client_C, step, length_C)

    def _fitting(self) -> int:
        """As many clients as the memory holds."""
        clients = len(self._sizes)
        if self._differentiate is None:
            return clients
        flat = self.training.flat
        x_P, b_Z = (row.to(self._device) for row in flat.row(flat.module))
        whose_N = np.zeros(clients, dtype=np.int64)
        x, b = Spread(x_P[None], whose_N), Spread(b_Z[None], whose_N)

        uncounted = torch.zeros_like(self._clipped)

        def attempt(few: int) -> None:
            work = Work(x, b, (x,), (), list(range(few)), 0, 1, 0)
            for chunk in self._chunks(work, 1):
                rows = Rows.holding(work, few, self.leaf)
                rows.load(work, chunk.leaves, self._way(rows).layout)

                def gradients(wanted: Wanted) -> Gradients:
                    return self._gradients(rows, chunk, 0, 0, wanted)

                step(rows, gradients, self.leaf, 0.0, self._ops, uncounted)

        self.chunk = clients
        batch_bytes = self._places * self.training.inputs[0].nbytes
        with computing(self.precision, x_P.device):
            return fitting(x_P.device, clients, x_P.nbytes, batch_bytes, attempt)

    def _captured_for(self, work: Work, chunk: Chunk) -> Captured | None:
        """A CUDA graph of a step of such a chunk, if there can be one."""
        assert self._differentiate is not None
        if not self._capture or (self.training.augment is not None and not self._augments):
            return None
        if self._differentiate.even and (chunk.length_CH != self._places).any():
            return None
        pulls = tuple((pull.local, pull.correction is None) for pull in work.pulls)
        key = (
            len(chunk.leaves),
            bool(work.corrections),
            pulls,
            self.leaf.stages,
            self.leaf.momentum,
            chunk.samples.mask_CHB.shape[2],
        )
        known = self._captured.pop(key, None)
        if known is None or known.steps < work.steps:
            known = None  # gives its memory back first
            known = self._new_captured(work, chunk)
            if known is None:
                return None
        while len(self._captured) >= KEPT:
            self._captured.pop(next(iter(self._captured)))
        self._captured[key] = known
        return known

    def _new_captured(self, work: Work, chunk: Chunk) -> Captured | None:
        length_C = chunk.length_CH[:, 0]

        def take(fixed: Fixed) -> None:
            held = fixed.samples
            index_CB = held.index_CHB.index_select(1, fixed.number_1)[:, 0]
            mask_CB = held.mask_CHB.index_select(1, fixed.number_1)[:, 0]

            def gradients(wanted: Wanted) -> Gradients:
                return self._differentiated(fixed.rows, held.client_C, index_CB, mask_CB, length_C, fixed.step, wanted)

            step(fixed.rows, gradients, self.leaf, fixed.lr, self._ops, self._clipped)

        rows = Rows.holding(work, len(chunk.leaves), self.leaf)
        rows.load(work, chunk.leaves, self._way(rows).layout)
        before = self._clipped.clone()
        try:
            return Captured(rows, chunk.samples, take)
        except RuntimeError as problem:
            self._capture = False
            line = str(problem).strip().partition("\n")[0]
            warnings.warn(f"a step could not be captured as a CUDA graph and runs without: {line}", stacklevel=5)
            return None
        finally:
            # trying it out does not count
            self._clipped.copy_(before)
