"""State of a chunk of clients (models, optimizer states, corrections), an optimizer step on it, and
the number of clients that fit into memory.

Shape suffixes: C clients of a chunk, P parameters, Z buffer values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.core.client_training import (
    ClientTraining,
    LocalRule,
    ProximalOffset,
    TrainRequest,
    split_proximal_behind_clip,
)
from stratafl.core.client_update import ClientUpdate, GradientTransform, StandardChain, apply_transforms
from stratafl.core.optimizer import OPTIMIZERS, Optimizer
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal
from stratafl.core.rule import Rows as States
from stratafl.engine.kernels import Backend
from stratafl.engine.kernels.reference import optimizer_step
from stratafl.engine.parameter_layout import ParameterLayout

ROW_ALIGNMENT = 16
"""Number of values: a GPU reads and writes rows that begin at its multiples in the widest words."""


def empty_rows(clients: int, values: int, like: Tensor) -> Tensor:
    """Empty matrix with one row per client.

    On a GPU rows are padded to 64 bytes, and the padding is zero.
    """
    if like.device.type != "cuda":
        return like.new_empty(clients, values)
    padded = like.new_empty(clients, -(-values // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    padded[:, values:].zero_()
    return padded[:, :values]


class BoundLocalTerm(NamedTuple):
    """Local term of a rule, with the edges of the chunk's clients."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    edge: Edge


class GradientRequest(NamedTuple):
    """Extras to compute with the gradients."""

    add_CP: Tensor | None = None
    """Correction to add."""
    squared_norms: bool = False
    """Whether the squared norms of the corrected gradients are used, if they cost nothing."""


PLAIN_REQUEST = GradientRequest()


class ClientGradients(NamedTuple):
    """Gradients of a chunk's clients."""

    grads_CP: Tensor
    """Gradients plus the requested correction."""
    partial_squared_norms: tuple[Tensor, ...] = ()
    """Parts (C, n) of each client's squared norm; empty where they were not requested or are not
    known."""
    reads: tuple[object, ...] = ()
    """Objects that own constants the gradients depend on. A CUDA graph goes on reading these, and
    has to keep the objects."""


