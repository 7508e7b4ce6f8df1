"""A deployed tree without processes, set up from a simulation so that both do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from stratafl import Simulation
from stratafl.core.channel import Channels
from stratafl.deploy.protocol.job import Job, Patience
from stratafl.deploy.protocol.messages import Bundle, Reply
from stratafl.deploy.protocol.node import Aggregator, LeafNode, NodeState, Root
from stratafl.engine.loop import LoopEngine
from stratafl.federation.local_parameters import ClientTrainer
from tests.deploy.balance import assert_balanced
from tests.flat import simulate

SHAPES: dict[int, Any] = {1: 3, 2: [2, 3], 3: [[2, 1], [1, 2]]}
PERIODS = {1: [2], 2: [2, 2], 3: [2, 3, 2]}
ROUNDS = 3
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def normed() -> nn.Module:
    """A model with a batch norm, which may stay with the leaves."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def simulation(rules: Any, depth: int, huge: dict[int, float] | None = None, **settings: Any) -> Simulation:
    leaves = {1: 3, 2: 5, 3: 6}[depth]
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(leaves * 7, 4, generator=random)
    targets = (inputs @ torch.randn(4, 3, generator=random)).argmax(dim=1)
    parts = [np.arange(leaf * 7, leaf * 7 + 4 + leaf % 3) for leaf in range(leaves)]
    for leaf, size in (huge or {}).items():
        inputs[parts[leaf]] = size
    given = {"weights": "samples", "seed": 4, "batch": 3, "periods": PERIODS[depth], "rounds": ROUNDS, **settings}
    model = given.pop("model", lambda: nn.Linear(4, 3))
    return simulate(model, (inputs, targets), parts, SHAPES[depth], rules, engine="loop", **given)


class Handler(Protocol):
    """A node as its parent knows it."""

    def handle(self, bundle: Bundle) -> Reply: ...


class MemoryLink:
    """Hands every bundle to the child of that name, one child after another."""

    def __init__(self, children: Mapping[str, Handler]):
        self.children = dict(children)

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply]:
        return {name: self.children[name].handle(bundle) for name, bundle in bundles.items() if name in self.children}


class Deployed:
    """Every node of a tree, and what each last saved."""

    def __init__(
        self,
        sim: Simulation,
        patience: Patience | None = None,
        by_samples: bool = False,
        update_limit: float | None = None,
        update_factor: Any = None,
        wrap: Callable[[Handler], Handler] = lambda node: node,
        channels: tuple[Channels, ...] = (),
        undeclared: Sequence[int] = (),
    ):
        """`undeclared`: leaves whose samples nobody knows before they say so."""
        federation = sim.federation
        assert isinstance(sim.engine, LoopEngine)
        self.parts = sim.engine.training.clients
        tree, flat = federation.tree, sim.flat
        self.job = Job(
            name="test",
            tree=tree,
            rules=tuple(federation.rules),
            schedule=sim.schedule,
            participation=tuple(edge.participation for edge in federation.edges.values()),
            seed=federation.edges[1].seed,
            rounds=sim.rounds,
            parameters=sim.home.parameters.shared_width,
            buffers=sim.home.buffers.shared_width,
            dtype=flat.dtype,
            by_samples=by_samples,
            patience=(patience or Patience(),) * tree.depth,
            update_limit=update_limit,
            update_factor=update_factor,
            leaf=sim.engine.client_update,
            samples=tuple(0 if leaf in undeclared else len(part) for leaf, part in enumerate(self.parts)),
            channels=channels,
        )
        at_home = {
            name: rows[:1] for name, rows in federation.levels[-1].client_rows.items() if name.startswith("local.")
        }
        self.trainer, self.wrap = ClientTrainer(sim.engine, sim.home, at_home), wrap
        self.counts = [len(part) for part in self.parts]
        """The samples that leaves say they have."""
        self.kept: dict[str, NodeState] = {}
        # children compare with what a channel to them left of the mean, and no longer with the mean
        self.is_checked = all(each.down == Channels().down for each in channels)
        """Whether every family must be in balance whenever a parent saves."""
        self.links: dict[str, MemoryLink] = {}
        self.nodes: dict[str, Any] = {}
        self.start = federation.levels[0].model[0], federation.buffers(0)[0]
        for level in range(tree.depth, -1, -1):
            for number in range(tree.sizes[level]):
                self.make(level, number)

    def make(self, level: int, number: int, kept: NodeState | None = None) -> None:
        tree, name = self.job.tree, self.job.tree.names[level][number]

        def save(state: NodeState) -> None:
            self.kept[name] = state
            if state.below is not None and self.is_checked:
                assert_balanced(self.job, level, number, state.below, self.kept)

        if level == tree.depth:
            self.nodes[name] = self.wrap(LeafNode(self.job, number, self.trainer, self.counts[number], save, kept))
            return
        below = [tree.names[level + 1][child] for child in self.job.children(level, number)]
        self.links[name] = MemoryLink({child: self.nodes[child] for child in below})
        if level == 0:
            self.nodes[name] = Root(self.job, *self.start, self.links[name], save, kept)
        else:
            self.nodes[name] = self.wrap(Aggregator(self.job, level, number, self.links[name], save, kept))

    @property
    def root(self) -> Root:
        return self.nodes["root"]

    def run(self) -> Deployed:
        self.root.greet()
        while self.root.round < self.job.rounds:
            self.root.one_round()
        self.root.end()
        return self

    def model(self) -> torch.Tensor:
        return self.root.down.now.held[0]

    def own(self, leaf: str) -> dict[str, torch.Tensor]:
        """What a leaf keeps to itself, where every report counted, the last one, too, of which it
        may not have been told yet; before its first round, what it begins with."""
        above, chain = self.kept[leaf].above, self.trainer.engine.client_update
        assert above is not None
        first = chain.optimizer.init(self.start[0][None]) if chain.keeps_optimizer_state else {}
        return (above.optimiser if above.sent is None else above.sent.optimiser) or {
            **first,
            **self.trainer.initial_local,
        }

    def correction(self, level: int, number: int) -> torch.Tensor | None:
        above = self.kept[self.job.tree.names[level][number]].above
        assert above is not None
        return None if above.correction is None else above.correction[0]

    def traffic(self, level: int, number: int) -> tuple[int, int, int, int]:
        tree = self.job.tree
        parent = int(tree.parents[level][number])
        below = self.kept[tree.names[level - 1][parent]].below
        assert below is not None
        account = below.children[self.job.children(level - 1, parent).index(number)].account
        return account.messages_up, account.messages_down, account.bytes_up, account.bytes_down


class Written:
    """Stands where a node's disk is."""

    def show(self, **facts: object) -> None:
        self.facts = facts


def assert_agrees(deployed: Deployed, sim: Simulation) -> None:
    """The tree ended where the simulation did, and sent as much over every edge."""
    result = sim.result()
    torch.testing.assert_close(deployed.model(), sim.home.shared(result.models[0])[0], **TOLERANCE)
    tree = deployed.job.tree
    for level in range(1, tree.depth + 1):
        for number in range(tree.sizes[level]):
            assert deployed.traffic(level, number) == astuple(result.communication.node(level, number))
