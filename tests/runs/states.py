"""Small runs, and their states in forms that compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from stratafl.base.state_dict import to_json_and_tensors
from stratafl.runs.checkpoint import Checkpoints, Progress, RoundLog
from stratafl.runs.provenance import Provenance
from tests.flat import simulate

SHAPES = {1: 3, 2: [2, 3], 3: [[2, 1], [1, 2]]}
PERIODS = {1: [2], 2: [2, 2], 3: [2, 1, 2]}
LEAVES = {1: 3, 2: 5, 3: 6}


def federation(rules: object, depth: int, **more):
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(LEAVES[depth] * 7, 4, generator=random)
    targets = (inputs @ torch.randn(4, 3, generator=random)).argmax(dim=1)
    parts = [np.arange(leaf * 7, leaf * 7 + 4 + leaf % 3) for leaf in range(LEAVES[depth])]
    module = more.pop("module", lambda: nn.Linear(4, 3))
    settings = {"rounds": 4, "batch": 3, "seed": 4, "weights": "samples", "test": (inputs, targets), **more}
    settings = {"periods": PERIODS[depth], **settings}
    return simulate(module, (inputs, targets), parts, SHAPES[depth], rules, **settings)


def everything(simulation) -> list:
    """State of a run without times, in a form that compares bit by bit."""
    state = simulation.state()
    history = [{**record, "seconds": None} for record in state["history"]]
    plain, tensors = to_json_and_tensors({**state, "history": history})
    return [repr(plain), {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()}]


def through_a_file(simulation, folder: Path):
    checkpoints = Checkpoints(folder, "run")
    checkpoints.folder.mkdir()
    records = RoundLog(folder, simulation.history)
    place = Progress(len(simulation.history), simulation.meetings)
    checkpoints.write(place, simulation.state(), records.sync(), Provenance({}, {}))
    records.close()
    return checkpoints.read(place)
