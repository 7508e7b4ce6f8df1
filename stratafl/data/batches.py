"""Which of its samples a client uses in a step: a function of (seed, client, step) and nothing else."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stratafl.streams import Purpose, bits, uniform

Sampling = Literal["epochs", "replacement"]


def batches(
    seed: int,
    client: int,
    size: int,
    first: int,
    steps: int,
    batch: int | None,
    sampling: Sampling = "epochs",
) -> list[Tensor]:
    """Positions in the client's own list of samples for `steps` steps from step `first` on.

    `"epochs"`: each pass over the data is a fresh shuffle without replacement, its last batch holding what is left.
    `"replacement"`: each sample drawn on its own. A client with fewer samples than a batch uses all it has, and
    `batch = None` means full batches in the given order.
    """
    if batch is None:
        return [torch.arange(size)] * steps
    batch = min(batch, size)
    if sampling == "replacement":
        places = torch.arange(batch)
        return [
            (uniform(seed, Purpose.BATCH, client, step, places) * size).long() for step in range(first, first + steps)
        ]
    per_epoch = -(-size // batch)
    chosen = []
    shuffled, order = -1, torch.empty(0, dtype=torch.long)
    for step in range(first, first + steps):
        epoch, slot = divmod(step, per_epoch)
        if epoch != shuffled:
            keys = bits(seed, Purpose.BATCH, client, epoch, torch.arange(size))
            shuffled, order = epoch, keys.argsort(stable=True)
        chosen.append(order[slot * batch : (slot + 1) * batch])
    return chosen
