"""Whole trees as processes on loopback, with TLS and keys on: they end where the simulation ends, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from benchmarks.small_tree import small_tree
from stratafl.deploy import whole
from stratafl.deploy.assemble import study_of, training_of
from stratafl.deploy.durable import DIGEST, STATE
from stratafl.deploy.node import Kept
from stratafl.deploy.provision import Topology, provision
from stratafl.deploy.site import Site, tree_of
from stratafl.deploy.wire import decode
from stratafl.store import files
from stratafl.store.lock import is_held

pytestmark = pytest.mark.deploy
LIMIT = 600
"""Seconds for one run, on a machine that is busy with other things."""


class Run:
    """The sites of one tree, and the processes that run them."""

    def __init__(self, folder: Path, port: int, *, deadline: Any = 0, own: str = "", **settings: Any):
        """`own`: a leaf whose part of the data lies at its own host."""
        self.out, self.config = folder / "sites", small_tree(folder, **settings)
        data = f'[data]\n"{own}" = "{self.keep_data(own, folder)}"\n' if own else ""
        topology = f'config = "run.toml"\nbase_port = {port}\ndeadline = {deadline}\n{data}'
        (folder / "topology.toml").write_text(topology)
        self.folders = provision(Topology.load(folder / "topology.toml"), self.out)
        self.hosts: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}

    def keep_data(self, name: str, folder: Path) -> Path:
        """The leaf's part, as a file beside it."""
        training = training_of(study_of(self.config))
        mine = training.partition[tree_of(self.config).find(name)[1]]
        np.savez(folder / "own.npz", x=training.inputs[mine].numpy(), y=training.targets[mine].numpy())
        return folder / "own.npz"

    def start(self, *names: str, apart: Sequence[Sequence[str]] = ()) -> None:
        """These sites, or all, by one process: a host; `apart`: each of these groups by one of its own."""
        elsewhere = {name for group in apart for name in group}
        names = names or tuple(name for name in self.folders if name not in elsewhere)
        for group in (names, *map(tuple, apart)):
            self.hosts[group] = whole.start(*(self.folders[name] for name in group))

    def kill(self, *names: str) -> None:
        """A host, as a power cut would: it takes its supervisors, and they their processes, with it."""
        folders = [self.folders[name] for name in names]
        os.killpg(self.hosts[names].pid, signal.SIGKILL)
        self.hosts.pop(names).wait()
        self.wait(lambda: not any(is_held(folder) or is_held(folder / "state") for folder in folders))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        path = self.folders["root"] / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Until something holds; until the run is over unless given."""
        give_up = time.monotonic() + LIMIT
        while not (until or self.is_over)():
            assert time.monotonic() < give_up, self.report()
            time.sleep(0.05)

    def is_over(self) -> bool:
        return self.status("root").get("doing") == "done" and not is_held(self.folders["root"])

    def is_inside(self, number: int, name: str = "root") -> bool:
        """Whether a site works on this round or a later one."""
        seen = self.status(name)
        return seen.get("doing") == "round" and seen["round"] >= number

    def status(self, name: str) -> dict[str, Any]:
        try:
            return files.read_json(self.folders[name] / "state" / "status.json")
        except ValueError:
            return {}

    def report(self) -> str:
        return "\n".join(f"{name}: {self.status(name)}" for name in self.folders)

    def difference(self) -> float:
        """From the simulation's final model."""
        wanted = study_of(self.config).simulation.run().module.state_dict()
        found = load_file(self.folders["root"] / "model.safetensors")
        return max(float((found[name] - value).abs().max()) for name, value in wanted.items())

    def missed(self, name: str) -> bool:
        return name in self.rounds[-1]["absent"]

    def assert_corrections_sum_to_zero(self) -> None:
        for name, folder in self.folders.items():
            if not Site.load(folder).is_leaf:
                assert self.correction_sum(name).abs().max() < 1e-4, name

    def accuracy(self) -> float:
        return self.rounds[-1]["metrics"]["accuracy"]

    def correction_sum(self, parent: str) -> torch.Tensor:
        """The weighted sum of what a node's children add to their gradients, as they keep it on their disks."""
        rows, counts = [], []
        for child in Site.load(self.folders[parent]).children:
            data = (self.folders[child] / "state" / STATE).read_bytes()[:-DIGEST].partition(b"\n")[2]
            kept = decode(data, Kept)
            assert kept.above is not None and kept.above.correction is not None and kept.reply is not None
            rows.append(kept.above.correction[0])
            counts.append(kept.reply.samples)
        weights = torch.tensor(counts) / sum(counts)
        return weights @ torch.stack(rows)

    def close(self) -> None:
        whole.stop(self.out)
        for process in self.hosts.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    started: list[Run] = []

    def make(**settings: Any) -> Run:
        # another range of ports for each worker and each run
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Run(folder, 20000 + 1000 * worker + os.getpid() % 10 * 100 + 50 * len(started), **settings))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.mark.parametrize("method", ["mtgc", "hfedavg", "scaffold"])
@pytest.mark.parametrize(("shape", "periods"), [("2x2", [2, 3]), ("2x2x2", [2, 2, 2])], ids=["2x2", "2x2x2"])
def test_the_final_model_is_the_simulation_s(runs: Any, shape: str, periods: list[int], method: str) -> None:
    """One of the leaves has its data beside it."""
    run = runs(shape=shape, periods=periods, method=method, own="1/1" if shape == "2x2" else "1/0/1")
    run.start()
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2]
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6


