"""The readable engine: one client after another, one step after another. Every other engine must
agree with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from stratafl.base.rng import PROCESS, Stream, derive_seed, device_generator, torch_as_before
from stratafl.core.client_training import ClientTraining, TrainRequest, TrainResult, move_decay_behind_clip
from stratafl.core.client_update import CorrectionFn, Stage, apply_transforms
from stratafl.data.batches import batch_indices
from stratafl.engine.module_profile import counter_increments, is_random
from stratafl.engine.precision import MixedPrecision, Precision, float32_matmul_precision
from stratafl.engine.random_streams import ClientStream, client_rng

SINGLE_THREAD_BELOW = 100_000
"""Parameters below which one thread is faster than several."""
STEPS_DRAWN_AT_ONCE = 1024
"""Steps whose batches are drawn in one go: a meeting may be a million steps away."""


@contextmanager
def limit_threads(parameters: int) -> Iterator[None]:
    """For a small model one thread, since sharing out its operations costs more than they do, and
    many times as much on a busy machine."""
    with PROCESS:
        threads = torch.get_num_threads()
        if parameters < SINGLE_THREAD_BELOW:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class LoopEngine:
    """Reference engine: one client after another, slow and obvious."""

    name = "loop"
    chunk: int | None = None

    def __init__(self, training: ClientTraining, *, how: str = "loop", precision: Precision = "fp32"):
        """how: "loop", or "loop: why" where another engine was asked for; precision: what products
        are computed in."""
        self.training, self.leaf, self.how = training, training.leaf, how
        self._casting = MixedPrecision(precision, training.supply.device, training.flat.dtype)
        self.precision = self._casting.compute
        self._loss = self._casting.scaled(training.loss)
        self._clipped = torch.zeros((), dtype=torch.int64, device=training.supply.device)
        self._counters, self._draws = counter_increments(training), is_random(training)
        # what a module draws from; torch.manual_seed would set all devices' and is a hundred times
        # slower
        self._generator = device_generator(training.supply.device)

    @property
    def clipped(self) -> int:
        return int(self._clipped)

    def train(self, work: TrainRequest) -> TrainResult:
        pulls, stages = move_decay_behind_clip(work.pulls, self.leaf.stages)
        self.training.flat.train()
        with self._quiet():
            done = [self._train(work._replace(pulls=pulls), client, stages) for client in work.active]
        none_0P, none_0B = work.x.rows_MP[:0], work.b.rows_MP[:0]
        kept = {name: rows.rows_MP[:0] for name, rows in work.optimiser.items()}
        return TrainResult.joined([TrainResult(none_0P, none_0B, _empty_path(work, none_0P), kept), *done])

    def _train(self, work: TrainRequest, client: int, stages: Sequence[Stage]) -> TrainResult:
        """One client's steps."""
        lr, optimiser = float(self.leaf.lr(work.round)), self.leaf.optimiser
        x_1P, b_1B = work.x.one(client).clone(), work.b.one(client).clone()
        first, steps, each = (self.training.steps(self.leaf, client, count) for count in (work.step, work.steps, 1))
        integers, correct = self._integers(first), _correction_fn(work, client)
        state = {name: rows.one(client) for name, rows in work.optimiser.items()} or optimiser.init(x_1P)
        path_1P = _empty_path(work, x_1P)
        for step, batch in enumerate(self._batches(client, first, steps), first):
            direction_1P = self._gradient(client, step, x_1P, b_1B, integers, batch)
            direction_1P = apply_transforms(stages, direction_1P, x_1P, correct, self._clipped)
            state, change_1P = optimiser.step(state, direction_1P, x_1P, lr)
            x_1P -= change_1P
            if work.has_path:
                path_1P -= lr / each * direction_1P
        return TrainResult(x_1P, b_1B, path_1P, state)

    def gradients(self, work: TrainRequest) -> Tensor:
        gradients = []
        self.training.flat.train()
        with self._quiet():
            for client in work.active:
                first = self.training.steps(self.leaf, client, work.step)
                (batch,) = self._batches(client, first, 1)
                # a look ahead must leave everything as it is
                x_1P, b_1B = work.x.one(client).clone(), work.b.one(client).clone()
                integers = self._integers(first)
                gradients.append(self._gradient(client, first, x_1P, b_1B, integers, batch))
        return torch.cat([work.x.rows_MP[:0], *gradients])

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Leave torch's generator as it was, and the number of threads."""
        flat, device = self.training.flat, self.training.supply.device
        with limit_threads(flat.parameters), torch_as_before(device), float32_matmul_precision(self.precision, device):
            yield

    def _integers(self, step: int) -> dict[str, Tensor]:
        """The integer buffers of a client that has done all steps so far."""
        own = self.training.flat.integers()
        return own | {name: own[name] + step * more for name, more in self._counters.items()}

    def _batches(self, client: int, first: int, steps: int) -> Iterator[Tensor]:
        given, mine = self.training, self.training.partition[client]
        for start in range(first, first + steps, STEPS_DRAWN_AT_ONCE):
            some = min(STEPS_DRAWN_AT_ONCE, first + steps - start)
            chosen = batch_indices(
                given.seed, given.first + client, len(mine), start, some, given.batch, given.sampling
            )
            yield from (mine[positions.to(mine.device)] for positions in chosen)

    def _gradient(
        self, client: int, step: int, x_1P: Tensor, b_1B: Tensor, integers: dict[str, Tensor], batch: Tensor
    ) -> Tensor:
        given, number = self.training, self.training.first + client
        # dropout and the like draw from the client's own stream, so the order of visits does not
        # matter
        self._generator.manual_seed(derive_seed(given.seed, Stream.MODULE, number, step))
        samples, forward = given.samples(number, step, batch), self._casting.forward
        within: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._draws:
            within = functools.partial(
                client_rng, ClientStream(given.seed, number, step), x_1P.device, given.flat.module
            )
        g_P = given.flat.gradient(x_1P[0], b_1B[0], *samples, self._loss, integers, within, forward)
        return self._casting.unscaled(g_P)[None]


def _empty_path(work: TrainRequest, x_NP: Tensor) -> Tensor:
    """Where paths begin: zero, and no columns where nobody wants them."""
    return torch.zeros_like(x_NP if work.has_path else x_NP[:, :0])


def _correction_fn(work: TrainRequest, client: int) -> CorrectionFn:
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
