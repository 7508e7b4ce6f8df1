"""The seam between a run and whatever trains its leaves: "train these rows this many steps".

Shape suffixes: N leaves, P parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from stratafl.local import Leaf
from stratafl.rule import Edge

Augment = Callable[[Tensor, int, int | Tensor, int | Tensor], Tensor]
"""(inputs of a batch, seed, client, step) -> inputs: drawn from the client's own stream. Where it can it also takes
the batches of several clients, with an axis of clients in front, and a tensor of their numbers."""


class Pull(NamedTuple):
    """A rule's own direction and the edge it looks at, one row per leaf."""

    local: Callable[[Tensor, Tensor, Edge], Tensor]
    edge: Edge


class Work(NamedTuple):
    """What the leaves are to do until they next meet their parents."""

    x_NP: Tensor
    """Each leaf's model at the start."""
    b_NB: Tensor
    correction_NP: Tensor | None
    """The sum of the corrections on each leaf's path to the root."""
    pulls: tuple[Pull, ...]
    active: list[int]
    """The leaves that take part."""
    step: int
    """How many steps of the run came before."""
    steps: int
    round: int
    """The global round, counted from 0: it sets the learning rate."""

    def correct(self, leaf: int, x_1P: Tensor, direction_1P: Tensor) -> Tensor:
        """The direction of one leaf with everything the rules add."""
        if self.correction_NP is not None:
            direction_1P = direction_1P + self.correction_NP[leaf]
        for local, edge in self.pulls:
            direction_1P = local(x_1P, direction_1P, edge.each(lambda rows: rows[leaf : leaf + 1]))
        return direction_1P


def looking(x_NP: Tensor, b_NB: Tensor) -> Work:
    """All leaves at these models: work for a look at their gradients, not for training."""
    return Work(x_NP, b_NB, None, (), list(range(len(x_NP))), step=0, steps=1, round=0)


class Engine(Protocol):
    """Trains leaves. All engines give the same result for the same work, up to rounding."""

    leaf: Leaf

    @property
    def clipped(self) -> int | None:
        """How many steps a clip has shortened so far; None where the engine does not count them."""
        ...

    def train(self, work: Work) -> tuple[Tensor, Tensor]:
        """The leaves' models and buffers afterwards; rows of inactive leaves are as they were given."""
        ...

    def gradients(self, work: Work) -> Tensor:
        """The gradient of each active leaf at its first model and first batch, zero for the others."""
        ...
