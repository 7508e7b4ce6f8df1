"""The fast engine: all clients at once, as rows of one matrix. It gives the loop engine's result, up to rounding.

Clients are taken in chunks that fit the memory at hand. On a GPU one step of a chunk is captured as a CUDA graph and
replayed, so that the host has nothing to do between steps.

Shape suffixes: N leaves, C clients of a chunk, P parameters, Z buffer values, H steps, B places in a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.data.batches import Sampling, stacked_batches
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels
from stratafl.engine.augmenting import one_by_one, takes_stacks
from stratafl.engine.differentiate import Batch, Differentiate, choose
from stratafl.engine.graph import Captured, Fixed, Samples
from stratafl.engine.loop import LoopEngine
from stratafl.engine.memory import fitting
from stratafl.engine.ops import Compute, table
from stratafl.engine.precision import computing
from stratafl.engine.rows import Rows, advance, where
from stratafl.engine.work import Augment, Work
from stratafl.flat import Flat
from stratafl.local import Leaf

KEPT = 2
"""Captured steps kept: enough for two sizes of chunk."""


class Lengths(NamedTuple):
    """How long a chunk's batches are, and the longest of all clients' in each step: what a step is padded to must
    not depend on who else is in the chunk."""

    own_CH: np.ndarray
    longest_H: np.ndarray


class StackedEngine:
    """`how` says which way the model allows: "stacked", or "vmap: why" or "loop: why" where it has no stacked form."""

    def __init__(
        self,
        flat: Flat,
        loss: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        partition: Sequence[Tensor],
        leaf: Leaf,
        batch: int | None,
        sampling: Sampling,
        seed: int,
        augment: Augment | None = None,
        *,
        chunk: int | None = None,
        precision: Compute = "fp32",
        capture: bool = True,
    ):
        """chunk: clients at once, as many as fit unless given; precision: what products are computed in;
        capture: whether a GPU's steps become a CUDA graph."""
        self.flat, self.loss, self.leaf = flat, loss, leaf
        self.inputs, self.targets, self.partition = inputs, targets, partition
        self.batch, self.sampling, self.seed = batch, sampling, seed
        self.augment, self.precision = augment, precision
        self._capture = capture and inputs.device.type == "cuda"
        self._sizes = [len(part) for part in partition]
        longest = max(self._sizes)
        self._places = longest if batch is None else min(longest, batch)
        self._start_N = torch.as_tensor(np.cumsum([0, *self._sizes[:-1]]), device=inputs.device)
        self._samples = torch.cat(list(partition)).to(inputs.device)
        self._ops = table(inputs.device, flat.dtype)
        self._captured: dict[object, Captured] = {}
        self._loop = LoopEngine(flat, loss, inputs, targets, partition, leaf, batch, sampling, seed, augment)

        few = self._samples[:2]
        sample = inputs[few] if augment is None else augment(inputs[few], seed, 0, 0)
        self._augments = augment is not None and takes_stacks(augment, inputs[few], seed)
        # flips and crops have a kernel that also gathers the samples and lays them out
        images = inputs.dim() == 4 and inputs.dtype == flat.dtype == torch.float32 and inputs.is_contiguous()
        self._fetches = augment is flip_and_crop and images and inputs.device.type == "cuda" and kernels.available()
        with computing("fp32", inputs.device):
            # to the library a label below zero means "ignore"
            labels = not (targets.is_floating_point() or targets.is_complex()) and int(targets.min()) >= 0
            found, self.how = choose(flat, loss, sample, targets[few], precision, labels)
        self._differentiate: Differentiate | None = found
        self.chunk = chunk or self._fitting()

    @property
    def clipped(self) -> int | None:
        # the kernels that clip do not say how often
        return self._loop.clipped if self._differentiate is None else None

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        if self._differentiate is None:
            self._loop.leaf = self.leaf
            return self._loop.train(work)
        x_NP = work.x_NP.clone()
        lr = self.leaf.lr(work.round)
        self.flat.module.train()
        with computing(self.precision, x_NP.device):
            for leaves, samples, lengths in self._chunks(work, work.steps):
                rows = Rows.of(work, x_NP, leaves, self.leaf.momentum)
                if not self._replay(rows, samples, lengths, work, lr):
                    self._steps(rows, samples, lengths, work.step, lr)
                if isinstance(chosen := where(leaves), list):
                    # rows that do not lie together were copied out
                    x_NP[chosen] = rows.x_CP
        return x_NP, work.b_NB.clone()

    def gradients(self, work: Work) -> Tensor:
        if self._differentiate is None:
            return self._loop.gradients(work)
        g_NP = torch.zeros_like(work.x_NP)
        self.flat.module.train()
        with computing(self.precision, g_NP.device):
            for leaves, samples, lengths in self._chunks(work, 1):
                rows = Rows.of(work, work.x_NP, leaves, 0.0)
                g_NP[where(leaves)] = self._gradient(rows, samples, lengths, 0, work.step)
        return g_NP

    # -- one chunk ----------------------------------------------------------------------------------------------------

    def _chunks(self, work: Work, steps: int) -> Iterator[tuple[list[int], Samples, Lengths]]:
        """The active leaves in chunks, each with its samples and the lengths of its batches."""
        active = work.active
        sizes = [self._sizes[leaf] for leaf in active]
        if not active:
            return
        device = self.inputs.device
        stack = stacked_batches(
            self.seed, active, sizes, work.step, steps, self.batch, self.sampling, device, self._places
        )
        client_C = torch.as_tensor(active, device=device)
        index_CHB = self._samples[self._start_N[client_C][:, None, None] + stack.position_CHB]
        # as many chunks as needed and as even as can be, so that they look alike to a CUDA graph
        count = -(-len(active) // self.chunk)
        size = -(-len(active) // count)
        for first in range(0, len(active), size):
            mine = slice(first, first + size)
            samples = Samples(client_C[mine], index_CHB[mine], stack.mask_CHB[mine])
            yield active[mine], samples, Lengths(stack.length_CH[mine], stack.length_CH.max(axis=0))

    def _steps(self, rows: Rows, samples: Samples, lengths: Lengths, step: int, lr: float) -> None:
        for number in range(samples.index_CHB.shape[1]):
            g_CP = self._gradient(rows, samples, lengths, number, step + number)
            advance(rows, g_CP, self.leaf, lr, self._ops)

    def _gradient(self, rows: Rows, samples: Samples, lengths: Lengths, number: int, step: int) -> Tensor:
        longest = int(lengths.longest_H[number])
        index_CB, mask_CB = (each[:, number, :longest] for each in (samples.index_CHB, samples.mask_CHB))
        return self._differentiated(rows, samples.client_C, index_CB, mask_CB, lengths.own_CH[:, number], step)

    def _differentiated(
        self,
        rows: Rows,
        client_C: Tensor,
        index_CB: Tensor,
        mask_CB: Tensor,
        length_C: np.ndarray,
        step: int | Tensor,
    ) -> Tensor:
        assert self._differentiate is not None
        inputs_CB = self._inputs(client_C, index_CB, length_C, step)
        batch = Batch(inputs_CB, self.targets[index_CB], mask_CB, length_C)
        return self._differentiate(rows.x_CP, rows.b_CZ, batch)

    def _inputs(self, client_C: Tensor, index_CB: Tensor, length_C: np.ndarray, step: int | Tensor) -> Tensor:
        """The samples as the clients train on them."""
        if self._fetches:
            return kernels.fetch(self.inputs, index_CB, self.seed, client_C, step, self.precision)
        inputs_CB = self.inputs[index_CB]
        if self.augment is None:
            return inputs_CB
        if self._augments:
            return self.augment(inputs_CB, self.seed, client_C, step)
        return one_by_one(self.augment, inputs_CB, self.seed, client_C, step, length_C)

    def _fitting(self) -> int:
        """As many clients as the memory holds."""
        if self._differentiate is None:
            return len(self._sizes)
        x_P, b_Z = (row.to(self.inputs.device) for row in self.flat.row(self.flat.module))

        def attempt(clients: int) -> None:
            chosen = list(range(clients))
            x_NP, b_NB = x_P.repeat(clients, 1), b_Z.repeat(clients, 1)
            work = Work(x_NP, b_NB, torch.zeros_like(x_NP), (), chosen, 0, 1, 0)
            for leaves, samples, lengths in self._chunks(work, 1):
                self._steps(Rows.of(work, x_NP, leaves, self.leaf.momentum), samples, lengths, 0, 0.0)

        self.chunk = len(self._sizes)
        batch_bytes = self._places * self.inputs[0].nbytes
        with computing(self.precision, x_P.device):
            return fitting(x_P.device, len(self._sizes), x_P.nbytes, batch_bytes, attempt)

    def _replay(self, rows: Rows, samples: Samples, lengths: Lengths, work: Work, lr: float) -> bool:
        """Do the steps by a CUDA graph, if there can be one."""
        assert self._differentiate is not None
        if not self._capture or (self.augment is not None and not self._augments):
            return False
        if self._differentiate.even and (lengths.own_CH != self._places).any():
            return False
        shapes = tuple(tensor.shape for tensor in rows.tensors())
        locals = tuple(local for local, _ in work.pulls)
        key = (
            shapes,
            rows.correction_CP is None,
            locals,
            self.leaf.stages,
            self.leaf.momentum,
            samples.mask_CHB.shape[2],
        )
        known = self._captured.pop(key, None)
        if known is None or known.steps < work.steps:
            length_C = lengths.own_CH[:, 0]

            def take(fixed: Fixed) -> None:
                held = fixed.samples
                index_CB = held.index_CHB.index_select(1, fixed.number_1)[:, 0]
                mask_CB = held.mask_CHB.index_select(1, fixed.number_1)[:, 0]
                g_CP = self._differentiated(fixed.rows, held.client_C, index_CB, mask_CB, length_C, fixed.step)
                advance(fixed.rows, g_CP, self.leaf, fixed.lr, self._ops)

            try:
                known = Captured(rows, samples, take)
            except RuntimeError as problem:
                self._capture = False
                line = str(problem).strip().partition("\n")[0]
                warnings.warn(f"a step could not be captured as a CUDA graph and runs without: {line}", stacklevel=3)
                return False
        while len(self._captured) >= KEPT:
            self._captured.pop(next(iter(self._captured)))
        self._captured[key] = known
        known.run(rows, samples, work.step, lr)
        return True
