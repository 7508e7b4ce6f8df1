"""Which engine trains on a CPU where none is named: a function of the module, its samples, the
batch and the clients, never of a timing, the threads or the moment.

The stacked engine saves what a small operation costs besides its arithmetic, and keeps images
channels-last, which max pooling is several times as fast with. Where operations are large and
nothing is pooled, it has nothing to save. `benchmarks/cpu_engines.py` measures both sides of this.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from torch import Tensor

from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import as_before
from stratafl.core.client_training import Training
from stratafl.core.client_update import Usual
from stratafl.data.batches import batch_lengths, steps_of_pass
from stratafl.engine.habits import Observer
from stratafl.engine.ops import HALF, Compute

FEWEST = 8
"""Clients that train at once: of fewer a run is short, and setting up weighs more than it saves."""
SMALL = 128 << 10
"""Bytes that an operation on one client's batch gives on average, up to which it is small."""
EVEN = 0.75
"""Of the longest batch's samples, how many a batch has on average: shorter ones are padded."""

LOOKED_AT = 100
"""Steps of a pass whose batches' lengths are counted, at most."""


class Operations(Observer):
    """Counts the operations that compute something, and how much they give."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.given = 0
        self.pools = False
        """Whether the largest values of images' neighbourhoods are among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            every = result if isinstance(result, tuple | list) else [result]
            self.count += 1
            self.given += sum(each.nbytes for each in every if isinstance(each, Tensor))
            # one axis alone is pooled as an image of one line
            self.pools |= func._opname == "max_pool2d_with_indices" and every[0].shape[-2] > 1
        return result

    @property
    def small(self) -> bool:
        return self.given <= SMALL * self.count


def default_engine(whole: Training, clients: float, precision: Compute) -> Literal["loop", "stacked"]:
    """The one that is to be tried first.

    whole: with all clients of the tree, also where this process has a part of them; clients: how
    many train at once, on average.
    """
    if clients < FEWEST or precision in HALF:
        return "loop"
    # a stage of one's own may look at all rows it is given, and the loop gives it one
    if Usual.of(whole.leaf.stages) is None:
        return "loop"
    longest = max(whole.partition, key=len)
    places = len(longest) if whole.batch is None else min(whole.batch, len(longest))
    if sum(min(len(part), places) for part in whole.partition) < EVEN * places * len(whole.partition):
        return "loop"
    seen = operations(whole, longest[:places])
    return "stacked" if seen is not None and (seen.small or seen.pools) else "loop"


def lengths_at_once(whole: Training) -> float:
    """How many lengths the clients' batches have in a step, on average over the longest pass."""
    size_N = np.array([len(part) for part in whole.partition])
    steps = min(LOOKED_AT, steps_of_pass(int(size_N.max()), whole.batch))
    step_NH = np.broadcast_to(np.arange(steps), (len(size_N), steps))
    length_NH = batch_lengths(size_N, step_NH, whole.batch, whole.sampling)
    return float(np.mean([len(np.unique(length_N)) for length_N in length_NH.T]))


def operations(training: Training, index_B: Tensor) -> Operations | None:
    """Those of a client's batch on the way forward; None where they cannot be seen."""
    flat, device, seen = training.flat, training.supply.device, Operations()
    x_P, b_Z = (row.to(device).clone() for row in flat.row(flat.module))
    flat.train()
    with as_before(device):
        try:
            samples = training.samples(0, 0, index_B)
            flat.gradient(x_P, b_Z, *samples, training.loss, flat.integers(), forward=lambda: seen)
        except Exception as problem:
            pass_on_no_room(problem)
            return None  # what is wrong with the module is said where it is used in earnest
    return seen
