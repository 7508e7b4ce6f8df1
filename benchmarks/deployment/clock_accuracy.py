"""Accuracy of the cost model: rounds of deployed trees on limited links, measured and computed.

    python -m benchmarks.deployment.clock_accuracy [--tree 2x2] [--out FILE.json]

Every site of a tree is a host of its own, a network namespace, and every child has a link of its
own to its parent (`network_emulator`): 20 Mbit/s and 50 ms one way at the clients, 5 Mbit/s and 100
ms above. "Real" is the time between the ends of two global rounds at the root, the median of all
but the first two rounds. "Priced" is the cost model's time for the same run on a network with

- bandwidth and latency as configured;
- the seconds of a step, measured at one client of the deployment before it starts: clients that
  share the processors of this machine take longer, but their steps are a small part of a round;
- the overhead of a message beside its arrays, in seconds and in bytes, the same on all levels.

The overhead is measured on other runs: the same tree on links of the same latency and unlimited
bandwidth, with a tiny model and with the large one. The time by which their rounds exceed the cost
without overhead, divided by the messages on the critical path, is the overhead of a message of that
size; for sizes between, it is interpolated linearly. So it includes everything that the cost model
has no term for and that takes the same time on a limited link: the round trips in which Flower
delivers one message, polling for messages and the pauses between polls, and the processors' work
for a message with all sites on one machine. Bytes are those of all IP packets, polling included.

With the tiny model's overhead for all sizes, the cost of large messages is too low; the table has
both. This needs root, `ip` and TUN devices, and `stratafl[deploy]`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.deployment.network_emulator import EmulatedNetwork, LinkConfig
from benchmarks.deployment.sample_tree import small_tree
from stratafl.base.environment import environment
from stratafl.base.topology import Topology
from stratafl.core.client_training import TrainRequest
from stratafl.core.rows import IndexedRows
from stratafl.costs.costs import costs
from stratafl.deploy.host import this_machine
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.rounds import read_lines
from stratafl.deploy.sites.site import HUGE_PAGES
from stratafl.deploy.sites.state_file import status
from stratafl.experiment.algorithm import rule_names, sync_schedule
from stratafl.experiment.experiment import Experiment
from stratafl.network.instance import instantiate_network
from stratafl.network.messages import message_sizes
from stratafl.network.replay import Workload, leaf_steps
from stratafl.network.specification import Network
from stratafl.rules.registry import rules_for
from stratafl.simulation.build import batch_size
from stratafl.simulation.deployed import root_of

PERIODS = {"2x2": (2, 20), "2x2x2": (1, 1, 20)}
MODELS = {"tiny": (4,), "small": (160,), "large": (480, 560)}
"""Hidden widths of models of 1 kB, 48 kB and 1.2 MB."""
BELOW, ABOVE = LinkConfig(delay=0.05, mbit_s=20.0), LinkConfig(delay=0.1, mbit_s=5.0)
"""Links of the clients, and all other links."""
UNLIMITED = 1e7
"""Mbit/s that mean unlimited bandwidth."""
SKIPPED, ROUNDS, LIMIT = 2, 7, 600.0
CALIBRATED, COMPARED = ("tiny", "large"), ("small", "large")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Run(NamedTuple):
    """Deployment of a tree and a model on limited links, or on links with latency only."""

    tree: str
    model: str
    limited: bool

    @property
    def name(self) -> str:
        return f"{self.tree}, {self.model}, {'limited' if self.limited else 'latency only'}"

    def experiment(self, folder: Path, rounds: int = ROUNDS) -> Experiment:
        return small_tree(folder, shape=self.tree, periods=PERIODS[self.tree], hidden=MODELS[self.model], rounds=rounds)


class Overhead(NamedTuple):
    """Time and bytes of a message beside those of its arrays."""

    seconds: float
    bytes: float


NOTHING = Overhead(0.0, 0.0)


class Price(NamedTuple):
    """Computed cost of a global round, after the first ones: time, and bytes over all links."""

    seconds: float
    wire_bytes: float


@dataclass(frozen=True)
class RoundTimings:
    """Measurements of the rounds of a deployment."""

    seconds: list[float]
    """Times of all global rounds but the first."""
    wire_bytes: list[float]
    """Bytes over all links in these rounds."""
    step_s: float
    link: dict[str, Any]
    """Counters of the emulated links."""
    commit: str

    @property
    def round_s(self) -> float:
        return statistics.median(self.seconds[SKIPPED - 1 :])

    @property
    def round_bytes(self) -> float:
        return statistics.median(self.wire_bytes[SKIPPED - 1 :])


# -- the deployment --------------------------------------------------------------------------------


def lines_of(tree: Topology, limited: bool) -> dict[tuple[str, str], LinkConfig]:
    """Link of every child to its parent."""
    links = {}
    for level in range(1, tree.depth + 1):
        link = BELOW if level == tree.depth else ABOVE
        for name, parent in zip(tree.names[level], tree.parents[level], strict=True):
            links[name, tree.names[level - 1][parent]] = link if limited else LinkConfig(link.delay)
    return links


def deployed(run: Run, folder: Path) -> RoundTimings:
    """Run a deployment, every site on a host of its own."""
    experiment = run.experiment(folder)
    tree = Topology.of(experiment.tree.shape)
    names = [name for level in tree.names for name in level]
    with EmulatedNetwork(names, LinkConfig(0.0), lines_of(tree, run.limited)) as hosts:
        parents = "".join(f'"{name}" = "{hosts.addresses[name]}"\n' for level in tree.names[:-1] for name in level)
        (folder / "topology.toml").write_text(f'config = "run.toml"\n[hosts]\n{parents}')
        sites = provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
        step_s = step_seconds(sites[tree.names[-1][0]])
        ends: list[float] = []
        sent: list[float] = []
        with _running(sites, hosts) as started:
            until = time.monotonic() + LIMIT
            while len(ends) < experiment.rounds:
                time.sleep(0.02)
                if len(read_lines(sites["root"])) > len(ends):
                    ends.append(time.monotonic())
                    sent.append(hosts.counts()["bytes"])
                if time.monotonic() > until or started["root"].poll() is not None:
                    shown = {name: status(site / "state") for name, site in sites.items()}
                    raise SystemExit(f"{run.name} has not ended: {shown}")
        counts = hosts.cut()
    seconds, wire = ([after - before for before, after in itertools.pairwise(values)] for values in (ends, sent))
    return RoundTimings(seconds, wire, step_s, counts, str(environment()["commit"]))


def step_seconds(leaf: Path) -> float:
    """Seconds of one step at a client, on one core."""
    site = Assembled.of(leaf)
    try:
        node = site.leaf()
        flat, chain = node.engine.training.flat, node.engine.client_update
        x_1P, b_1B = torch.zeros(1, flat.parameters), torch.zeros(1, flat.buffers)
        at_1 = np.zeros(node.number + 1, dtype=np.int64)
        state = chain.optimizer.init(x_1P) if chain.keeps_optimizer_state else {}
        work = TrainRequest(
            model=IndexedRows(x_1P, at_1), buffers=IndexedRows(b_1B, at_1), corrections=(IndexedRows(x_1P, at_1),) * 2,
            clients=[node.number], steps=site.job.every[-1],
            client_rows={name: IndexedRows(rows, at_1) for name, rows in state.items()},
        )  # fmt: skip
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            node.engine.train(work)
            seconds.append((time.perf_counter() - began) / work.steps)
        return statistics.median(seconds)
    finally:
        site.durable.close()


@contextlib.contextmanager
def _running(sites: Mapping[str, Path], hosts: EmulatedNetwork) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start all sites, and stop those that still run at the end of the block."""
    started = {}
    try:
        for name, folder in sites.items():
            command = hosts.on(name, [sys.executable, "-m", "stratafl", "deploy", "site", str(folder)])
            with open(folder / "host.log", "wb") as log:
                started[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=dict([HUGE_PAGES]) | os.environ,
                )  # fmt: skip
        yield started
    finally:
        this_machine.stop(sites)
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- the cost model --------------------------------------------------------------------------------


