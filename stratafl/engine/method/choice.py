"""Which method of getting many clients' gradients a module allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from stratafl.base import errors
from stratafl.base.rng import as_before
from stratafl.core.flat_module import Flat
from stratafl.core.losses import Loss, OnScores
from stratafl.data.inputs import Inputs, typed
from stratafl.engine import ops
from stratafl.engine.capture.padding import pads
from stratafl.engine.capture.recorded import Recorded
from stratafl.engine.gradients import Mapped, Stacked
from stratafl.engine.habits import Habits, habits, plain
from stratafl.engine.method.differentiate import Differentiate
from stratafl.engine.method.trial import Trial, perturbed, trials
from stratafl.engine.method.unsupported import Unsupported
from stratafl.engine.precision import computing

GradientMethod = Literal["stacked", "vmap"]
FEW_MAPPED = 3
"""Operations without a form of which `how` names each."""


class Kind(NamedTuple):
    """A method that may be tried."""

    name: GradientMethod
    make: Callable[[Flat, ops.Compute], Differentiate]
    is_last: bool = True
    """Whether its reason is the one to tell, where none of this name does."""


def choose(
    flat: Flat,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    compute: ops.Compute = "fp32",
    labels: bool = False,
    methods: Sequence[GradientMethod] = ("stacked", "vmap"),
) -> tuple[Differentiate | None, str]:
    """The first of these methods that gives this module's own gradients, tried on a few samples;
    None if only a loop does.

    `labels` says that every target of the run is a class number, none to be ignored.
    """
    with as_before(inputs.device):
        return _chosen(flat, loss, plain(inputs), plain(targets), compute, labels, methods)


def _chosen(
    flat: Flat,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    compute: ops.Compute,
    labels: bool,
    methods: Sequence[GradientMethod],
) -> tuple[Differentiate | None, str]:
    try:
        x_CP, b_CZ = perturbed(flat, *(row.to(inputs.device) for row in flat.row(flat.module)))
        known = habits(flat, loss, x_CP[0], b_CZ[0], inputs, targets)
        reason = _peculiar(flat, known)
        tried = [] if reason else trials(flat, loss, x_CP, b_CZ, inputs, targets, known.draws)
    except Exception as problem:
        errors.pass_on_no_room(problem)
        reason = errors.reason(problem)
    if reason:
        return None, f"loop: {reason}"
    reasons: list[str] = []
    for kind in _kinds(flat, loss, inputs, labels, methods, known, tried):
        try:
            if kind.name == "vmap" and _alters(known):
                raise Unsupported(_alters(known))
            if kind.name == "stacked" and known.autocasts:
                raise Unsupported("autocast within the module")
            made = kind.make(flat, compute)
            on_trial = [kind.make(trial.flat, "fp32") for trial in tried]
            agrees = all(trial.agrees(method) for trial, method in zip(tried, on_trial, strict=True))
            if agrees and made.compute != "fp32":
                with computing(made.compute, inputs.device):
                    agrees = tried[-1].agrees_coarsely(kind.make(flat, compute), flat)
        except Unsupported as problem:
            told = str(problem)
        except Exception as problem:
            errors.pass_on_no_room(problem)
            told = f"{kind.name} failed: {errors.reason(problem)}"
        else:
            if agrees:
                return made, _said(kind.name, reasons, on_trial)
            told = f"{kind.name} does not give the module's own gradient"
        if kind.is_last:
            reasons.append(told)
    return None, f"loop: {'; '.join(dict.fromkeys(reasons))}"


def _kinds(
    flat: Flat,
    loss: Loss,
    inputs: Inputs,
    labels: bool,
    methods: Sequence[GradientMethod],
    known: Habits,
    tried: list[Trial],
) -> Iterator[Kind]:
    """The methods there are, each in the order in which they are tried: of the stacked ones first
    that of a module's layers, which has kernels of its own."""
    for name in methods:
        if name == "vmap":
            yield Kind(name, lambda flat, compute: Mapped(flat, loss, inputs.device, compute))
            continue
        # of weights that nobody trains a recording makes one product of all clients' samples
        if not known.writes and all(each.requires_grad for each in flat.module.parameters()):
            yield Kind(
                name,
                lambda flat, compute: Stacked(flat, loss, typed(inputs, flat.dtype), compute, labels),
                is_last=False,
            )
        if (
            not known.autocasts
            and len(tried) > 1
            and pads(tried[0].flat, tried[0].batch, not isinstance(loss, OnScores))
        ):
            yield Kind(
                name,
                lambda flat, compute: Recorded(flat, loss, inputs.device, compute, labels, pads=True),
                is_last=False,
            )
        yield Kind(name, lambda flat, compute: Recorded(flat, loss, inputs.device, compute, labels))
        yield Kind(
            name,
            lambda flat, compute: Recorded(flat, loss, inputs.device, compute, labels, apart=True),
            is_last=False,
        )


def _said(name: GradientMethod, reasons: list[str], on_trial: Sequence[Differentiate]) -> str:
    """How clients train, in words."""
    if name == "vmap":
        return name if not reasons else f"{name}: {'; '.join(reasons)}"
    mapped = sorted({op for method in on_trial if isinstance(method, Recorded) for op in method.mapped})
    if not mapped:
        return name
    named = ", ".join(mapped) if len(mapped) <= FEW_MAPPED else f"{len(mapped)} operations ({', '.join(mapped)})"
    return f"{name}: {named} mapped over the clients"


def _alters(known: Habits) -> str:
    """What a module does in training that `torch.func` does not follow."""
    if known.draws:
        return "the module or loss draws random numbers"
    return "training changes the module's buffers" if known.writes else ""


def _peculiar(flat: Flat, known: Habits) -> str:
    """What makes a module's training depend on more than its parameters, buffers, batch and stream,
    if anything does."""
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in flat.module.modules() for kind in hooks):
        return "hooks on the gradients"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in flat.module.parameters()):
        return "hooks on the parameters' gradients"
    if known.draws_from:
        return f"the module or loss draws random numbers by {' and '.join(known.draws_from)}"
    if set(known.writes) - {"buffers"}:
        return f"training changes the module's {' and '.join(known.writes)}"
    return "" if known.repeats else "the module gives another gradient the second time"
