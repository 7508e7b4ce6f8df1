"""State of a chunk of clients, one optimizer step on it, and how many clients fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stratafl.core.client_training import LocalRule, ProximalOffset, TrainRequest, move_decay_behind_clip
from stratafl.core.client_update import Leaf, Stage, StandardChain, apply_transforms
from stratafl.core.optimizer import OPTIMIZERS, Optimiser
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal
from stratafl.core.rule import Rows as States
from stratafl.engine.ops import Table, advance
from stratafl.engine.parameter_layout import ParameterLayout

ROW_ALIGNMENT = 16
"""Values: rows that begin at multiples of this are read and written in the widest words a GPU
has."""


def empty_rows(clients: int, values: int, like: Tensor) -> Tensor:
    """An empty matrix; on a GPU its rows are aligned, and the gaps between them are zero."""
    if like.device.type != "cuda":
        return like.new_empty(clients, values)
    whole = like.new_empty(clients, -(-values // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    whole[:, values:].zero_()
    return whole[:, :values]


class BoundLocalTerm(NamedTuple):
    """A rule's own direction, and the clients' edges."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    edge: Edge


class ChunkState(NamedTuple):
    """One chunk's part of the work, in memory of its own."""

    x_CP: Tensor
    b_CZ: Tensor
    optimiser: Optimiser
    state: States
    """Of the optimiser, one row per client."""
    path_CP: Tensor | None
    """Where plain SGD would have come, where that is wanted."""
    correction_CP: Tensor | None
    """The sum of all on a client's path to the root, and of what proximal pulls add in every step
    alike."""
    pulls: tuple[BoundLocalTerm, ...]
    stages: tuple[Stage, ...]
    """The leaf's chain, with what pulls add behind its clip."""
    strength: float = 0.0
    """The sum of all proximal pulls' mu: mu (x - model) is -mu model, alike in every step, and mu
    x, which is not."""
    sum_CP: Tensor | None = None
    """Room for the correction and strength * x together."""

    @staticmethod
    def holding(work: TrainRequest, clients: int, leaf: Leaf) -> ChunkState:
        """Room for so many clients' part of this work."""

        def new(given: IndexedRows) -> Tensor:
            return empty_rows(clients, given.rows_MP.shape[1], given.rows_MP)

        pulls, stages = move_decay_behind_clip(work.local_rules, leaf.stages)
        anchors = _anchors(pulls)
        strength = sum((pull.local.strength for pull in pulls if anchors and isinstance(pull.local, Proximal)), 0.0)
        return ChunkState(
            new(work.model),
            new(work.buffers),
            leaf.optimiser,
            _state(leaf.optimiser, work, clients),
            new(work.model) if work.wants_sgd_path else None,
            new(work.model) if work.corrections or anchors else None,
            () if anchors else tuple(BoundLocalTerm(pull.local, pull.edge(new)) for pull in pulls),
            stages,
            strength,
            new(work.model) if strength else None,
        )

    def load(self, work: TrainRequest, leaves: Sequence[int], layout: ParameterLayout) -> None:
        """Take over what these leaves start from; rows of parameters lie as this says from then
        on."""
        layout.into(self.x_CP, work.model, leaves)
        work.buffers.copy_into(self.b_CZ, leaves)
        for name, kept in work.client_rows.items():
            layout.into(self.state[name], kept, leaves)
        if not work.client_rows:
            for name, begun in self.optimiser.init(self.x_CP).items():
                self.state[name].copy_(begun)
        if self.path_CP is not None:
            self.path_CP.zero_()
        if self.correction_CP is not None:
            terms = [(1.0, correction) for correction in work.corrections]
            (factor, first), *others = terms + [(-strength, model) for strength, model in _anchors(work.local_rules)]
            layout.into(self.correction_CP, first, leaves)
            if factor != 1:
                self.correction_CP.mul_(factor)
            for factor, other in others:
                self.correction_CP.add_(layout.some(other, leaves), alpha=factor)
        for mine, pull in zip(self.pulls, work.local_rules, strict=False):  # none of mine where all are proximal
            given = pull.edge(lambda rows: layout.some(rows, leaves))
            for part, theirs in zip(mine.edge.tensors(), given.tensors(), strict=True):
                part.copy_(theirs)

    def among(self, clients: int) -> ChunkState:
        """The first so many clients' alone, in the same memory."""
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
            pulls=tuple(BoundLocalTerm(local, edge.among(clients)) for local, edge in self.pulls),
            sum_CP=cut(self.sum_CP),
        )

    def added(self, x_CP: Tensor) -> Tensor | None:
        """What corrections and proximal pulls add to the gradients at these models."""
        if self.correction_CP is None or self.sum_CP is None:
            return self.correction_CP
        return torch.add(self.correction_CP, x_CP, alpha=self.strength, out=self.sum_CP)

    def correct(self, x_CP: Tensor, direction_CP: Tensor) -> Tensor:
        """The directions with everything the rules add."""
        added_CP = self.added(x_CP)
        if added_CP is not None:
            direction_CP = direction_CP + added_CP
        for local, edge in self.pulls:
            direction_CP = local(x_CP, direction_CP, edge)
        return direction_CP


