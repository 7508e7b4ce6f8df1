"""Fingerprints of many small runs, which show whether changed code still computes the same.

    python -m tests.fingerprints            list the runs that differ from the table
    python -m tests.fingerprints --write    write a new table, if results are meant to change

The table, `fingerprints.json`, has three SHA-256 for every run of `fingerprint_runs`: of the root's
model, of every node's state, and of the round records without times. They cover names, types,
shapes and bytes, so that the last bit of every number counts. The runs use float64, one thread, and
a process of their own in which libraries use their most portable kernels; but processors and builds
of torch may still round differently. So the table also has the digest of a canary, a fixed
computation in torch without this package. If the canary is the same, all SHA-256 must be the same.
If it is not, bits cannot be compared, and coarse numbers are compared to six digits instead: for
each kind of tensor, and each quantity of the records, its norm and its product with a fixed vector.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from stratafl.distributed.communicator import Communicator
from tests.distributed.conftest import on_ranks
from tests.fingerprint_runs import RANKED, Left, Tensors, every_run, simulated

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".json")
RANKS, SECONDS = 2, 600
PLAIN = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default",
    "PYTHONPATH": str(ROOT),
}  # fmt: skip
"""Environment for one thread and instructions that every processor has."""
DIGITS, RELATIVE, ABSOLUTE = 8, 1e-6, 1e-9
Table = dict[str, Any]


# -- digests ---------------------------------------------------------------------------------------


def sha256(tensors: Tensors) -> str:
    """Digest of names, types, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def coarse(values: Iterable[float]) -> list[float]:
    """Norm, product with a fixed vector of about unit length, and number of values that are not
    finite."""
    numbers = list(values)
    finite = [value if math.isfinite(value) else 0.0 for value in numbers]
    product = math.fsum(value * math.cos(position) for position, value in enumerate(finite)) / math.sqrt(
        len(finite) or 1
    )
    numbers_of = [math.hypot(*finite), product, float(sum(not math.isfinite(value) for value in numbers))]
    return [float(f"{value:.{DIGITS}g}") for value in numbers_of]


def same_roughly(one: list[float], other: list[float]) -> bool:
    allowed = RELATIVE * one[0] + ABSOLUTE
    return one[2] == other[2] and all(abs(a - b) <= allowed for a, b in zip(one[:2], other[:2], strict=True))


