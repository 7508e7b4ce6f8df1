"""The seam between a run and whatever trains its leaves: "train these rows this many steps".

Shape suffixes: N leaves, A leaves that take part, C leaves of a chunk, P parameters, B buffer
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""(inputs of a batch, seed, client, step) -> inputs: drawn from the client's own stream. Where it
can it also takes the batches of several clients, with an axis of clients in front, and a tensor of
their numbers. Inputs are a tensor, or a table of tensors where they have names."""


@dataclass(frozen=True)
class ClientTraining:
    """What the leaves train, on what, and how: the same for every engine."""

    flat: FlatModule
    loss: Loss
    supply: SampleSource
    """The samples that `clients` has the numbers of."""
    clients: ClientIndex
    leaf: Leaf
    """The chain to begin with; an engine's own may be changed between rounds."""
    batch: int | None
    sampling: Sampling
    seed: int
    augment: Augment | None = None
    first: int = 0
    """The first leaf's number in the whole tree, of which these may be a part: a leaf draws by that
    number."""

    def samples(self, number: int, step: int, index_B: Tensor) -> Pair:
        """What a leaf, by its number in the whole tree, trains on in a step."""
        inputs, targets = self.supply.batch(index_B, BatchKey(self.seed, number, step))
        return (inputs if self.augment is None else self.augment(inputs, self.seed, number, step)), targets

    def steps(self, leaf: Leaf, client: int, count: int) -> int:
        """A client's own steps, of so many that a schedule counts: these are passes over its data
        where the chain says so."""
        return count if leaf.epochs is None else count * steps_per_epoch(len(self.clients[client]), self.batch)

    def owners(self) -> dict[CodeType, str]:
        """Whose each function is that a user may have written."""
        kind = type(self.flat.module).__name__
        parts = [type(part).forward for part in self.flat.module.modules()]
        named: list[tuple[str, object]] = [(f"model {kind!r}:", forward) for forward in parts]
        named += [("loss", unwrap_loss(self.loss)), ("augment", self.augment), ("learning rate", self.leaf.lr)]
        named += [("stage", stage) for stage in self.leaf.stages]
        named += [("optimiser", self.leaf.optimiser.init), ("optimiser", self.leaf.optimiser.step)]
        codes = [(what, code_object(function)) for what, function in named]
        return {code: f"{what} {code.co_qualname}" for what, code in reversed(codes) if code and _is_users(code)}


def _is_users(code: CodeType) -> bool:
    """Whether code is neither this package's nor torch's: what is written for them may be installed
    as a library."""
    places = PACKAGE, Path(torch.__file__).parent
    return not any(Path(code.co_filename).is_relative_to(place) for place in places)


class LocalRule(NamedTuple):
    """A rule's own direction, and the edge it looks at."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    model: IndexedRows
    correction: IndexedRows | None
    rate: IndexedRows

    def edge(self, rows: Callable[[IndexedRows], Tensor]) -> Edge:
        """The edge of the leaves whose rows are asked for."""
        return Edge(rows(self.model), None if self.correction is None else rows(self.correction), rows(self.rate))


@dataclass(frozen=True)
class Anchor:
    """The part of a proximal pull that is alike in every step: -strength * the model the parent
    gave."""

    strength: float

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g - self.strength * edge.model


def move_decay_behind_clip(
    pulls: tuple[LocalRule, ...], stages: tuple[Stage, ...]
) -> tuple[tuple[LocalRule, ...], tuple[Stage, ...]]:
    """The pulls and the chain to train with, where some pulls ask for their strength * x behind the
    clip: there it is weight decay, and what is left of them is an anchor. A chain with no clip, or
    nothing that rules add, stays."""
    last = max((place for place, stage in enumerate(stages) if reports_clipping(stage)), default=None)
    adds = any(not (reports_clipping(stage) or isinstance(stage, decay)) for stage in stages)
    rate, kept = 0.0, []
    for pull in pulls:
        if isinstance(pull.local, Proximal) and pull.local.after_clip:
            rate += pull.local.strength
            pull = pull._replace(local=Anchor(pull.local.strength))
        kept.append(pull)
    if last is None or not adds or not rate:
        return pulls, stages
    return tuple(kept), (*stages[: last + 1], decay(rate), *stages[last + 1 :])


class TrainRequest(NamedTuple):
    """What the leaves are to do until they next meet their parents."""

    x: IndexedRows
    """Each leaf's model at the start."""
    b: IndexedRows
    corrections: tuple[IndexedRows, ...]
    """The corrections on each leaf's path to the root, which add up."""
    pulls: tuple[LocalRule, ...]
    active: list[int]
    """The leaves that take part."""
    step: int
    """How many steps of the run came before; passes, where the leaf's chain counts these."""
    steps: int
    round: int
    """The global round, counted from 0: it sets the learning rate."""
    optimiser: dict[str, IndexedRows] = {}  # noqa: RUF012 -- never changed
    """The leaves' states of their optimiser, where they are kept."""
    has_path: bool = False
    """Whether the leaves' paths are wanted (see `core.client_update`)."""


class TrainResult(NamedTuple):
    """The leaves that took part, in their order, after their work."""

    x_AP: Tensor
    b_AB: Tensor
    path_AP: Tensor
    """How far plain SGD would have come along the same directions; no columns where it is not
    wanted."""
    optimiser: Rows
    """The states of their optimiser, where they are kept."""

    @staticmethod
    def room(work: TrainRequest) -> TrainResult:
        """Make room for what becomes of the leaves that take part."""
        like, clients = work.x.rows_MP, len(work.active)
        width = like.shape[1]
        return TrainResult(
            like.new_empty(clients, width),
            work.b.some(work.active).clone(),
            like.new_empty(clients, width if work.has_path else 0),
            {name: each.rows_MP.new_empty(clients, each.rows_MP.shape[1]) for name, each in work.optimiser.items()},
        )

    def in_order(self, place_A: np.ndarray) -> TrainResult:
        """The same leaves in another order."""
        on_device_A = to_device(place_A, self.x_AP.device)
        x_AP, b_AB, path_AP = (each.index_select(0, on_device_A) for each in self[:3])
        return TrainResult(
            x_AP, b_AB, path_AP, {name: each.index_select(0, on_device_A) for name, each in self.optimiser.items()}
        )

    @staticmethod
    def joined(parts: Sequence[TrainResult]) -> TrainResult:
        """One after another; states of what the first has any of."""
        x_AP, b_AB, path_AP = (torch.cat(rows) for rows in zip(*(part[:3] for part in parts), strict=True))
        kept = {name: torch.cat([part.optimiser[name] for part in parts]) for name in parts[0].optimiser}
        return TrainResult(x_AP, b_AB, path_AP, kept)


class Engine(Protocol):
    """Trains leaves. All engines give the same result for the same work, up to rounding."""

    training: ClientTraining
    leaf: Leaf
    chunk_size: int | None
    """Clients at once; None where it takes one after another."""

    @property
    def how(self) -> str:
        """The engine's name, and why it is not the one that was asked for: "loop: the module or
        loss draws random numbers"."""
        ...

    @property
    def precision(self) -> str:
        """What products are computed in."""
        ...

    @property
    def name(self) -> str:
        """What trains: "loop", "stacked" or "vmap"."""
        ...

    @property
    def clipped_steps(self) -> int:
        """How many steps a clip has shortened so far."""
        ...

    def train(self, work: TrainRequest) -> TrainResult:
        """What becomes of the leaves that take part."""
        ...

    def gradients(self, work: TrainRequest) -> Tensor:
        """The gradient of each of them at its first model and first batch."""
        ...
