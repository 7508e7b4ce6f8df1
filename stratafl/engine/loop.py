"""Sequential reference engine: one client after another, one step after another.

Every other engine must agree with it.

Shape suffixes: P parameters, B buffer values of one client (1 as a matrix of one row), H steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from stratafl.base.rng import PROCESS_LOCK, Stream, derive_seed, device_generator, torch_as_before
from stratafl.core.client_training import ClientTraining, TrainRequest, TrainResult, split_proximal_behind_clip
from stratafl.core.client_update import CorrectionFn, GradientTransform, apply_transforms
from stratafl.data.batches import batch_indices
from stratafl.engine.module_profile import ModuleProfile, profile_module
from stratafl.engine.precision import MixedPrecision, Precision, float32_matmul_precision
from stratafl.engine.random_streams import ClientStream, client_rng

SINGLE_THREAD_BELOW = 100_000
"""Parameters of a model below which one thread is faster than several."""

STEPS_DRAWN_AT_ONCE = 1024
"""Steps whose batches are drawn together: a synchronisation may be a million steps away."""


@contextmanager
def limit_threads(parameters: int) -> Iterator[None]:
    """Use one thread for a small model.

    Distributing its operations costs more than computing them, and many times as much on a busy
    machine.
    """
    with PROCESS_LOCK:
        threads = torch.get_num_threads()
        if parameters < SINGLE_THREAD_BELOW:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class LoopEngine:
    """Trains one client after another with plain PyTorch."""

    name = "loop"
    chunk_size: int | None = None

    def __init__(
        self,
        training: ClientTraining,
        *,
        how: str = "loop",
        precision: Precision = "fp32",
        profile: ModuleProfile | None = None,
    ):
        """how: "loop", or "loop: reason" where another engine was asked for; precision: of the
        products; profile: of the module, observed here by default."""
        self.training, self.client_update, self.how = training, training.client_update, how
        self.profile = profile_module(training) if profile is None else profile
        self._mixed_precision = MixedPrecision(precision, training.samples.device, training.flat.dtype)
        self.precision = self._mixed_precision.precision
        self._loss = self._mixed_precision.scale_loss(training.loss)
        self._clipped_steps = torch.zeros((), dtype=torch.int64, device=training.samples.device)
        # this device's alone: torch.manual_seed sets all devices' and is a hundred times slower
        self._generator = device_generator(training.samples.device)

    @property
    def clipped_steps(self) -> int:
        return int(self._clipped_steps)

    def train(self, request: TrainRequest) -> TrainResult:
        local_rules, transforms = split_proximal_behind_clip(request.local_rules, self.client_update.transforms)
        self.training.flat.train()
        request = replace(request, local_rules=local_rules)
        with self._isolated():
            results = [self._train(request, client, transforms) for client in request.clients]
        return TrainResult.concatenate([TrainResult.empty_for(replace(request, clients=[])), *results])

    def _train(self, request: TrainRequest, client: int, transforms: Sequence[GradientTransform]) -> TrainResult:
        """Train one client."""
        lr, optimizer = float(self.client_update.lr(request.round)), self.client_update.optimizer
        x_1P, b_1B = request.model.row(client).clone(), request.buffers.row(client).clone()
        counts = request.first_step, request.steps, 1
        first, steps, steps_per_count = (self.training.steps(self.client_update, client, count) for count in counts)
        integers, correct = self._integer_buffers(first), _correction_fn(request, client)
        state = {name: rows.row(client) for name, rows in request.client_rows.items()} or optimizer.init(x_1P)
        path_1P = torch.zeros_like(x_1P if request.wants_sgd_path else x_1P[:, :0])
        for step, batch in enumerate(self._batches(client, first, steps), first):
            direction_1P = self._gradient(client, step, x_1P, b_1B, integers, batch)
            direction_1P = apply_transforms(transforms, direction_1P, x_1P, correct, self._clipped_steps)
            state, change_1P = optimizer.step(state, direction_1P, x_1P, lr)
            x_1P -= change_1P
            if request.wants_sgd_path:
                path_1P -= lr / steps_per_count * direction_1P
        return TrainResult(model_AP=x_1P, buffers_AB=b_1B, path_AP=path_1P, client_rows=state)

    def gradients(self, request: TrainRequest) -> Tensor:
        gradients = [request.model.rows_MP[:0]]
        self.training.flat.train()
        with self._isolated():
            for client in request.clients:
                first = self.training.steps(self.client_update, client, request.first_step)
                (batch,) = self._batches(client, first, 1)
                # copies: the state of the run must stay as it is
                x_1P, b_1B = request.model.row(client).clone(), request.buffers.row(client).clone()
                gradients.append(self._gradient(client, first, x_1P, b_1B, self._integer_buffers(first), batch))
        return torch.cat(gradients)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Restore torch's generator, number of threads and tf32 switches afterwards."""
        flat, device = self.training.flat, self.training.samples.device
        with limit_threads(flat.parameters), torch_as_before(device), float32_matmul_precision(self.precision, device):
            yield

    def _integer_buffers(self, step: int) -> dict[str, Tensor]:
        """Integer buffers of a client before this step, with its counters."""
        initial = self.training.flat.integer_buffers()
        increments = self.profile.counter_increments
        return initial | {name: initial[name] + step * increment for name, increment in increments.items()}

    def _batches(self, client: int, first: int, steps: int) -> Iterator[Tensor]:
        """Sample indices of the client's steps from `first` on."""
        training, part = self.training, self.training.clients[client]
        for start in range(first, first + steps, STEPS_DRAWN_AT_ONCE):
            count = min(STEPS_DRAWN_AT_ONCE, first + steps - start)
            positions_HB = batch_indices(
                training.seed, training.first_client + client, len(part), start, count,
                training.batch_size, training.sampling,
            )  # fmt: skip
            yield from (part[position_B.to(part.device)] for position_B in positions_HB)

    def _gradient(
        self, client: int, step: int, x_1P: Tensor, b_1B: Tensor, integers: dict[str, Tensor], batch: Tensor
    ) -> Tensor:
        """Gradient of one client's step, with its random numbers."""
        training, number = self.training, self.training.first_client + client
        # random operations use the client's own stream: the order of clients does not matter
        self._generator.manual_seed(derive_seed(training.seed, Stream.MODULE, number, step))
        samples, forward = training.batch(number, step, batch), self._mixed_precision.autocast
        within: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.profile.is_random:
            stream = ClientStream(training.seed, number, step)
            within = functools.partial(client_rng, stream, x_1P.device, training.flat.module)
        g_P = training.flat.gradient(x_1P[0], b_1B[0], *samples, self._loss, integers, within, forward)
        return self._mixed_precision.unscale_(g_P)[None]


def _correction_fn(request: TrainRequest, client: int) -> CorrectionFn:
    """Function that adds the corrections and local terms of all rules to a client's direction."""
    corrections = [rows.row(client) for rows in request.corrections]
    correction_1P = torch.cat(corrections).sum(dim=0, keepdim=True) if corrections else None
    local_terms = [(rule.local, rule.edge(lambda rows: rows.row(client))) for rule in request.local_rules]

    def correct(x_1P: Tensor, direction_1P: Tensor) -> Tensor:
        if correction_1P is not None:
            direction_1P = direction_1P + correction_1P
        for local, edge in local_terms:
            direction_1P = local(x_1P, direction_1P, edge)
        return direction_1P

    return correct
