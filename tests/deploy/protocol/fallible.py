"""A tree without processes whose nodes die and come back."""

from __future__ import annotations

from typing import Any

import torch

from stratafl.deploy.protocol.messages import Bundle, Reply
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode
from tests.deploy.trees import Deployed, simulation


class Died(Exception):
    """Stands for a process that ended."""


class Fallible:
    """A node that can be killed before it gets a bundle, or after it saved and before its reply
    leaves."""

    def __init__(self, node: Any):
        self.node, self.when, self.calls = node, None, 0
        self.job = node.job

    def handle(self, bundle: Bundle) -> Reply:
        self.calls += 1
        if self.when == "before":
            raise Died
        reply = self.node.handle(bundle)
        if self.when == "after":
            raise Died
        return reply


class FallibleTree(Deployed):
    """A tree whose nodes keep their state as bytes, and whose links leave out those that died."""

    def __init__(self, sim: Any, **settings: Any):
        super().__init__(sim, wrap=Fallible, **settings)
        self.revive = False
        self.away: set[str] = set()
        """Nodes that were not started yet, or are not to be reached."""
        for link in self.links.values():
            link.ask = self.asking(link)  # type: ignore[method-assign]

    def asking(self, link: Any) -> Any:
        def ask(bundles: dict[str, Bundle], deadline: float | None) -> dict[str, Reply]:
            replies = {}
            for name, bundle in bundles.items():
                if name in self.away:
                    continue
                try:
                    replies[name] = link.children[name].handle(bundle)
                except Died:
                    if self.revive:
                        self.restart(name)
                        replies[name] = link.children[name].handle(bundle)
            return replies

        return ask

    def restart(self, name: str) -> None:
        """A new process that knows only what the last one wrote."""
        level, number = self.job.tree.find(name)
        kept = decode(encode(self.kept[name]), NodeState) if name in self.kept else None
        self.make(level, number, kept)
        if level:
            parent = self.job.tree.names[level - 1][int(self.job.tree.parents[level][number])]
            self.links[parent].children[name] = self.nodes[name]
        if level < self.job.tree.depth:
            self.links[name].ask = self.asking(self.links[name])  # type: ignore[method-assign]

    def die(self, name: str, after: int) -> list[int]:
        """Have a node end after so many saves, and come back; how many are left until then."""
        node = getattr(self.nodes[name], "node", self.nodes[name])
        save, left = node._save, [after]

        def dying(kept: NodeState) -> None:
            save(kept)
            left[0] -= 1
            if left[0] == 0:
                raise Died

        node._save = dying
        self.revive = True
        return left

    def weighted_sum(self, level: int, parent: int) -> torch.Tensor:
        """Of the corrections of a parent's children."""
        children = self.job.children(level - 1, parent)
        weights = self.job.tree.weights[level][children]
        rows = [self.correction(level, child) for child in children]
        return sum(float(w) * row for w, row in zip(weights, rows, strict=True))  # type: ignore[return-value,operator]


def undisturbed(rules: Any = "mtgc", depth: int = 2) -> torch.Tensor:
    return Deployed(simulation(rules, depth)).run().model()
