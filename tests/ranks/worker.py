"""One rank of the parity tests: every case, the whole state of each in a file of the first rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from stratafl.ranks.group import Ranks
from tests.ranks.cases import CASES


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join()
    found: dict[str, Any] = {}
    for name, make in CASES.items():
        simulation = make(ranks)
        for _ in simulation:
            pass
        sent = simulation.result().communication.saved()
        found[name] = {"state": simulation.state(), "communication": sent}
    # a run of two rounds in two goes, the second from what this many ranks and what one rank left of the first
    if ranks.is_first:
        torch.save(found, folder / f"found{ranks.count}.pt")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