def workload_of(experiment: Experiment) -> Workload:
    """Workload of the run for the cost model."""
    root = root_of(experiment)
    tree, flat, schedule = root.tree, root.start.flat, sync_schedule(experiment.schedule, root.tree)
    held_N = root.counts.labels.sum(axis=1)
    steps_N, samples_N = leaf_steps(held_N, batch_size(experiment), schedule, experiment.schedule.unit == "epochs")
    return Workload(
        tree=tree,
        schedule=schedule,
        participation=(None,) * tree.depth,
        seed=experiment.seed,
        sizes=message_sizes(rules_for(rule_names(experiment.method), tree.depth), flat.parameters, flat.buffers),
        steps_N=steps_N,
        samples_N=samples_N,
        rounds=experiment.rounds,
    )


def network(limited: bool, step_s: float, overhead: Overhead) -> Network:
    """Network with the links as configured."""
    overheads = {"overhead_s": overhead.seconds, "overhead_bytes": overhead.bytes}
    tiers = [
        {"up_mbit_s": line.mbit_s if limited else UNLIMITED, "latency_s": line.delay, **overheads}
        for line in (BELOW, ABOVE)
    ]
    return Network.of({"name": "links", "leaf": {"step_s": step_s}, "tier": tiers})


def priced(workload: Workload, limited: bool, step_s: float, overhead: Overhead) -> Price:
    """Cost of the run's last round."""
    instance = instantiate_network(network(limited, step_s, overhead), workload.tree, workload.seed, workload.samples_N)
    run_costs = costs(workload, instance)
    return Price(float(run_costs.seconds_R[-1]), float(sum(level_bytes[-1] for level_bytes in run_costs.bytes)))