@pytest.mark.parametrize(
    "names", [["1/0"], ["0"], ["root"], ["0", "0/0", "0/1"]], ids=["leaf", "aggregator", "root", "host of a group"]
)
def test_who_is_killed_inside_a_round_comes_back_and_nothing_is_lost(runs: Any, names: list[str]) -> None:
    """Without a deadline its parent waits for it: the run ends where the undisturbed one does."""
    run = runs(rounds=4)
    run.start(apart=[names])
    run.wait(lambda: run.is_inside(2, names[0] if names[0] == "0" else "root"))
    run.kill(*names)
    run.start(*names)
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4]
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6
    run.assert_corrections_sum_to_zero()
    for name in names:  # its parent did not take it for the one before, still alive
        assert "supernode ended" not in (run.folders[name] / "logs" / "site.log").read_text()


def test_who_is_killed_is_left_out_after_the_deadline(runs: Any) -> None:
    """A leaf and an aggregator, in one run: each is missed, comes back, and the run goes on all the while."""
    run = runs(rounds=16, deadline=[20, 4])
    run.start(apart=[["0/1"], ["1"]])
    for name, inside in (("0/1", 2), ("1", 6)):
        run.wait(lambda: run.is_inside(inside))
        run.kill(name)
        run.wait(lambda: run.missed(name))
        run.start(name)
        run.wait(lambda: not run.missed(name))
    run.wait()
    assert [line["round"] for line in run.rounds] == list(range(1, 17))
    undisturbed = study_of(run.config).simulation.run().history[-1].metrics["accuracy"]
    assert abs(run.accuracy() - undisturbed) < 0.1
    run.assert_corrections_sum_to_zero()


def test_a_leaf_with_another_config_is_refused_by_name_and_the_run_goes_on(runs: Any) -> None:
    """Although its parent waits for ever for whoever belongs to the run."""
    run = runs(rounds=2)
    path = run.folders["1/0"] / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    run.start()
    run.wait()
    assert [(line["round"], set(line["refused"]), line["absent"]) for line in run.rounds] == [
        (1, {"1/0"}, []),
        (2, {"1/0"}, []),
    ]
    said = (run.folders["1"] / "logs" / "node.log").read_text()
    assert "1/0 is refused" in said and "leaf.lr is 0.2 there and 0.1 here" in said
