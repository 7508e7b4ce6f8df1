"""Memory of a deployment over hundreds of rounds.

    python -m benchmarks.deployment.memory_soak [--rounds 300] [--out FILE.json]

A 2x2 tree on loopback, MTGC, a multi-layer perceptron of 5 million parameters, one step of SGD per
round. Every ten rounds, two numbers are recorded for each process: its private memory (pages shared
with the process that forked it are not counted), and its resident memory. The values at the end are
compared with those at round 30.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.deployment.round_cost import provisioned
from benchmarks.deployment.sample_tree import processes
from stratafl.base.environment import environment
from stratafl.deploy.host import this_machine

HIDDEN = [66_700]
FIRST, EVERY = 30, 10
"""Round with which the end is compared, and rounds between two measurements."""
WIDTHS = (15, 12, 7, 20, 12, 7)
ROOM = 1.15
"""Largest accepted ratio of the resident memory at the end to that at round `FIRST`."""


def memory(pid: int) -> dict[str, float]:
    """Private and resident memory of a process, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}
    return {"own": (kib["Private_Dirty"] + kib["Private_Clean"]) / 1024, "resident": kib["Rss"] / 1024}


def soak(folder: Path, rounds: int) -> dict[int, dict[str, dict[str, float]]]:
    """Memory by round and process."""
    _, sites = provisioned(folder, rounds, hidden=HIDDEN, shape="2x2", periods=[1, 1], method="mtgc")
    looks: dict[int, dict[str, dict[str, float]]] = {}

    def look(line: str) -> None:
        number = json.loads(line)["round"]
        # also in the round before the last, since the processes end with the last
        if number % EVERY == 0 or number == rounds - 1:
            looks[number] = {
                f"{site} {kind}": memory(pid) for site, place in sites.items() for kind, pid in processes(place).items()
            }
            print(f"round {number}: {sum(size['own'] for size in looks[number].values()):,.0f} MiB in all", flush=True)

    this_machine.run(folder / "sites", look)
    return looks


def compared(looks: dict[int, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Memory of each process at round `FIRST`, at the end, and their ratio."""
    last = looks[max(looks)]
    return {
        name: {kind: [before[kind], last[name][kind], last[name][kind] / before[kind]] for kind in ("own", "resident")}
        for name, before in looks[FIRST].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        looks = soak(Path(folder), options.rounds)
    ratios = compared(looks)
    heads = f"own, round {FIRST}", "at the end", "ratio", f"resident, round {FIRST}", "at the end", "ratio"
    print(f"{'MiB':20}" + "".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS, strict=True)))
    for name, sizes in ratios.items():
        numbers = [*sizes["own"], *sizes["resident"]]
        print(f"{name:20}" + "".join(f"{number:{width},.2f}" for number, width in zip(numbers, WIDTHS, strict=True)))
    if options.out:
        record = {"environment": environment(), "rounds": options.rounds, "mib": ratios, "looks": looks}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    # private memory is small, and a model in transit at a measurement changes it by much
    grown = [name for name, sizes in ratios.items() if sizes["resident"][2] > ROOM]
    if grown:
        print(f"grown by more than {ROOM - 1:.0%}: {', '.join(grown)}")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
