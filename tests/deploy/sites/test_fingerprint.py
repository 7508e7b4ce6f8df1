"""Real sites in one process, over the real link with a grid in memory: who works with something
else is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr")

import stratafl
from stratafl.config.schema import Config
from stratafl.deploy.flower import inbox, process
from stratafl.deploy.flower.process import GridLink
from stratafl.deploy.protocol.messages import PROTOCOL, Reply
from stratafl.deploy.protocol.wire import encode, receive_reply
from stratafl.deploy.sites.assemble import Assembled, study_of
from stratafl.deploy.sites.fingerprint import differences
from stratafl.deploy.sites.provision import Topology, flower_key, provision

CONFIG = """
[tree]
shape = "{shape}"
weights = "samples"
[model]
name = "mlp"
hidden = [6]
[schedule]
periods = {periods}
[leaf]
lr = 0.3
batch = 20
[run]
rounds = 4
{run}
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


class Tree:
    """A tree's sites, as they are on disk."""

    def __init__(self, folder: Path, shape: str = "3", periods: Sequence[int] = (3,), run: str = ""):
        (folder / "run.toml").write_text(CONFIG.format(shape=shape, periods=list(periods), run=run))
        (folder / "topology.toml").write_text('config = "run.toml"\n')
        self.config = Config.load(folder / "run.toml")
        self.folders = provision(Topology.load(folder / "topology.toml"), folder / "sites")
        self.opened: list[Assembled] = []

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folders[name] / "config.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def open(self, name: str) -> Assembled:
        self.opened.append(Assembled.of(self.folders[name]))
        return self.opened[-1]

    def link(self, here: Assembled, changed: dict[str, dict[str, Any]]) -> GridLink:
        nodes = []
        for child, key in here.child_nodes().items():
            below = self.open(child)
            below.job = dataclasses.replace(below.job, **changed.get(child, {}))
            node = below.leaf() if below.site.is_leaf else below.aggregator(self.link(below, changed))
            nodes.append((flower_key(key), below.sealed(node, lambda: None)))
        grid: Any = Grid(nodes)
        return GridLink(grid, here.job, here.site.level + 1, here.child_keys(), here.child_nodes())

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
        made = study_of(self.config)
        if without is not None:
            mask = np.arange(3) != without
            made.simulation.federation.participation[1] = lambda draw: mask
        wanted = made.simulation.run().module.state_dict()
        found = load_file(self.folders["root"] / "model.safetensors")
        return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As Flower lets an app run, with no pause between two looks for nodes."""
    monkeypatch.setattr(process, "LOOK_AROUND", 0.0)
    before = inbox._identity()
    inbox._become((1, 1, 1))
    yield
    inbox._become(before)


def test_those_who_work_with_the_same_end_where_the_simulation_does(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "2x2", [2, 2])
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [[]] * 4
    assert tree.difference() < 1e-6


def test_a_leaf_with_another_config_is_refused_by_name_and_the_rest_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Tree(tmp_path)
    tree.edit("1", "lr = 0.3", "lr = 0.25")
    tree.edit("1", "rounds = 4", "rounds = 4\nseed = 9")
    tree.run()
    assert [(line["refused"], line["absent"]) for line in tree.rounds] == [(["1"], [])] * 4
    said = [line for line in capsys.readouterr().err.splitlines() if "1 is refused" in line]
    assert len(said) == 1, "it is said once, not in every round"
    assert "leaf.lr is 0.25 there and 0.3 here; run.seed is 9 there and 0 here" in said[0]
    assert tree.difference(without=1) < 1e-6


def test_a_leaf_below_an_aggregator_is_named_to_the_root(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "2x2", [2, 2])
    tree.edit("0/1", "batch = 20", "batch = 10")
    tree.run()
    assert [set(line["refused"]) for line in tree.rounds] == [{"0/1"}] * 4


def test_a_whole_group_with_another_config_is_refused(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "2x2", [2, 2])
    for name in ("0", "0/0", "0/1"):
        tree.edit(name, "lr = 0.3", "lr = 0.1")
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [["0"]] * 4


def test_another_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = Tree(tmp_path)
    here = tree.open("2")
    made_of = {**here.job.made_of, "stratafl": "9.9"}
    tree.close()
    tree.run(**{"2": {"made_of": made_of}})
    assert [line["refused"] for line in tree.rounds] == [["2"]] * 4
    assert f"stratafl is 9.9 there and {stratafl.__version__} here" in capsys.readouterr().err


def test_one_that_speaks_another_protocol_is_told_who_it_is_from(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    here = tree.open("root")
    newer = encode(Reply("job", "1", 3, protocol=PROTOCOL + 1)).replace(b"fingerprint", b"sealedprint")
    reply = receive_reply(newer, here.job, frozenset({"model"}))
    assert (reply.job, reply.site, reply.fingerprint, reply.report) == ("job", "1", "", None)
    assert f"protocol is {PROTOCOL + 1} there and {PROTOCOL} here" in differences(here.job.made_of, reply.made_of)
    tree.close()


def test_one_that_was_put_right_takes_part_again(tmp_path: Path) -> None:
    tree = Tree(tmp_path, run="stop_at = 0.01")  # reached by whatever is evaluated first
    tree.edit("1", "lr = 0.3", "lr = 0.25")
    tree.run()
    tree.edit("1", "lr = 0.25", "lr = 0.3")
    for name in tree.folders:
        tree.edit(name, "stop_at = 0.01", "")
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [["1"], [], [], []]


def test_a_site_s_own_config_is_not_that_of_another_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.edit("2", 'shape = "3"', 'shape = "2"')
    with pytest.raises(stratafl.InvalidInput, match="'2'"):
        tree.open("2")


@pytest.mark.parametrize("run", ["evaluate_every = 3", "stop_at = 0.6", "evaluate_every = 2\nstop_at = 0.4"])
def test_it_is_evaluated_and_stopped_when_the_simulation_is(tmp_path: Path, run: str) -> None:
    tree = Tree(tmp_path, "2x2", [2, 5], run=run)
    tree.run()
    history = study_of(tree.config).simulation.run().history
    assert [line["round"] for line in tree.rounds] == [result.round for result in history]
    for line, result in zip(tree.rounds, history, strict=True):
        assert line["metrics"] == pytest.approx(result.metrics, abs=1e-4)
    assert "stop_at" not in run or len(history) < 4, "the run ends early"
    assert tree.difference() < 1e-6


def test_a_root_that_is_started_again_after_it_reached_its_accuracy_does_no_more(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "2x2", [2, 5], run="stop_at = 0.5")
    tree.run()
    done = len(tree.rounds)
    (tree.folders["root"] / "model.safetensors").unlink()
    tree.run()
    assert len(tree.rounds) == done < 4
    assert tree.difference() < 1e-6
