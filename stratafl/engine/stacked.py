"""The fast engine: all clients at once, as rows of one matrix. It gives the loop engine's result, up to rounding.

Clients are taken in chunks that fit the memory at hand. On a GPU one step of a chunk is captured as a CUDA graph and
replayed, so that the host has nothing to do between steps.

Shape suffixes: N leaves, C clients of a chunk, P parameters, Z buffer values, H steps, B places in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import batched

import numpy as np
import torch
from torch import Tensor

from stratafl.data.batches import Sampling, stacked_batches
from stratafl.engine.differentiate import Batch, Differentiate, choose
from stratafl.engine.graph import Captured, Fixed, Samples
from stratafl.engine.loop import LoopEngine
from stratafl.engine.memory import fitting
from stratafl.engine.ops import Compute, table
from stratafl.engine.precision import computing
from stratafl.engine.rows import Rows, advance, where
from stratafl.engine.work import Work
from stratafl.flat import Flat
from stratafl.local import Leaf

Augment = Callable[[Tensor, int, int | Tensor, int | Tensor], Tensor]
"""(inputs, seed, client or clients, step) -> inputs; stacked inputs have an axis of clients in front."""

KEPT = 2
"""Captured steps kept: enough for two sizes of chunk."""


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
        *,
        augment: Augment | None = None,
        chunk: int | None = None,
        precision: Compute = "fp32",
        capture: bool = True,
    ):
        """chunk: clients at once, as many as fit unless given; precision: what products are computed in;
        capture: whether a GPU's steps become a CUDA graph."""
        self.flat, self.loss, self.leaf = flat, loss, leaf
        self.inputs, self.targets, self.partition = inputs, targets, partition
        self.batch, self.sampling, self.seed = batch, sampling, seed
        self.augment, self.chunk, self.precision, self.capture = augment, chunk, precision, capture
        self._sizes = [len(part) for part in partition]
        self._start_N = torch.as_tensor(np.cumsum([0, *self._sizes[:-1]]), device=inputs.device)
        self._samples = torch.cat(list(partition)).to(inputs.device)
        self._ops = table(inputs.device, flat.dtype)
        self._captured: dict[object, Captured] = {}
        few = self._samples[:2]
        with computing("fp32", inputs.device):
            found, self.how = choose(flat, loss, self._seen(inputs[few][None])[0], targets[few], precision)
        self._differentiate: Differentiate | None = found
        self._loop = LoopEngine(flat, loss, inputs, targets, partition, leaf, batch, sampling, seed)

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        if self._differentiate is None:
            self._loop.leaf = self.leaf
            return self._loop.train(work)
        x_NP = work.x_NP.clone()
        lr = self.leaf.lr(work.round)
        self.flat.module.train()
        with computing(self.precision, x_NP.device):
            for leaves, samples, length_CH in self._chunks(work, work.steps):
                rows = Rows.of(work, x_NP, leaves, self.leaf.momentum)
                if not self._replay(rows, samples, length_CH, work, lr):
                    self._steps(rows, samples, length_CH, work.step, lr)
                x_NP[where(leaves)] = rows.x_CP
        return x_NP, work.b_NB.clone()

    def gradients(self, work: Work) -> Tensor:
        if self._differentiate is None:
            return self._loop.gradients(work)
        g_NP = torch.zeros_like(work.x_NP)
        self.flat.module.train()
        with computing(self.precision, g_NP.device):
            for leaves, samples, length_CH in self._chunks(work, 1):
                rows = Rows.of(work, work.x_NP, leaves, 0.0)
                g_NP[where(leaves)] = self._gradient(rows, samples, length_CH, 0, work.step)
        return g_NP
