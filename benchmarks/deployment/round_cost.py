"""Time of a deployed round against Flower's FedAvg on a star with the same clients.

    python -m benchmarks.deployment.round_cost [--rounds 10] [--only NAME] [--out FILE.json]

Four clients on loopback, with TLS and registered node keys, a multi-layer perceptron of 0.8 million
parameters, one step of SGD with a batch of 20: almost all of the time is communication. The tree is
2x2 with MTGC. A global round with E group rounds takes a + b E seconds: b, the time of one group
round, is computed from E = 1 and E = 5. CPU seconds of all processes together are reported, too:
they do not depend on other programs on the machine.

Flower's side is an ordinary app on unmodified flower-superlink and flower-supernode: FedAvg of
flwr.serverapp, and a ClientApp that Flower starts for every message. Flower's first round waits for
its nodes; the first round is not counted on either side.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.deployment.flower_star.model import HIDDEN
from benchmarks.deployment.sample_tree import small_tree
from stratafl.base.environment import environment
from stratafl.data.dataset import BatchKey
from stratafl.deploy.host import this_machine
from stratafl.deploy.host.supervise import QUIET
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.experiment.experiment import Experiment

LEAVES, LIMIT = 4, 900.0
OURS: dict[str, dict[str, Any]] = {
    "tree, E = 1": {"shape": "2x2", "periods": [1, 1], "method": "mtgc"},
    "tree, E = 5": {"shape": "2x2", "periods": [5, 1], "method": "mtgc"},
    "star": {"shape": "4", "periods": [1], "method": "hfedavg"},
}
FLOWER = "Flower's FedAvg on a star"
COMMANDS = """\
import json, sys
from flwr.cli.app import app
for command in json.loads(sys.argv[1]):
    app(command, standalone_mode=False)
"""
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "flower-star"
version = "1.0.0"
description = "Federated averaging on a star"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "stratafl"
[tool.flwr.app.components]
serverapp = "flower_star.server:app"
clientapp = "flower_star.client:app"
[tool.flwr.app.config]
data = ""
ends = ""
nodes = 0
rounds = 0
"""
MARK = "STRATAFL_BENCHMARK"
"""Environment variable of every process that is measured."""


def provisioned(folder: Path, rounds: int, **settings: Any) -> tuple[Experiment, dict[str, Path]]:
    experiment = small_tree(folder, rounds=rounds, **{"hidden": HIDDEN, **settings})
    (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {_free_ports(40)}\n')
    return experiment, provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")


@dataclass
class DeploymentTimings:
    """End times of the rounds of a run, and CPU time of all its processes."""

    ends: list[float]
    work: CpuTime

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.ends)]

    @property
    def work_a_round(self) -> float:
        return (self.work.at(self.ends[-1]) - self.work.at(self.ends[0])) / (len(self.ends) - 1)


