"""Memory of a deployment over hundreds of rounds.

    python -m benchmarks.deployment.memory_soak [--rounds 300] [--out FILE.json]

A 2x2 tree on loopback, MTGC, a multi-layer perceptron of 5 million parameters, one step of SGD a
round. Looked at every ten rounds: the memory that each process has for itself (what it shares with
the one it was forked from is not counted) and all that is resident. What is there at the end is
compared with what was there at round 30.
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
"""Rounds: the one that the end is compared with, and between two looks."""
WIDTHS = (15, 12, 7, 20, 12, 7)
ROOM = 1.15
"""Times as much as then, at most."""


def memory(pid: int) -> dict[str, float]:
    """What a process holds, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}
    return {"own": (kib["Private_Dirty"] + kib["Private_Clean"]) / 1024, "resident": kib["Rss"] / 1024}


def soak(folder: Path, rounds: int) -> dict[int, dict[str, dict[str, float]]]:
    """Per round that was looked at, per process."""
    _, sites = provisioned(folder, rounds, hidden=HIDDEN, shape="2x2", periods=[1, 1], method="mtgc")
    looks: dict[int, dict[str, dict[str, float]]] = {}

    def look(line: str) -> None:
        number = json.loads(line)["round"]
        # one round before the end, as the processes end with it
        if number % EVERY == 0 or number == rounds - 1:
            looks[number] = {
                f"{site} {kind}": memory(pid) for site, place in sites.items() for kind, pid in processes(place).items()
            }
            print(f"round {number}: {sum(each['own'] for each in looks[number].values()):,.0f} MiB in all", flush=True)

    this_machine.run(folder / "sites", look)
    return looks


def compared(looks: dict[int, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Each process at the end against itself at the first look that counts."""
    last = looks[max(looks)]
    return {
        name: {kind: [before[kind], last[name][kind], last[name][kind] / before[kind]] for kind in ("own", "resident")}
        for name, before in looks[FIRST].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        looks = soak(Path(folder), given.rounds)
    ratios = compared(looks)
    heads = f"own, round {FIRST}", "at the end", "ratio", f"resident, round {FIRST}", "at the end", "ratio"
    print(f"{'MiB':20}" + "".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS, strict=True)))
    for name, each in ratios.items():
        numbers = [*each["own"], *each["resident"]]
        print(f"{name:20}" + "".join(f"{number:{width},.2f}" for number, width in zip(numbers, WIDTHS, strict=True)))
    if given.out:
        told = {"environment": environment(), "rounds": given.rounds, "mib": ratios, "looks": looks}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    # a process's own part is small, and a model that is under way at a look changes it by much
    grown = [name for name, each in ratios.items() if each["resident"][2] > ROOM]
    if grown:
        print(f"grown by more than {ROOM - 1:.0%}: {', '.join(grown)}")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
