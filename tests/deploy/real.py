"""A deployed tree of real processes on loopback, with TLS and keys on."""

from __future__ import annotations

import contextlib
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

from benchmarks.deployment.sample_tree import processes, small_tree
from stratafl.base import files
from stratafl.core.participation import sample_participants
from stratafl.core.rule import Rows
from stratafl.deploy.flower.grid import PromptGrid
from stratafl.deploy.flower.tasks import SERVER_APP, Tasks
from stratafl.deploy.host import supervise, this_machine
from stratafl.deploy.host.supervise import Supervisor
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site, tree_of
from stratafl.deploy.sites.state_file import DIGEST, STATE
from stratafl.federation import federation
from stratafl.federation.local_parameters import match_local_parameters
from stratafl.runs.format import is_locked
from stratafl.simulation.deployed import part_of

LIMIT = 600
"""Seconds for one run, on a machine that is busy with other things."""


class Run:
    """The sites of one tree, and the processes that run them."""

    def __init__(self, folder: Path, port: int, *, deadline: Any = 0, own: str = "", **settings: Any):
        """`own`: a leaf whose part of the data lies at its own host."""
        self.out, self.experiment = folder / "sites", small_tree(folder, **settings)
        data = f'[data]\n"{own}" = "{self.keep_data(own, folder)}"\n' if own else ""
        topology = f'config = "run.toml"\nbase_port = {port}\ndeadline = {deadline}\n{data}'
        (folder / "topology.toml").write_text(topology)
        self.folders = provision(DeploymentTopology.load(folder / "topology.toml"), self.out)
        self.hosts: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}

    def keep_data(self, name: str, folder: Path) -> Path:
        """The leaf's part, as a file beside it."""
        (x, y), _ = part_of(self.experiment, tree_of(self.experiment).find(name)[1])
        np.savez(folder / "own.npz", x=x.numpy(), y=y.numpy())
        return folder / "own.npz"

    def start(self, *names: str, apart: Sequence[Sequence[str]] = ()) -> None:
        """These sites, or all, by one process: a host; `apart`: each of these groups by one of its
        own."""
        elsewhere = {name for group in apart for name in group}
        names = names or tuple(name for name in self.folders if name not in elsewhere)
        for group in (names, *map(tuple, apart)):
            self.hosts[group] = this_machine.start(*(self.folders[name] for name in group))

    def kill(self, *names: str) -> None:
        """A host, as a power cut would: it takes its supervisors, and they their processes, with
        it."""
        folders = [self.folders[name] for name in names]
        os.killpg(self.hosts[names].pid, signal.SIGKILL)
        self.hosts.pop(names).wait()
        self.wait(lambda: not any(is_locked(folder) or is_locked(folder / "state") for folder in folders))

    def processes(self, name: str) -> dict[str, int]:
        return processes(self.folders[name])

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
        return self.status("root").get("doing") == "done" and not is_locked(self.folders["root"])

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
        """From the final model of a simulation in which the same nodes were absent in the same
        rounds.

        Of a tree whose groups meet more than once a round nobody may have been absent: the record
        does not say when.
        """
        tree, absent = tree_of(self.experiment), [line["absent"] for line in self.rounds]

        def here(participation: Any, whole_tree: Any, level: int, round: int, **more: Any) -> np.ndarray:
            drawn_N = sample_participants(participation, whole_tree, level, round, **more)
            for name in absent[round] if round < len(absent) else ():
                if tree.find(name)[0] == level:
                    drawn_N[tree.find(name)[1]] = False
            return drawn_N

        with pytest.MonkeyPatch.context() as patch:
            if any(absent):
                assert set(self.experiment.schedule.periods[:-1]) <= {1}
                patch.setattr(federation, "sample_participants", here)
            sim = reference_simulation(self.experiment)
            first, wanted = sim.result().module.state_dict(), sim.run().module.state_dict()
        # a root has what stays with the leaves as it was at first
        wanted |= {
            name: first[name] for name in match_local_parameters(sim.flat, self.experiment.model.local_parameters)
        }
        found = load_file(self.folders["root"] / "model.safetensors")
        apart = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
        return max(apart, self._apart_at_home(sim.federation.levels[-1].client_rows))

    def _apart_at_home(self, wanted: Rows) -> float:
        """How far what the leaves keep to themselves is from these, where every report counted."""
        found = [0.0]
        for name, rows in wanted.items():
            for leaf, row in zip(tree_of(self.experiment).names[-1], rows, strict=True):
                above = self.state(leaf).above
                assert above is not None
                own = above.optimiser if above.sent is None else above.sent.optimiser
                found.append(float((own[name][0] - row).abs().sum()))
        return max(found)

    def state(self, name: str) -> NodeState:
        """What a node keeps on its disk."""
        data = (self.folders[name] / "state" / STATE).read_bytes()[:-DIGEST].partition(b"\n")[2]
        return decode(data, NodeState)

    def missed(self, name: str) -> bool:
        return name in self.rounds[-1]["absent"]

    def assert_corrections_sum_to_zero(self) -> None:
        for name, folder in self.folders.items():
            if not Site.load(folder).is_leaf:
                assert self.correction_sum(name).abs().max() < 1e-4, name

    def accuracy(self) -> float:
        return self.rounds[-1]["metrics"]["accuracy"]

    def correction_sum(self, parent: str) -> torch.Tensor:
        """The weighted sum of what a node's children add to their gradients, as they keep it on
        their disks."""
        rows, counts = [], []
        for child in Site.load(self.folders[parent]).children:
            kept = self.state(child)
            assert kept.above is not None and kept.above.correction is not None and kept.reply is not None
            rows.append(kept.above.correction[0])
            counts.append(kept.reply.samples)
        weights = torch.tensor(counts) / sum(counts)
        return weights @ torch.stack(rows)

    def close(self) -> None:
        this_machine.stop(self.folders)
        for process in self.hosts.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def wired(folders: dict[str, Path]) -> Iterator[tuple[Supervisor, Supervisor, PromptGrid]]:
    """The root's SuperLink and leaf 0's SuperNode, each with its supervisor, and the grid between
    them, without any node."""
    top, below = (Supervisor(folders[name], print) for name in ("root", "0"))
    for each in (top, below):
        for name in ("logs", "flower"):
            files.make_folder(each.folder / name)
    try:
        top._start("superlink", supervise._superlink)
        top._wait_for(top.site.runtime_port)
        below._start("supernode", supervise._supernode)
        keys = [files.read_bytes(top.folder / name) for name in ("ca.pem", "inner.key")]
        tasks = Tasks(SERVER_APP, top.site.runtime_port, *keys, print)
        token = tasks.next(lambda: True)
        assert token is not None
        with tasks.grid(token) as grid:
            yield top, below, grid
        for client in (tasks._signed, tasks._own):
            client.close()
    finally:
        for each in (top, below):
            each.stop()
