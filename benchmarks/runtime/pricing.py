"""Time to compute the cost of a run of 1,000 clients and 1,000 global rounds on several networks.

    python -m benchmarks.runtime.pricing

On one thread; in CPU seconds, which other programs do not change much, and in wall-clock seconds.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from stratafl.base.topology import Topology
from stratafl.core.participation import Participation
from stratafl.core.schedule import SyncSchedule
from stratafl.costs.costs import costs
from stratafl.network.instance import instantiate_network
from stratafl.network.messages import message_sizes
from stratafl.network.replay import Workload
from stratafl.network.specification import Network, network
from stratafl.rules.registry import rules_for

ROUNDS, PARAMETERS, FLOPS = 1000, 800_000, 9e7
JITTERY = Network.of(
    {
        "name": "jitter, pipes and stragglers",
        "leaf": {"gflop_s": 10, "slowdown": {"name": "lognormal", "median": 1, "sigma": 0.5}},
        "tier": [
            {"up_mbit_s": 50, "jitter_s": {"name": "pareto", "least": 0.001, "alpha": 2}, "pipe_up_mbit_s": 200},
            {"up_mbit_s": 50, "jitter_s": {"name": "pareto", "least": 0.01, "alpha": 2}},
        ],
    }
)


def make_workload(shape: str, periods: list[int], participation: Participation) -> Workload:
    """Workload of a run of MTGC."""
    tree = Topology.of(shape)
    return Workload(
        tree=tree,
        schedule=SyncSchedule.of(periods, tree.depth),
        participation=(None,) * (tree.depth - 1) + (participation,),
        seed=0,
        sizes=message_sizes(rules_for("mtgc", tree.depth), PARAMETERS, 0),
        steps_N=np.full(tree.leaves, periods[-1]),
        samples_N=np.full(tree.leaves, 50),
        rounds=ROUNDS,
    )


def main() -> None:
    """Print the time of each case."""
    cases: list[tuple[str, list[int], Participation]] = [
        ("100x10", [1, 20], None),
        ("100x10", [10, 20], None),
        ("10x10x10", [2, 2, 20], None),
        ("100x10", [1, 20], 0.5),
        ("100x10", [10, 20], 0.5),
        ("1000", [20], None),
        ("10x100", [10, 20], None),
    ]
    torch.set_num_threads(1)
    print(f"{ROUNDS} global rounds of 1,000 clients; seconds to compute their cost: CPU, wall clock")
    for shape, periods, participation in cases:
        workload = make_workload(shape, periods, participation)
        for a_network in (network("lan_wan"), network("nyc_mesh"), JITTERY):
            begin = time.process_time(), time.perf_counter()
            priced = costs(workload, instantiate_network(a_network, workload.tree, 0, workload.samples_N, FLOPS))
            core, wall = time.process_time() - begin[0], time.perf_counter() - begin[1]
            hours = priced.seconds_R.sum() / 3600
            share = "all" if participation is None else f"{participation:.0%}"
            print(f"{shape:9} periods {periods!s:11} {share:4} {a_network.name:28} "
                  f"{core:6.2f} s {wall:6.2f} s   ({hours:.1f} h there)")  # fmt: skip


if __name__ == "__main__":
    main()
