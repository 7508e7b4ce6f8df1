"""Two processes against one on two cores, and the bytes they exchange against the minimum.

    python -m benchmarks.runtime.distributed [--ranks 2] [--rounds 5] [--out FILE.json]

Each process has one thread, so that one rank uses one core. The trees are 4 groups of 5 clients,
and groups of 14, 3 and 3, of which the first must be split; the model a multi-layer perceptron of
0.2 million parameters; MTGC, E = 5, H = 10.

The minimum: an aggregator whose children are on several ranks needs one row from each rank at every
synchronisation. `rows` is what ranks contributed to sums of rows; `numbers` and `values` are all
small messages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stratafl import Client, Data, Simulation, simulate
from stratafl.base.environment import environment
from stratafl.base.topology import Topology
from stratafl.distributed.communicator import Communicator
from stratafl.distributed.subtree import Branch
from stratafl.models.registry import build

TREES = {"4x5": "4x5", "14 + 3 + 3": [14, 3, 3]}
FEATURES, CLASSES, SAMPLES, PERIODS = 784, 10, 100, [5, 10]
TURNS = 3


def simulation(shape: Any, rounds: int, ranks: Communicator) -> Simulation:
    tree = Topology.of(shape)
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(tree.leaves * SAMPLES, FEATURES, generator=random)
    targets = torch.randint(CLASSES, (len(inputs),), generator=random)
    return simulate(
        lambda: build("mlp", (FEATURES,), CLASSES, hidden=[200, 200]),
        Data((inputs, targets), partition=list(np.arange(len(inputs)).reshape(tree.leaves, -1))),
        tree,
        "mtgc",
        rounds=rounds,
        schedule=PERIODS,
        client=Client(0.01, batch_size=50, clip_norm=10.0),
        execution={"engine": "loop"},
        ranks=ranks,
    )


def least_bytes(run: Simulation) -> int:
    """Fewest bytes of this rank in a round: one row per shared parent and synchronisation."""
    tree, meetings = run.federation.tree, run.schedule.meetings
    if not isinstance(tree, Branch):
        return 0
    shared = sum(int(meetings[level]) * len(tree._shared_parents(level)) for level in range(1, tree.depth + 1))
    return shared * run.federation.levels[0].model.nbytes


def one_rank(shape: Any, rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = Communicator.join()
    run = simulation(shape, rounds, ranks)
    next(run)
    ranks.bytes_sent.clear()
    seconds = [record.seconds for record in run]
    measured = {"sent": dict(ranks.bytes_sent), "least": least_bytes(run), "leaves": run.federation.tree.leaves}
    all_measured = ranks.all_gather(measured)
    if ranks.is_first:
        out.write_text(
            json.dumps(
                {"seconds": seconds, "ranks": all_measured, "norm": float(run.federation.levels[0].model.norm())}
            )
        )
    ranks.leave()


def on_ranks(count: int, tree: str, rounds: int, out: Path) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    module = "benchmarks.runtime.distributed"
    command = [sys.executable, "-m", module, "--rounds", str(rounds), "--one-rank", tree, str(out)]
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(count)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(out.read_text())


def compare(tree: str, count: int, rounds: int, out: Path) -> dict[str, Any]:
    # in turns, and the fastest round of each: the cores of a virtual machine are not always equally
    # fast
    turns = [[on_ranks(ranks, tree, rounds, out) for ranks in (1, count)] for _ in range(TURNS)]
    one, several = turns[-1]
    sent = sum(rank["sent"].get("rows", 0) for rank in several["ranks"]) / (rounds - 1)
    least = sum(rank["least"] for rank in several["ranks"])
    small = sum(rank["sent"].get(kind, 0) for rank in several["ranks"] for kind in ("numbers", "values"))
    alone, shared = (min(min(turn[which]["seconds"]) for turn in turns) for which in (0, 1))
    return {
        "tree": tree, "ranks": count, "leaves": [rank["leaves"] for rank in several["ranks"]],
        "seconds_one": alone, "seconds_several": shared, "speedup": alone / shared,
        "bytes_of_rows": sent, "least_bytes": least, "of_the_least": sent / least,
        "small_bytes": small / (rounds - 1),
        "relative_difference": abs(one["norm"] / several["norm"] - 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("ranks.json"))
    parser.add_argument("--one-rank", nargs=2, metavar=("TREE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_rank:
        return one_rank(TREES[options.one_rank[0]], options.rounds, Path(options.one_rank[1]))
    rows = [compare(tree, options.ranks, options.rounds, options.out) for tree in TREES]
    options.out.write_text(json.dumps({"environment": environment(), "runs": rows}, indent=2) + "\n")
    for row in rows:
        print(
            f"{row['tree']}: {row['seconds_one']:.2f} s a round on one rank, {row['seconds_several']:.2f} s on "
            f"{row['ranks']} ({row['leaves']} clients): {row['speedup']:.2f} times as fast; rows "
            f"{row['bytes_of_rows'] / 1e6:.2f} MB a round, {row['of_the_least']:.2f} of the least, and "
            f"{row['small_bytes'] / 1e3:.1f} kB of small messages"
        )


if __name__ == "__main__":
    main()
