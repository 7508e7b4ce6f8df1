"""The paper's theorems on quadratics with heterogeneous clients and groups.

Two claims are measured. Theorem 4.1: MTGC's error does not depend on how different clients and
groups are, while that of HFedAvg grows with it. Corollary 4.1: with noisy gradients the error falls
in the number of clients (linear speed-up).

    python -m benchmarks.studies.theory [--out docs/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratafl import Client, Data, Topology, simulate
from stratafl.base.environment import environment
from stratafl.base.plotting import PALETTE, pyplot, save

DIM, SAMPLES, LR = 20, 64, 0.05
PERIODS = (2, 5)
METHODS: dict[str, Any] = {
    "HFedAvg": "hfedavg",
    "MTGC, restart at zero": {"name": "mtgc", "restart": "zero"},
    "MTGC, restart from gradients": {"name": "mtgc", "restart": "gradient"},
    "MTGC, corrections kept": {"name": "mtgc", "restart": "keep"},
}
UNBIASED = ("MTGC, restart from gradients", "MTGC, corrections kept")


class Point(nn.Module):
    """Model with a point w; the loss of a sample is curvature/2 (w - target)^2 per coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, samples: Tensor) -> Tensor:
        target, curvature = samples.split(DIM, dim=1)
        return 0.5 * curvature * (self.w - target) ** 2


def mean_cost(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum(dim=1).mean()


class Quadratics:
    """Quadratic losses of clients whose minimisers differ by `scale` between and within groups.

    Curvatures differ between clients, too.
    """

    def __init__(self, shape: str, scale: float, noise: float, seed: int):
        rng = np.random.default_rng(seed)
        self.tree = Topology.of(shape)
        groups, clients = self.tree.sizes[1:]
        centre = scale * rng.normal(size=(groups, DIM))[self.tree.parents[2]]
        centre = centre + scale * rng.normal(size=(clients, DIM))
        centre = centre - centre.mean(axis=0)  # every federation starts at the same distance
        curvature = rng.uniform(0.5, 1.5, size=(clients, DIM))
        disturbance = noise * rng.normal(size=(clients, SAMPLES, DIM))
        disturbance -= disturbance.mean(axis=1, keepdims=True)
        target = centre[:, None] + disturbance
        samples = np.concatenate([target, np.broadcast_to(curvature[:, None], target.shape)], axis=2)
        self.samples = torch.tensor(samples.reshape(clients * SAMPLES, 2 * DIM))
        self.partition = np.arange(clients * SAMPLES).reshape(clients, SAMPLES)
        self.minimiser = torch.tensor((curvature * centre).sum(axis=0) / curvature.sum(axis=0))

    def errors(self, method: Any, rounds: int, batch: int, seed: int = 0) -> np.ndarray:
        """Squared distance of the root's model to the minimiser, round by round."""
        simulation = simulate(
            Point(),
            Data((self.samples, torch.zeros(len(self.samples))), partition=list(self.partition)),
            self.tree,
            method,
            rounds=rounds,
            schedule=PERIODS,
            client=Client(LR, batch_size=batch, sampling="replacement"),
            loss=mean_cost,
            seed=seed,
        )
        errors = []
        for _ in simulation:
            root = simulation.federation.levels[0].model[0]
            errors.append(float(((root - self.minimiser) ** 2).sum()))
        return np.array(errors)


def heterogeneity(scales: Sequence[float], rounds: int, settle: int) -> dict[str, list[float]]:
    """Distance to the minimiser at the end, by method; the noise is the same at every scale."""
    return {
        title: [
            float(np.sqrt(Quadratics("2x4", scale, 0.1, seed=1).errors(method, rounds, 1)[settle:].mean()))
            for scale in scales
        ]
        for title, method in METHODS.items()
    }


def speed_up(shapes: Sequence[str], rounds: int, settle: int) -> dict[str, list[float]]:
    """Mean squared error under gradient noise, by method and number of clients."""
    return {
        title: [
            float(
                np.mean(
                    [
                        Quadratics(shape, 1.0, 3.0, seed).errors(METHODS[title], rounds, 1, seed)[settle:]
                        for seed in range(2)
                    ]
                )
            )
            for shape in shapes
        ]
        for title in UNBIASED
    }


def picture(path: Path, scales: Sequence[float], ends: dict[str, list[float]],
            clients: Sequence[int], floors: dict[str, list[float]]) -> None:  # fmt: skip
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    for colour, (title, values) in zip(PALETTE, ends.items(), strict=False):
        # the curves of the two unbiased variants coincide: the first is wide, so that both are seen
        style = {"label": title, "color": colour, "marker": "o", "linewidth": 7 if title == UNBIASED[0] else 2}
        left.loglog(scales, values, **style)
        if title in floors:
            right.loglog(clients, floors[title], **style)
    first = np.mean([values[0] for values in floors.values()])
    right.loglog(
        clients,
        [first * clients[0] / n for n in clients],
        label="1 / clients",
        color="#444444",
        linestyle=":",
    )
    left.set(xlabel="heterogeneity", ylabel="distance to the minimiser at the end")
    left.set_title("Heterogeneity does not matter to MTGC", loc="left", fontsize=11)
    right.set(xlabel="clients", ylabel="mean squared error under gradient noise")
    right.set_title("Linear speed-up in the number of clients", loc="left", fontsize=11)
    right.set_xticks(clients, [str(n) for n in clients])
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out = parser.parse_args().out
    torch.set_num_threads(1)

    scales = (1.0, 10.0, 100.0)
    ends = heterogeneity(scales, rounds=100, settle=60)
    print(f"{'distance to the minimiser at heterogeneity':46}" + "".join(f"{s:>10g}x" for s in scales))
    for title, values in ends.items():
        print(f"  {title:44}" + "".join(f"{value:>11.1e}" for value in values))
    growth = {title: values[-1] / values[0] for title, values in ends.items()}
    for title, ratio in growth.items():
        print(f"  {title}: x{ratio:.3g} from {scales[0]:g}x to {scales[-1]:g}x")

    shapes = ("2x2", "2x4", "4x4", "4x8", "8x8")
    clients = [Topology.of(shape).leaves for shape in shapes]
    floors = speed_up(shapes, rounds=60, settle=20)
    slopes = {title: float(np.polyfit(np.log(clients), np.log(values), 1)[0]) for title, values in floors.items()}
    print(f"{'mean squared error by number of clients':46}" + "".join(f"{n:>11d}" for n in clients))
    for title, values in floors.items():
        print(f"  {title:44}" + "".join(f"{value:>11.1e}" for value in values))
        print(f"  falls as clients^{slopes[title]:.2f} (linear speed-up: -1)")

    picture(out / "theory.png", scales, ends, clients, floors)
    record = {
        "environment": environment(),
        "heterogeneity": {"scales": scales, "distance": ends, "growth": growth},
        "speed_up": {"clients": clients, "mean_squared_error": floors, "slope": slopes},
    }
    (out / "theory.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
