"""Select the method that computes a module's gradients, by a trial against the loop's gradients.

Shape suffixes: C trial clients, P parameters, Z buffer values, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import describe_exception, reraise_out_of_memory
from stratafl.base.rng import preserve_rng
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import LossOnScores
from stratafl.data.inputs import as_type, map_tensors
from stratafl.engine import kernels
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.compiler.padding import can_pad
from stratafl.engine.gradients import BatchedGradients, CompiledGradients, GradientTask, VmapGradients, in_module_order
from stratafl.engine.module_profile import PROBE_SAMPLES, ModuleProfile, RoundingObserver, nested, sanitise_samples
from stratafl.engine.precision import Precision, float32_matmul_precision
from stratafl.engine.random_streams import ClientStream, client_rng

TRIAL_CLIENTS = 3
"""Clients of a trial. Two of them always have batches of the same length, since a group of one
client might not show an error."""

MAX_FLOAT64_PARAMETERS = 50_000_000
"""Parameters of a module, with the frozen ones, up to which it is copied in float64 for a trial."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3}
"""Relative error of a gradient that is accepted. In float64 only the order of sums may differ, in
float32 also on which side of a kink (of ReLU, say) a value lies."""

COARSE_TOLERANCE: dict[Precision, float] = {"tf32": 0.2, "fp16": 0.2, "bf16": 0.5}
"""Relative error accepted in these precisions: seven times that of small modules with kinks under
torch's own autocast on a CPU. It finds gradients that are cut off, overflow or are missing."""

MAX_TOLERANCE = 5e-2
"""Largest relative error accepted where a module computes a part of itself in a coarse type."""

MAX_NAMED_OPS = 3
"""Operations mapped over the clients that the user's message lists without saying how many there
are."""

GradientMethodName = Literal["stacked", "vmap"]


class Trial(NamedTuple):
    """Clients with different weights, buffers and batches, and their gradients by the loop."""

    flat: FlatModule
    x_CP: Tensor
    b_CZ: Tensor
    batch: ClientBatches
    expected_CP: Tensor
    """Gradients."""
    expected_CZ: Tensor
    """Buffers after the gradients were computed."""
    tolerance: float
    """Accepted norm of the error, relative to the norm of the expected values."""

    def results(self, method: BatchedGradients, flat: FlatModule) -> tuple[Tensor, Tensor]:
        """Gradients by a method, and buffers afterwards, computed in the type of `flat`."""
        if isinstance(method, CompiledGradients):
            method.fills_with_nan = True  # shows gradients that the method does not write
        # copies: a module or a loss may write to its arguments
        batch = _cast_batch(self.batch, flat.dtype)
        batch = batch._replace(inputs_CB=batch.inputs_CB.clone(), targets_CB=batch.targets_CB.clone())
        x_CP, b_CZ = (rows.to(flat.dtype, copy=True) for rows in (self.x_CP, self.b_CZ))
        return in_module_order(method, flat)(x_CP, b_CZ, batch).grads_CP, b_CZ

    def agrees(self, method: BatchedGradients) -> bool:
        """Whether a method gives the expected gradients and buffers."""
        g_CP, b_CZ = self.results(method, self.flat)
        pairs = (g_CP, self.expected_CP), (b_CZ, self.expected_CZ)
        return all(_is_near(values, expected, self.tolerance) for values, expected in pairs)

    def agrees_coarsely(self, method: BatchedGradients, flat: FlatModule) -> bool:
        """Whether a method that computes in a coarser precision, in rows of the type of `flat`,
        gives gradients near the expected ones."""
        g_CP, _ = self.results(method, flat)
        return _is_near(g_CP, self.expected_CP, max(self.tolerance, COARSE_TOLERANCE[method.precision]))


def _is_near(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether every client's relative error is within the tolerance; never for NaN."""
    error = torch.where(values == expected, torch.zeros_like(values), values - expected)  # equal infinities
    norm_C = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).norm(dim=1)
    return bool((error.norm(dim=1) / norm_C.clamp(min=1e-30) <= tolerance).all())


