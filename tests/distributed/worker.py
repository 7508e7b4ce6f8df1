"""Rank of the parity tests: runs all cases, whose states the first rank writes to a file."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from stratafl import Simulation
from stratafl.distributed.communicator import Communicator
from tests.distributed.cases import CASES, IN_TWO_GOES, WITHIN


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Communicator.join()
    results: dict[str, Any] = {name: finished(make(ranks)) for name, make in CASES.items()}
    halves = {}
    for name in IN_TWO_GOES:
        simulation = CASES[name](ranks)
        next(simulation)
        halves[name] = copy.deepcopy(simulation.state())
        simulation.advance()
        halves[name + WITHIN] = simulation.state()
        again = CASES[name](ranks)
        again.restore(halves[name + WITHIN])
        results[f"{name}, in two goes"] = finished(again)
    # states of fewer ranks, after the first round or within the second, are resumed on these
    for path in sorted(folder.glob("halves*.pt")):
        for name, state in torch.load(path, weights_only=False).items():
            simulation = CASES[name.removesuffix(WITHIN)](ranks)
            simulation.restore(state if ranks.is_first else {})
            results[f"{name}, after {path.stem}"] = finished(simulation)
    ranks.all_gather("all have read the files")
    if ranks.is_first:
        torch.save(halves, folder / f"halves{ranks.count}.pt")
        torch.save(results, folder / f"found{ranks.count}.pt")
    ranks.leave()


def finished(simulation: Simulation) -> dict[str, Any]:
    for _ in simulation:
        pass
    sent = simulation.result().communication.saved()
    return {"state": simulation.state(), "communication": sent}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
