"""Measurement of all engines on a GPU: every model and contender, many clients, synchronisation.

    python -m benchmarks.speed.h200 --out benchmarks/results [--only cnn mlp ...]
    python -m benchmarks.speed.publish

The first command writes one file per part as soon as it is measured, with commit and hardware. A
part that fails is named, and the others are still measured. The second command writes the numbers
into the documents.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import jax_baseline, synchronisation
from benchmarks.speed.measure import compare_engines
from benchmarks.speed.results import TablePrinter
from stratafl.base.environment import environment

DEVICE = torch.device("cuda")
EVERY_WAY = (
    "plain loop:tf32", "graphed loop:tf32", "vmap:tf32", "graphed vmap:tf32", "compiled vmap:tf32", "jax:tf32",
    "stacked:tf32", "graphed loop:bf16", "vmap:bf16", "graphed vmap:bf16", "compiled vmap:bf16", "jax:bf16",
    "stacked:bf16", "stacked:fp16", "stacked:fp32",
)  # fmt: skip
"""Contenders. The plain loop has one precision, since it waits for the host in every one."""


def _bench(model: str, clients: int, engines: tuple[str, ...], rounds: int = 2) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        available = [name for name in engines if jax_baseline.available() or not name.startswith("jax")]
        table = compare_engines(model, clients, engines=available, device=DEVICE, rounds=rounds, watch=TablePrinter())
        print("\n".join(table.remarks()))
        return table.as_dict()

    return run


def _sync() -> dict[str, Any]:
    milliseconds = {
        method: {
            "groups": synchronisation.milliseconds(DEVICE, method, 2),
            "groups and root": synchronisation.milliseconds(DEVICE, method, 1),
        }
        for method in ("hfedavg", "mtgc", "scaffold")
    }
    for method, levels in milliseconds.items():
        print(f"meeting, 100 rows x {synchronisation.PARAMETERS:,}, {method}: {json.dumps(levels)} ms")
    return {"rows": 100, "parameters": synchronisation.PARAMETERS, "milliseconds": milliseconds}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cnn": _bench("cnn", 100, EVERY_WAY),
    "lstm": _bench(
        "lstm", 100,
        ("plain loop:tf32", "graphed loop:tf32", "stacked:tf32", "graphed loop:bf16", "stacked:bf16"),
    ),
    "mlp": _bench("mlp", 100, EVERY_WAY),
    "resnet18_gn": _bench(
        "resnet18_gn", 100,
        tuple(
            f"{way}:{kind}"
            for kind in ("tf32", "bf16")
            for way in ("graphed loop", "vmap", "graphed vmap", "compiled vmap", "stacked")
        ),
        rounds=1,
    ),
    "cnn_1000_clients": _bench("cnn", 1_000, ("stacked:tf32", "stacked:bf16"), rounds=1),
    "cnn_10000_clients": _bench("cnn", 10_000, ("stacked:bf16",), rounds=1),
    "sync": _sync,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        print(f"-- {name}", flush=True)
        began = time.perf_counter()
        try:
            record = {"environment": environment(), **PARTS[name]()}
            (options.out / f"h200_{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            failed += [f"{name}, {way}" for way in record.get("failed", {})]
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"   {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
