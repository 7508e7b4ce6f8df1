"""The seam between a run and whatever trains its leaves: "train these rows this many steps".

Shape suffixes: N leaves, A leaves that take part, C leaves of a chunk, P parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from stratafl.data.batches import Sampling
from stratafl.engine.spread import Spread
from stratafl.flat import Flat
from stratafl.local import Leaf, Stage, clip, decay
from stratafl.rule import Edge, Proximal

Augment = Callable[[Tensor, int, int | Tensor, int | Tensor], Tensor]
"""(inputs of a batch, seed, client, step) -> inputs: drawn from the client's own stream. Where it can it also takes
the batches of several clients, with an axis of clients in front, and a tensor of their numbers."""


@dataclass(frozen=True)
class Training:
    """What the leaves train, on what, and how: the same for every engine."""

    flat: Flat
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    partition: Sequence[Tensor]
    leaf: Leaf
    """The chain to begin with; an engine's own may be changed between rounds."""
    batch: int | None
    sampling: Sampling
    seed: int
    augment: Augment | None = None
    first: int = 0
    """The first leaf's number in the whole tree, of which these may be a part: a leaf draws by that number."""


class Pull(NamedTuple):
    """A rule's own direction, and the edge it looks at."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    model: Spread
    correction: Spread | None
    rate: Spread

    def edge(self, rows: Callable[[Spread], Tensor]) -> Edge:
        """The edge of the leaves whose rows are asked for."""
        return Edge(rows(self.model), None if self.correction is None else rows(self.correction), rows(self.rate))


@dataclass(frozen=True)
class Anchor:
    """The part of a proximal pull that is alike in every step: -strength * the model the parent gave."""

    strength: float

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g - self.strength * edge.model


def behind_clip(pulls: tuple[Pull, ...], stages: tuple[Stage, ...]) -> tuple[tuple[Pull, ...], tuple[Stage, ...]]:
    """The pulls and the chain to train with, where some pulls ask for their strength * x behind the clip: there it is
    weight decay, and what is left of them is an anchor. A chain with no clip, or nothing that rules add, stays."""
    last = max((place for place, stage in enumerate(stages) if isinstance(stage, clip)), default=None)
    adds = any(not isinstance(stage, clip | decay) for stage in stages)
    rate, kept = 0.0, []
    for pull in pulls:
        if isinstance(pull.local, Proximal) and pull.local.after_clip:
            rate += pull.local.strength
            pull = pull._replace(local=Anchor(pull.local.strength))
        kept.append(pull)
    if last is None or not adds or not rate:
        return pulls, stages
    return tuple(kept), (*stages[: last + 1], decay(rate), *stages[last + 1 :])


class Work(NamedTuple):
    """What the leaves are to do until they next meet their parents."""

    x: Spread
    """Each leaf's model at the start."""
    b: Spread
    corrections: tuple[Spread, ...]
    """Those on each leaf's path to the root, which add up."""
    pulls: tuple[Pull, ...]
    active: list[int]
    """The leaves that take part."""
    step: int
    """How many steps of the run came before."""
    steps: int
    round: int
    """The global round, counted from 0: it sets the learning rate."""


class Engine(Protocol):
    """Trains leaves. All engines give the same result for the same work, up to rounding."""

    leaf: Leaf
    chunk: int | None
    """Clients at once; None where it takes one after another."""

    @property
    def how(self) -> str:
        """Its name, and why it is not the one that was asked for: "loop: the module or loss draws random numbers"."""
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
    def clipped(self) -> int:
        """How many steps a clip has shortened so far."""
        ...

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        """The models and buffers of the leaves that take part, in their order, afterwards."""
        ...

    def gradients(self, work: Work) -> Tensor:
        """The gradient of each of them at its first model and first batch."""
        ...
