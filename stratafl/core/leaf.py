"""A leaf's step, as a visible chain: gradient -> + corrections -> clip -> + weight decay -> SGD.

Stages work on rows (one per client), so one client and all of them at once take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stratafl.errors import number, whole

Correct = Callable[[Tensor, Tensor], Tensor]
"""(model, gradient) -> the direction with everything the rules on the path to the root add."""
Stage = Callable[[Tensor, Tensor, Correct], Tensor]
"""(direction, model, correct) -> direction."""
LearningRate = Callable[[int], float]
"""The learning rate of a global round, counted from 0."""


def corrections(direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
    """Stage: add what the rules add."""
    return correct(x, direction)


@dataclass(frozen=True)
class clip:
    """Stage: scale each client's direction down to this norm where it is longer."""

    norm: float

    def __call__(self, direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
        return direction * self.factor(direction)

    def factor(self, direction: Tensor) -> Tensor:
        """What each row is multiplied by: one, or less where it is clipped."""
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        return self.norm / length.clamp(min=self.norm)


@dataclass(frozen=True)
class decay:
    """Stage: add weight decay."""

    rate: float

    def __call__(self, direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
        return direction + self.rate * x


@dataclass(frozen=True)
class Leaf:
    """The chain every client runs: stages between the gradient and SGD, the learning rate and the momentum.

    The momentum starts at zero whenever a client gets a model from its parent.
    """

    lr: LearningRate
    stages: tuple[Stage, ...] = (corrections,)
    momentum: float = 0.0

    def rate(self, round: int, steps: int) -> float:
        """The sum of the learning rates used in these steps, each with the weight momentum gives it:
        how far the model moves if every gradient is one."""
        m = self.momentum
        if m == 0:
            return self.lr(round) * steps
        weights = ((1 - m ** (h + 1)) / (1 - m) for h in range(steps))
        return self.lr(round) * math.fsum(weights)


def leaf(
    lr: float | LearningRate = 0.1,
    *,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> Leaf:
    """The usual chain: corrections, then clip by norm, then weight decay."""
    stages: list[Stage] = [corrections]
    if clip_norm is not None:
        stages.append(clip(number("leaf.clip", clip_norm, above=0, at_most=1e30)))
    strength = number("leaf.weight_decay", weight_decay, at_least=0)
    if strength > 0:
        stages.append(decay(strength))
    number("leaf.momentum", momentum, at_least=0, below=1)
    schedule = lr if callable(lr) else constant(lr)
    return Leaf(schedule, tuple(stages), momentum)


def constant(lr: float) -> LearningRate:
    lr = number("leaf.lr", lr, above=0)
    return lambda round: lr


def step_decay(lr: float, every: int, factor: float = 0.1) -> LearningRate:
    """Multiply by `factor` after each `every` global rounds."""
    lr = number("leaf.lr", lr, above=0)
    whole("leaf.schedule.every", every, at_least=1)
    number("leaf.schedule.factor", factor, above=0, at_most=1)
    return lambda round: lr * factor ** (round // every)


def cosine(lr: float, rounds: int, floor: float = 0.0) -> LearningRate:
    """From `lr` towards `floor` along half a cosine over `rounds` global rounds."""
    lr = number("leaf.lr", lr, above=0)
    whole("leaf.schedule.rounds", rounds, at_least=1)
    number("leaf.schedule.floor", floor, at_least=0, at_most=lr)
    return lambda round: floor + (lr - floor) * (1 + math.cos(math.pi * min(round, rounds) / rounds)) / 2