def of_tensors(tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Fingerprint of tensors; `kinds`: name of the coarse numbers that each tensor counts in."""
    flat: dict[str, list[float]] = {}
    for name, tensor in sorted(tensors.items()):
        flat.setdefault(kinds[name], []).extend(tensor.detach().double().flatten().tolist())
    return {"sha256": sha256(tensors), "coarse": {kind: coarse(values) for kind, values in flat.items()}}


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Fingerprint of records as JSON, which has every bit of a float; texts must always agree."""
    text = json.dumps(records, sort_keys=True)
    numbers: dict[str, list[float]] = {}
    words = []
    for path, value in leaves(json.loads(text)):
        words.append(path)
        if isinstance(value, str):
            words.append(value)
        else:
            quantity = "traffic" if path.startswith(" traffic") else path.rpartition(" ")[2]
            numbers.setdefault(quantity, []).append(float(value))
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "words": hashlib.sha256("\n".join(words).encode()).hexdigest(),
        "coarse": {name: coarse(values) for name, values in sorted(numbers.items())},
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values in nested dicts and lists, with the keys on the path to each."""
    if isinstance(value, dict):
        for key, entry in sorted(value.items()):
            yield from leaves(entry, f"{path} {key}")
    elif isinstance(value, list):
        for entry in value:
            yield from leaves(entry, path)
    else:
        yield path, value


def fingerprint(left: Left) -> Table:
    nodes = {f"{node}: {kind}": tensor for node, tensors in left.nodes.items() for kind, tensor in tensors.items()}
    parts = {
        "model": of_tensors(left.model, {name: name for name in left.model}),
        "nodes": of_tensors(nodes, {name: name.partition(": ")[2] for name in nodes}),
        "records": of_records(left.records),
    }
    return {part: parts[part] for part in parts if part != "nodes" or nodes}


def canary() -> str:
    """Digest of this machine's results for the kinds of operations that training uses, without this
    package."""
    positions = torch.arange(1.0, 2401.0, dtype=torch.float64)
    wave = torch.sin(positions * positions)
    results = {"sin": wave, "exp": wave.exp(), "log": (wave.abs() + 0.1).log(), "tanh": wave.tanh(), "sum": wave.sum()}
    results["sqrt"] = wave.abs().sqrt() / positions.pow(0.9)
    for rows, inner, columns in ((3, 4, 3), (9, 4, 5), (5, 15, 7), (40, 30, 20)):
        left = wave[: rows * inner].reshape(rows, inner)
        right = wave[-inner * columns :].reshape(inner, columns)
        name = f"{rows}x{inner}x{columns}"
        results[f"product {name}"] = left @ right
        results[f"vector {name}"] = left @ right[:, 0]
        results[f"batched {name}"] = torch.stack([left, -left, left * left]) @ torch.stack([right, right + 1, right])
        results[f"norm {name}"] = torch.linalg.vector_norm(left, dim=1)
        results[f"mean {name}"] = left.mean(dim=0)
        results[f"median {name}"] = left.median(dim=0).values
    inputs, targets = wave[:96].reshape(24, 4), torch.arange(24) % 3
    first, second = wave[100:120].reshape(5, 4).clone(), wave[200:215].reshape(3, 5).clone()
    for _ in range(5):
        first.requires_grad_(True), second.requires_grad_(True)
        inner = F.batch_norm(torch.tanh(inputs @ first.T), None, None, training=True)
        loss = F.cross_entropy(F.linear(inner, second, second[:, 0]), targets)
        slopes = torch.autograd.grad(loss, [first, second])
        first, second = ((x - 0.3 * g).detach() for x, g in zip((first, second), slopes, strict=True))
    return sha256({**results, "first": first, "second": second})


# -- the table -------------------------------------------------------------------------------------


def computed_here() -> Table:
    """Compute the table in this process and in ranks that it starts."""
    runs = {name: fingerprint(left) for name, left in every_run()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        on_ranks(RANKS, "-m", "tests.fingerprints", "--rank", path)
        runs |= json.loads(path.read_text())
    made_with = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    return {"canary": canary(), "made_with": made_with, "runs": runs}


def computed() -> Table:
    """Compute the table in a process with the environment `PLAIN`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.fingerprints", "--compute", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **PLAIN}, timeout=SECONDS)
        return json.loads(path.read_text())


def as_text(table: Table) -> str:
    """JSON with one line for each part of a run, so that differences are easy to locate."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(table[key])},\n" for key in ("canary", "made_with"))
    runs = (
        f"{json.dumps(name)}: {{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in run.items()) + "\n}"
        for name, run in table["runs"].items()
    )
    return f'{{\n{head}"runs": {{\n' + ",\n".join(runs) + "\n}}\n"


def on_this_rank(path: Path) -> None:
    ranks = Communicator.join()
    runs = {
        f"{name}, {ranks.count} ranks": fingerprint(simulated(build(ranks=ranks))) for name, build in RANKED.items()
    }
    if ranks.is_first:
        path.write_text(json.dumps(runs))
    ranks.leave()


def differences(table: Table, computed_table: Table) -> list[str]:
    """Parts of runs that differ from the table: in any bit if the canary is the same, else
    roughly."""
    exact = table["canary"] == computed_table["canary"]
    lines = []
    for name in sorted({*table["runs"], *computed_table["runs"]}):
        before, after = table["runs"].get(name), computed_table["runs"].get(name)
        if before is None or after is None:
            lines.append(f"{name}: {'not in the table' if before is None else 'not run any more'}")
            continue
        for part in sorted({*before, *after}):
            kinds = different(before.get(part, {}), after.get(part, {}), exact)
            if kinds is not None:
                lines.append(f"{name}: {part}: {', '.join(kinds) or 'in the last digits'}")
    return lines


def different(before: Table, after: Table, exact: bool) -> list[str] | None:
    """Kinds of tensors or quantities that differ roughly; None if there is no difference."""
    numbers_before, numbers_after = before.get("coarse", {}), after.get("coarse", {})
    kinds = [
        kind
        for kind in sorted({*numbers_before, *numbers_after})
        if kind not in numbers_before
        or kind not in numbers_after
        or not same_roughly(numbers_before[kind], numbers_after[kind])
    ]
    if before.get("words") != after.get("words"):
        kinds.append("names")
    same = before.get("sha256") == after.get("sha256") if exact else not kinds
    return None if same else kinds


def main() -> int:
    parser = argparse.ArgumentParser(description="Fingerprints of many small runs.")
    parser.add_argument("--write", action="store_true", help="make the table anew")
    parser.add_argument("--compute", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        on_this_rank(arguments.rank)
        return 0
    if arguments.compute:
        arguments.compute.write_text(json.dumps(computed_here()))
        return 0
    computed_table = computed()
    if arguments.write:
        TABLE.write_text(as_text(computed_table))
        print(f"{TABLE}: {len(computed_table['runs'])} runs")
        return 0
    table = json.loads(TABLE.read_text())
    lines = differences(table, computed_table)
    precision = (
        "every bit"
        if table["canary"] == computed_table["canary"]
        else "six digits, since this machine rounds differently"
    )
    print("\n".join(lines) or f"{len(table['runs'])} runs as before, in {precision}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
