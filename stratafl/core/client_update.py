"""A client's local update: learning rate, transforms of the gradient, and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.rng import ALIKE, seeded_rng
from stratafl.base.validation import check_number
from stratafl.core.dry_run import ImpureFunction, dry_run
from stratafl.core.flat_module import equal_with_nan
from stratafl.core.optimizer import OPTIMIZERS, SGD, LearningRate, Optimizer
from stratafl.core.rule import Proximal, Rows, Rule

CorrectionFn = Callable[[Tensor, Tensor], Tensor]
"""(model, gradient) -> gradient plus corrections and local terms of all rules on the path to the
root."""

GradientTransform = Callable[[Tensor, Tensor, CorrectionFn], Tensor]
"""Gradient transform: (direction, model, correct) -> direction."""

OptimizerStateMode = Literal["reset", "keep"]
"""Whether the state of a client's optimizer is reset when it gets a model from its parent."""

PLAIN = SGD()


def reports_clipping(transform: GradientTransform) -> bool:
    """Whether a transform counts the directions that it shortens: `clip`, and a user's transform
    with a method `shortened`, which takes the same arguments and returns the directions and the
    number of shortened rows."""
    return hasattr(transform, "shortened")


def apply_transforms(
    transforms: Sequence[GradientTransform], direction: Tensor, x: Tensor, correct: CorrectionFn, clipped: Tensor
) -> Tensor:
    """Apply all transforms in order, and add the number of shortened rows to `clipped`."""
    for transform in transforms:
        shortened = getattr(transform, "shortened", None)
        if shortened is None:
            direction = transform(direction, x, correct)
        else:
            direction, count = shortened(direction, x, correct)
            clipped += count
    return direction


def corrections(direction: Tensor, x: Tensor, correct: CorrectionFn) -> Tensor:
    """Gradient transform: add the corrections and local terms of all rules."""
    return correct(x, direction)


@dataclass(frozen=True)
class clip:
    """Gradient transform: clip the norm of each client's direction."""

    norm: float

    def __call__(self, direction: Tensor, x: Tensor, correct: CorrectionFn) -> Tensor:
        return self.shortened(direction, x, correct)[0]

    def shortened(self, direction: Tensor, x: Tensor, correct: CorrectionFn) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        factor = self.norm / length.clamp(min=self.norm)
        return direction * factor, (factor < 1).sum()


@dataclass(frozen=True)
class decay:
    """Gradient transform: add weight decay."""

    rate: float

    def __call__(self, direction: Tensor, x: Tensor, correct: CorrectionFn) -> Tensor:
        return direction + self.rate * x


class StandardChain(NamedTuple):
    """Settings of the standard chain, corrections -> clip -> decay, for engines that have one
    kernel for all of it."""

    clip: float | None
    decay: float

    @staticmethod
    def from_transforms(transforms: Sequence[GradientTransform]) -> StandardChain | None:
        """The settings of these transforms; None if they are not a standard chain."""
        rest = list(transforms)
        if not rest or rest.pop(0) is not corrections:
            return None
        norms = [transform.norm for transform in rest[:1] if type(transform) is clip]
        rates = [transform.rate for transform in rest if type(transform) is decay]
        if len(norms) + len(rates) < len(rest):
            return None
        return StandardChain(norms[0] if norms else None, sum(rates, 0.0))


@dataclass(frozen=True)
class ClientUpdate:
    """Local update of every client: learning rate, transforms between gradient and optimizer, and
    optimizer."""

    lr: LearningRate
    transforms: tuple[GradientTransform, ...] = (corrections,)
    optimizer: Optimizer = PLAIN
    optimizer_state: OptimizerStateMode = "reset"
    epochs: int | None = None
    """Passes over a client's own data between two synchronisations; None if the schedule counts
    steps instead."""

    @property
    def has_clip(self) -> bool:
        """Whether a transform may shorten directions."""
        return any(map(reports_clipping, self.transforms))

    @property
    def keeps_optimizer_state(self) -> bool:
        """Whether the optimizer's state is kept when a client gets a new model."""
        return self.optimizer_state == "keep"

    @property
    def is_nonlinear(self) -> bool:
        """Whether a model's displacement differs from the learning rate times the sum of its
        directions, or clients differ in their numbers of steps.

        False only for SGD that keeps no velocity when it gets a new model, in runs that count steps
        rather than passes over clients' data. Where it is True, rules that derive gradients from
        displacements need the SGD path.
        """
        sgd = self.optimizer if type(self.optimizer) is SGD else None
        return sgd is None or (self.keeps_optimizer_state and sgd.momentum > 0) or self.epochs is not None

    def lr_sum(self, round: int, steps: int) -> float:
        """Sum of the learning rates of these steps, each with the weight that momentum gives to its
        gradient: the displacement if all directions are 1. If `is_nonlinear`, the plain sum over
        steps or passes."""
        weights = steps if self.is_nonlinear or type(self.optimizer) is not SGD else self.optimizer.reach(steps)
        return float(self.lr(round)) * weights