class CpuTime(threading.Thread):
    """Thread that samples the CPU seconds of all marked processes.

    The CPU time of a process that has ended is included in that of its parent.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, float]] = []
        self._over = threading.Event()

    def __enter__(self) -> CpuTime:
        self.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.seen.append((time.monotonic(), sum(map(_processor_seconds, _marked()))))

    def at(self, moment: float) -> float:
        times, sums = zip(*self.seen, strict=True)
        return float(np.interp(moment, times, sums))


def _marked() -> list[Path]:
    def is_marked(process: Path) -> bool:
        with contextlib.suppress(OSError):
            return MARK.encode() in (process / "environ").read_bytes()
        return False

    return [process for process in Path("/proc").iterdir() if process.name.isdigit() and is_marked(process)]


def _processor_seconds(process: Path) -> float:
    with contextlib.suppress(OSError):
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def ours(folder: Path, rounds: int, **settings: Any) -> DeploymentTimings:
    provisioned(folder, rounds, **settings)
    ends: list[float] = []
    with CpuTime() as work:
        this_machine.run(folder / "sites", lambda line: ends.append(time.monotonic()))
    return DeploymentTimings(ends, work)


def flower(folder: Path, rounds: int) -> DeploymentTimings:
    experiment, sites = provisioned(folder, rounds, **OURS["star"])
    data = reference_simulation(experiment).data
    assert data.clients is not None and data.test is not None
    for number, part in enumerate(data.clients):
        _store(folder / f"{number}.npz", *data.samples.batch(part, BatchKey(0, number, 0)))
    _store(folder / "test.npz", data.test.samples.head(1), data.test.samples.targets_N)
    _app(folder / "app")
    root, port = sites.pop("root"), _free_ports(8)
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flower")}
    commands = Path(sys.executable).parent
    environment["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
    tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    superlink = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), *tls, "--enable-supernode-auth"]
    command = [*superlink, "--disable-runtime-dependency-installation"]
    with CpuTime() as work, _running({root: command}, environment):
        _answers(port)
        (folder / "flower").mkdir(exist_ok=True)
        (folder / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{root / "ca.pem"}"\n'
        )
        nodes = {
            leaf: [
                "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates", "ca.pem",
                "--auth-supernode-private-key", "node.key", "--host", "127.0.0.1", "--port", str(port + 1 + number),
                *tls, "--node-config", f'data="{folder / f"{number}.npz"}"',
            ]
            for number, leaf in enumerate(sites.values())
        }  # fmt: skip
        ends = folder / "ends.json"
        settings = f'data="{folder / "test.npz"}" ends="{ends}" nodes={LEAVES} rounds={rounds}'
        register = [["supernode", "register", str(path), "own"] for path in (root / "down").glob("*.pub")]
        run = ["run", str(folder / "app"), "own", "--run-config", settings]
        command_line = [sys.executable, "-c", COMMANDS, json.dumps([*register, run])]
        subprocess.run(command_line, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with _running(nodes, environment):
            until = time.monotonic() + LIMIT
            while not ends.exists():
                if time.monotonic() > until:
                    raise SystemExit(f"Flower's run has not ended; see the logs in {folder}")
                time.sleep(1.0)
    return DeploymentTimings(json.loads(ends.read_text())[1:], work)


def _store(path: Path, inputs: Any, targets: Any) -> None:
    np.savez(path, inputs=inputs.flatten(1).numpy(), targets=targets.numpy())


def _app(folder: Path) -> None:
    """Write an app folder for `flwr run`."""
    package = folder / "flower_star"
    shutil.copytree(Path(__file__).parent / "flower_star", package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text(APP)


@contextlib.contextmanager
def _running(commands: dict[Path, list[str]], environment: dict[str, str]) -> Iterator[None]:
    """Run each command in its own folder and session, until the block ends."""
    started = []
    try:
        for folder, command in commands.items():
            with open(folder / "flower.log", "ab") as log:
                started.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("Flower's SuperLink does not answer")


def _free_ports(count: int) -> int:
    """First of `count` consecutive free ports."""
    for first in range(24000, 32000, count):
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise SystemExit("no free ports")


def summed_up(runs: dict[str, DeploymentTimings]) -> dict[str, Any]:
    """Median seconds and mean CPU seconds per round, their ratios to Flower's, and those of a
    group round."""
    kinds = {
        "seconds": {name: statistics.median(run.seconds) for name, run in runs.items()},
        "processor_seconds": {name: run.work_a_round for name, run in runs.items()},
    }
    summary: dict[str, Any] = {}
    for kind, values in kinds.items():
        if {"tree, E = 1", "tree, E = 5"} <= set(values):
            values["a group round"] = (values["tree, E = 5"] - values["tree, E = 1"]) / 4
        summary[kind] = values
        if FLOWER in values:
            summary[f"{kind}_to_flower"] = {
                name: value / values[FLOWER] for name, value in values.items() if name != FLOWER
            }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", action="append", choices=[*OURS, FLOWER])
    parser.add_argument("--out", type=Path, default=Path("deploy.json"))
    options = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", MARK: "1"})
    runs: dict[str, DeploymentTimings] = {}
    for name in options.only or [FLOWER, *OURS]:
        with tempfile.TemporaryDirectory(prefix="stratafl-bench-") as folder:
            place = Path(folder)
            runs[name] = flower(place, options.rounds) if name == FLOWER else ours(place, options.rounds, **OURS[name])
        print(f"{name}: {[round(seconds, 2) for seconds in runs[name].seconds]}", flush=True)
    summary = summed_up(runs)
    record = {
        "environment": environment(),
        "versions": {name: version(name) for name in ("flwr", "torch", "stratafl")},
        "leaves": LEAVES,
        **summary,
        "every_round": {name: run.seconds for name, run in runs.items()},
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for name, seconds in summary["seconds"].items():
        work, ratio = summary["processor_seconds"][name], summary.get("seconds_to_flower", {}).get(name)
        suffix = "" if ratio is None else f", {ratio:.2f} times Flower's round"
        print(f"{name}: {seconds:.2f} s, {work:.2f} s of processor{suffix}")


if __name__ == "__main__":
    main()
