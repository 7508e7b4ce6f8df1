"""The clock against reality: deployed trees on limited links, measured and priced.

    python -m benchmarks.deployment.clock_accuracy [--tree 2x2] [--out FILE.json]

Every site of a tree is a host of its own, a network namespace, and every child has a link of its
own to its parent (`network_emulator`): 20 Mbit/s and 50 ms one way at the leaves, 5 Mbit/s and 100
ms above. Real is the time from the end of a global round to the end of the next one at the root,
the middle one of all after the first two. Priced is what the clock says of the same run on a
network that has

- the links' numbers as they were set;
- the seconds of a step, measured at a leaf of the deployment before it starts, alone: leaves that
  share the processors of this machine take longer, but their steps are a small part of a round;
- what a message costs beside its arrays, in seconds and in bytes, the same on all levels.

The last is measured on other runs than those that are priced: the same tree on links that have the
same latency and no limit of bandwidth, with a tiny model and with the large one. What their rounds
take longer than the clock says without any overhead, divided by the messages on the critical path,
is the overhead of a message of that size; that of a size between is on the line through the two.
So it holds what the clock has no term for and what takes the same time on a limited link: the
several round trips in which Flower hands over one message, the looks for messages and the pauses
between them, the processors' work for a message of that size with all sites on one machine. Bytes
are those of all IP packets, the looks for messages included.

Where only the tiny model's overhead is taken for all sizes, prices are too low for large messages;
the table has both. It needs root, `ip` and TUN devices, and `stratafl[deploy]`.
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
from stratafl.base.topology import Tree
from stratafl.config.schema import Config
from stratafl.config.setup import root_of, rules_of, schedule_of
from stratafl.core.client_training import TrainRequest
from stratafl.core.rows import IndexedRows
from stratafl.cost.costs import costs
from stratafl.deploy.host import this_machine
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import Topology, provision
from stratafl.deploy.sites.rounds import read_lines
from stratafl.deploy.sites.site import HUGE_PAGES
from stratafl.deploy.sites.state_file import status
from stratafl.network.instance import instantiate_network
from stratafl.network.messages import message_sizes
from stratafl.network.replay import Workload, leaf_steps
from stratafl.network.specification import Network
from stratafl.rules.registry import rules_for

PERIODS = {"2x2": (2, 20), "2x2x2": (1, 1, 20)}
MODELS = {"tiny": (4,), "small": (160,), "large": (480, 560)}
"""Hidden widths: of 1 kB, 48 kB and 1.2 MB."""
BELOW, ABOVE = LinkConfig(delay=0.05, mbit_s=20.0), LinkConfig(delay=0.1, mbit_s=5.0)
"""The leaves' links, and all others."""
UNLIMITED = 1e7
"""Mbit/s that stand for no limit."""
SKIPPED, ROUNDS, LIMIT = 2, 7, 600.0
CALIBRATED, COMPARED = ("tiny", "large"), ("small", "large")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Run(NamedTuple):
    """One deployment."""

    tree: str
    model: str
    limited: bool

    @property
    def name(self) -> str:
        return f"{self.tree}, {self.model}, {'limited' if self.limited else 'latency only'}"

    def config(self, folder: Path, rounds: int = ROUNDS) -> Config:
        return small_tree(folder, shape=self.tree, periods=PERIODS[self.tree], hidden=MODELS[self.model], rounds=rounds)


class Overhead(NamedTuple):
    """What a message costs beside its arrays."""

    seconds: float
    bytes: float


NOTHING = Overhead(0.0, 0.0)


class Price(NamedTuple):
    """A global round on the clock, once rounds are alike: how long it takes, and the bytes over all
    links."""

    seconds: float
    wire_bytes: float


@dataclass(frozen=True)
class RoundTimings:
    """A deployment's rounds."""

    seconds: list[float]
    """Of every global round but the first."""
    wire_bytes: list[float]
    """Over all links, likewise."""
    step_s: float
    link: dict[str, Any]
    """What the links themselves count."""
    commit: str

    @property
    def round_s(self) -> float:
        return statistics.median(self.seconds[SKIPPED - 1 :])

    @property
    def round_bytes(self) -> float:
        return statistics.median(self.wire_bytes[SKIPPED - 1 :])


# -- the deployment --------------------------------------------------------------------------------


def lines_of(tree: Tree, limited: bool) -> dict[tuple[str, str], LinkConfig]:
    """The link of every child to its parent."""
    found = {}
    for level in range(1, tree.depth + 1):
        line = BELOW if level == tree.depth else ABOVE
        for name, parent in zip(tree.names[level], tree.parents[level], strict=True):
            found[name, tree.names[level - 1][parent]] = line if limited else LinkConfig(line.delay)
    return found


