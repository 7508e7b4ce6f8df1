"""The memory of a site's processes does not grow with the messages that went through them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict

from stratafl.base import files
from stratafl.deploy.flower.inbox import RECORD, Inbox
from stratafl.deploy.host import garbage, supervise
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site
from tests.deploy.real import wired

CONFIG = """
rounds = 1
[tree]
shape = "1"
[model]
name = "mlp"
hidden = [20000]
[schedule]
periods = [1]
"""
MODEL = 6 << 20
"""Bytes of a message."""
MOST = 6
"""Messages that a process may hold more of after 25 than after 5: it swings by a few from look to
look, and one that kept them would hold 20 more."""


def resident(process: Forked) -> int:
    """Bytes of its own: what it has in common with this process is not counted."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[dict[str, Path]]:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {24000 + os.getpid() % 1000}\n')
    made = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    supervise._import_what_they_need([Site.load(folder) for folder in made.values()])
    gc.collect()
    gc.freeze()  # as a site's supervisor does
    yield made
    gc.unfreeze()


def echo(folder: Path, port: int) -> None:
    keys = (files.read_bytes(folder / name) for name in ("ca.pem", "inner.key"))
    inbox = Inbox(port, *keys, 2 * MODEL, print)
    inbox.serve(lambda data: data, lambda: True)


@pytest.mark.deploy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_no_process_keeps_the_models_that_went_through_it(folders: dict[str, Path]) -> None:
    with wired(folders) as (top, below, grid):
        below._start("node", lambda folder: echo(folder, below.site.inner_port))
        watched = {**top._running, **below._running}
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.2)
        held = []
        for number in range(25):
            record = ConfigRecord({"data": number.to_bytes(2, "big") * (MODEL // 2)})
            (sent,) = grid.push_messages([Message(RecordDict({RECORD: record}), nodes[0], "train")])
            while not (replies := list(grid.pull_messages([sent]))):
                time.sleep(0.05)
            assert replies[0].content[RECORD]["data"] == record["data"]
            if number in (4, 24):
                time.sleep(2 * garbage.EVERY)
                held.append({name: resident(process) / MODEL for name, process in watched.items()})
    for name in watched:
        assert held[1][name] - held[0][name] < MOST, held
