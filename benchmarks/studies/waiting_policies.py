"""Waiting policies: accuracy over simulated seconds, Fashion-MNIST on heavy-tailed devices.

    python -m benchmarks.studies.waiting_policies          train what is missing, write the results
    python -m benchmarks.studies.waiting_policies --draw   write table and figure of stored results

Every policy trains until the same simulated time, with three seeds. Writes
docs/results/policies.json, policies.md and policies.png. Runs in policies.json are not trained
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stratafl import Data, Experiment, Schedule
from stratafl.base.environment import environment
from stratafl.base.files import write_json
from stratafl.base.plotting import PALETTE, save, style
from stratafl.base.statistics import mean_std
from stratafl.metrics.records import ClockedRound

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SEEDS, SECONDS, ROUNDS, POINTS = (0, 1, 2), 400.0, 2_000, 120
TARGETS = (0.75, 0.8)
NETWORK = {
    "name": "heavy-tailed phones",
    "leaf": {
        "step_s": {"name": "pareto", "least": 0.02, "alpha": 1.1, "at_most": 2.0},
        "slowdown": {"name": "lognormal", "median": 1.0, "sigma": 0.5},
    },
    "tier": [
        {"name": "radio", "up_mbit_s": {"name": "lognormal", "median": 5.0, "sigma": 0.7}, "latency_s": 0.03},
        {"name": "backhaul", "up_mbit_s": 50.0, "latency_s": 0.05},
    ],
}
POLICIES: dict[str, Any] = {
    "all": "all",
    "deadline of 3 s": {"deadline": 3.0},
    "first 7 of 10": {"first": 7},
    "deadline of 3 s, late work counts": {"deadline": 3.0, "late": "counts"},
    "buffers of 3 clients": {"buffer": 3},
    "buffers of 3 clients, 3 groups": [{"buffer": 3}, {"buffer": 3}],
}
METHODS: dict[str, dict[str, Any]] = {"HFedAvg": {"name": "hfedavg"}, "MTGC": {"name": "mtgc", "restart": "keep"}}


def experiment(method: str, policy: str, seed: int) -> Experiment:
    return Experiment(
        model={"name": "mlp", "hidden": [64]},
        data=Data("fashion_mnist", partition=[{"name": "dirichlet", "alpha": 0.1}] * 2),
        tree="5x10",
        method=METHODS[method],
        schedule=Schedule([4, 10], wait=POLICIES[policy]),
        client={"lr": 0.05, "batch_size": 20},
        evaluation={"drift": "none"},
        network=NETWORK,
        execution={"engine": "stacked"},
        rounds=ROUNDS,
        seed=seed,
    )


def trained(method: str, policy: str, seed: int) -> dict[str, Any]:
    """Train one run until its time is up; seconds and accuracies of some of its rounds."""
    began, seconds, accuracy, late = time.perf_counter(), [0.0], [0.1], 0
    for record in experiment(method, policy, seed).start():
        assert isinstance(record, ClockedRound)
        seconds.append(record.clock_total)
        accuracy.append(record.metrics["accuracy"])
        late += len(record.late)
        if record.clock_total >= SECONDS:
            break
    which = np.unique(np.linspace(0, len(seconds) - 1, POINTS).astype(int))
    return {
        "method": method, "policy": policy, "seed": seed, "rounds": len(seconds) - 1, "late": late,
        "trained_in_s": round(time.perf_counter() - began, 1),
        "seconds": [round(seconds[n], 2) for n in which], "accuracy": [round(accuracy[n], 4) for n in which],
        "first": {str(target): _first(seconds, accuracy, target) for target in TARGETS},
    }  # fmt: skip


def _first(seconds: list[float], accuracy: list[float], target: float) -> float | None:
    """Time at which the accuracy first reaches the target."""
    return next((round(at, 2) for at, value in zip(seconds, accuracy, strict=True) if value >= target), None)


def at(run: dict[str, Any], moments: np.ndarray) -> np.ndarray:
    """Accuracy of the newest model of a run at some moments."""
    place = np.searchsorted(run["seconds"], moments, side="right") - 1
    return np.asarray(run["accuracy"])[place]


def drawn(runs: list[dict[str, Any]], path: Path) -> None:
    moments = np.linspace(0, SECONDS, 201)
    with style() as plt:
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
        for panel, method in zip(axes, METHODS, strict=True):
            for colour, policy in zip(PALETTE, POLICIES, strict=False):
                curves = [at(run, moments) for run in runs if (run["method"], run["policy"]) == (method, policy)]
                mean, low, high = np.mean(curves, axis=0), np.min(curves, axis=0), np.max(curves, axis=0)
                panel.plot(moments, mean, color=colour, linewidth=1.8, label=policy)
                panel.fill_between(moments, low, high, color=colour, alpha=0.12, linewidth=0)
            panel.set_title(method, loc="left")
            panel.set(xlabel="seconds on the network", xlim=(0, SECONDS), ylim=(0.1, 0.85))
            panel.grid(alpha=0.25)
        axes[0].set_ylabel("test accuracy")
        axes[1].legend(frameon=False, loc="lower right", fontsize=8)
        save(figure, path)


def table(runs: list[dict[str, Any]]) -> list[str]:
    heads = [f"s to {100 * target:.0f} %" for target in TARGETS]
    lines = [
        f"| method | whom parents wait for | {' | '.join(heads)} | accuracy after {SECONDS:.0f} s | rounds |",
        "|---|---|" + "---|" * (len(heads) + 2),
    ]
    for method in METHODS:
        for policy in POLICIES:
            chosen = [run for run in runs if (run["method"], run["policy"]) == (method, policy)]
            last = [float(at(run, np.array([SECONDS]))[0]) for run in chosen]
            mean, deviation = mean_std(last)
            cells = [_reached([run["first"][str(target)] for run in chosen]) for target in TARGETS]
            rounds = np.mean([run["rounds"] for run in chosen])
            shown = f"{100 * mean:.1f} ± {100 * (deviation or 0.0):.1f} %"
            lines.append(f"| {method} | {policy} | {' | '.join(cells)} | {shown} | {rounds:.0f} |")
    return lines


def _reached(moments: list[float | None]) -> str:
    # the last round of a run ends after its time is up
    reached = [moment for moment in moments if moment is not None and moment <= SECONDS]
    if not reached:
        return "never"
    mean, deviation = mean_std(reached)
    text = f"{mean:.0f}" if deviation is None else f"{mean:.0f} ± {deviation:.0f}"
    return text if len(reached) == len(moments) else f"{text} ({len(reached)} of {len(moments)})"


PAGE = """# Whom to wait for