def make_trials(task: GradientTask, is_random: bool) -> list[Trial]:
    """Trials that a gradient method must pass: in float64 where module and loss allow it, and in
    the module's own type where the device has kernels for it.

    `is_random`: whether the module or loss draws random numbers.
    """
    flat = task.flat
    x_CP, b_CZ = _perturbed_clients(flat, *(row.to(task.inputs.device) for row in flat.flatten_module(flat.module)))

    def trials(flat: FlatModule, tolerance: float) -> list[Trial]:
        return _loop_trials(task, flat, x_CP.to(flat.dtype), b_CZ.to(flat.dtype), is_random, tolerance)

    own_tolerance = TOLERANCE.get(flat.dtype, MAX_TOLERANCE)
    if flat.dtype == torch.float64 or sum(p.numel() for p in flat.module.parameters()) > MAX_FLOAT64_PARAMETERS:
        return trials(flat, own_tolerance)
    try:
        exact = trials(FlatModule(copy_module(flat.module).double()), TOLERANCE[torch.float64])
    except Exception as problem:
        reraise_out_of_memory(problem)
        return trials(flat, own_tolerance)  # the module or the loss works in one type only
    if kernels.backend_for(task.inputs.device, flat.dtype) is kernels.TORCH_BACKEND:
        return exact
    own_type = []
    for own, true in zip(trials(flat, own_tolerance), exact, strict=True):
        # the loop itself has errors where values lie near a kink
        expected_CP = true.expected_CP.to(flat.dtype)
        error_C = (own.expected_CP - expected_CP).norm(dim=1) / expected_CP.norm(dim=1).clamp(min=1e-30)
        own_type.append(own._replace(expected_CP=expected_CP, tolerance=max(own_tolerance, 10 * float(error_C.max()))))
    return exact + own_type


def _loop_trials(
    task: GradientTask, flat: FlatModule, x_CP: Tensor, b_CZ: Tensor, is_random: bool, tolerance: float
) -> list[Trial]:
    """Trials on each of the trial batches, with the results of the module for one client alone."""
    batches = [_cast_batch(batch, flat.dtype) for batch in _trial_batches(task)]
    results: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    rounding = RoundingObserver()
    for batch in batches:
        for client, length in enumerate(batch.length_C.tolist()):
            # most clients have the same batch in all trials: their gradient is computed once
            if (client, length) in results:
                continue
            samples = batch.inputs_CB[client, :length].clone(), batch.targets_CB[client, :length].clone()
            x_P, b_Z = x_CP[client].clone(), b_CZ[client].clone()
            stream = ClientStream(0, client, 0)
            random = client_rng(stream, x_P.device, flat.module) if is_random else nullcontext()
            within = partial(nested, random, rounding)
            results[client, length] = flat.gradient(x_P, b_Z, *samples, task.loss, within=within), b_Z
    tolerance = max(tolerance, min(100 * rounding.eps, MAX_TOLERANCE))
    trials = []
    for batch in batches:
        clients = (results[key] for key in enumerate(batch.length_C.tolist()))
        expected_CP, expected_CZ = (torch.stack(rows) for rows in zip(*clients, strict=True))
        trials.append(Trial(flat, x_CP, b_CZ, batch, expected_CP, expected_CZ, tolerance))
    return trials


def _cast_batch(batch: ClientBatches, dtype: torch.dtype) -> ClientBatches:
    """Cast real numbers to this type."""
    return batch._replace(inputs_CB=as_type(batch.inputs_CB, dtype), targets_CB=as_type(batch.targets_CB, dtype))