def deployed(run: Run, folder: Path) -> RoundTimings:
    """Run a tree, every site on a host of its own."""
    config = run.config(folder)
    tree = Tree.of(config.tree.shape)
    names = [name for level in tree.names for name in level]
    with EmulatedNetwork(names, LinkConfig(0.0), lines_of(tree, run.limited)) as hosts:
        parents = "".join(f'"{name}" = "{hosts.addresses[name]}"\n' for level in tree.names[:-1] for name in level)
        (folder / "topology.toml").write_text(f'config = "run.toml"\n[hosts]\n{parents}')
        sites = provision(Topology.load(folder / "topology.toml"), folder / "sites")
        step_s = step_seconds(sites[tree.names[-1][0]])
        ends: list[float] = []
        sent: list[float] = []
        with _running(sites, hosts) as started:
            until = time.monotonic() + LIMIT
            while len(ends) < config.run.rounds:
                time.sleep(0.02)
                if len(read_lines(sites["root"])) > len(ends):
                    ends.append(time.monotonic())
                    sent.append(hosts.counts()["bytes"])
                if time.monotonic() > until or started["root"].poll() is not None:
                    shown = {name: status(site / "state") for name, site in sites.items()}
                    raise SystemExit(f"{run.name} has not ended: {shown}")
        counts = hosts.cut()
    seconds, wire = ([after - before for before, after in itertools.pairwise(each)] for each in (ends, sent))
    return RoundTimings(seconds, wire, step_s, counts, str(environment()["commit"]))


def step_seconds(leaf: Path) -> float:
    """Of one step at a leaf, on one core."""
    here = Assembled.of(leaf)
    try:
        node = here.leaf()
        flat, chain = node.engine.training.flat, node.engine.leaf
        x_1P, b_1B = torch.zeros(1, flat.parameters), torch.zeros(1, flat.buffers)
        at_1 = np.zeros(node.number + 1, dtype=np.int64)
        state = chain.optimiser.init(x_1P) if chain.keeps_optimizer_state else {}
        work = TrainRequest(
            model=IndexedRows(x_1P, at_1), buffers=IndexedRows(b_1B, at_1), corrections=(IndexedRows(x_1P, at_1),) * 2,
            clients=[node.number], steps=here.job.every[-1],
            client_rows={name: IndexedRows(rows, at_1) for name, rows in state.items()},
        )  # fmt: skip
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            node.engine.train(work)
            taken.append((time.perf_counter() - began) / work.steps)
        return statistics.median(taken)
    finally:
        here.durable.close()


@contextlib.contextmanager
def _running(sites: Mapping[str, Path], hosts: EmulatedNetwork) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All sites, stopped at the end of the block if they still run."""
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


# -- the clock -------------------------------------------------------------------------------------


def workload_of(config: Config) -> Workload:
    """What the clock needs to know of the run."""
    made, leaf = root_of(config), config.leaf
    tree, flat, schedule = made.tree, made.start.flat, schedule_of(config, made.tree.depth)
    held_N = made.counts.labels.sum(axis=1)
    steps_N, samples_N = leaf_steps(held_N, leaf.batch, schedule, leaf.epochs is not None)
    return Workload(
        tree=tree,
        schedule=schedule,
        participation=(None,) * tree.depth,
        seed=config.run.seed,
        sizes=message_sizes(rules_for(rules_of(config), tree.depth), flat.parameters, flat.buffers),
        steps_N=steps_N,
        samples_N=samples_N,
        rounds=config.run.rounds,
    )


def network(limited: bool, step_s: float, overhead: Overhead) -> Network:
    """The links as they were set."""
    beside = {"overhead_s": overhead.seconds, "overhead_bytes": overhead.bytes}
    tiers = [
        {"up_mbit_s": line.mbit_s if limited else UNLIMITED, "latency_s": line.delay, **beside}
        for line in (BELOW, ABOVE)
    ]
    return Network.of({"name": "links", "leaf": {"step_s": step_s}, "tier": tiers})


def priced(workload: Workload, limited: bool, step_s: float, overhead: Overhead) -> Price:
    """The run's last round."""
    instance = instantiate_network(network(limited, step_s, overhead), workload.tree, workload.seed, workload.samples_N)
    found = costs(workload, instance)
    return Price(float(found.seconds_R[-1]), float(sum(each[-1] for each in found.bytes)))


def message_bytes(workload: Workload) -> float:
    """Of the arrays of a message, on average over all of a round."""
    arrays = priced(workload, False, 1.0, NOTHING).wire_bytes
    return arrays / (priced(workload, False, 1.0, Overhead(0.0, 1.0)).wire_bytes - arrays)


