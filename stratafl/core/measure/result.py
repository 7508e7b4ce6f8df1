"""What a run came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn

from stratafl.communication import Communication
from stratafl.divergence import diverged
from stratafl.flat import Flat
from stratafl.record import RoundResult
from stratafl.tree import Tree


@dataclass(frozen=True)
class Result:
    """A run as it stands: rows are nodes in the tree's order, columns parameters in the module's order."""

    tree: Tree
    module: nn.Module
    """The root's model."""
    models: list[Tensor]
    """Per level, root first: each node's model just before its parent's replaced it."""
    corrections: list[Tensor | None]
    """Per edge level, root first: what each node's subtree adds to its gradients."""
    history: list[RoundResult]
    communication: Communication
    flat: Flat = field(repr=False)
    buffers: list[Tensor] = field(repr=False)

    def model_of(self, name: str) -> nn.Module:
        """A named node's model as a module."""
        level, number = self.tree.find(name)
        return self.flat.build(self.models[level][number], self.buffers[level][number])

    @property
    def refused(self) -> dict[str, int]:
        """How often each node's update was refused."""
        return dict(Counter(name for each in self.history for name in each.refused))

    @property
    def too_large(self) -> dict[str, int]:
        """How often of these because it was finite, but far too large."""
        return dict(Counter(name for each in self.history for name in each.too_large))

    @property
    def diverged(self) -> int | None:
        """The round from which on the test loss is not finite; None where the run lives."""
        return diverged(vars(each) for each in self.history)
