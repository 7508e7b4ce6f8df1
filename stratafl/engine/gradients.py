"""The gradients of many clients at once, and which method of getting them a module allows.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stratafl.base import errors
from stratafl.core.flat import Flat, copied
from stratafl.core.objective.losses import Loss, OnScores, bare
from stratafl.core.shared_rows import Spread
from stratafl.data.inputs import Inputs, arguments, mapped, typed
from stratafl.engine import ops
from stratafl.engine.habits import Habits, Rounding, habits, plain
from stratafl.engine.precision import Casting, scale_of
from stratafl.engine.rows import ALONE, Gradients, Wanted, room
from stratafl.engine.trace.layout import Layout
from stratafl.engine.trace.lowering import Sinks, Unsupported
from stratafl.engine.trace.program import Program
from stratafl.engine.vocabulary import Vocabulary

GradientMethod = Literal["stacked", "vmap"]


class Batch(NamedTuple):
    """One step's samples of all clients, padded to a common length."""

    inputs_CB: Inputs
    targets_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """The clients' own lengths, on the host."""


class Differentiate(Protocol):
    """The gradient of each client's mean loss, with what is wanted added."""

    layout: Layout
    """How the rows lie that it takes and gives."""
    even: bool
    """Whether it reads the batches' lengths on the host, so that these must not change in a CUDA
    graph."""

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients: ...