def needs_sgd_path(update: ClientUpdate, rules: Sequence[Rule]) -> bool:
    """Whether nodes carry SGD paths (see `core.rule.SgdPath`) beside their models."""
    return update.is_nonlinear and any(rule.measures for rule in rules)


def append_sgd_path(b_NB: Tensor, path_NP: Tensor) -> Tensor:
    """Append SGD paths to the rows of buffers, beside which they are averaged and sent."""
    return torch.cat([b_NB, path_NP], dim=-1)


def dry_run_client_update(update: ClientUpdate, parameters: int, dtype: torch.dtype, device: torch.device) -> None:
    """Dry run of a user's transforms and optimizer on two rows; raises if they are not pure
    functions."""
    x_2P = torch.linspace(-1.0, 1.0, 2 * parameters, dtype=dtype, device=device).view(parameters, 2).T.contiguous()
    _dry_run_transforms(update.transforms, x_2P)
    _dry_run_optimizer(update.optimizer, x_2P)


def _dry_run_transforms(transforms: Sequence[GradientTransform], x_2P: Tensor) -> None:
    """Try the transforms on two clients in turn; raises if a result depends on earlier calls.

    Engines call transforms in different orders, and all clients would share a transform's memory.
    """
    d_2P = x_2P.flip(1)
    for transform in transforms:
        if transform is corrections or type(transform) in (clip, decay):
            continue
        name = getattr(transform, "__name__", type(transform).__name__)
        results = []
        for client in (0, 1, 0, 0):
            rows = slice(client, client + 1)
            with (
                seeded_rng(ALIKE, devices=True),
                convert_errors("client.gradient_transforms", name, "fails on a row of numbers"),
            ):
                results.append(transform(d_2P[rows].clone(), x_2P[rows].clone(), lambda x, g: g))
                if not isinstance(results[-1], Tensor) or results[-1].shape != x_2P[rows].shape:
                    raise ValueError("it must give a direction of the model's shape")
        first, _, *repeated = results
        if not all(equal_with_nan(first, result) for result in repeated):
            allowed = "depends on earlier calls: only an optimizer may have a state (docs/optimisers.md)"
            raise InvalidInput("client.gradient_transforms", name, allowed)


def _dry_run_optimizer(optimizer: Optimizer, x_NP: Tensor) -> None:
    """Try an optimizer for two steps on these rows; raises if it is not a pure function of rows."""
    if type(optimizer) in OPTIMIZERS.values():
        return
    name = type(optimizer).__name__

    def step(state: Rows, direction: Tensor, x: Tensor, lr: float) -> tuple[Rows, Tensor]:
        result = optimizer.step(state, direction, x, lr)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)):
            raise ValueError("step must return two things, the next state and what is subtracted from the models")
        after, change = result
        for key, rows in {**after, "change": change}.items():
            if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(x):
                raise ValueError(f"{key} must be a matrix with {len(x)} rows, one per client")
        if change.shape != x.shape or after.keys() != state.keys():
            raise ValueError("step must give a state like the one of init, and a change of the model's shape")
        return result

    with convert_errors("client.optimizer", name, "must be a value that does not change, such as a NamedTuple"):
        hash(optimizer)
    with convert_errors("client.optimizer", name, "fails on a row of numbers"):
        try:
            state = dry_run(optimizer.init, {"x": x_NP})
            for factor in (1.0, -0.5):
                direction_NP = factor * x_NP.flip(1)
                state, _ = dry_run(step, {"state": state, "direction": direction_NP, "x": x_NP, "lr": 0.1})
        except ImpureFunction as problem:
            raise InvalidInput("client.optimizer", name, str(problem)) from None


def check_strengths(dtype: torch.dtype, chain: ClientUpdate, rules: Sequence[Rule]) -> None:
    """Raise if the model's type cannot represent a learning rate, decay or proximal strength."""
    largest = torch.finfo(dtype).max
    check_number("client.lr", chain.lr(0), at_most=largest)
    for transform in chain.transforms:
        if isinstance(transform, decay):
            check_number("client.weight_decay", transform.rate, at_most=largest)
    for rule in rules:
        if isinstance(rule.local, Proximal):
            check_number("method", rule.local.strength, at_most=largest)