def overhead_of(workload: Workload, measured: RoundTimings) -> Overhead:
    """Of a message, from a run without limits of bandwidth: what the clock does not know of,
    divided by the messages on the critical path, and in bytes by all."""
    bare = priced(workload, False, measured.step_s, NOTHING)
    more = priced(workload, False, measured.step_s, Overhead(1.0, 1.0))
    messages, on_the_path = more.wire_bytes - bare.wire_bytes, more.seconds - bare.seconds
    return Overhead(
        (measured.round_s - bare.seconds) / on_the_path, (measured.round_bytes - bare.wire_bytes) / messages
    )


def between(one: tuple[float, Overhead], other: tuple[float, Overhead], size: float) -> Overhead:
    """On the line through what two sizes of messages cost."""
    share = (size - one[0]) / (other[0] - one[0])
    return Overhead(*(first + share * (last - first) for first, last in zip(one[1], other[1], strict=True)))


def compared(tree: str, runs: Mapping[Run, RoundTimings]) -> list[dict[str, Any]]:
    """What was measured and what the clock says, for every run on limited links that there is."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        workloads = {model: workload_of(Run(tree, model, True).config(Path(folder))) for model in MODELS}
    known = [
        (message_bytes(workloads[model]), overhead_of(workloads[model], runs[Run(tree, model, False)]))
        for model in CALIBRATED
    ]
    for model in COMPARED:
        measured = runs.get(Run(tree, model, True))
        if measured is None:
            continue
        size = message_bytes(workloads[model])
        overhead = between(known[0], known[1], size)
        whole, of_tiny, without = (
            priced(workloads[model], True, measured.step_s, each).seconds for each in (overhead, known[0][1], NOTHING)
        )
        found.append(
            {
                "tree": tree,
                "model": model,
                "message_bytes": size,
                "step_s": measured.step_s,
                "overhead_s": overhead.seconds,
                "overhead_bytes": overhead.bytes,
                "real_s": measured.round_s,
                "priced_s": whole,
                "ratio": whole / measured.round_s,
                "tiny_overhead_s": known[0][1].seconds,
                "priced_with_tiny_overhead_s": of_tiny,
                "ratio_with_tiny_overhead": of_tiny / measured.round_s,
                "priced_without_overhead_s": without,
            }
        )
    return found


# -- the record ------------------------------------------------------------------------------------


def read_runs(path: Path) -> dict[Run, RoundTimings]:
    """Those that a record has."""
    if not path.exists():
        return {}
    return {Run(**each["run"]): RoundTimings(**each["measured"]) for each in json.loads(path.read_text())["runs"]}


def write(path: Path, runs: Mapping[Run, RoundTimings]) -> list[dict[str, Any]]:
    """Everything measured so far, and what can be compared of it."""
    complete = [tree for tree in PERIODS if all(Run(tree, model, False) in runs for model in CALIBRATED)]
    table = [line for tree in complete for line in compared(tree, runs)]
    record = {
        "environment": environment(),
        "versions": {name: version(name) for name in ("flwr", "torch")},
        "tcp_congestion_control": CONGESTION.read_text().strip(),
        "links": {"below": vars(BELOW), "above": vars(ABOVE)},
        "periods": PERIODS,
        "compared": table,
        "runs": [{"run": run._asdict(), "measured": vars(each)} for run, each in runs.items()],
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return table


def show(table: Sequence[Mapping[str, Any]]) -> None:
    print("| tree | mean message | real | priced | priced / real | with a tiny message's overhead |")
    print("|---|---|---|---|---|---|")
    for line in table:
        size, real, told = f"{line['message_bytes'] / 1e3:.0f} kB", line["real_s"], line["priced_s"]
        other = line["ratio_with_tiny_overhead"]
        print(f"| {line['tree']} | {size} | {real:.2f} s | {told:.2f} s | {line['ratio']:.2f} | {other:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", choices=[*PERIODS], help="of which to measure anew; all unless given"
    )
    parser.add_argument("--out", type=Path, default=Path("clock_reality.json"))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    trees = given.tree or list(PERIODS)
    runs = {run: each for run, each in read_runs(given.out).items() if run.tree not in trees}
    for tree in trees:
        for run in [Run(tree, m, False) for m in CALIBRATED] + [Run(tree, m, True) for m in COMPARED]:
            with tempfile.TemporaryDirectory(prefix="stratafl-reality-") as folder:
                runs[run] = deployed(run, Path(folder))
            table = write(given.out, runs)
            print(f"{run.name}: {[round(each, 2) for each in runs[run].seconds]}", flush=True)
    show(table)


if __name__ == "__main__":
    main()
