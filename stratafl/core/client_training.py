"""Interface between a run and the engine that trains its clients: requests and results.

Shape suffixes: N clients, A clients that take part, P parameters, B buffer values.
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
from stratafl.core.client_update import ClientUpdate, GradientTransform, decay, reports_clipping
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import Loss, unwrap_loss
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal, Rows
from stratafl.data.batches import Sampling, steps_per_epoch
from stratafl.data.dataset import BatchKey, ClientIndex, SampleSource
from stratafl.data.inputs import Pair

Augment = Callable[[Any, int, int | Tensor, int | Tensor], Any]
"""(inputs of a batch, seed, client, step) -> augmented inputs, drawn from the client's own random
stream. It may also take the batches of several clients, with a leading axis of clients, and a
tensor of their numbers. Inputs are a tensor, or a table of named tensors."""


@dataclass(frozen=True, kw_only=True)
class ClientTraining:
    """Model, data and settings of the clients' training, the same for every engine."""

    flat: FlatModule
    loss: Loss
    samples: SampleSource
    clients: ClientIndex
    """Sample numbers in `samples` of each client."""
    client_update: ClientUpdate
    """Initial settings of the clients' update; an engine's own may be changed between rounds."""
    batch_size: int | None
    """Samples per step; None for all samples of a client."""
    sampling: Sampling
    seed: int
    augment: Augment | None = None
    first_client: int = 0
    """Number in the whole tree of the first of these clients, which may be a part of it; random
    streams depend on it."""

    def batch(self, client: int, step: int, index_B: Tensor) -> Pair:
        """Inputs and targets of a step; `client` is a number in the whole tree."""
        inputs, targets = self.samples.batch(index_B, BatchKey(self.seed, client, step))
        return (inputs if self.augment is None else self.augment(inputs, self.seed, client, step)), targets

    def steps(self, client_update: ClientUpdate, client: int, count: int) -> int:
        """Number of steps of a client for a schedule's count of steps, or of passes if the update
        has `epochs`."""
        if client_update.epochs is None:
            return count
        return count * steps_per_epoch(len(self.clients[client]), self.batch_size)

    def function_names(self) -> dict[CodeType, str]:
        """Names, for errors, of the functions that a user wrote, by their code objects."""
        model, update = f"model {type(self.flat.module).__name__!r}:", self.client_update
        functions: list[tuple[str, object]] = [
            *((model, type(part).forward) for part in self.flat.module.modules()),
            *(("loss", unwrap_loss(self.loss)), ("augment", self.augment), ("learning rate", update.lr)),
            *(("transform", transform) for transform in update.transforms),
            *(("optimizer", update.optimizer.init), ("optimizer", update.optimizer.step)),
        ]
        codes = [(role, code_object(function)) for role, function in functions]
        return {code: f"{role} {code.co_qualname}" for role, code in reversed(codes) if code and _is_user_code(code)}


def _is_user_code(code: CodeType) -> bool:
    """Whether code is neither this package's nor torch's; users may install theirs as a library."""
    folders = PACKAGE, Path(torch.__file__).parent
    return not any(Path(code.co_filename).is_relative_to(folder) for folder in folders)