def _state(optimiser: Optimiser, work: TrainRequest, clients: int) -> States:
    """Room for so many clients' states."""
    like = optimiser.init(work.model.rows_MP[:1])
    return {name: empty_rows(clients, rows.shape[1], rows) for name, rows in like.items()}


def _anchors(pulls: Sequence[LocalRule]) -> list[tuple[float, IndexedRows]]:
    """Strengths and models of the pulls, where all of them are proximal and may be added up in any
    order."""
    found = [(pull.local.strength, pull.model) for pull in pulls if isinstance(pull.local, Proximal | ProximalOffset)]
    return found if len(found) == len(pulls) else []


def fused_step_config(rows: ChunkState) -> StandardChain | None:
    """The usual chain, which has kernels that do all of it; None where it is another, rules have
    directions of their own, or the optimiser is a user's."""
    return (
        None
        if rows.pulls or type(rows.optimiser) not in OPTIMIZERS.values()
        else StandardChain.from_stages(rows.stages)
    )


class GradientRequest(NamedTuple):
    """What gradients are wanted with, where the way they are computed can add it at no cost."""

    correction_CP: Tensor | None = None
    squares: bool = False
    """Whether the sums of squares of the corrected gradients are wanted, for a clip."""


PLAIN_REQUEST = GradientRequest()


class ClientGradients(NamedTuple):
    g_CP: Tensor
    """With the corrections that were wanted."""
    squares: tuple[Tensor, ...] = ()
    """Parts (C, n) of each client's sum of squares; empty where they were not wanted or are not
    known."""
    reads: tuple[object, ...] = ()
    """What holds the constants they were computed from: a CUDA graph goes on reading these, and has
    to keep it."""


def apply_step(
    rows: ChunkState,
    gradients: Callable[[GradientRequest], ClientGradients],
    lr: float | Tensor,
    ops: Table,
    clipped: Tensor,
) -> tuple[object, ...]:
    """One step of all rows, in place; to `clipped` is added how many of them a clip shortened.
    Returned is what a CUDA graph of it has to keep."""
    chain, end = fused_step_config(rows), (rows.optimiser, rows.state, rows.path_CP)
    if chain is not None:
        g_CP, squares, reads = gradients(GradientRequest(rows.added(rows.x_CP), chain.clip is not None))
        ops.update(rows.x_CP, g_CP, lr, chain.clip, chain.decay, *end, squares, clipped)
        return reads
    g_CP, _, reads = gradients(PLAIN_REQUEST)
    direction_CP = apply_transforms(rows.stages, g_CP, rows.x_CP, rows.correct, clipped)
    advance(rows.x_CP, direction_CP, lr, *end)
    return reads


MAX_GPU_CHUNK = 512
"""Clients at once on a GPU: more than fill it gain nothing, and their memory is better left to the
rows."""

MEMORY_FRACTION = 0.4
"""Of the free memory: a captured step keeps memory of its own beside what the first, eager ones
left behind."""

CPU_CHUNK_BYTES = 16 << 20
"""Bytes at once on a CPU: a step goes over its rows several times, and what stays in the cache is
quick."""

CPU_ACTIVATION_BYTES = 4 << 20
"""Bytes of an activation that a CPU's caches hold while the next operation comes."""

ACTIVATIONS_PER_INPUT = 4
"""Activations of a batch in terms of its inputs, roughly; it matters where a model has few
parameters only."""


def max_chunk_size(
    device: torch.device,
    clients: int,
    row_bytes: int,
    batch_bytes: int,
    value_bytes: int,
    attempt: Callable[[int], None],
) -> int:
    """Clients at once; `value_bytes` are those of one client's largest activation, and `attempt`
    takes a step of so many, from which a GPU's need of memory is measured."""
    if device.type != "cuda":
        near = CPU_ACTIVATION_BYTES // max(1, value_bytes)
        return max(1, min(clients, near, CPU_CHUNK_BYTES // (row_bytes + ACTIVATIONS_PER_INPUT * batch_bytes)))
    few = min(clients, 8)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    attempt(few)
    torch.cuda.synchronize(device)
    each = max(1, (torch.cuda.max_memory_allocated(device) - before) // few)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(clients, MAX_GPU_CHUNK, int(MEMORY_FRACTION * free / each)))
