"""Choose how a module's gradients are computed, and try it on known gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base import errors
from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import preserve_rng
from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import Loss, LossOnScores
from stratafl.data.inputs import Inputs, as_type, map_tensors
from stratafl.engine import kernels, precision
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.compiler.padding import can_pad
from stratafl.engine.gradients import BatchedGradients, CompiledGradients, VmapGradients, in_module_order
from stratafl.engine.module_profile import CoarsestDtype, ModuleProfile, sanitise_samples
from stratafl.engine.precision import float32_matmul_precision
from stratafl.engine.random_streams import ClientStream, client_rng

ORDINARY = ModuleProfile()
"""Profile of a module without side effects."""


class Trial(NamedTuple):
    """Some clients whose weights, buffers and batches differ, and the gradients and buffers a
    module gives each of them alone."""

    flat: FlatModule
    x_CP: Tensor
    b_CZ: Tensor
    batch: ClientBatches
    expected_CP: Tensor
    expected_CZ: Tensor
    """What becomes of the buffers."""
    tolerance: float
    """How large the difference's norm may be, in terms of the expected one's."""

    def gradients(self, method: BatchedGradients, flat: FlatModule) -> tuple[Tensor, Tensor]:
        """What a method gives these clients, all in the type of `flat`, and their buffers after."""
        if isinstance(method, CompiledGradients):
            method.poisoned = True
        # copies: a module or a loss may write into what it is given
        batch = _cast_batch(self.batch, flat.dtype)
        batch = batch._replace(inputs_CB=batch.inputs_CB.clone(), targets_CB=batch.targets_CB.clone())
        x_CP, b_CZ = (each.to(flat.dtype, copy=True) for each in (self.x_CP, self.b_CZ))
        return in_module_order(method, flat)(x_CP, b_CZ, batch).grads_CP, b_CZ

    def agrees(self, method: BatchedGradients) -> bool:
        got_CP, got_CZ = self.gradients(method, self.flat)
        pairs = (got_CP, self.expected_CP), (got_CZ, self.expected_CZ)
        return all(self._near(got, expected, self.tolerance) for got, expected in pairs)

    def agrees_coarsely(self, method: BatchedGradients, flat: FlatModule) -> bool:
        """Whether the gradients are also near in the precision that the method computes in, all in
        the type of `flat`."""
        got_CP, _ = self.gradients(method, flat)
        return self._near(got_CP, self.expected_CP, max(self.tolerance, COARSE[method.compute]))

    @staticmethod
    def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
        off = torch.where(got == expected, torch.zeros_like(got), got - expected)  # infinities that agree
        size_C = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).norm(dim=1)
        # which what is no number never is
        return bool((off.norm(dim=1) / size_C.clamp(min=1e-30) <= tolerance).all())


TRIAL_CLIENTS = 3
"""How many a trial has: two have batches of one length, since the library may keep the values of
one alone where they are."""

MAX_FLOAT64_PARAMETERS = 50_000_000
"""Parameters of a module, frozen ones with them, of which no copy in float64 is made for a
trial."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3}
"""In float64 sums in another order are all that may differ; in float32 also which side of a kink a
value lies on."""

COARSE: dict[precision.Precision, float] = {"tf32": 0.2, "fp16": 0.2, "bf16": 0.5}
"""In these precisions: seven times what small modules with kinks were off by in 16 bits on a CPU,
by torch's own autocast alike. It is for what is cut off, overflows or is not computed at all."""

MAX_TOLERANCE = 5e-2
"""Whatever a module, or a part of it, computes in."""


