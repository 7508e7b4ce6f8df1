"""Time of a synchronisation: 100 clients of 0.8 million parameters, a tree of 10x10, corrections on
both levels.

    python -m benchmarks.speed.synchronisation [--device cuda]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from stratafl.base.topology import Topology
from stratafl.core.client_training import TrainResult
from stratafl.engine.factory import drift_kernel
from stratafl.federation.federation import Federation
from stratafl.federation.sync import edge_levels
from stratafl.rules.registry import place

PARAMETERS = 797_962


def milliseconds(device: torch.device, method: str, top: int, shape: str = "10x10", times: int = 20) -> float:
    """Median time of one synchronisation up to edge level `top`."""
    tree = Topology.of(shape)
    x_P = torch.randn(PARAMETERS, device=device)
    edges = edge_levels(place(method, tree.depth), seed=0)
    federation = Federation(tree, edges, x_P, x_P[:0], drift_kernel=drift_kernel(x_P))
    x_NP = x_P + 0.01 * torch.randn(tree.leaves, PARAMETERS, device=device)
    b_NB = x_NP[:, :0]
    spent = []
    for _ in range(times):
        federation.begin_round()
        federation.apply_training(TrainResult(model_AP=x_NP, buffers_AB=b_NB, path_AP=b_NB, client_rows={}), 0.1)
        if top < tree.depth:
            federation.levels[top].lr_sum_N[:] += 0.1
        _wait(device)
        began = time.perf_counter()
        federation.synchronize(top)
        _wait(device)
        spent.append(1e3 * (time.perf_counter() - began))
    return float(np.median(spent))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    for method in ("hfedavg", "mtgc", "scaffold"):
        group, everything = (milliseconds(device, method, top) for top in (2, 1))
        print(f"{method:10} groups {group:8.3f} ms   groups and root {everything:8.3f} ms")


if __name__ == "__main__":
    main()
