"""Fingerprints of many small runs, so that code may move and be seen to compute what it did.

    python -m tests.fingerprints            which runs differ from the table
    python -m tests.fingerprints --write    make the table anew, where results are meant to change

The table, `fingerprints.json`, holds for every run of `fingerprint_runs` three SHA-256: of the
root's model, of every node's state, and of the round records without times. They are over names,
types, shapes and bytes, so that the last bit of any number counts. The runs are in float64, on one
thread, in a process of their own that asks the libraries for their plainest arithmetic; but
processors and builds of torch may still round differently. So the table also has the digest of a
canary, a fixed computation in plain torch that uses nothing of this package. Where the canary is
the same, all SHA-256 must be. Where it is not, bits say nothing, and the coarse numbers beside them
are compared: of each kind of tensor, and each quantity of the records, its norm and its product
with a fixed vector, to six digits.
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
"""One thread, and no instructions that only some processors have."""
DIGITS, RELATIVE, ABSOLUTE = 8, 1e-6, 1e-9
Table = dict[str, Any]


# -- digests ---------------------------------------------------------------------------------------


def sha256(tensors: Tensors) -> str:
    """Of names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def coarse(values: Iterable[float]) -> list[float]:
    """The norm, and the product with a fixed vector of about unit length; then how many are not
    finite."""
    numbers = list(values)
    finite = [value if math.isfinite(value) else 0.0 for value in numbers]
    product = math.fsum(value * math.cos(place) for place, value in enumerate(finite)) / math.sqrt(len(finite) or 1)
    found = [math.hypot(*finite), product, float(sum(not math.isfinite(value) for value in numbers))]
    return [float(f"{value:.{DIGITS}g}") for value in found]


def same_roughly(one: list[float], other: list[float]) -> bool:
    allowed = RELATIVE * one[0] + ABSOLUTE
    return one[2] == other[2] and all(abs(a - b) <= allowed for a, b in zip(one[:2], other[:2], strict=True))


def of_tensors(tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, Any]:
    """`kinds`: under which name each tensor's coarse numbers go."""
    flat: dict[str, list[float]] = {}
    for name, tensor in sorted(tensors.items()):
        flat.setdefault(kinds[name], []).extend(tensor.detach().double().flatten().tolist())
    return {"sha256": sha256(tensors), "coarse": {kind: coarse(values) for kind, values in flat.items()}}


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """As JSON says them, where a float is written to its last bit; texts must agree also where
    numbers are rough."""
    text = json.dumps(records, sort_keys=True)
    numbers: dict[str, list[float]] = {}
    words = []
    for where, value in leaves(json.loads(text)):
        words.append(where)
        if isinstance(value, str):
            words.append(value)
        else:
            quantity = "traffic" if where.startswith(" traffic") else where.rpartition(" ")[2]
            numbers.setdefault(quantity, []).append(float(value))
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "words": hashlib.sha256("\n".join(words).encode()).hexdigest(),
        "coarse": {name: coarse(values) for name, values in sorted(numbers.items())},
    }


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested tables and lists, each with the keys that lead to it."""
    if isinstance(value, dict):
        for key, each in sorted(value.items()):
            yield from leaves(each, f"{where} {key}")
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, where)
    else:
        yield where, value


def fingerprint(left: Left) -> Table:
    nodes = {f"{node}: {kind}": tensor for node, held in left.nodes.items() for kind, tensor in held.items()}
    found = {
        "model": of_tensors(left.model, {name: name for name in left.model}),
        "nodes": of_tensors(nodes, {name: name.partition(": ")[2] for name in nodes}),
        "records": of_records(left.records),
    }
    return {part: found[part] for part in found if part != "nodes" or nodes}


def canary() -> str:
    """What this machine makes of the kinds of operations that training uses: nothing of this
    package is in it."""
    place = torch.arange(1.0, 2401.0, dtype=torch.float64)
    wave = torch.sin(place * place)
    found = {"sin": wave, "exp": wave.exp(), "log": (wave.abs() + 0.1).log(), "tanh": wave.tanh(), "sum": wave.sum()}
    found["sqrt"] = wave.abs().sqrt() / place.pow(0.9)
    for rows, inner, columns in ((3, 4, 3), (9, 4, 5), (5, 15, 7), (40, 30, 20)):
        left = wave[: rows * inner].reshape(rows, inner)
        right = wave[-inner * columns :].reshape(inner, columns)
        name = f"{rows}x{inner}x{columns}"
        found[f"product {name}"] = left @ right
        found[f"vector {name}"] = left @ right[:, 0]
        found[f"batched {name}"] = torch.stack([left, -left, left * left]) @ torch.stack([right, right + 1, right])
        found[f"norm {name}"] = torch.linalg.vector_norm(left, dim=1)
        found[f"mean {name}"] = left.mean(dim=0)
        found[f"median {name}"] = left.median(dim=0).values
    inputs, targets = wave[:96].reshape(24, 4), torch.arange(24) % 3
    first, second = wave[100:120].reshape(5, 4).clone(), wave[200:215].reshape(3, 5).clone()
    for _ in range(5):
        first.requires_grad_(True), second.requires_grad_(True)
        inner = F.batch_norm(torch.tanh(inputs @ first.T), None, None, training=True)
        loss = F.cross_entropy(F.linear(inner, second, second[:, 0]), targets)
        slopes = torch.autograd.grad(loss, [first, second])
        first, second = ((x - 0.3 * g).detach() for x, g in zip((first, second), slopes, strict=True))
    return sha256({**found, "first": first, "second": second})


# -- the table -------------------------------------------------------------------------------------


def computed_here() -> Table:
    """All of it, by this process and ranks that it starts."""
    runs = {name: fingerprint(left) for name, left in every_run()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        on_ranks(RANKS, "-m", "tests.fingerprints", "--rank", path)
        runs |= json.loads(path.read_text())
    made_with = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    return {"canary": canary(), "made_with": made_with, "runs": runs}


def computed() -> Table:
    """By a process with plain arithmetic."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.fingerprints", "--compute", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **PLAIN}, timeout=SECONDS)
        return json.loads(path.read_text())


