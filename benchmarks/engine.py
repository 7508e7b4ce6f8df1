"""The engines' whole table on a GPU in one run: every model, every way to train it, many clients, and the meeting.

python -m benchmarks.engine --out benchmarks/results [--only cnn mlp ...]

Writes one file per part, with the commit and the hardware, and prints what each part shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import sync
from stratafl.bench import Table, bench
from stratafl.store.environment import environment

DEVICE = torch.device("cuda")


def _bench(
    model: str, clients: int, engines: list[str] | None, rounds: int = 3, steps: int = 20
) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        table = bench(model, clients, steps=steps, engines=engines, device=DEVICE, rounds=rounds)
        print(table.text())
        _compare(table)
        return table.as_dict()

    return run


def _compare(table: Table) -> None:
    """Each of our rows as a multiple of each other way."""
    others = [row for row in table.rows if row.engine != "stacked"]
    for ours in (row for row in table.rows if row.engine == "stacked"):
        ratios = ", ".join(f"{ours.client_steps / row.client_steps:.1f}x {row.engine}" for row in others)
        print(f"  {ours.precision}: {ratios}" if ratios else f"  {ours.precision}")


def _sync() -> dict[str, Any]:
    found = {
        method: {
            "groups": sync.milliseconds(DEVICE, method, 2),
            "groups and root": sync.milliseconds(DEVICE, method, 1),
        }
        for method in ("hfedavg", "mtgc", "scaffold")
    }
    for method, both in found.items():
        print(f"meeting, 100 rows x {sync.PARAMETERS:,}, {method}: {json.dumps(both)} ms")
    return {"rows": 100, "parameters": sync.PARAMETERS, "milliseconds": found}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cnn": _bench("cnn", 100, None),
    "mlp": _bench("mlp", 100, None),
    "resnet18_gn": _bench("resnet18_gn", 100, ["vmap:tf32", "stacked:tf32", "stacked:bf16"], rounds=1),
    "lstm": _bench("lstm", 100, ["plain loop:tf32", "stacked:tf32", "stacked:bf16"], rounds=1, steps=2),
    "cnn_1000_clients": _bench("cnn", 1_000, ["stacked:tf32", "stacked:bf16"], rounds=1),
    "cnn_10000_clients": _bench("cnn", 10_000, ["stacked:bf16"], rounds=1),
    "sync": _sync,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        print(f"-- {name}", flush=True)
        found = {"environment": environment(), **PARTS[name]()}
        (given.out / f"h200_{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
