"""User's program on several ranks that saves its run, and that one rank may interrupt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from stratafl import ParticipationContext
from stratafl.distributed.communicator import Communicator
from tests.distributed.cases import make


class Lots:
    """Participation of all clients that interrupts rank 1 at the `moment`-th call."""

    def __init__(self, ranks: Communicator, moment: int):
        self.ranks, self.moment, self.drawn = ranks, moment, 0

    def __call__(self, draw: ParticipationContext) -> np.ndarray:
        self.drawn += 1
        if self.drawn == self.moment and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return np.ones(draw.tree.sizes[draw.level], dtype=bool)


def main(folder: Path, moment: int) -> None:
    torch.set_num_threads(1)
    ranks = Communicator.join()
    try:
        lots = Lots(ranks, moment)
        simulation = make(ranks, "uneven", "mtgc", participation=[None, lots], drift="ideal", broken=4, rounds=3)
        simulation.save(folder, checkpoint_every=0, keep_state=True)
        simulation.run()
    finally:
        ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
