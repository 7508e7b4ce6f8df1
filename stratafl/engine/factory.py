"""Choose and build the engine of a run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.rng import preserve_rng
from stratafl.base.validation import check_choice
from stratafl.core.client_training import ClientTraining, Engine, TrainRequest
from stratafl.core.client_update import StandardChain
from stratafl.core.rows import DriftKernel, IndexedRows
from stratafl.data.batches import batch_lengths, steps_per_epoch
from stratafl.data.inputs import shape_of
from stratafl.engine.loop import LoopEngine
from stratafl.engine.module_profile import count_operations
from stratafl.engine.ops import table
from stratafl.engine.precision import HALF_DTYPES, PRECISIONS, Precision
from stratafl.engine.stacked import StackedEngine

MIN_CLIENTS = 8
"""Clients that train at once: of fewer a run is short, and setting up weighs more than it saves."""

MIN_BATCH_FILL = 0.75
"""Of the longest batch's samples, how many a batch has on average: shorter ones are padded."""


MAX_STEPS_COUNTED = 100
"""Steps of a pass whose batches' lengths are counted, at most."""


def default_engine_name(whole: ClientTraining, clients: float, precision: Precision) -> Literal["loop", "stacked"]:
    """The one that is to be tried first.

    whole: with all clients of the tree, also where this process has a part of them; clients: how
    many train at once, on average.
    """
    if clients < MIN_CLIENTS or precision in HALF_DTYPES:
        return "loop"
    # a stage of one's own may look at all rows it is given, and the loop gives it one
    if StandardChain.from_stages(whole.client_update.stages) is None:
        return "loop"
    longest = max(whole.partition, key=len)
    places = len(longest) if whole.batch_size is None else min(whole.batch_size, len(longest))
    if sum(min(len(part), places) for part in whole.partition) < MIN_BATCH_FILL * places * len(whole.partition):
        return "loop"
    seen = count_operations(whole, longest[:places])
    return "stacked" if seen is not None and (seen.small or seen.pools) else "loop"


def mean_distinct_batch_lengths(whole: ClientTraining) -> float:
    """How many lengths the clients' batches have in a step, on average over the longest pass."""
    size_N = np.array([len(part) for part in whole.partition])
    steps = min(MAX_STEPS_COUNTED, steps_per_epoch(int(size_N.max()), whole.batch_size))
    step_NH = np.broadcast_to(np.arange(steps), (len(size_N), steps))
    length_NH = batch_lengths(size_N, step_NH, whole.batch_size, whole.sampling)
    return float(np.mean([len(np.unique(length_N)) for length_N in length_NH.T]))


EngineName = Literal["auto", "loop", "stacked", "vmap"]


CLIENTS, STEPS, TRIES = 16, 2, 3
"""What is measured: so many clients' steps at most, the best of so many times."""


FALLBACK_HINTS = {
    "hooks on": "without them all clients can train at once",
    "depends on values": "a module that decides by shapes alone lets all clients train at once",
    "draws random numbers by": "torch's own random numbers are each client's, and let all clients train at once",
    "draws random numbers": "engine = 'stacked' gives each client draws of its own",
    "changes the module's buffers": "engine = 'stacked' gives each client statistics of its own",
    "training changes": "weights that only training changes let all clients train at once",
    "the second time": "a module that keeps nothing between two calls lets all clients train at once",
}
"""What would help where only the loop can train, by a part of the reason."""


_timings: dict[object, EngineName] = {}
"""What was measured in this process, by model, batch and clients."""


def drift_kernel(like: Tensor) -> DriftKernel | None:
    """For what rules compute at a meeting with such rows, where their device has a kernel for
    it."""
    return table(like.device, like.dtype).drift


def make_engine(
    name: EngineName, training: ClientTraining, *, chunk: int | None = None, precision: Precision = "fp32"
) -> LoopEngine | StackedEngine:
    """The engine of this name.

    "vmap" is the stacked engine with gradients from `torch.func`. "auto" is the stacked engine on a
    GPU; on a CPU a few steps of all three are timed and the fastest one taken, once for each model,
    batch and number of clients in a process. They give the same result, up to rounding.
    """
    check_choice("engine", name, get_args(EngineName))
    check_choice("precision", precision, PRECISIONS)
    if name == "loop":
        return _loop(training, precision)
    stacked = StackedEngine(
        training, chunk=chunk, precision=precision, ways=("vmap",) if name == "vmap" else ("stacked", "vmap")
    )
    if stacked.name == "loop":
        return _loop(training, precision, stacked.description)
    if name in ("stacked", "vmap") or training.samples.device.type != "cpu":
        return stacked
    engines: dict[EngineName, LoopEngine | StackedEngine] = {"loop": _loop(training, precision)}
    key = _timing_key(training, precision)
    if key in _timings:
        return make_engine(_timings[key], training, chunk=chunk, precision=precision)
    engines |= {"stacked": stacked, "vmap": make_engine("vmap", training, chunk=chunk, precision=precision)}
    clients = min(len(training.partition), stacked.chunk or CLIENTS, CLIENTS)
    seconds = {name: _time_engine(engine, training, clients) for name, engine in engines.items()}
    _timings[key] = min(seconds, key=lambda name: seconds[name])
    return engines[_timings[key]]


