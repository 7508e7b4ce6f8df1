"""What a run came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from stratafl.base.topology import Tree
from stratafl.core.flat import Flat
from stratafl.core.measure.divergence import diverged
from stratafl.core.measure.record import RoundResult
from stratafl.core.measure.show import card, last_metrics, numbers, plotted, table
from stratafl.core.measure.traffic import Communication


@dataclass(frozen=True)
class Result:
    """A run as it stands: rows are nodes in the tree's order, columns parameters in the module's
    order."""

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
    method: str = ""
    """The rules in a few words."""

    def __repr__(self) -> str:
        told = f"<Result of {self.method or 'a run'} on {self.tree.leaves:,} clients after {len(self.history)} rounds"
        metrics = numbers(last_metrics(self.history))
        return f"{told}: {metrics}>" if metrics else f"{told}>"

    def _repr_html_(self) -> str:
        facts = {"method": self.method, "tree": " > ".join(f"{size:,}" for size in self.tree.sizes)}
        facts |= {"parameters": f"{self.models[0].shape[1]:,}", "rounds": str(len(self.history))}
        if self.diverged is not None:
            facts["diverged"] = f"at round {self.diverged}"
        return card("Result", facts, self.history)

    def frame(self) -> Any:
        """A pandas table with a row per round and a column per value: "round",
        "metrics.accuracy", "drift.1.drift" and so on, as a stored run's `frame` has them."""
        return table([asdict(record) for record in self.history])

    def plot(self, metric: str | None = None, ax: Any = None) -> Any:
        """Draw a metric over the rounds, the accuracy unless one is named, on these axes of
        matplotlib's or on new ones; they are returned, and nothing is shown."""
        return plotted(self.history, metric, ax, self.method)

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
