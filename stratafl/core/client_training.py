"""Interface between a run and the engine that trains its clients.

A run asks an engine to train these clients from these rows for so many steps, and gets rows back.

Shape suffixes: N clients, A clients that take part, C clients of a chunk, P parameters, B buffer
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.tracebacks import PACKAGE, code_object
from stratafl.core.client_update import Leaf, Stage, decay, reports_clipping
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import Loss, unwrap_loss
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal, Rows
from stratafl.data.batches import Sampling, steps_per_epoch
from stratafl.data.dataset import BatchKey, ClientIndex, SampleSource
from stratafl.data.inputs import Pair

Augment = Callable[[Any, int, int | Tensor, int | Tensor], Any]
"""(inputs of a batch, seed, client, step) -> inputs, drawn from the client's own random stream.
Where it can it also takes the batches of several clients, with an axis of clients in front, and a
tensor of their numbers. Inputs are a tensor, or a table of tensors where they have names."""


@dataclass(frozen=True, kw_only=True)
class ClientTraining:
    """Model, data and settings of the clients' training: the same for every engine."""

    flat: FlatModule
    loss: Loss
    samples: SampleSource
    clients: ClientIndex
    """Each client's sample numbers in `samples`."""
    client_update: Leaf
    """The chain at the beginning; an engine's own may be changed between rounds."""
    batch_size: int | None
    """Samples per step; None for all of a client's."""
    sampling: Sampling
    seed: int
    augment: Augment | None = None
    first_client: int = 0
    """Number of the first client in the whole tree, of which these may be a part: random streams
    depend on that number."""

    def batch(self, client: int, step: int, index_B: Tensor) -> Pair:
        """The batch of a client, by its number in the whole tree, in a step."""
        inputs, targets = self.samples.batch(index_B, BatchKey(self.seed, client, step))
        return (inputs if self.augment is None else self.augment(inputs, self.seed, client, step)), targets

    def steps(self, client_update: Leaf, client: int, count: int) -> int:
        """A client's own number of steps for a number of a schedule's, which counts passes over the
        client's data where the chain has `epochs`."""
        if client_update.epochs is None:
            return count
        return count * steps_per_epoch(len(self.clients[client]), self.batch_size)

    def function_names(self) -> dict[CodeType, str]:
        """Names for errors, by code object, of the functions that a user may have written."""
        kind = type(self.flat.module).__name__
        parts = [type(part).forward for part in self.flat.module.modules()]
        functions: list[tuple[str, object]] = [(f"model {kind!r}:", forward) for forward in parts]
        functions += [("loss", unwrap_loss(self.loss)), ("augment", self.augment)]
        functions += [("learning rate", self.client_update.lr)]
        functions += [("stage", stage) for stage in self.client_update.stages]
        optimizer = self.client_update.optimiser
        functions += [("optimiser", optimizer.init), ("optimiser", optimizer.step)]
        codes = [(role, code_object(function)) for role, function in functions]
        return {code: f"{role} {code.co_qualname}" for role, code in reversed(codes) if code and _is_users(code)}


def _is_users(code: CodeType) -> bool:
    """Whether code is neither this package's nor torch's; a user's may be installed as a
    library."""
    folders = PACKAGE, Path(torch.__file__).parent
    return not any(Path(code.co_filename).is_relative_to(folder) for folder in folders)


