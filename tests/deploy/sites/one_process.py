"""Real sites in one process, over the real link with a grid in memory."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.torch import load_file

from stratafl.deploy.flower import inbox, process
from stratafl.deploy.flower.process import GridLink
from stratafl.deploy.protocol.node import Aggregator, LeafNode, NodeState
from stratafl.deploy.sites.assemble import Assembled, reference_simulation
from stratafl.deploy.sites.provision import DeploymentTopology, flower_key, provision
from stratafl.experiment.experiment import Experiment
from tests.deploy.balance import assert_balanced

CONFIG = """
rounds = 4
{options}
[tree]
shape = "{shape}"
weights = "samples"
[model]
name = "mlp"
hidden = [{hidden}]
[schedule]
periods = {periods}
[client]
lr = 0.3
batch_size = 20
"""


class Grid:
    """Hands every message to a child's own process, which is this one."""

    def __init__(self, nodes: Sequence[tuple[bytes, Any]]):
        self._keys, self._handlers = [key for key, _ in nodes], [handle for _, handle in nodes]
        self._replies: dict[str, bytes] = {}

    def get_nodes(self) -> list[SimpleNamespace]:
        numbers = range(len(self._keys))
        return [
            SimpleNamespace(public_key=self._keys[i], node_id=i, status="online", last_activated_at="then")
            for i in numbers
        ]

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        (message,) = messages
        name = str(len(self._replies))
        request = message.content[inbox.RECORD]["data"]
        self._replies[name] = self._handlers[message.metadata.dst_node_id](request)
        return [name]

    def look(self, names: Sequence[str]) -> list[tuple[str, SimpleNamespace]]:
        return [
            (
                name,
                SimpleNamespace(
                    has_error=lambda: False, content={inbox.RECORD: {"refused": False, "data": self._replies[name]}}
                ),
            )
            for name in names
        ]

    def withdraw(self, names: Sequence[str]) -> None: ...

    def hurry(self, until: float) -> None: ...


class OneProcess:
    """A tree's sites, as they are on disk."""

    def __init__(
        self, folder: Path, shape: str = "3", periods: Sequence[int] = (3,), options: str = "", hidden: int = 6
    ):
        config = CONFIG.format(shape=shape, periods=list(periods), options=options, hidden=hidden)
        (folder / "run.toml").write_text(config)
        (folder / "topology.toml").write_text('config = "run.toml"\n')
        self.experiment = Experiment.from_toml(folder / "run.toml")
        self.folders = provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
        self.opened: list[Assembled] = []

    @staticmethod
    def begun(folder: Path) -> OneProcess:
        """A run of which two of four rounds are done, as the first version of stratafl with a
        deployment left it."""
        tree, stored = OneProcess(folder, "2x2", [2, 2], hidden=2), Path(__file__).parent / "first_format"
        for site in tree.folders.values():
            shutil.copytree(stored / site.name, site / "state")
            shutil.copyfile(stored / "config.toml", site / "config.toml")
            (site / "state" / "site.json").replace(site / "site.json")
            for name in ("topology.json", "rounds.jsonl"):
                if (site / "state" / name).exists():
                    (site / "state" / name).replace(site / name)
        return tree

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folders[name] / "config.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def open(self, name: str) -> Assembled:
        self.opened.append(Assembled.of(self.folders[name]))
        return self.opened[-1]

    def link(self, here: Assembled, changed: dict[str, dict[str, Any]]) -> GridLink:
        nodes, children = [], {}
        for child, key in here.child_nodes().items():
            below = self.open(child)
            below.job = dataclasses.replace(below.job, **changed.get(child, {}))
            node = below.leaf() if below.site.is_leaf else below.aggregator(self.link(below, changed))
            nodes.append((flower_key(key), below.sealed(node, lambda: None)))
            children[child] = node
        self.watch(here, children)
        grid: Any = Grid(nodes)
        return GridLink(grid, here.job, here.site.level + 1, here.child_keys(), here.child_nodes())

    def watch(self, here: Assembled, children: dict[str, LeafNode | Aggregator]) -> None:
        """Hold every save of a parent against what corrections rest on."""
        save = here._save

        def saving(kept: NodeState) -> None:
            save(kept)
            if kept.below is not None:
                states = {name: child._kept for name, child in children.items()}
                assert_balanced(here.job, here.site.level, here.site.number, kept.below, states)

        here._save = saving  # type: ignore[method-assign]

    def run(self, **changed: dict[str, Any]) -> None:
        here = self.open("root")
        process._lead(here, self.link(here, changed))
        self.close()

    def close(self) -> None:
        while self.opened:
            self.opened.pop().durable.close()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folders["root"] / "rounds.jsonl").read_text().splitlines()]

    def difference(self, without: int | None = None) -> float:
        """From the simulation's, in which a leaf may have nothing to say."""
        made = reference_simulation(self.experiment)
        if without is not None:
            mask = np.arange(3) != without
            edges = made.federation.edges
            edges[1] = replace(edges[1], participation=lambda draw: mask)
        wanted = made.run().module.state_dict()
        found = load_file(self.folders["root"] / "model.safetensors")
        return max(float((found[name] - value).abs().max()) for name, value in wanted.items())