def make_default_engine(
    training: ClientTraining, whole: ClientTraining, clients: float, precision: Precision = "fp32"
) -> LoopEngine | StackedEngine:
    """The engine of a CPU where none is named: `default_engine` says which, and where that is the
    stacked one it must take the whole module, and where only clients whose batches are as long can
    train at once, enough of them.

    whole: with all clients of the tree, so that every rank chooses alike; clients: how many train
    at once, on average.
    """
    if default_engine_name(whole, clients, precision) == "loop":
        return _loop(training, precision)
    stacked = StackedEngine(whole, precision=precision, ways=("stacked",))
    if stacked.description != "stacked" or (
        stacked.by_length and clients < MIN_CLIENTS * mean_distinct_batch_lengths(whole)
    ):
        return _loop(training, precision)
    return stacked if whole is training else StackedEngine(training, precision=precision, ways=("stacked",))


def _loop(training: ClientTraining, precision: Precision, description: str = "loop") -> LoopEngine:
    """The loop; where it is to compute in 16 bits, one client's gradient is tried in them."""
    engine = LoopEngine(training, description=description, precision=precision)
    if engine.precision not in HALF_DTYPES:
        return engine

    def finite(engine: LoopEngine) -> bool:
        with preserve_rng(training.samples.device):
            return bool(engine.gradients(_probe_work(training, 1)).isfinite().all())

    with convert_errors("precision", precision, "the model or loss cannot be computed in it here"):
        fits = finite(engine)
    if not fits and finite(LoopEngine(training)):
        told = "the model's gradients are beyond what it can hold; precision = 'bf16' holds larger ones"
        raise InvalidInput("precision", precision, told)
    return engine


def fallback_notes(engine: Engine, name: EngineName | None, precision: Precision) -> list[str]:
    """What an engine does otherwise than it was asked to, in words for the user; None asks for
    nothing."""
    found = []
    if name not in (None, "auto") and engine.name != name:
        how = engine.description.replace(":", " trains the clients:", 1)
        other = f"the result is the same, only slower; see docs/engine.md for what {name} can train"
        help = next((text for part, text in FALLBACK_HINTS.items() if part in how), other)
        found.append(f"engine {name!r} was asked for, and {how}; {help} (engine = {engine.name!r} does not say this)")
    if engine.precision != precision:
        found.append(f"precision {precision!r} is not honoured: {engine.name} computes in {engine.precision} here")
    return found


def _timing_key(training: ClientTraining, precision: Precision) -> object:
    flat, batch = training.flat, training.batch_size
    largest = max(len(part) for part in training.partition)
    shape = str(shape_of(training.samples.first(1))), largest if batch is None else min(batch, largest)
    clients = len(training.partition)
    return (
        str(flat.module), flat.dtype, flat.parameters, *shape, clients, training.augment, precision,
        torch.get_num_threads(),
    )  # fmt: skip


def _time_engine(engine: Engine, training: ClientTraining, clients: int) -> float:
    """The best time of a few steps of a few clients, from the module's own values."""
    work = _probe_work(training, clients)
    engine.train(replace(work, steps=1))
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        engine.train(work)
        best = min(best, time.perf_counter() - began)
    return best


def _probe_work(training: ClientTraining, clients: int) -> TrainRequest:
    """A few steps of the first clients, from the module's own values."""
    x_P, b_B = (row.to(training.samples.device) for row in training.flat.flatten_module(training.flat.module))
    shared = np.zeros(clients, dtype=np.int64)
    x, b = IndexedRows(x_P[None], shared), IndexedRows(b_B[None], shared)
    correction = IndexedRows(torch.zeros_like(x_P)[None], shared)
    return TrainRequest(model=x, buffers=b, corrections=(correction,), clients=list(range(clients)), steps=STEPS)