class LocalRule(NamedTuple):
    """A rule's `local` with the edge that it is called with."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    model: IndexedRows
    correction: IndexedRows | None
    lr_sum: IndexedRows

    def edge(self, rows: Callable[[IndexedRows], Tensor]) -> Edge:
        """The edge of the clients whose rows the function selects."""
        return Edge(rows(self.model), None if self.correction is None else rows(self.correction), rows(self.lr_sum))


@dataclass(frozen=True)
class ProximalOffset:
    """The constant part of a proximal term, -strength * (the model that the parent gave)."""

    strength: float

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g - self.strength * edge.model


def move_decay_behind_clip(
    local_rules: tuple[LocalRule, ...], stages: tuple[Stage, ...]
) -> tuple[tuple[LocalRule, ...], tuple[Stage, ...]]:
    """Add the strength * x of proximal terms that ask for it behind the clip, as weight decay.

    The constant part of these terms stays where it is. A chain without a clip, or without a stage
    that adds the rules' corrections, is not changed.
    """
    last_clip = max((place for place, stage in enumerate(stages) if reports_clipping(stage)), default=None)
    adds_corrections = any(not (reports_clipping(stage) or isinstance(stage, decay)) for stage in stages)
    rate, rest = 0.0, []
    for local_rule in local_rules:
        if isinstance(local_rule.local, Proximal) and local_rule.local.after_clip:
            rate += local_rule.local.strength
            local_rule = local_rule._replace(local=ProximalOffset(local_rule.local.strength))
        rest.append(local_rule)
    if last_clip is None or not adds_corrections or not rate:
        return local_rules, stages
    return tuple(rest), (*stages[: last_clip + 1], decay(rate), *stages[last_clip + 1 :])


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """The training that clients do until the next synchronisation."""

    model: IndexedRows
    """Each client's model at the start."""
    buffers: IndexedRows
    corrections: tuple[IndexedRows, ...] = ()
    """The corrections on each client's path to the root, which are added up."""
    local_rules: tuple[LocalRule, ...] = ()
    clients: list[int]
    """Clients that take part."""
    first_step: int = 0
    """Number of steps of the run before these; passes, where the clients' chain counts passes."""
    steps: int = 1
    round: int = 0
    """Global round, counted from 0: it sets the learning rate."""
    client_rows: dict[str, IndexedRows] = field(default_factory=dict)
    """Each client's optimizer state, where it is kept, and local parameters."""
    wants_sgd_path: bool = False
    """Whether the result is to have SGD paths (see `core.client_update`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainResult:
    """Rows of the clients that took part, in their order, after their training."""

    model_AP: Tensor
    buffers_AB: Tensor
    path_AP: Tensor
    """Displacement of plain SGD along the same directions; no columns where it was not asked
    for."""
    client_rows: Rows
    """Optimizer states, where they are kept, and local parameters."""

    @staticmethod
    def empty_for(request: TrainRequest) -> TrainResult:
        """Allocate the rows for the result of a request."""
        rows, clients = request.model.rows_MP, len(request.clients)
        width = rows.shape[1]
        return TrainResult(
            model_AP=rows.new_empty(clients, width),
            buffers_AB=request.buffers.take(request.clients).clone(),
            path_AP=rows.new_empty(clients, width if request.wants_sgd_path else 0),
            client_rows={
                name: indexed.rows_MP.new_empty(clients, indexed.rows_MP.shape[1])
                for name, indexed in request.client_rows.items()
            },
        )

    def reorder(self, order_A: np.ndarray) -> TrainResult:
        """The same clients in another order."""
        device_order_A = to_device(order_A, self.model_AP.device)
        return TrainResult(
            model_AP=self.model_AP.index_select(0, device_order_A),
            buffers_AB=self.buffers_AB.index_select(0, device_order_A),
            path_AP=self.path_AP.index_select(0, device_order_A),
            client_rows={name: rows.index_select(0, device_order_A) for name, rows in self.client_rows.items()},
        )

    @staticmethod
    def concatenate(parts: Sequence[TrainResult]) -> TrainResult:
        """The clients of all parts; they keep the rows that the first part has."""
        return TrainResult(
            model_AP=torch.cat([part.model_AP for part in parts]),
            buffers_AB=torch.cat([part.buffers_AB for part in parts]),
            path_AP=torch.cat([part.path_AP for part in parts]),
            client_rows={name: torch.cat([part.client_rows[name] for part in parts]) for name in parts[0].client_rows},
        )


class Engine(Protocol):
    """Trains clients. All engines give the same result for the same request, up to rounding."""

    training: ClientTraining
    leaf: Leaf
    chunk_size: int | None
    """Number of clients trained at once; None where they are trained one after another."""

    @property
    def how(self) -> str:
        """The engine's name, and why it is not the one that was asked for: "loop: the module or
        loss draws random numbers"."""
        ...

    @property
    def precision(self) -> str:
        """Type of the products in training."""
        ...

    @property
    def name(self) -> str:
        """The engine that trains: "loop", "stacked" or "vmap"."""
        ...

    @property
    def clipped_steps(self) -> int:
        """Number of steps that a clip has shortened so far."""
        ...

    def train(self, request: TrainRequest) -> TrainResult:
        """Train the clients that take part."""
        ...

    def gradients(self, request: TrainRequest) -> Tensor:
        """The gradient of each client that takes part, at its first model and first batch."""
        ...