class Stacked:
    """One pass forward and one back for all clients, through the module's client-batched
    program."""

    def __init__(self, flat: Flat, loss: Loss, inputs: Inputs, compute: ops.Compute = "fp32", labels: bool = False):
        """`labels`: every target is a class number, so that the library's cross-entropy has a
        stacked form."""
        self.flat, self.loss, self.compute = flat, bare(loss), compute
        self.program = Program(flat, inputs)
        if self.program.gives_more and not isinstance(loss, OnScores):
            raise Unsupported("a loss of one's own, of an output that is no tensor")
        self.ops = ops.table(inputs.device, flat.dtype)
        reorder = self.ops.reorder
        self.layout = Layout(flat) if reorder is None else Layout(flat, self.program.filters, reorder)
        self.even = not (labels and self.loss is F.cross_entropy)
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""
        self._maps = True

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        sinks = Sinks(
            self._views(g_CP, b_CZ),
            {} if wanted.correction_CP is None else self._views(wanted.correction_CP, b_CZ),
            [] if wanted.squares and self.ops.squares else None,
        )
        scale = scale_of(self.compute)
        with torch.enable_grad():
            outputs_CB, sunk = self.program(named, batch.inputs_CB, self.ops, self.compute, sinks, scale)
            losses_C = self._losses(outputs_CB, batch)
            losses_C.backward(torch.full_like(losses_C, scale))
        for name, weight in weights.items():
            if name not in sunk:
                part = torch.zeros_like(weight) if weight.grad is None else weight.grad
                sink = sinks.gradients[name]
                ops.settle(part, sink, sinks.corrections.get(name), scale)
                if sinks.squares is not None:
                    sinks.squares.append(sink.flatten(1).square().sum(dim=1, keepdim=True))
        return Gradients(g_CP, tuple(sinks.squares or ()))

    def _views(self, rows_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        views = self.layout.named(rows_CP, b_CZ)
        return {name: views[name] for name in self.flat.names}

    def _losses(self, outputs_CB: Tensor, batch: Batch) -> Tensor:
        if not self.even:
            op = self.ops.functions["cross_entropy"] if batch.targets_CB.dim() == 2 else ops.cross_entropy
            return op(outputs_CB, batch.targets_CB, batch.mask_CB)
        outputs_CB = outputs_CB.to(self.flat.dtype)
        losses = []
        for length, mine in _by_length(batch.length_C):
            # copies: a loss may write into what it is given
            outputs, targets = outputs_CB[mine, :length].clone(), batch.targets_CB[mine, :length].clone()
            losses.append(self._own_losses(outputs, targets))
        return torch.cat(losses)

    def _own_losses(self, outputs_CB: Tensor, targets_CB: Tensor) -> Tensor:
        """A user's loss of each client, none of whose batches is padded."""
        if self._maps:
            try:
                return vmap(lambda *pair: self.loss(*pair).reshape(()))(outputs_CB, targets_CB)
            except RuntimeError:
                # it looks at values or does what cannot be mapped; this shows when the engine first
                # tries it
                self._maps = False
        return torch.stack([self.loss(*pair).reshape(()) for pair in zip(outputs_CB, targets_CB, strict=True)])


class Mapped:
    """`torch.func` over the clients whose batches have the same length."""

    even = True

    def __init__(self, flat: Flat, loss: Loss, device: torch.device, compute: ops.Compute = "fp32"):
        self.flat, self.layout = flat, Layout(flat)
        self._casting = Casting(compute, device, flat.dtype, keeps=False)
        self.loss = self._casting.scaled(loss)
        # of its own, in training mode: a module may keep what it computed, which is of no use
        # outside the mapping
        flat.train()
        self._module = copied(flat.module, shared=flat.module.parameters())
        self._gradient = vmap(grad(self._one, has_aux=True), randomness="error")

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        for length, mine in _by_length(batch.length_C):
            inputs, targets = batch.inputs_CB[mine, :length], batch.targets_CB[mine, :length]
            g_CP[mine], beyond = self._gradient(x_CP[mine], b_CZ[mine], *arguments(inputs), targets)
            Vocabulary.check(beyond)
        g_CP = self._casting.unscaled(g_CP)
        return Gradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))

    def _one(
        self, x_P: Tensor, b_Z: Tensor, positional: tuple[Tensor, ...], keywords: dict[str, Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        values = self.flat.named(x_P, b_Z)
        with Vocabulary() as vocabulary, self._casting.forward():
            loss = self.loss(functional_call(self._module, values, positional, keywords), targets).reshape(())
        return loss, vocabulary.beyond


class ModuleOrder:
    """Another method's gradients, of rows in the module's order and in that order."""

    def __init__(self, method: Differentiate, flat: Flat):
        self.method, self.layout, self.even = method, Layout(flat), method.even

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        inner = self.method.layout
        own_CP, g_CP = (room(len(x_CP), x_CP.shape[1], x_CP) for _ in range(2))
        inner.into(own_CP, Spread(x_CP), range(len(x_CP)))
        inner.restore(self.method(own_CP, b_CZ, batch).g_CP, g_CP)
        return Gradients(g_CP if wanted.correction_CP is None else g_CP.add_(wanted.correction_CP))


def ordered(method: Differentiate, flat: Flat) -> Differentiate:
    """The same for rows in the module's order."""
    return method if method.layout.plain else ModuleOrder(method, flat)


def _by_length(length_C: np.ndarray) -> list[tuple[int, slice | list[int]]]:
    """Each length there is and who has it."""
    lengths = np.unique(length_C)
    if len(lengths) == 1:
        return [(int(lengths[0]), slice(None))]
    return [(int(length), np.flatnonzero(length_C == length).tolist()) for length in lengths]


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
    inputs, targets = plain(inputs), plain(targets)
    try:
        x_CP, b_CZ = _perturbed(flat, *(row.to(inputs.device) for row in flat.row(flat.module)))
        known = habits(flat, loss, x_CP[0], b_CZ[0], inputs, targets)
        reason = _peculiar(flat, known)
        trials = [] if reason else _trials(flat, loss, x_CP, b_CZ, inputs, targets)
    except Exception as problem:
        reason = errors.reason(problem)
    if reason:
        return None, f"loop: {reason}"
    reasons = []
    for how in methods:

        def make(flat: Flat, compute: ops.Compute) -> Differentiate:
            if how == "vmap":
                return Mapped(flat, loss, inputs.device, compute)
            return Stacked(flat, loss, typed(inputs, flat.dtype), compute, labels)

        try:
            if how == "stacked" and known.autocasts:
                raise Unsupported("autocast within the module")
            made = make(flat, compute)
            agrees = all(trial.agrees(make(trial.flat, "fp32")) for trial in trials)
            if agrees and compute in ops.HALF:
                # not compared, since rounding is the point of it, but it must get through
                agrees = bool(trials[-1].gradients(make(flat, compute), flat).isfinite().all())
        except Unsupported as problem:
            reasons.append(str(problem))
        except Exception as problem:
            reasons.append(f"{how} failed: {errors.reason(problem)}")
        else:
            if agrees:
                return made, how if not reasons else f"{how}: {'; '.join(reasons)}"
            reasons.append(f"{how} does not give the module's own gradient")
    return None, f"loop: {'; '.join(reasons)}"


def _peculiar(flat: Flat, known: Habits) -> str:
    """What makes a module's training depend on more than its parameters and batch, if anything
    does."""
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in flat.module.modules() for kind in hooks):
        return "hooks on the gradients"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in flat.module.parameters()):
        return "hooks on the parameters' gradients"
    if known.draws:
        return "the module or loss draws random numbers"
    if known.writes:
        return f"training changes the module's {' and '.join(known.writes)}"
    return "" if known.repeats else "the module gives another gradient the second time"


class Trial(NamedTuple):
    """Some clients whose weights, buffers and batches differ, and the gradients a module gives each
    of them alone."""

    flat: Flat
    x_CP: Tensor
    b_CZ: Tensor
    batch: Batch
    expected_CP: Tensor
    tolerance: float
    """How large the difference's norm may be, in terms of the expected one's."""

    def gradients(self, method: Differentiate, flat: Flat) -> Tensor:
        """What a method gives these clients, all in the type of `flat`."""
        if isinstance(method, Stacked):
            method.poisoned = True
        # copies: a module or a loss may write into what it is given
        batch = _typed(self.batch, flat.dtype)
        batch = batch._replace(inputs_CB=batch.inputs_CB.clone(), targets_CB=batch.targets_CB.clone())
        x_CP, b_CZ = (each.to(flat.dtype, copy=True) for each in (self.x_CP, self.b_CZ))
        return ordered(method, flat)(x_CP, b_CZ, batch).g_CP

    def agrees(self, method: Differentiate) -> bool:
        got_CP = self.gradients(method, self.flat)
        off_C = (got_CP - self.expected_CP).norm(dim=1) / self.expected_CP.norm(dim=1).clamp(min=1e-30)
        return bool((off_C <= self.tolerance).all())  # which what is no number never is