def make_trials(
    flat: FlatModule, loss: Loss, x_CP: Tensor, b_CZ: Tensor, inputs: Inputs, targets: Tensor, draws: bool
) -> list[Trial]:
    """What a method to get gradients must pass: in float64 where module and loss allow it, and in
    the module's own type where that has operations of its own. `draws`: whether it draws."""
    tolerance = TOLERANCE.get(flat.dtype, MAX_TOLERANCE)

    def trial(flat: FlatModule, tolerance: float, batch: ClientBatches) -> Trial:
        x, b = x_CP.to(flat.dtype), b_CZ.to(flat.dtype)
        own, rounding, batch, kept = [], CoarsestDtype(), _cast_batch(batch, flat.dtype), b.clone()
        for client, length in enumerate(batch.length_C):
            mine, labels = batch.inputs_CB[client, :length].clone(), batch.targets_CB[client, :length].clone()
            rows = x[client].clone(), kept[client]

            @contextmanager
            def watched() -> Iterator[None]:
                with client_rng(ClientStream(0, client, 0), x.device, flat.module), rounding:
                    yield

            own.append(flat.gradient(*rows, mine, labels, loss, within=watched if draws else lambda: rounding))
        return Trial(flat, x, b, batch, torch.stack(own), kept, max(tolerance, min(100 * rounding.eps, MAX_TOLERANCE)))

    def own_type_trials() -> list[Trial]:
        return [trial(flat, tolerance, batch) for batch in _batches(inputs, targets)]

    if flat.dtype == torch.float64 or sum(p.numel() for p in flat.module.parameters()) > MAX_FLOAT64_PARAMETERS:
        return own_type_trials()
    try:
        double = FlatModule(copy_module(flat.module).double())
        exact = [trial(double, TOLERANCE[torch.float64], batch) for batch in _batches(inputs, targets)]
    except Exception as problem:
        pass_on_no_room(problem)
        return own_type_trials()  # a type is written into the module or the loss
    if kernels.backend_for(inputs.device, flat.dtype) is kernels.TORCH_BACKEND:
        return exact
    near = []
    for own, true in zip(own_type_trials(), exact, strict=True):
        # how far the library itself is off, where values lie near a kink
        expected_CP = true.expected_CP.to(flat.dtype)
        off_C = (own.expected_CP - expected_CP).norm(dim=1) / expected_CP.norm(dim=1).clamp(min=1e-30)
        near.append(own._replace(expected_CP=expected_CP, tolerance=max(tolerance, 10 * float(off_C.max()))))
    return exact + near


def _cast_batch(batch: ClientBatches, dtype: torch.dtype) -> ClientBatches:
    """Real numbers in this type."""
    return batch._replace(inputs_CB=as_type(batch.inputs_CB, dtype), targets_CB=as_type(batch.targets_CB, dtype))


def perturbed_clients(flat: FlatModule, x_P: Tensor, b_Z: Tensor) -> tuple[Tensor, Tensor]:
    """Several clients' rows, each a little off these: at a module's first values much is zero or
    alike by chance."""
    random = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random).to(like)

    rows = []
    for _ in range(TRIAL_CLIENTS):
        parts = [view.reshape(-1) for name, view in flat.unflatten(x_P, b_Z).items() if name in set(flat.names)]
        moved = [part + 0.1 * (part.square().mean().sqrt() or 1.0) * noise(part) for part in parts]
        # a buffer may be a mask, of which zeros and infinities stay as they are
        rows.append((torch.cat(moved), b_Z * (1 + 0.05 * noise(b_Z))))
    x_CP, b_CZ = (torch.stack(each) for each in zip(*rows, strict=True))
    return x_CP, b_CZ


def _batches(inputs: Inputs, targets: Tensor) -> list[ClientBatches]:
    """The samples in another order for each client; then the second client lacks one, and its batch
    is padded."""
    count = len(inputs)

    def turned(each: Tensor) -> Tensor:
        return torch.stack([each.roll(client, 0) for client in range(TRIAL_CLIENTS)])

    inputs_CB, targets_CB = map_tensors(turned, inputs), turned(targets)
    place_B = torch.arange(count, device=inputs.device)
    batches = []
    for second in (count, count - 1) if count > 2 else (count,):
        length_C = np.array([count, second, *[count] * (TRIAL_CLIENTS - 2)])
        mask_CB = place_B < torch.as_tensor(length_C, device=inputs.device)[:, None]
        stream = ClientStream(0, torch.arange(TRIAL_CLIENTS, device=inputs.device), 0)
        batches.append(ClientBatches(inputs_CB, targets_CB, mask_CB, length_C, stream))
    return batches


GradientMethodName = Literal["stacked", "vmap"]

MAX_NAMED_OPS = 3
"""Operations called for one client after another of which `how` names each."""


GradientMethodMaker = Callable[[FlatModule, precision.Precision], BatchedGradients]


class Candidate(NamedTuple):
    """A method that may be tried."""

    name: GradientMethodName
    make: GradientMethodMaker
    is_last: bool = True
    """Whether its reason is the one to tell, where none of this name does."""


def select_gradient_method(
    flat: FlatModule,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    compute: precision.Precision = "fp32",
    labels: bool = False,
    methods: Sequence[GradientMethodName] = ("stacked", "vmap"),
    known: ModuleProfile = ORDINARY,
) -> tuple[BatchedGradients | None, str]:
    """The first of these methods that gives this module's own gradients, tried on a few samples;
    None if only a loop does.

    `labels` says that every target of the run is a class number, none to be ignored.
    """
    with preserve_rng(inputs.device):
        return _chosen(flat, loss, sanitise_samples(inputs), sanitise_samples(targets), compute, labels, methods, known)