def message_bytes(workload: Workload) -> float:
    """Mean bytes of the arrays of a message, over all messages of a round."""
    arrays = priced(workload, False, 1.0, NOTHING).wire_bytes
    return arrays / (priced(workload, False, 1.0, Overhead(0.0, 1.0)).wire_bytes - arrays)


def overhead_of(workload: Workload, measured: RoundTimings) -> Overhead:
    """Overhead of a message, from a run with unlimited bandwidth.

    This is the difference between measured and computed cost: of the time, divided by the messages
    on the critical path; of the bytes, divided by all messages.
    """
    bare = priced(workload, False, measured.step_s, NOTHING)
    more = priced(workload, False, measured.step_s, Overhead(1.0, 1.0))
    messages, on_the_path = more.wire_bytes - bare.wire_bytes, more.seconds - bare.seconds
    return Overhead(
        (measured.round_s - bare.seconds) / on_the_path, (measured.round_bytes - bare.wire_bytes) / messages
    )


def between(one: tuple[float, Overhead], other: tuple[float, Overhead], size: float) -> Overhead:
    """Overhead of a message of some size, on the line through those of two other sizes."""
    share = (size - one[0]) / (other[0] - one[0])
    return Overhead(*(first + share * (last - first) for first, last in zip(one[1], other[1], strict=True)))


def compared(tree: str, runs: Mapping[Run, RoundTimings]) -> list[dict[str, Any]]:
    """Measured and computed times of the runs of a tree on limited links."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        workloads = {model: workload_of(Run(tree, model, True).experiment(Path(folder))) for model in MODELS}
    calibration = [
        (message_bytes(workloads[model]), overhead_of(workloads[model], runs[Run(tree, model, False)]))
        for model in CALIBRATED
    ]
    for model in COMPARED:
        measured = runs.get(Run(tree, model, True))
        if measured is None:
            continue
        size = message_bytes(workloads[model])
        overhead = between(calibration[0], calibration[1], size)
        seconds, of_tiny, without = (
            priced(workloads[model], True, measured.step_s, used).seconds
            for used in (overhead, calibration[0][1], NOTHING)
        )
        rows.append(
            {
                "tree": tree,
                "model": model,
                "message_bytes": size,
                "step_s": measured.step_s,
                "overhead_s": overhead.seconds,
                "overhead_bytes": overhead.bytes,
                "real_s": measured.round_s,
                "priced_s": seconds,
                "ratio": seconds / measured.round_s,
                "tiny_overhead_s": calibration[0][1].seconds,
                "priced_with_tiny_overhead_s": of_tiny,
                "ratio_with_tiny_overhead": of_tiny / measured.round_s,
                "priced_without_overhead_s": without,
            }
        )
    return rows


# -- the record ------------------------------------------------------------------------------------


def read_runs(path: Path) -> dict[Run, RoundTimings]:
    """Runs of a stored record."""
    if not path.exists():
        return {}
    return {Run(**entry["run"]): RoundTimings(**entry["measured"]) for entry in json.loads(path.read_text())["runs"]}


def write(path: Path, runs: Mapping[Run, RoundTimings]) -> list[dict[str, Any]]:
    """Write all measurements so far, and the comparisons that are possible with them."""
    complete = [tree for tree in PERIODS if all(Run(tree, model, False) in runs for model in CALIBRATED)]
    table = [line for tree in complete for line in compared(tree, runs)]
    record = {
        "environment": environment(),
        "versions": {name: version(name) for name in ("flwr", "torch")},
        "tcp_congestion_control": CONGESTION.read_text().strip(),
        "links": {"below": vars(BELOW), "above": vars(ABOVE)},
        "periods": PERIODS,
        "compared": table,
        "runs": [{"run": run._asdict(), "measured": vars(timings)} for run, timings in runs.items()],
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return table


def show(table: Sequence[Mapping[str, Any]]) -> None:
    print("| tree | mean message | real | priced | priced / real | with a tiny message's overhead |")
    print("|---|---|---|---|---|---|")
    for line in table:
        size, real, priced_s = f"{line['message_bytes'] / 1e3:.0f} kB", line["real_s"], line["priced_s"]
        other = line["ratio_with_tiny_overhead"]
        print(f"| {line['tree']} | {size} | {real:.2f} s | {priced_s:.2f} s | {line['ratio']:.2f} | {other:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", choices=[*PERIODS], help="tree to measure again; default: all")
    parser.add_argument("--out", type=Path, default=Path("clock_reality.json"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    trees = options.tree or list(PERIODS)
    runs = {run: timings for run, timings in read_runs(options.out).items() if run.tree not in trees}
    for tree in trees:
        for run in [Run(tree, m, False) for m in CALIBRATED] + [Run(tree, m, True) for m in COMPARED]:
            with tempfile.TemporaryDirectory(prefix="stratafl-reality-") as folder:
                runs[run] = deployed(run, Path(folder))
            table = write(options.out, runs)
            print(f"{run.name}: {[round(timings, 2) for timings in runs[run].seconds]}", flush=True)
    show(table)


if __name__ == "__main__":
    main()