CLIENTS = 3
"""How many a trial has: two have batches of one length, since the library may keep the values of
one alone where they are."""
LARGE = 50_000_000
"""Parameters of a module, frozen ones with them, of which no copy in float64 is made for a
trial."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3}
"""In float64 sums in another order are all that may differ; in float32 also which side of a kink a
value lies on."""
COARSEST = 5e-2
"""Whatever a module, or a part of it, computes in."""


def _trials(flat: Flat, loss: Loss, x_CP: Tensor, b_CZ: Tensor, inputs: Inputs, targets: Tensor) -> list[Trial]:
    """What a method to get gradients must pass: in float64 where module and loss allow it, and in
    the module's own type where that has operations of its own."""
    tolerance = TOLERANCE.get(flat.dtype, COARSEST)

    def trial(flat: Flat, tolerance: float, batch: Batch) -> Trial:
        x, b = x_CP.to(flat.dtype), b_CZ.to(flat.dtype)
        own, rounding, batch = [], Rounding(), _typed(batch, flat.dtype)
        for client, length in enumerate(batch.length_C):
            mine, labels = batch.inputs_CB[client, :length].clone(), batch.targets_CB[client, :length].clone()
            rows = x[client].clone(), b[client].clone()
            own.append(flat.gradient(*rows, mine, labels, loss, within=lambda: rounding))
        return Trial(flat, x, b, batch, torch.stack(own), max(tolerance, min(100 * rounding.eps, COARSEST)))

    trials = [trial(flat, tolerance, batch) for batch in _batches(inputs, targets)]
    if flat.dtype == torch.float64 or sum(p.numel() for p in flat.module.parameters()) > LARGE:
        return trials
    try:
        double = Flat(copied(flat.module).double())
        exact = [trial(double, TOLERANCE[torch.float64], batch) for batch in _batches(inputs, targets)]
    except Exception:
        return trials  # a type is written into the module or the loss
    if ops.table(inputs.device, flat.dtype) is ops.PLAIN:
        return exact
    near = []
    for own, true in zip(trials, exact, strict=True):
        # how far the library itself is off, where values lie near a kink
        expected_CP = true.expected_CP.to(flat.dtype)
        off_C = (own.expected_CP - expected_CP).norm(dim=1) / expected_CP.norm(dim=1).clamp(min=1e-30)
        near.append(own._replace(expected_CP=expected_CP, tolerance=max(tolerance, 10 * float(off_C.max()))))
    return exact + near


def _typed(batch: Batch, dtype: torch.dtype) -> Batch:
    """Real numbers in this type."""
    return batch._replace(inputs_CB=typed(batch.inputs_CB, dtype), targets_CB=typed(batch.targets_CB, dtype))


def _perturbed(flat: Flat, x_P: Tensor, b_Z: Tensor) -> tuple[Tensor, Tensor]:
    """Several clients' rows, each a little off these: at a module's first values much is zero or
    alike by chance."""
    random = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random).to(like)

    rows = []
    for _ in range(CLIENTS):
        parts = [view.reshape(-1) for name, view in flat.named(x_P, b_Z).items() if name in set(flat.names)]
        moved = [part + 0.1 * (part.square().mean().sqrt() or 1.0) * noise(part) for part in parts]
        # a buffer may be a mask, of which zeros and infinities stay as they are
        rows.append((torch.cat(moved), b_Z * (1 + 0.05 * noise(b_Z))))
    x_CP, b_CZ = (torch.stack(each) for each in zip(*rows, strict=True))
    return x_CP, b_CZ


def _batches(inputs: Inputs, targets: Tensor) -> list[Batch]:
    """The samples in another order for each client; then the second client lacks one, and its batch
    is padded."""
    count = len(inputs)

    def turned(each: Tensor) -> Tensor:
        return torch.stack([each.roll(client, 0) for client in range(CLIENTS)])

    inputs_CB, targets_CB = mapped(turned, inputs), turned(targets)
    place_B = torch.arange(count, device=inputs.device)
    batches = []
    for second in (count, count - 1) if count > 2 else (count,):
        length_C = np.array([count, second, *[count] * (CLIENTS - 2)])
        mask_CB = place_B < torch.as_tensor(length_C, device=inputs.device)[:, None]
        batches.append(Batch(inputs_CB, targets_CB, mask_CB, length_C))
    return batches
