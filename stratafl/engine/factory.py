"""Choose and build the engine of a run."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from torch import Tensor

from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.rng import preserve_rng
from stratafl.base.validation import check_choice
from stratafl.core.client_training import ClientTraining, Engine
from stratafl.core.client_update import StandardChain
from stratafl.core.rows import DriftKernel
from stratafl.data.batches import batch_lengths, steps_per_epoch
from stratafl.engine import kernels
from stratafl.engine.chunk import probe_request
from stratafl.engine.gradients import CompiledGradients
from stratafl.engine.loop import LoopEngine
from stratafl.engine.module_profile import ModuleProfile, profile_module
from stratafl.engine.precision import HALF_DTYPES, PRECISIONS, Precision
from stratafl.engine.selection import GradientMethodName, select_for_training
from stratafl.engine.stacked import StackedEngine

EngineName = Literal["auto", "loop", "stacked", "vmap"]

MIN_CLIENTS = 8
"""Clients at once from which on the stacked engine is the default. With fewer a run is short, and
setting up costs more than it saves."""

MIN_BATCH_FILL = 0.75
"""Mean batch length, relative to the longest, from which on the stacked engine is the default:
shorter batches are padded."""

MAX_STEPS_COUNTED = 100
"""Number of steps, from an epoch's first, whose batch lengths are counted."""

FALLBACK_HINTS = {
    "hooks on": "without them all clients can train at once",
    "depends on values": "a module that decides by shapes alone lets all clients train at once",
    "draws random numbers by": "torch's own random numbers are each client's, and let all clients train at once",
    "draws random numbers": "engine = 'stacked' gives each client draws of its own",
    "changes the module's buffers": "engine = 'stacked' gives each client statistics of its own",
    "training changes": "weights that only training changes let all clients train at once",
    "the second time": "a module that keeps nothing between two calls lets all clients train at once",
}
"""Advice where only the loop can train, by a part of the reason."""


def default_engine_name(
    full_training: ClientTraining, expected_clients: float, precision: Precision, profile: ModuleProfile
) -> Literal["loop", "stacked"]:
    """Name of the engine to try first on a CPU.

    full_training: with all clients of the tree, also where this process has a part of them;
    expected_clients: average number of clients that train at once.
    """
    if expected_clients < MIN_CLIENTS or precision in HALF_DTYPES:
        return "loop"
    # a user's transform may depend on all rows in its argument, and in the loop it gets one row
    if StandardChain.from_transforms(full_training.client_update.transforms) is None:
        return "loop"
    sizes = full_training.clients.sizes.tolist()
    batch = max(sizes) if full_training.batch_size is None else min(full_training.batch_size, max(sizes))
    if sum(min(size, batch) for size in sizes) < MIN_BATCH_FILL * batch * len(sizes):
        return "loop"
    gains = profile.has_small_outputs or profile.has_max_pool or profile.has_lstm
    return "stacked" if gains and not profile.failure else "loop"


def mean_distinct_batch_lengths(full_training: ClientTraining) -> float:
    """Mean number of distinct batch lengths among the clients in a step, over the first
    MAX_STEPS_COUNTED steps of the longest epoch."""
    size_N = full_training.clients.sizes
    steps = min(MAX_STEPS_COUNTED, steps_per_epoch(int(size_N.max()), full_training.batch_size))
    step_NH = np.broadcast_to(np.arange(steps), (len(size_N), steps))
    length_NH = batch_lengths(size_N, step_NH, full_training.batch_size, full_training.sampling)
    return float(np.mean([len(np.unique(length_N)) for length_N in length_NH.T]))


def drift_kernel(rows: Tensor) -> DriftKernel | None:
    """Kernel for the drift of rows on this device and of this type, if there is one."""
    return kernels.backend_for(rows.device, rows.dtype).drift


