"""The readable engine: one client after another, one step after another. Every other engine must agree with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stratafl.data.batches import batches
from stratafl.engine.habits import counters, generator_of
from stratafl.engine.ops import Compute
from stratafl.engine.precision import computing, honoured
from stratafl.engine.work import Training, Work, behind_clip
from stratafl.local import Correct, clip
from stratafl.streams import Purpose, integer

SMALL = 100_000
"""Parameters below which one thread is faster than several."""
AHEAD = 1024
"""Steps whose batches are drawn in one go: a meeting may be a million steps away."""


class LoopEngine:
    name = "loop"
    chunk: int | None = None

    def __init__(self, training: Training, *, how: str = "loop", precision: Compute = "fp32"):
        """how: "loop", or "loop: why" where another engine was asked for; precision: what a GPU's float32 products may
        round to, "fp32" or "tf32"."""
        self.training, self.leaf, self.how = training, training.leaf, how
        self.precision = honoured(precision, training.inputs.device, training.flat.dtype, casts=False)
        self._clipped = torch.zeros((), dtype=torch.int64, device=training.inputs.device)
        self._counters = counters(training)
        # what a module draws from; torch.manual_seed would set all devices' and is a hundred times slower
        self._generator = generator_of(training.inputs.device)

    @property
    def clipped(self) -> int:
        return int(self._clipped)

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        models, buffers = [], []
        lr = self.leaf.lr(work.round)
        pulls, stages = behind_clip(work.pulls, self.leaf.stages)
        work = work._replace(pulls=pulls)
        self.training.flat.train()
        with self._quiet():
            for client in work.active:
                x_1P, b_1B = work.x.one(client).clone(), work.b.one(client).clone()
                integers = self._integers(work.step)
                correct = _correcting(work, client)
                velocity_1P = torch.zeros_like(x_1P)
                for step, batch in enumerate(self._batches(client, work.step, work.steps), work.step):
                    direction_1P = self._gradient(client, step, x_1P, b_1B, integers, batch)
                    for stage in stages:
                        if isinstance(stage, clip):
                            factor_11 = stage.factor(direction_1P)
                            self._clipped += factor_11[0, 0] < 1
                            direction_1P = direction_1P * factor_11
                        else:
                            direction_1P = stage(direction_1P, x_1P, correct)
                    velocity_1P = self.leaf.momentum * velocity_1P + direction_1P
                    x_1P -= lr * velocity_1P
                models.append(x_1P)
                buffers.append(b_1B)
        return torch.cat([work.x.rows_MP[:0], *models]), torch.cat([work.b.rows_MP[:0], *buffers])

    def gradients(self, work: Work) -> Tensor:
        gradients = []
        self.training.flat.train()
        with self._quiet():
            for client in work.active:
                (batch,) = self._batches(client, work.step, 1)
                # a look ahead must leave everything as it is
                x_1P, b_1B = work.x.one(client).clone(), work.b.one(client).clone()
                integers = self._integers(work.step)
                gradients.append(self._gradient(client, work.step, x_1P, b_1B, integers, batch))
        return torch.cat([work.x.rows_MP[:0], *gradients])

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Leave torch's generator as it was; and for a small model use one thread, since sharing out its
        operations costs more than they do."""
        threads = torch.get_num_threads()
        if self.training.flat.parameters < SMALL:
            torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(), computing(self.precision, self.training.inputs.device):
                yield
        finally:
            torch.set_num_threads(threads)

    def _integers(self, step: int) -> dict[str, Tensor]:
        """The integer buffers of a client that has done all steps so far."""
        own = self.training.flat.integers()
        return own | {name: own[name] + step * more for name, more in self._counters.items()}

    def _batches(self, client: int, first: int, steps: int) -> Iterator[Tensor]:
        given, mine = self.training, self.training.partition[client]
        for start in range(first, first + steps, AHEAD):
            some = min(AHEAD, first + steps - start)
            chosen = batches(given.seed, given.first + client, len(mine), start, some, given.batch, given.sampling)
            yield from (mine[positions.to(mine.device)] for positions in chosen)

    def _gradient(
        self, client: int, step: int, x_1P: Tensor, b_1B: Tensor, integers: dict[str, Tensor], batch: Tensor
    ) -> Tensor:
        given, number = self.training, self.training.first + client
        # dropout and the like draw from the client's own stream, so the order of visits does not matter
        self._generator.manual_seed(integer(given.seed, Purpose.MODULE, number, step))
        inputs = given.inputs[batch]
        if given.augment is not None:
            inputs = given.augment(inputs, given.seed, number, step)
        g_P = given.flat.gradient(x_1P[0], b_1B[0], inputs, given.targets[batch], given.loss, integers)
        return g_P[None]


def _correcting(work: Work, client: int) -> Correct:
    """What adds everything the rules add to a leaf's direction."""
    corrections = [each.one(client) for each in work.corrections]
    correction_1P = torch.cat(corrections).sum(dim=0, keepdim=True) if corrections else None
    pulls = [(pull.local, pull.edge(lambda rows: rows.one(client))) for pull in work.pulls]

    def correct(x_1P: Tensor, direction_1P: Tensor) -> Tensor:
        if correction_1P is not None:
            direction_1P = direction_1P + correction_1P
        for local, edge in pulls:
            direction_1P = local(x_1P, direction_1P, edge)
        return direction_1P

    return correct