class LocalRule(NamedTuple):
    """A rule's `local` and the rows of the edge that it is called with."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    model: IndexedRows
    correction: IndexedRows | None
    lr_sum: IndexedRows
    """Sum of the learning rates since the child last synchronised, `Edge.rate`."""

    def edge(self, rows: Callable[[IndexedRows], Tensor]) -> Edge:
        """The edge of some clients, whose rows the function selects."""
        return Edge(rows(self.model), None if self.correction is None else rows(self.correction), rows(self.lr_sum))


@dataclass(frozen=True)
class ProximalOffset:
    """Constant part of a proximal term, -strength * (the model that the parent sent)."""

    strength: float

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g - self.strength * edge.model


def split_proximal_behind_clip(
    local_rules: tuple[LocalRule, ...], transforms: tuple[GradientTransform, ...]
) -> tuple[tuple[LocalRule, ...], tuple[GradientTransform, ...]]:
    """Replace proximal terms with `after_clip` by their constant part and weight decay behind the
    last clip.

    Transforms without a clip, or without a transform that adds the rules' corrections, are not
    changed.
    """
    last_clip = max(
        (position for position, transform in enumerate(transforms) if reports_clipping(transform)), default=None
    )
    # every transform but clips and decay may add the corrections and the rules' local terms
    adds_corrections = any(
        not (reports_clipping(transform) or isinstance(transform, decay)) for transform in transforms
    )
    rate, changed_rules = 0.0, []
    for local_rule in local_rules:
        if isinstance(local_rule.local, Proximal) and local_rule.local.after_clip:
            rate += local_rule.local.strength
            local_rule = local_rule._replace(local=ProximalOffset(local_rule.local.strength))
        changed_rules.append(local_rule)
    if last_clip is None or not adds_corrections or not rate:
        return local_rules, transforms
    return tuple(changed_rules), (*transforms[: last_clip + 1], decay(rate), *transforms[last_clip + 1 :])


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """Local training of clients until the next synchronisation."""

    model: IndexedRows
    """Models at the start."""
    buffers: IndexedRows
    corrections: tuple[IndexedRows, ...] = ()
    """Corrections of the edge levels, whose sum is added to the clients' gradients."""
    local_rules: tuple[LocalRule, ...] = ()
    clients: list[int]
    """Clients that take part."""
    first_step: int = 0
    """Number of earlier steps of the run; of passes, if the clients' update has `epochs`."""
    steps: int = 1
    """Local steps; passes, if the clients' update has `epochs`."""
    round: int = 0
    """Global round, counted from 0, which determines the learning rate."""
    client_rows: dict[str, IndexedRows] = field(default_factory=dict)
    """Optimizer states, if they are kept, and local parameters."""
    wants_sgd_path: bool = False
    """Whether the result has SGD paths (see `core.rule.SgdPath`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainResult:
    """Rows after training, of the clients in the order of the request."""

    model_AP: Tensor
    buffers_AB: Tensor
    path_AP: Tensor
    """Displacement of plain SGD along the same directions; no columns if it was not requested."""
    client_rows: Rows
    """Optimizer states, if they are kept, and local parameters."""

    @staticmethod
    def empty_for(request: TrainRequest) -> TrainResult:
        """Allocate the rows for the result of a request; buffers begin as the request's."""
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
        return TrainResult._combine([self], lambda rows: rows[0].index_select(0, device_order_A))

    @staticmethod
    def concatenate(parts: Sequence[TrainResult]) -> TrainResult:
        """The clients of all parts; their `client_rows` are those that the first part has."""
        return TrainResult._combine(parts, torch.cat)

    @staticmethod
    def _combine(parts: Sequence[TrainResult], function: Callable[[list[Tensor]], Tensor]) -> TrainResult:
        return TrainResult(
            model_AP=function([part.model_AP for part in parts]),
            buffers_AB=function([part.buffers_AB for part in parts]),
            path_AP=function([part.path_AP for part in parts]),
            client_rows={name: function([part.client_rows[name] for part in parts]) for name in parts[0].client_rows},
        )


class Engine(Protocol):
    """Trainer of clients. All engines return the same result for a request, up to rounding."""

    training: ClientTraining
    client_update: ClientUpdate
    chunk_size: int | None
    """Number of clients trained at once; None if they are trained one after another."""

    @property
    def how(self) -> str:
        """Name of the engine, with the reason if it is not the requested one: "loop: the module or
        loss draws random numbers"."""
        ...

    @property
    def precision(self) -> str:
        """Type of the products in training."""
        ...

    @property
    def name(self) -> str:
        """Name of the engine: "loop", "stacked" or "vmap"."""
        ...

    @property
    def clipped_steps(self) -> int:
        """Number of clients' steps so far whose direction a transform shortened."""
        ...

    def train(self, request: TrainRequest) -> TrainResult:
        """Train the clients that take part."""
        ...

    def gradients(self, request: TrainRequest) -> Tensor:
        """Gradient of each client that takes part, at its model and first batch."""
        ...
