"""Which engine trains a run: by name, or the faster one for this model on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from stratafl.data.batches import Sampling
from stratafl.engine.loop import LoopEngine
from stratafl.engine.ops import COMPUTES, Compute
from stratafl.engine.stacked import StackedEngine
from stratafl.engine.work import Augment, Engine, Work
from stratafl.errors import unknown
from stratafl.flat import Flat
from stratafl.local import Leaf

Name = Literal["auto", "loop", "stacked"]

CLIENTS, STEPS, TRIES = 16, 2, 3
"""What is measured: so many clients' steps at most, the best of so many times."""

_faster: dict[object, str] = {}
"""What was measured in this process, by model, batch and clients."""


def make_engine(
    name: Name,
    flat: Flat,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    partition: Sequence[Tensor],
    leaf: Leaf,
    batch: int | None,
    sampling: Sampling,
    seed: int,
    augment: Augment | None = None,
    *,
    chunk: int | None = None,
    precision: Compute = "fp32",
) -> LoopEngine | StackedEngine:
    """The engine of this name.

    "auto" is the stacked engine on a GPU; on a CPU a few steps of both are timed and the faster one taken, once for
    each model, batch and number of clients in a process. Both give the same result, up to rounding.
    """
    if name not in get_args(Name):
        raise unknown("engine", name, get_args(Name))
    if precision not in COMPUTES:
        raise unknown("precision", precision, COMPUTES)
    given = (flat, loss, inputs, targets, partition, leaf, batch, sampling, seed, augment)
    if name == "loop":
        return LoopEngine(*given)
    stacked = StackedEngine(*given, chunk=chunk, precision=precision)
    if name == "stacked":
        return stacked
    loop = LoopEngine(*given)
    if stacked.how.startswith("loop"):
        return loop
    if inputs.device.type != "cpu":
        return stacked
    key = _key(flat, inputs, partition, batch, augment, precision)
    if key not in _faster:
        clients = min(len(partition), stacked.chunk, CLIENTS)
        slower = _seconds(stacked, flat, clients) > _seconds(loop, flat, clients)
        _faster[key] = "loop" if slower else "stacked"
    return stacked if _faster[key] == "stacked" else loop


def _key(
    flat: Flat,
    inputs: Tensor,
    partition: Sequence[Tensor],
    batch: int | None,
    augment: Augment | None,
    precision: Compute,
) -> object:
    largest = max(len(part) for part in partition)
    shape = tuple(inputs.shape[1:]), largest if batch is None else min(batch, largest), len(partition)
    return str(flat.module), flat.dtype, flat.parameters, *shape, augment, precision, torch.get_num_threads()


def _seconds(engine: Engine, flat: Flat, clients: int) -> float:
    """The best time of a few steps of a few clients, from the module's own values."""
    x_P, b_B = flat.row(flat.module)
    x_NP, b_NB = x_P.repeat(clients, 1), b_B.repeat(clients, 1)
    work = Work(x_NP, b_NB, torch.zeros_like(x_NP), (), list(range(clients)), 0, STEPS, 0)
    engine.train(work._replace(steps=1))
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        engine.train(work)
        best = min(best, time.perf_counter() - began)
    return best
