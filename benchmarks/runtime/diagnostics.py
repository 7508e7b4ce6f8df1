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

from stratafl.core.client_update import leaf
from stratafl.engine.factory import EngineName
from stratafl.metrics.drift import Diagnose
from stratafl.models.registry import build
from stratafl.runs.python.simulate import simulate
from stratafl.simulation.simulation import Simulation

SAMPLES = 100
SHAPES = {"mlp": (784,), "cnn": (3, 32, 32)}


def study(
    model: str, tree: str, periods: Sequence[int], engine: EngineName, device: str, diagnose: Diagnose
) -> Simulation:
    """Simulation with the paper's client: batches of 50, clipping at 10, weight decay."""
    clients = int(np.prod([int(part) for part in tree.split("x")]))
    maker = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * SAMPLES, *SHAPES[model], generator=maker)
    targets = torch.randint(0, 10, (len(inputs),), generator=maker)
    return simulate(
        lambda: build(model, SHAPES[model], 10),
        (inputs, targets),
        list(np.arange(len(inputs)).reshape(clients, SAMPLES)),
        tree,
        "mtgc",
        periods=periods,
        rounds=10**6,
        leaf=leaf(0.01, clip_norm=10, weight_decay=1e-3),
        batch=50,
        device=device,
        engine=engine,
        precision="bf16" if device == "cuda" else "fp32",
        diagnose=diagnose,
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
    modes: list[Diagnose] = ["drift", "ideal"]
    big = options.device == "cuda"
    engine: EngineName = "stacked" if big else "loop"
    cases: list[tuple[str, str, list[int]]] = (
        [("cnn", "10x10", [5, 20]), ("mlp", "10x10", [5, 20]), ("mlp", "10x10", [20, 5])]
        if big
        else [("mlp", "2x5", [3, 5]), ("cnn", "2x2", [2, 5])]
    )
    print(f"{options.device}, {engine} engine, MTGC")
    for model, tree, periods in cases:
        for mode in modes:
            seconds, measured = share(study(model, tree, periods, engine, options.device, mode), options.rounds)
            print(
                f"{model} {tree}, periods {periods}, {mode}: "
                f"{100 * measured:.2f} % of a round of {1e3 * seconds:.1f} ms is spent on diagnostics"
            )


if __name__ == "__main__":
    main()