class ChunkState(NamedTuple):
    """Rows of a chunk's clients, in memory that belongs to the chunk."""

    x_CP: Tensor
    b_CZ: Tensor
    optimizer: Optimizer
    state: States
    """States of the optimizer, one row per client."""
    path_CP: Tensor | None
    """Negated sum of learning rate times direction, where the request asks for it."""
    correction_CP: Tensor | None
    """Sum of the corrections on a client's path to the root and of the constant parts of proximal
    terms."""
    local_terms: tuple[BoundLocalTerm, ...]
    transforms: tuple[GradientTransform, ...]
    """Transforms of the client update, with the proximal terms that act behind its clip."""
    fused_chain: StandardChain | None
    """Settings of the fused optimizer step. None for transforms other than the standard ones, rules
    with local terms that are not proximal, and optimizers written by a user."""
    proximal_strength: float = 0.0
    """Sum of the mu of all proximal terms mu (x - model). Their part mu x changes with every step,
    and -mu model is constant."""
    scratch_CP: Tensor | None = None
    """Memory for correction + proximal_strength * x."""

    @staticmethod
    def allocate(request: TrainRequest, clients: int, update: ClientUpdate) -> ChunkState:
        """Allocate the state of this many clients of a request."""

        def empty_like(rows: IndexedRows) -> Tensor:
            return empty_rows(clients, rows.rows_MP.shape[1], rows.rows_MP)

        rules, transforms = split_proximal_behind_clip(request.local_rules, update.transforms)
        terms = _proximal_terms(rules)
        strength = sum((rule.local.strength for rule in rules if terms and isinstance(rule.local, Proximal)), 0.0)
        local_terms = () if terms else tuple(BoundLocalTerm(rule.local, rule.edge(empty_like)) for rule in rules)
        is_fused = not local_terms and type(update.optimizer) in OPTIMIZERS.values()
        states = update.optimizer.init(request.model.rows_MP[:1])
        return ChunkState(
            x_CP=empty_like(request.model),
            b_CZ=empty_like(request.buffers),
            optimizer=update.optimizer,
            state={name: empty_rows(clients, rows.shape[1], rows) for name, rows in states.items()},
            path_CP=empty_like(request.model) if request.wants_sgd_path else None,
            correction_CP=empty_like(request.model) if request.corrections or terms else None,
            local_terms=local_terms,
            transforms=transforms,
            fused_chain=StandardChain.from_transforms(transforms) if is_fused else None,
            proximal_strength=strength,
            scratch_CP=empty_like(request.model) if strength else None,
        )

    def load(self, request: TrainRequest, clients: Sequence[int], layout: ParameterLayout) -> None:
        """Copy the initial rows of these clients, in a layout of parameters."""
        layout.into(self.x_CP, request.model, clients)
        request.buffers.copy_into(self.b_CZ, clients)
        for name, rows in request.client_rows.items():
            layout.into(self.state[name], rows, clients)
        if not request.client_rows:
            for name, initial in self.optimizer.init(self.x_CP).items():
                self.state[name].copy_(initial)
        if self.path_CP is not None:
            self.path_CP.zero_()
        if self.correction_CP is not None:
            terms = [(1.0, correction) for correction in request.corrections]
            terms += [(-strength, model) for strength, model in _proximal_terms(request.local_rules)]
            (factor, first), *others = terms
            layout.into(self.correction_CP, first, clients)
            if factor != 1:
                self.correction_CP.mul_(factor)
            for factor, rows in others:
                self.correction_CP.add_(layout.take(rows, clients), alpha=factor)
        for term, rule in zip(self.local_terms, request.local_rules, strict=False):  # no terms where all are proximal
            edge = rule.edge(lambda rows: layout.take(rows, clients))
            for memory, values in zip(term.edge.tensors().values(), edge.tensors().values(), strict=True):
                memory.copy_(values)

    def first(self, clients: int) -> ChunkState:
        """State of the first clients, in the same memory."""
        if clients == len(self.x_CP):
            return self

        def cut(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows[:clients]

        return self._replace(
            x_CP=self.x_CP[:clients],
            b_CZ=self.b_CZ[:clients],
            state={name: rows[:clients] for name, rows in self.state.items()},
            path_CP=cut(self.path_CP),
            correction_CP=cut(self.correction_CP),
            local_terms=tuple(BoundLocalTerm(local, edge.first_rows(clients)) for local, edge in self.local_terms),
            scratch_CP=cut(self.scratch_CP),
        )

    def gradient_request(self) -> GradientRequest:
        """Extras that the next step needs with the gradients."""
        chain = self.fused_chain
        if chain is None:
            return PLAIN_REQUEST
        return GradientRequest(self._added_to_gradients(self.x_CP), chain.clip is not None)

    def apply(self, gradients: ClientGradients, lr: float | Tensor, backend: Backend, clipped_steps: Tensor) -> None:
        """Take one step of all rows, in place, and add the number of clipped rows to
        `clipped_steps`."""
        chain = self.fused_chain
        if chain is None:
            direction_CP = apply_transforms(
                self.transforms, gradients.grads_CP, self.x_CP, self._correct, clipped_steps
            )
            optimizer_step(
                self.x_CP, direction_CP, lr, optimizer=self.optimizer, state=self.state, path_CP=self.path_CP
            )
            return
        backend.optimizer_step(
            self.x_CP,
            gradients.grads_CP,
            lr,
            clip_norm=chain.clip,
            weight_decay=chain.decay,
            optimizer=self.optimizer,
            state=self.state,
            path_CP=self.path_CP,
            squared_norms=gradients.partial_squared_norms,
            clipped_steps=clipped_steps,
        )

    def _added_to_gradients(self, x_CP: Tensor) -> Tensor | None:
        """Sum of corrections and proximal terms at these models."""
        if self.correction_CP is None or self.scratch_CP is None:
            return self.correction_CP
        return torch.add(self.correction_CP, x_CP, alpha=self.proximal_strength, out=self.scratch_CP)

    def _correct(self, x_CP: Tensor, direction_CP: Tensor) -> Tensor:
        """Add the corrections and local terms of all rules to the directions."""
        added_CP = self._added_to_gradients(x_CP)
        if added_CP is not None:
            direction_CP = direction_CP + added_CP
        for local, edge in self.local_terms:
            direction_CP = local(x_CP, direction_CP, edge)
        return direction_CP


def _proximal_terms(rules: Sequence[LocalRule]) -> list[tuple[float, IndexedRows]]:
    """Strengths and models of the local terms if all are proximal, so that they may be added in any
    order; otherwise none."""
    terms = [(rule.local.strength, rule.model) for rule in rules if isinstance(rule.local, Proximal | ProximalOffset)]
    return terms if len(terms) == len(rules) else []


def probe_request(training: ClientTraining, clients: int) -> TrainRequest:
    """Request for one step of the first clients, from the module's own values."""
    x_P, b_Z = (row.to(training.samples.device) for row in training.flat.flatten_module(training.flat.module))
    index_N = np.zeros(clients, dtype=np.int64)
    x, b = IndexedRows(x_P[None], index_N), IndexedRows(b_Z[None], index_N)
    return TrainRequest(model=x, buffers=b, corrections=(x,), clients=list(range(clients)))


# -- memory ----------------------------------------------------------------------------------------


MAX_GPU_CHUNK = 512
"""Largest chunk on a GPU. More clients than occupy it gain nothing, and the rows of all clients
need the memory."""

MEMORY_FRACTION = 0.4
"""Share of the free memory for a chunk: a captured step keeps its own memory beside that of the
steps before it."""

CPU_CHUNK_BYTES = 16 << 20
"""Bytes of a chunk on a CPU: a step reads its rows several times, which is fast in the cache."""

CPU_ACTIVATION_BYTES = 4 << 20
"""Bytes of an activation that stay in a CPU's caches until the next operation."""

ACTIVATIONS_PER_INPUT = 4
"""Rough ratio of a batch's activations to its inputs, which matters for models with few parameters
only."""


def max_chunk_size(
    device: torch.device, clients: int, row_bytes: int, batch_bytes: int, run_step: Callable[[int], None]
) -> int:
    """Number of clients in the largest chunk that fits into memory.

    On a GPU the memory that a client needs is measured by `run_step`, which takes a step with the
    given number of clients. On a CPU the gradient method itself limits activations.
    """
    if device.type != "cuda":
        return max(1, min(clients, CPU_CHUNK_BYTES // (row_bytes + ACTIVATIONS_PER_INPUT * batch_bytes)))
    measured_clients = min(clients, 8)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_step(measured_clients)
    torch.cuda.synchronize(device)
    client_bytes = max(1, (torch.cuda.max_memory_allocated(device) - before) // measured_clients)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(clients, MAX_GPU_CHUNK, int(MEMORY_FRACTION * free / client_bytes)))