Made by `python -m benchmarks.studies.waiting_policies`: Fashion-MNIST, an MLP with 64 hidden units, 50 clients in 5
groups, both levels non-i.i.d. (Dirichlet, 0.1), 4 group rounds of 10 steps in a global one. Steps
take 20 ms or more, with a Pareto tail (1.1, at most 2 s), links about 5 Mbit/s: the numbers are at
the top of the benchmark. Every run trains for {seconds:.0f} s on this network, three seeds each; a
policy that waits for fewer has more rounds in them. Means and standard deviations over the seeds;
bands in the picture go from the lowest to the highest. MTGC keeps its corrections (`restart =
"keep"`), as asynchronous levels want it. Commit {commit}{changed}, {cores} cores of {cpu}, no GPU.

![Accuracy against seconds on the network](policies.png)

{table}

With "first 7 of 10" and a deadline, clients that are always slow are hardly ever heard, and what
only they have is hardly learnt. Late work that counts is [defined
here](../how-to/waiting.md#late-work-that-counts).
"""


def page(results: dict[str, Any]) -> str:
    """Results of the runs as Markdown."""
    machine = results["environment"]
    changed = " with changes" if machine["changed_since_commit"] else ""
    values = {"commit": machine["commit"], "changed": changed, "cores": machine["cores"], "cpu": machine["processor"]}
    return PAGE.format(seconds=SECONDS, table="\n".join(table(results["runs"])), **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only write table and figure")
    options, path = parser.parse_args(), RESULTS / "policies.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    done = {(run["method"], run["policy"], run["seed"]) for run in results["runs"]}
    torch.set_num_threads(1)
    for seed in () if options.draw else SEEDS:
        for policy in POLICIES:
            for method in METHODS:
                if (method, policy, seed) in done:
                    continue
                run = trained(method, policy, seed)
                results["runs"].append(run)
                results["environment"] = environment()
                write_json(path, results)
                shown = f"{run['rounds']} rounds in {run['trained_in_s']} s, {run['accuracy'][-1]:.3f}"
                print(f"{method}, {policy}, seed {seed}: {shown}", file=sys.stderr)
    drawn(results["runs"], path.with_suffix(".png"))
    path.with_suffix(".md").write_text(page(results))
    print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()
