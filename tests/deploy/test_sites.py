"""Whole trees as processes on loopback, with TLS and keys on: they end where the simulation ends, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from stratafl.config import Config
from stratafl.deploy import whole
from stratafl.deploy.assemble import study_of
from stratafl.deploy.provision import Topology, provision
from stratafl.deploy.wire import decode
from stratafl.store import files

pytestmark = pytest.mark.deploy
LIMIT = 600
"""Seconds for one run, on a machine that is busy with other things."""
CONFIG = """
[tree]
shape = "{shape}"
weights = "samples"
[data]
name = "digits"
[model]
name = "mlp"
hidden = [16]
[method]
name = "{method}"
[schedule]
periods = {periods}
[leaf]
lr = 0.1
batch = 20
[run]
rounds = {rounds}
"""


class Run:
    """The sites of one tree, and the processes that run them."""

    def __init__(self, folder: Path, port: int, *, deadline: float = 0, **settings: Any):
        values = {"shape": "2x2", "method": "mtgc", "periods": [2, 3], "rounds": 2, **settings}
        (folder / "run.toml").write_text(CONFIG.format(**values))
        (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {port}\ndeadline = {deadline}\n')
        self.out, self.config = folder / "sites", Config.load(folder / "run.toml")
        self.folders = provision(Topology.load(folder / "topology.toml"), self.out)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names or self.folders:
            self.processes[name] = whole.start(self.folders[name])

    def kill(self, name: str) -> None:
        """As a power cut would: the supervisor takes its processes with it."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        path = self.folders["root"] / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, until: Any = None) -> None:
        """Until something holds; until the root is done unless given."""
        give_up = time.monotonic() + LIMIT
        while not (until() if until else self.processes["root"].poll() is not None):
            assert time.monotonic() < give_up, self.report()
            time.sleep(0.1)

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

    def accuracy(self) -> float:
        return self.rounds[-1]["metrics"]["accuracy"]

    def correction_sum(self, parent: str) -> torch.Tensor:
        """The weighted sum of what a node's children add to their gradients, as they keep it on their disks."""
        from stratafl.deploy.durable import DIGEST, STATE
        from stratafl.deploy.node import Kept
        from stratafl.deploy.site import Site

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
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
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
        started.append(Run(folder, 20000 + 2000 * worker + os.getpid() % 20 * 80 + 40 * len(started), **settings))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.mark.parametrize("method", ["mtgc", "hfedavg", "scaffold"])
@pytest.mark.parametrize(("shape", "periods"), [("2x2", [2, 3]), ("2x2x2", [2, 2, 2])], ids=["2x2", "2x2x2"])
def test_the_final_model_is_the_simulation_s(runs: Any, shape: str, periods: list[int], method: str) -> None:
    run = runs(shape=shape, periods=periods, method=method)
    run.start()
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2]
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6


STAR = {"shape": "2", "periods": [3]}
GROUPS = {"shape": "2x1", "periods": [2, 3]}


@pytest.mark.parametrize(
    ("name", "tree"), [("1", STAR), ("0", GROUPS), ("root", STAR)], ids=["leaf", "aggregator", "root"]
)
def test_a_killed_site_comes_back_and_nothing_is_lost(runs: Any, name: str, tree: dict[str, Any]) -> None:
    """Without a deadline its parent waits for it: the run ends where the undisturbed one does."""
    run = runs(rounds=6, **tree)
    run.start()
    run.wait(lambda: len(run.rounds) == 2)
    run.kill(name)
    run.start(name)
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4, 5, 6]
    assert run.difference() < 1e-6


@pytest.mark.parametrize(("name", "tree"), [("1", STAR), ("0", GROUPS)], ids=["leaf", "aggregator"])
def test_a_killed_site_is_left_out_after_the_deadline(runs: Any, name: str, tree: dict[str, Any]) -> None:
    run = runs(rounds=12, deadline=20, **tree)
    run.start()
    run.wait(lambda: len(run.rounds) == 2)
    run.kill(name)
    run.wait(lambda: name in run.rounds[-1]["absent"])
    run.start(name)
    run.wait()
    assert [line["round"] for line in run.rounds] == list(range(1, 13))
    assert run.rounds[-1]["absent"] == [], "it came back"
    undisturbed = study_of(run.config).simulation.run().history[-1].metrics["accuracy"]
    assert abs(run.accuracy() - undisturbed) < 0.1
    assert run.correction_sum("root").abs().max() < 1e-4