def make_engine(
    name: EngineName,
    training: ClientTraining,
    *,
    chunk_size: int | None = None,
    precision: Precision = "fp32",
    cuda_graphs: bool = True,
) -> LoopEngine | StackedEngine:
    """Build the engine of this name, or the loop where it cannot train the module.

    "stacked" tries gradients by batching rules, then by `torch.func`; with the latter the engine is
    named "vmap". "vmap" tries `torch.func` alone, and "auto" is the default engine. All give the
    same result, up to rounding. chunk_size and cuda_graphs are for the stacked engine, and have no
    effect with "auto".
    """
    check_choice("execution.engine", name, get_args(EngineName))
    check_choice("execution.precision", precision, PRECISIONS)
    if name == "auto":
        return make_default_engine(training, training, len(training.clients), precision)
    profile = profile_module(training)
    if name == "loop":
        return _make_loop(training, profile, precision)
    methods: tuple[GradientMethodName, ...] = ("vmap",) if name == "vmap" else ("stacked", "vmap")
    gradients, how = select_for_training(training, precision, methods, profile)
    if gradients is None:
        return _make_loop(training, profile, precision, how)
    return StackedEngine(training, gradients, how=how, profile=profile, chunk_size=chunk_size, cuda_graphs=cuda_graphs)


def make_default_engine(
    training: ClientTraining, full_training: ClientTraining, expected_clients: float, precision: Precision = "fp32"
) -> LoopEngine | StackedEngine:
    """Build the engine of a run where none is named: the stacked one on a GPU.

    On a CPU it is the one that `default_engine_name` returns. The stacked engine must also have a
    batching rule for every operation of the module and, where batches cannot be padded,
    MIN_CLIENTS clients for each batch length.

    full_training: with all clients of the tree, so that every process chooses alike;
    expected_clients: average number of clients that train at once.
    """
    if training.samples.device.type != "cpu":
        return make_engine("stacked", training, precision=precision)
    profile = profile_module(full_training)
    if default_engine_name(full_training, expected_clients, precision, profile) == "loop":
        return _make_loop(training, profile, precision)
    gradients, how = select_for_training(full_training, precision, ("stacked",), profile)
    if not isinstance(gradients, CompiledGradients) or how != "stacked":
        return _make_loop(training, profile, precision)
    min_clients = 0.0 if gradients.pads else MIN_CLIENTS * mean_distinct_batch_lengths(full_training)
    if expected_clients < min_clients:
        return _make_loop(training, profile, precision)
    return StackedEngine(training, gradients, how=how, profile=profile)


def _make_loop(training: ClientTraining, profile: ModuleProfile, precision: Precision, how: str = "loop") -> LoopEngine:
    """Build the loop; a precision of 16 bits is tried on the gradient of one client."""
    engine = LoopEngine(training, how=how, precision=precision, profile=profile)
    if engine.precision not in HALF_DTYPES:
        return engine

    def is_finite(engine: LoopEngine) -> bool:
        with preserve_rng(training.samples.device):
            return bool(engine.gradients(probe_request(training, 1)).isfinite().all())

    with convert_errors("execution.precision", precision, "the model or loss cannot be computed in it here"):
        has_finite_gradient = is_finite(engine)
    if not has_finite_gradient and is_finite(LoopEngine(training, profile=profile)):
        reason = "the model's gradients are beyond what it can hold; precision = 'bf16' holds larger ones"
        raise InvalidInput("execution.precision", precision, reason)
    return engine


def fallback_notes(engine: Engine, name: EngineName | None, precision: Precision) -> list[str]:
    """Notes for the user where the engine or precision is not the requested one."""
    notes = []
    if name not in (None, "auto") and engine.name != name:
        description = engine.how.replace(":", " trains the clients:", 1)
        default = f"the result is the same, only slower; see docs/engine.md for what {name} can train"
        hint = next((text for part, text in FALLBACK_HINTS.items() if part in description), default)
        request = f"engine {name!r} was asked for, and {description}"
        notes.append(f"{request}; {hint} (engine = {engine.name!r} does not say this)")
    if engine.precision != precision:
        notes.append(f"precision {precision!r} is not honoured: {engine.name} computes in {engine.precision} here")
    return notes
