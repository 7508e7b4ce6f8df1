"""A tree on three hosts with a bad link between them: 50 ms each way, and one packet of a hundred
lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

pytest.importorskip("flwr")

from benchmarks.deployment.network_emulator import EmulatedNetwork, LinkConfig, NotPermitted
from benchmarks.deployment.sample_tree import small_tree
from stratafl.base import files
from stratafl.cli.main import app
from stratafl.deploy.host import this_machine
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.deploy.sites.state_file import status
from stratafl.experiment.experiment import Experiment

pytestmark = pytest.mark.deploy
DELAY, LOSS, LIMIT = 0.05, 0.01, 170
ON = {"root": ["root"], "0": ["0", "0/0", "0/1"], "1": ["1", "1/0", "1/1"]}
"""Which sites are on which host: each group has its own."""


@pytest.fixture
def hosts() -> Iterator[EmulatedNetwork]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(EmulatedNetwork(list(ON), LinkConfig(DELAY, loss=LOSS), seed=1))
        except NotPermitted as problem:
            pytest.skip(f"hosts need network namespaces and TUN devices: {problem}")
        yield made


def provisioned(folder: Path, hosts: EmulatedNetwork) -> Path:
    lines = "".join(f'{name} = "{address}"\n' for name, address in hosts.addresses.items())
    small_tree(folder, hidden=[100], rounds=3)
    (folder / "topology.toml").write_text(f'config = "run.toml"\n[hosts]\n{lines}')
    out = folder / "sites"
    result = CliRunner().invoke(app, ["deploy", "init", str(folder / "topology.toml"), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    return out


@contextlib.contextmanager
def running(out: Path, hosts: EmulatedNetwork) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every host's sites, started there, and stopped at the end of the block if they still run."""
    folders, started = this_machine.sites(out), []
    try:
        for host, names in ON.items():
            command = [sys.executable, "-m", "stratafl", "deploy", "site", *(str(folders[name]) for name in names)]
            files.make_folder(folders[host] / "logs")
            with open(folders[host] / "logs" / "host.log", "wb") as log:
                started.append(
                    subprocess.Popen(hosts.on(host, command), stdout=log, stderr=log, start_new_session=True)
                )
        yield started
    finally:
        this_machine.stop(folders)
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def statuses(out: Path) -> dict[str, dict[str, Any]]:
    """What each site last showed."""
    return {name: status(folder / "state") for name, folder in this_machine.sites(out).items()}


def test_a_run_over_a_slow_link_that_loses_packets_ends_where_the_simulation_ends(
    tmp_path: Path, hosts: EmulatedNetwork
) -> None:
    out = provisioned(tmp_path, hosts)
    began = time.monotonic()
    with running(out, hosts) as started:
        while any(process.poll() is None for process in started):
            assert time.monotonic() - began < LIMIT, statuses(out)
            time.sleep(0.2)
    sent_again = sum(hosts.retransmitted(name) for name in ON)
    counts = hosts.cut()
    print(f"{time.monotonic() - began:.0f} s; {counts}; {sent_again} segments sent again")

    run = reference_simulation(Experiment.from_toml(tmp_path / "run.toml")).run()
    found = load_file(out / "root" / "model.safetensors")
    difference = max(float((found[name] - value).abs().max()) for name, value in run.module.state_dict().items())
    assert difference < 1e-6
    assert counts["least_delay"] >= DELAY
    assert counts["dropped"] > 0 and sent_again > 0
    assert 0.2 * LOSS < counts["dropped"] / (counts["passed"] + counts["dropped"]) < 3 * LOSS
    # whatever TCP had to repeat, the messages themselves went over the link once
    between = run.communication.level(1)
    assert sum(statuses(out)[name]["arrays_out"] for name in ("0", "1")) == between.bytes_up
    assert counts["bytes"] > between.bytes
