"""The readable engine: one client after another, one step after another. Every other engine must agree with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stratafl.data.batches import Sampling, batches
from stratafl.engine.work import Augment, Work
from stratafl.flat import Flat
from stratafl.local import Leaf, clip
from stratafl.streams import Purpose, integer

SMALL = 100_000
"""Parameters below which one thread is faster than several."""


class LoopEngine:
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
    ):
        self.flat, self.loss = flat, loss
        self.inputs, self.targets, self.partition = inputs, targets, partition
        self.leaf, self.batch, self.sampling, self.seed = leaf, batch, sampling, seed
        self.augment = augment
        self._clipped = torch.zeros((), dtype=torch.int64, device=inputs.device)
        # what a module draws from; torch.manual_seed would set all devices' and is a hundred times slower
        self._generator = (
            torch.cuda.default_generators[inputs.device.index or 0]
            if inputs.device.type == "cuda"
            else torch.default_generator
        )

    @property
    def clipped(self) -> int:
        return int(self._clipped)

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        x_NP, b_NB = work.x_NP.clone(), work.b_NB.clone()
        lr = self.leaf.lr(work.round)
        self.flat.module.train()
        with self._quiet():
            for client in work.active:
                x_1P, b_B = x_NP[client : client + 1], b_NB[client]
                velocity_1P = torch.zeros_like(x_1P)
                for step, batch in enumerate(self._batches(client, work.step, work.steps), work.step):
                    direction_1P = self._gradient(client, step, x_1P, b_B, batch)
                    for stage in self.leaf.stages:
                        if isinstance(stage, clip):
                            factor_11 = stage.factor(direction_1P)
                            self._clipped += factor_11[0, 0] < 1
                            direction_1P = direction_1P * factor_11
                        else:
                            direction_1P = stage(direction_1P, x_1P, lambda x, d: work.correct(client, x, d))
                    velocity_1P = self.leaf.momentum * velocity_1P + direction_1P
                    x_1P -= lr * velocity_1P
        return x_NP, b_NB

    def gradients(self, work: Work) -> Tensor:
        g_NP = torch.zeros_like(work.x_NP)
        self.flat.module.train()
        with self._quiet():
            for client in work.active:
                (batch,) = self._batches(client, work.step, 1)
                # a look ahead must leave the running statistics as they are
                x_1P, b_B = work.x_NP[client : client + 1], work.b_NB[client].clone()
                g_NP[client] = self._gradient(client, work.step, x_1P, b_B, batch)
        return g_NP

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Leave torch's generator as it was; and for a small model use one thread, since sharing out its
        operations costs more than they do."""
        threads = torch.get_num_threads()
        if self.flat.parameters < SMALL:
            torch.set_num_threads(1)
        try:
            with torch.random.fork_rng():
                yield
        finally:
            torch.set_num_threads(threads)

    def _batches(self, client: int, first: int, steps: int) -> list[Tensor]:
        mine = self.partition[client]
        chosen = batches(self.seed, client, len(mine), first, steps, self.batch, self.sampling)
        return [mine[positions.to(mine.device)] for positions in chosen]

    def _gradient(self, client: int, step: int, x_1P: Tensor, b_B: Tensor, batch: Tensor) -> Tensor:
        # dropout and the like draw from the client's own stream, so the order of visits does not matter
        self._generator.manual_seed(integer(self.seed, Purpose.MODULE, client, step))
        inputs = self.inputs[batch]
        if self.augment is not None:
            inputs = self.augment(inputs, self.seed, client, step)
        g_P = self.flat.gradient(x_1P[0], b_B, inputs, self.targets[batch], self.loss)
        return g_P[None]
