"""The arrays that go over each edge of a deployed tree are, to the byte, those that `simulate`
accounts for.

Counted on the encoded messages: all bytes of their arrays (a model with its buffers, a rule's note
or message, the corrections from above), and nothing else. Names, numbers, shapes and the seal are
the framing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.deployment.sample_tree import small_tree
from stratafl.cli.main import app
from stratafl.deploy.protocol.messages import Bundle, Reply
from stratafl.deploy.protocol.node import Aggregator, LeafNode
from stratafl.deploy.protocol.wire import array_bytes, decode, encode
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.communication import Communication
from tests.deploy.trees import Deployed, Handler

TREES = {"2x2": [2, 3], "2x2x2": [2, 2, 2]}


@dataclass
class OnTheWire:
    """A node that is spoken to in encoded messages, and what went over the edge to its parent."""

    node: Any
    up: int = 0
    down: int = 0

    def handle(self, bundle: Bundle) -> Reply:
        request = encode(bundle)
        answer = encode(self.node.handle(decode(request, Bundle)))
        self.down += array_bytes(request)
        self.up += array_bytes(answer)
        return decode(answer, Reply)


def on_the_wire(node: Handler) -> OnTheWire:
    assert isinstance(node, LeafNode | Aggregator)
    return OnTheWire(node)


def accounted(experiment: Experiment) -> Communication:
    return reference_simulation(experiment).run().communication


@pytest.mark.parametrize("method", ["mtgc", "hfedavg", "scaffold"])
@pytest.mark.parametrize("shape", TREES)
def test_every_level_and_direction_has_the_simulation_s_bytes(tmp_path: Path, shape: str, method: str) -> None:
    experiment = small_tree(tmp_path, shape=shape, periods=TREES[shape], method=method)
    tree = Deployed(reference_simulation(experiment), by_samples=True, wrap=on_the_wire).run()
    expected = accounted(experiment)
    names = tree.job.tree.names
    for level in range(1, tree.job.tree.depth + 1):
        for number, name in enumerate(names[level]):
            node, total = tree.nodes[name], expected.node(level, number)
            assert (node.up, node.down) == (total.bytes_up, total.bytes_down), name
        assert sum(tree.nodes[name].up for name in names[level]) == expected.level(level).bytes_up > 0
        assert sum(tree.nodes[name].down for name in names[level]) == expected.level(level).bytes_down > 0


def test_of_a_base_with_adapters_only_these_travel(tmp_path: Path) -> None:
    plain = small_tree(tmp_path, hidden=[200])
    lora = {"rank": 2, "alpha": 4, "targets": ["*"]}
    experiment = plain.replace({"model.lora": lora})
    simulation = reference_simulation(experiment)
    adapters = 2 * (64 + 200) + 2 * (200 + 10)
    tree = Deployed(simulation, by_samples=True, wrap=on_the_wire).run()
    expected = accounted(experiment)
    for number, name in enumerate(tree.job.tree.names[2]):
        node, total = tree.nodes[name], expected.node(2, number)
        assert (node.up, node.down) == (total.bytes_up, total.bytes_down), name
        assert node.up == 2 * 2 * 4 * adapters, "two meetings in each of two rounds"
    assert 15 * expected.level(2).bytes_up < accounted(plain).level(2).bytes_up
    assert torch.equal(tree.model(), reference_simulation(experiment).run().models[0][0])


def test_a_correction_from_above_and_a_control_variate_are_seen(tmp_path: Path) -> None:
    """The methods differ by whole models, so that equal accounts are no accident of counting models
    only."""
    methods = ("hfedavg", "mtgc", "scaffold")
    leaves = {method: accounted(small_tree(tmp_path, method=method)).level(2) for method in methods}
    assert leaves["mtgc"].bytes_down > leaves["hfedavg"].bytes_down
    assert leaves["scaffold"].bytes_up == 2 * leaves["hfedavg"].bytes_up


@pytest.mark.deploy
def test_status_of_a_tree_of_processes_shows_the_simulation_s_bytes(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from stratafl.deploy.host import this_machine
    from stratafl.deploy.sites import state_file
    from stratafl.deploy.sites.provision import DeploymentTopology, provision
    from stratafl.deploy.sites.site import Site

    experiment, out = small_tree(tmp_path, hidden=[800]), tmp_path / "sites"
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {27000 + os.getpid() % 100 * 20}\n')
    provision(DeploymentTopology.load(tmp_path / "topology.toml"), out)
    this_machine.run(out, print)
    expected = accounted(experiment)
    shown = CliRunner().invoke(app, ["deploy", "status", "--out", str(out)], env={"COLUMNS": "160"}).output
    for folder in this_machine.sites(out).values():
        site, status = Site.load(folder), state_file.status(folder / "state")
        if site.is_root:
            continue
        total = expected.node(site.level, site.number)
        assert (status["arrays_out"], status["arrays_in"]) == (total.bytes_up, total.bytes_down), site.name
        assert str(status["arrays_in"]) in shown and str(status["bytes_in"]) in shown
        framing = status["bytes_in"] + status["bytes_out"] - total.bytes
        print(f"{site.name}: framing adds {framing} bytes, {100 * framing / total.bytes:.3f} %")
        assert 0 < framing < 0.01 * total.bytes, site.name
