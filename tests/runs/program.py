"""A user's program, which keeps its run in a folder; and which is stopped or killed from inside, at
a moment that is known: when the leaves draw lots for the so-and-so-manieth time.

    program.py FOLDER ENGINE [SIGNAL MOMENT] [key=value ...]
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

from stratafl import ParticipationContext, mtgc
from tests.flat import client_options, simulate

ROUNDS, GROUP_ROUNDS = 3, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class Lots:
    """Two clients of each group take part."""

    def __init__(self, signal: int, moment: int):
        self.signal, self.moment, self.drawn = signal, moment, 0

    def __call__(self, draw: ParticipationContext):
        self.drawn += 1
        if self.drawn == self.moment:
            os.kill(os.getpid(), self.signal)
        order = draw.generator.permuted([[1, 1, 0]] * 2, axis=1)
        return order.ravel().astype(bool)


def main(folder: str, engine: str, signal: str = "0", moment: str = "0", *changes: str) -> None:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(60, 4, generator=random)
    targets = (inputs @ torch.randn(4, 3, generator=random)).argmax(dim=1)
    lots = Lots(int(signal), int(moment))
    options = {
        "method": [mtgc("keep"), "scaffold"], "periods": [GROUP_ROUNDS, 2], "rounds": ROUNDS, "batch": 4,
        "keep_state": True,
        "leaf": client_options(0.1, clip_norm=0.5, momentum=0.5), "test": (inputs, targets), "evaluate_levels": [1],
        "participation": [None, lots], "drift": "ideal",
    }  # fmt: skip
    options |= {key: json.loads(value) for key, _, value in (change.partition("=") for change in changes)}
    parts = [range(10 * client, 10 * client + 10) for client in range(6)]
    simulation = simulate(Net, (inputs, targets), parts, "2x3", engine=engine, save=folder, **options)
    for record in simulation:
        print(record.round, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
