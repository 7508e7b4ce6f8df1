"""Cost of checkpoints: time to write one against a plain copy of its bytes, and share of a run's
time.

    python -m benchmarks.runtime.checkpoints [--folder DIR] [--out FILE.json]

The state is that of the paper's CIFAR-10 setting: 10 groups of 10 clients, a CNN of 0.8 million
parameters. "mtgc" is as after a global round (the clients' corrections have just restarted),
"scaffold" has a control variate per client. A plain copy writes the same files' bytes from memory
in chunks and syncs them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stratafl import Experiment, Storage
from stratafl.base.environment import environment
from stratafl.base.state_dict import StateDict
from stratafl.base.topology import Topology
from stratafl.core.flat_module import FlatModule
from stratafl.federation.federation import Federation
from stratafl.federation.sync import edge_levels, extras_of
from stratafl.metrics.communication import CommunicationMeter
from stratafl.models.registry import build
from stratafl.rules.registry import rules_for
from stratafl.runs import format
from stratafl.runs.checkpoint import CHUNK, Checkpoints, LogDigest, Progress
from stratafl.runs.provenance import Provenance
from stratafl.runs.session import RunSession

CLIENTS, TIMES = "10x10", 3


def paper_state(method: str, device: torch.device) -> StateDict:
    """State of a federation, with values like those of trained models."""
    flat = FlatModule(build("cnn", (3, 32, 32), 10))
    x_P, b_B = (row.to(device) for row in flat.flatten_module(flat.module))
    tree = Topology.of(CLIENTS)
    federation = Federation(tree, edge_levels(rules_for(method, tree.depth), seed=0), x_P, b_B)
    noise = torch.Generator(device).manual_seed(0)

    def trained(rows: torch.Tensor) -> torch.Tensor:
        return rows + 0.01 * torch.randn(rows.shape, generator=noise, device=device)

    kept = [1] if method == "mtgc" else [1, 2]
    for level, state in enumerate(federation.levels):
        model = trained(state.model)
        broadcast = {**state.broadcast, "model": model} if state.broadcast else {}
        state = replace(state, model=model, broadcast=broadcast)
        if level in kept:
            rule_state = {name: trained(rows) for name, rows in state.state.items()}
            extras = {
                name: tree.to_children(level, rows)
                for name, rows in extras_of(federation.levels[level - 1].broadcast).items()
            }
            # the correction, which is computed from the state, is stored in a checkpoint, too
            correction = federation.edges[level].rule.correction(rule_state, extras)
            state = replace(state, state=rule_state, correction=correction)
        federation.levels[level] = state
    return {"step": 0, "federation": federation.saved(), "traffic": CommunicationMeter(tree).saved(), "chunk": None}


def checkpoint_cost(method: str, folder: Path, device: torch.device) -> dict[str, Any]:
    state = paper_state(method, device)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / format.ROUNDS).touch()
    checkpoints = Checkpoints(folder, "benchmark")
    written, copied, read = [], [], []
    for number in range(TIMES):
        began = time.perf_counter()
        checkpoints.write(Progress(0), state, LogDigest(0, hashlib.sha256().hexdigest()), Provenance({}, {}))
        written.append(time.perf_counter() - began)
        contents = [path.read_bytes() for path in checkpoints.path(Progress(0)).iterdir()]
        began = time.perf_counter()
        _plain_copy(folder / f"copy{number}", contents)
        copied.append(time.perf_counter() - began)
        began = time.perf_counter()
        checkpoints.read(Progress(0))
        read.append(time.perf_counter() - began)
        shutil.rmtree(folder / f"copy{number}")
        checkpoints.keep_only()
    size = sum(map(len, contents))
    return {
        "method": method,
        "bytes": size,
        "write_seconds": written,
        "plain_copy_seconds": copied,
        "read_seconds": read,
        "write_GB_per_second": size / 1e9 / statistics.median(written),
        "ratio_to_plain_copy": statistics.median(written) / statistics.median(copied),
    }


def _plain_copy(folder: Path, contents: list[bytes]) -> None:
    folder.mkdir()
    for number, data in enumerate(contents):
        with (folder / str(number)).open("wb", buffering=0) as file:
            view = memoryview(data)
            for begin in range(0, len(view), CHUNK):
                file.write(view[begin : begin + CHUNK])
            os.fsync(file.fileno())


def share_of_a_run(folder: Path, device: str) -> dict[str, Any]:
    """Times of the rounds and checkpoints of a run, and the share of checkpoints by default."""
    experiment = Experiment(
        model={"name": "mlp", "hidden": [200, 200]},
        tree=CLIENTS,
        schedule=[5, 10],
        client={"batch_size": 10},
        execution=device,
        storage={"checkpoint_every": 1},
        rounds=4,
    )
    session = RunSession.start(experiment, "share", folder)
    rounds: list[float] = []
    spent: list[float] = []
    assert session.writer is not None
    write = session.writer.checkpoints.write

    def timed(progress: Progress, state: StateDict, records: LogDigest, provenance: Provenance) -> None:
        began = time.perf_counter()
        write(progress, state, records, provenance)
        spent.append(time.perf_counter() - began)

    session.writer.checkpoints.write = timed  # type: ignore[method-assign]
    session.run(lambda record: rounds.append(record.seconds))
    every = Storage().checkpoint_every
    one, other = statistics.median(spent), every * statistics.median(rounds[1:])
    return {
        "model": "mlp",
        "parameters": session.simulation.flat.parameters,
        "steps_per_round": session.simulation.schedule.steps[0],
        "round_seconds": rounds,
        "checkpoint_seconds": spent,
        "checkpoint_every": every,
        "share": one / (one + other),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    costs = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for method in ("mtgc", "scaffold"):
            cost = checkpoint_cost(method, Path(place) / method, device)
            costs.append(cost)
            print(
                f"{method:8}  {cost['bytes'] / 1e6:.0f} MB  "
                f"written in {statistics.median(cost['write_seconds']):.2f} s "
                f"({cost['write_GB_per_second']:.2f} GB/s), {cost['ratio_to_plain_copy']:.2f} times a plain copy",
                flush=True,
            )
        share = share_of_a_run(Path(place) / "runs", device.type)
    print(
        f"share of a run's time, a checkpoint every {share['checkpoint_every']} rounds "
        f"of {share['steps_per_round']} steps: {100 * share['share']:.2f} %"
    )
    if options.out is not None:
        record = {"environment": environment(), "checkpoints": costs, "run": share}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