def _perturbed_clients(flat: FlatModule, x_P: Tensor, b_Z: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the trial clients: the module's own values plus noise.

    At a module's initial values many numbers are zero, or equal by chance.
    """
    random = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random).to(like)

    rows = []
    for _ in range(TRIAL_CLIENTS):
        parts = [view.reshape(-1) for name, view in flat.unflatten(x_P, b_Z).items() if name in set(flat.names)]
        moved = [part + 0.1 * (part.square().mean().sqrt() or 1.0) * noise(part) for part in parts]
        # a buffer may be a mask, of which zeros and infinities stay as they are
        rows.append((torch.cat(moved), b_Z * (1 + 0.05 * noise(b_Z))))
    x_CP, b_CZ = (torch.stack(clients) for clients in zip(*rows, strict=True))
    return x_CP, b_CZ


def _trial_batches(task: GradientTask) -> list[ClientBatches]:
    """Batches of the same samples in another order for each client, first full ones; then the
    second client has one sample less, and its batch is padded."""
    inputs, targets, device = task.inputs, task.targets, task.inputs.device
    count = len(inputs)

    def reordered(samples: Tensor) -> Tensor:
        return torch.stack([samples.roll(client, 0) for client in range(TRIAL_CLIENTS)])

    inputs_CB, targets_CB = map_tensors(reordered, inputs), reordered(targets)
    stream = ClientStream(0, torch.arange(TRIAL_CLIENTS, device=device), 0)
    batches = []
    for second in (count, count - 1) if count > 2 else (count,):
        length_C = np.array([count, second, *[count] * (TRIAL_CLIENTS - 2)])
        mask_CB = torch.arange(count, device=device) < torch.as_tensor(length_C, device=device)[:, None]
        batches.append(ClientBatches(inputs_CB, targets_CB, mask_CB, length_C, stream))
    return batches


class Candidate(NamedTuple):
    """A gradient method that may be tried."""

    name: GradientMethodName
    make: Callable[[GradientTask], BatchedGradients]
    reports_failure: bool = True
    """Whether the user is told why it failed: for one of the candidates with the same name."""


class Selection(NamedTuple):
    """Method that computes gradients for a stacked engine."""

    gradients: BatchedGradients | None
    """None where only the loop is right."""
    how: str
    """Sentence for the user, such as "stacked" or "loop: what it does depends on values"."""


def select_for_training(
    training: ClientTraining, precision: Precision, methods: Sequence[GradientMethodName], profile: ModuleProfile
) -> Selection:
    """Select the gradient method for these clients, on the first samples of the first of them."""
    samples, labels = training.samples, training.samples.targets_N
    if training.client_update.epochs is not None and (training.augment is not None or not samples.is_on_device):
        return Selection(None, "loop: clients that make passes of their own read or augment one by one")
    with preserve_rng(samples.device):
        inputs, targets = training.batch(0, 0, training.clients.order[:PROBE_SAMPLES].to(samples.device))
    # a label below zero is one to ignore; labels that are read anew for each batch may change
    are_classes = not (labels.is_floating_point() or labels.is_complex())
    class_indices = samples.is_on_device and are_classes and int(labels.min()) >= 0
    task = GradientTask(training.flat, training.loss, inputs, targets, precision, class_indices)
    with float32_matmul_precision("fp32", samples.device):
        return select_gradient_method(task, methods, profile)


def select_gradient_method(
    task: GradientTask, methods: Sequence[GradientMethodName], profile: ModuleProfile
) -> Selection:
    """Select the first of these methods that gives the module's own gradients on the trial
    clients."""
    with preserve_rng(task.inputs.device):
        task = replace(task, inputs=sanitise_samples(task.inputs), targets=sanitise_samples(task.targets))
        try:
            obstacle = _loop_only_reason(task.flat, profile)
            trials = [] if obstacle else make_trials(task, profile.is_random)
        except Exception as problem:
            reraise_out_of_memory(problem)
            obstacle = describe_exception(problem)
        if obstacle:
            return Selection(None, f"loop: {obstacle}")
        failures: list[str] = []
        for candidate in _candidates(task, methods, profile, trials):
            try:
                method, on_trial = _tried(candidate, task, profile, trials)
            except UnsupportedModule as problem:
                failure = str(problem)
            except Exception as problem:
                reraise_out_of_memory(problem)
                failure = f"{candidate.name} failed: {describe_exception(problem)}"
            else:
                return Selection(method, _describe(candidate.name, failures, on_trial))
            if candidate.reports_failure:
                failures.append(failure)
        return Selection(None, f"loop: {'; '.join(dict.fromkeys(failures))}")


def _tried(
    candidate: Candidate, task: GradientTask, profile: ModuleProfile, trials: Sequence[Trial]
) -> tuple[BatchedGradients, list[BatchedGradients]]:
    """The candidate's method after all trials, and those used in the trials.

    Raises UnsupportedModule where it does not pass.
    """
    obstacle = _functorch_obstacle(profile) if candidate.name == "vmap" else ""
    if candidate.name == "stacked" and profile.uses_autocast:
        obstacle = "autocast within the module"
    if obstacle:
        raise UnsupportedModule(obstacle)
    method = candidate.make(task)
    on_trial = [candidate.make(replace(task, flat=trial.flat, precision="fp32")) for trial in trials]
    agrees = all(trial.agrees(exact) for trial, exact in zip(trials, on_trial, strict=True))
    if agrees and method.precision != "fp32":
        with float32_matmul_precision(method.precision, task.inputs.device):
            agrees = trials[-1].agrees_coarsely(candidate.make(task), task.flat)
    if not agrees:
        raise UnsupportedModule(f"{candidate.name} does not give the module's own gradient")
    return method, on_trial


def _candidates(
    task: GradientTask, methods: Sequence[GradientMethodName], profile: ModuleProfile, trials: Sequence[Trial]
) -> Iterator[Candidate]:
    """Candidates for these methods, in the order in which they are tried."""
    for name in methods:
        if name == "vmap":
            yield Candidate(name, VmapGradients)
            continue
        may_pad = len(trials) > 1 and not profile.uses_autocast
        pads = may_pad and can_pad(trials[0].flat, trials[0].batch, not isinstance(task.loss, LossOnScores))
        if pads:
            yield Candidate(name, partial(CompiledGradients, pads=True), reports_failure=False)
        yield Candidate(name, CompiledGradients)
        yield Candidate(name, partial(CompiledGradients, pads=pads, use_kernels=False), reports_failure=False)
        yield Candidate(name, partial(CompiledGradients, opaque_functions=True), reports_failure=False)


def _describe(name: GradientMethodName, failures: list[str], on_trial: Sequence[BatchedGradients]) -> str:
    """Sentence for the user on how clients train."""
    if name == "vmap":
        return name if not failures else f"{name}: {'; '.join(failures)}"
    mapped = sorted({op for method in on_trial if isinstance(method, CompiledGradients) for op in method.mapped})
    if not mapped:
        return name
    named = ", ".join(mapped) if len(mapped) <= MAX_NAMED_OPS else f"{len(mapped)} operations ({', '.join(mapped)})"
    return f"{name}: {named} mapped over the clients"


def _functorch_obstacle(profile: ModuleProfile) -> str:
    """Reason why `torch.func` cannot train this module, or ""."""
    if profile.is_random:
        return "the module or loss draws random numbers"
    return "training changes the module's buffers" if profile.mutates else ""


def _loop_only_reason(flat: FlatModule, profile: ModuleProfile) -> str:
    """Reason why a client's training depends on more than parameters, buffers, batch and random
    stream, so that only the loop is right; or ""."""
    if profile.failure:
        return profile.failure
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in flat.module.modules() for kind in hooks):
        return "hooks on the gradients"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in flat.module.parameters()):
        return "hooks on the parameters' gradients"
    if profile.foreign_generators:
        return f"the module or loss draws random numbers by {' and '.join(profile.foreign_generators)}"
    if set(profile.mutates) - {"buffers"}:
        return f"training changes the module's {' and '.join(profile.mutates)}"
    return "" if profile.is_repeatable else "the module gives another gradient the second time"
