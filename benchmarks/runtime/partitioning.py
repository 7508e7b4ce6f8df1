"""Time to partition data sets on one core: `python -m benchmarks.runtime.partitioning`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from stratafl.base.topology import Topology
from stratafl.data.partition.partition import partition

CASES: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet 0.1": {"name": "dirichlet", "alpha": 0.1},
    "dirichlet 0.1, log-normal sizes": {"name": "dirichlet", "alpha": 0.1, "sizes": {"lognormal": 1.0}},
    "release_dirichlet 0.1": {"name": "release_dirichlet", "alpha": 0.1},
    "classes 2": {"name": "classes", "k": 2},
    "classes 2, equal sizes": {"name": "classes", "k": 2, "sizes": "equal"},
}


def main() -> None:
    print(f"{'samples':>9} {'classes':>7} {'tree':>9}  {'split on each level':<33} seconds")
    for samples, classes, tree in (
        (50_000, 10, (10, 10)),
        (50_000, 100, (10, 10)),
        (50_000, 10, (4, 5, 5)),
        (1_000_000, 10, (100, 100)),
        (1_000_000, 10, (10_000,)),
        (1_000_000, 100, (10_000,)),
    ):
        labels, shape = np.arange(samples) % classes, "x".join(map(str, tree))
        parents = Topology.of(shape).parents
        for name, split in CASES.items():
            levels: list[object] = [split] * len(tree)
            if split["name"] == "classes":
                levels = [{**split, "k": 2 + len(tree) - m} for m in range(1, len(tree) + 1)]
            start = time.perf_counter()
            partition(labels, parents, levels, seed=0)
            seconds = time.perf_counter() - start
            print(f"{samples:>9,} {classes:>7} {shape:>9}  {name:<33} {seconds:7.3f}", flush=True)


if __name__ == "__main__":
    main()