def _chosen(
    flat: FlatModule,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    compute: precision.Precision,
    labels: bool,
    methods: Sequence[GradientMethodName],
    known: ModuleProfile,
) -> tuple[BatchedGradients | None, str]:
    try:
        x_CP, b_CZ = perturbed_clients(flat, *(row.to(inputs.device) for row in flat.flatten_module(flat.module)))
        reason = _loop_only_reason(flat, known)
        tried = [] if reason else make_trials(flat, loss, x_CP, b_CZ, inputs, targets, known.is_random)
    except Exception as problem:
        errors.pass_on_no_room(problem)
        reason = errors.describe_exception(problem)
    if reason:
        return None, f"loop: {reason}"
    reasons: list[str] = []
    for kind in _candidates(flat, loss, inputs, labels, methods, known, tried):
        try:
            if kind.name == "vmap" and _functorch_obstacle(known):
                raise UnsupportedModule(_functorch_obstacle(known))
            if kind.name == "stacked" and known.uses_autocast:
                raise UnsupportedModule("autocast within the module")
            made = kind.make(flat, compute)
            on_trial = [kind.make(trial.flat, "fp32") for trial in tried]
            agrees = all(trial.agrees(method) for trial, method in zip(tried, on_trial, strict=True))
            if agrees and made.compute != "fp32":
                with float32_matmul_precision(made.compute, inputs.device):
                    agrees = tried[-1].agrees_coarsely(kind.make(flat, compute), flat)
        except UnsupportedModule as problem:
            told = str(problem)
        except Exception as problem:
            errors.pass_on_no_room(problem)
            told = f"{kind.name} failed: {errors.describe_exception(problem)}"
        else:
            if agrees:
                return made, _describe(kind.name, reasons, on_trial)
            told = f"{kind.name} does not give the module's own gradient"
        if kind.is_last:
            reasons.append(told)
    return None, f"loop: {'; '.join(dict.fromkeys(reasons))}"


def _candidates(
    flat: FlatModule,
    loss: Loss,
    inputs: Inputs,
    labels: bool,
    methods: Sequence[GradientMethodName],
    known: ModuleProfile,
    tried: list[Trial],
) -> Iterator[Candidate]:
    """The methods there are, each in the order in which they are tried."""
    for name in methods:
        if name == "vmap":
            yield Candidate(name, lambda flat, compute: VmapGradients(flat, loss, inputs.device, compute))
            continue

        def compiled(pads: bool = False, apart: bool = False, use_kernels: bool = True) -> GradientMethodMaker:
            return lambda flat, compute: CompiledGradients(
                flat, loss, inputs, compute, labels, pads, apart, use_kernels
            )

        several = not known.uses_autocast and len(tried) > 1
        pads = several and can_pad(tried[0].flat, tried[0].batch, not isinstance(loss, LossOnScores))
        if pads:
            yield Candidate(name, compiled(pads=True), is_last=False)
        yield Candidate(name, compiled())
        yield Candidate(name, compiled(pads=pads, use_kernels=False), is_last=False)
        yield Candidate(name, compiled(apart=True), is_last=False)


def _describe(name: GradientMethodName, reasons: list[str], on_trial: Sequence[BatchedGradients]) -> str:
    """How clients train, in words."""
    if name == "vmap":
        return name if not reasons else f"{name}: {'; '.join(reasons)}"
    mapped = sorted({op for method in on_trial if isinstance(method, CompiledGradients) for op in method.mapped})
    if not mapped:
        return name
    named = ", ".join(mapped) if len(mapped) <= MAX_NAMED_OPS else f"{len(mapped)} operations ({', '.join(mapped)})"
    return f"{name}: {named} mapped over the clients"


def _functorch_obstacle(known: ModuleProfile) -> str:
    """What a module does in training that `torch.func` does not follow."""
    if known.is_random:
        return "the module or loss draws random numbers"
    return "training changes the module's buffers" if known.mutates else ""


def _loop_only_reason(flat: FlatModule, known: ModuleProfile) -> str:
    """What makes a module's training depend on more than its parameters, buffers, batch and stream,
    if anything does."""
    if known.failure:
        return known.failure
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in flat.module.modules() for kind in hooks):
        return "hooks on the gradients"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in flat.module.parameters()):
        return "hooks on the parameters' gradients"
    if known.foreign_generators:
        return f"the module or loss draws random numbers by {' and '.join(known.foreign_generators)}"
    if set(known.mutates) - {"buffers"}:
        return f"training changes the module's {' and '.join(known.mutates)}"
    return "" if known.is_repeatable else "the module gives another gradient the second time"