def as_text(table: Table) -> str:
    """JSON with a line for each part of a run, so that a change shows where it is."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(table[key])},\n" for key in ("canary", "made_with"))
    runs = (
        f"{json.dumps(name)}: {{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in run.items()) + "\n}"
        for name, run in table["runs"].items()
    )
    return f'{{\n{head}"runs": {{\n' + ",\n".join(runs) + "\n}}\n"


def on_this_rank(path: Path) -> None:
    ranks = Communicator.join()
    found = {f"{name}, {ranks.count} ranks": fingerprint(simulated(make(ranks=ranks))) for name, make in RANKED.items()}
    if ranks.is_first:
        path.write_text(json.dumps(found))
    ranks.leave()


def differences(table: Table, found: Table) -> list[str]:
    """Which part of which run is not as the table has it: in any bit where the canary is the same,
    else roughly."""
    exact = table["canary"] == found["canary"]
    said = []
    for name in sorted({*table["runs"], *found["runs"]}):
        before, now = table["runs"].get(name), found["runs"].get(name)
        if before is None or now is None:
            said.append(f"{name}: {'not in the table' if before is None else 'not run any more'}")
            continue
        for part in sorted({*before, *now}):
            kinds = different(before.get(part, {}), now.get(part, {}), exact)
            if kinds is not None:
                said.append(f"{name}: {part}: {', '.join(kinds) or 'in the last digits'}")
    return said


def different(before: Table, now: Table, exact: bool) -> list[str] | None:
    """The kinds of tensors or quantities that are roughly different; None where there is no
    difference."""
    ours, theirs = before.get("coarse", {}), now.get("coarse", {})
    kinds = [
        kind
        for kind in sorted({*ours, *theirs})
        if kind not in ours or kind not in theirs or not same_roughly(ours[kind], theirs[kind])
    ]
    if before.get("words") != now.get("words"):
        kinds.append("names")
    same = before.get("sha256") == now.get("sha256") if exact else not kinds
    return None if same else kinds


def main() -> int:
    parser = argparse.ArgumentParser(description="Fingerprints of many small runs.")
    parser.add_argument("--write", action="store_true", help="make the table anew")
    parser.add_argument("--compute", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank:
        on_this_rank(given.rank)
        return 0
    if given.compute:
        given.compute.write_text(json.dumps(computed_here()))
        return 0
    found = computed()
    if given.write:
        TABLE.write_text(as_text(found))
        print(f"{TABLE}: {len(found['runs'])} runs")
        return 0
    table = json.loads(TABLE.read_text())
    said = differences(table, found)
    how = "every bit" if table["canary"] == found["canary"] else "six digits, since this machine rounds differently"
    print("\n".join(said) or f"{len(table['runs'])} runs as before, in {how}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
