"""Share of a round's time that drift diagnostics take.

python -m benchmarks.runtime.diagnostics [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stratafl import Client, Data, Simulation, simulate
from stratafl.models.registry import build

SAMPLES = 100
SHAPES = {"mlp": (784,), "cnn": (3, 32, 32)}


def simulation(model: str, tree: str, periods: Sequence[int], engine: str, device: str, drift: str) -> Simulation:
    """Simulation with the paper's client: batches of 50, clipping at 10, weight decay."""
    clients = int(np.prod([int(part) for part in tree.split("x")]))
    maker = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * SAMPLES, *SHAPES[model], generator=maker)
    targets = torch.randint(0, 10, (len(inputs),), generator=maker)
    return simulate(
        lambda: build(model, SHAPES[model], 10),
        Data((inputs, targets), partition=list(np.arange(len(inputs)).reshape(clients, SAMPLES))),
        tree,
        "mtgc",
        rounds=10**6,
        schedule=periods,
        client=Client(0.01, batch_size=50, clip_norm=10, weight_decay=1e-3),
        evaluation={"drift": drift},
        execution={"device": device, "engine": engine, "precision": "bf16" if device == "cuda" else "fp32"},
    )


def share(simulation: Simulation, rounds: int) -> tuple[float, float]:
    """Median seconds of a round, and the share of all rounds that diagnostics take.

    The first round is a warm-up. Diagnostics are timed by themselves, with the device idle before
    and after, because two runs differ by more than the diagnostics take.
    """
    drift = simulation.drift
    assert drift is not None
    measured = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal measured
            _wait()
            began = time.perf_counter()
            result = method(*arguments, **options)
            _wait()
            measured += time.perf_counter() - began
            return result

        return call

    for name in ("on_training_begin", "on_level_synchronized", "pop_round"):
        setattr(drift, name, timed(getattr(drift, name)))
    next(simulation)
    measured, spent = 0.0, []
    for _ in range(rounds):
        began = time.perf_counter()
        next(simulation)
        _wait()
        spent.append(time.perf_counter() - began)
    return float(np.median(spent)), measured / sum(spent)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    big = options.device == "cuda"
    engine = "stacked" if big else "loop"
    cases: list[tuple[str, str, list[int]]] = (
        [("cnn", "10x10", [5, 20]), ("mlp", "10x10", [5, 20]), ("mlp", "10x10", [20, 5])]
        if big
        else [("mlp", "2x5", [3, 5]), ("cnn", "2x2", [2, 5])]
    )
    print(f"{options.device}, {engine} engine, MTGC")
    for model, tree, periods in cases:
        for drift in ("drift", "ideal"):
            seconds, measured = share(simulation(model, tree, periods, engine, options.device, drift), options.rounds)
            print(
                f"{model} {tree}, periods {periods}, {drift}: "
                f"{100 * measured:.2f} % of a round of {1e3 * seconds:.1f} ms is spent on diagnostics"
            )


if __name__ == "__main__":
    main()
