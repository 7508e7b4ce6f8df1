"""The engines on this machine's processor beside a plain PyTorch loop, round by round in turn.

python -m benchmarks.cpu_engines [--out FILE.json]

Other work on the machine slows them alike when they take turns; what is printed is the median of
each turn's ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from stratafl.base.environment import environment
from stratafl.bench.engines import TASKS, make, task_job

CASES = {"mlp": (20, 10), "cnn": (10, 4)}
"""Clients and steps of a round."""
WAYS = ("plain loop", "loop", "vmap", "stacked", "auto")


def ratios(model: str, clients: int, steps: int, turns: int) -> dict[str, float]:
    """Each way's speed as a multiple of the plain loop's."""
    job = task_job(model, TASKS[model], clients, 50, steps, torch.device("cpu"))
    made = {way: make(way, job, "fp32") for way in WAYS}
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        made[way].round()
    for _ in range(turns):
        for way in WAYS:
            began = time.perf_counter()
            made[way].round()
            spent[way].append(time.perf_counter() - began)
    plain = spent["plain loop"]
    print(f"{model}: auto is {made['auto'].how}; plain loop {clients * steps / min(plain):,.0f} client-steps/s")
    return {way: statistics.median(p / own for p, own in zip(plain, spent[way], strict=True)) for way in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    found = {}
    for model, (clients, steps) in CASES.items():
        found[model] = ratios(model, clients, steps, given.turns)
        print("  " + ", ".join(f"{way} {ratio:.2f}x" for way, ratio in found[model].items()))
    if given.out is not None:
        result = {"environment": environment(), "threads": torch.get_num_threads(), "times the plain loop": found}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
