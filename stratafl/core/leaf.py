"""A leaf's step, as a visible chain: gradient -> + corrections -> clip -> + weight decay ->
optimiser.

Stages work on rows (one per client), so one client and all of them at once take the same step. They
are functions and remember nothing: what has a memory is an optimiser (see `core.optimise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_choice, check_integer, check_number
from stratafl.core.optimise.optimiser import SGD, AdamW, Optimiser, optimiser_of

Correct = Callable[[Tensor, Tensor], Tensor]
"""(model, gradient) -> the direction with everything the rules on the path to the root add."""
Stage = Callable[[Tensor, Tensor, Correct], Tensor]
"""(direction, model, correct) -> direction."""
LearningRate = Callable[[int], float]
"""The learning rate of a global round, counted from 0."""
OptimiserState = Literal["restart", "keep"]
"""What becomes of an optimiser's state when a client gets a model from its parent."""
PLAIN = SGD()


def clips(stage: Stage) -> bool:
    """Whether a stage may shorten directions, and says of how many: `clip`, and any of a user's own
    that has a method `shortened` of the same arguments, for the directions behind it and the number
    of rows that it made shorter."""
    return hasattr(stage, "shortened")


def through(stages: Sequence[Stage], direction: Tensor, x: Tensor, correct: Correct, clipped: Tensor) -> Tensor:
    """The directions behind all stages; to `clipped` is added how many rows they shortened."""
    for stage in stages:
        shortened = getattr(stage, "shortened", None)
        if shortened is None:
            direction = stage(direction, x, correct)
        else:
            direction, count = shortened(direction, x, correct)
            clipped += count
    return direction


def corrections(direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
    """Stage: add what the rules add."""
    return correct(x, direction)


@dataclass(frozen=True)
class clip:
    """Stage: scale each client's direction down to this norm where it is longer."""

    norm: float

    def __call__(self, direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
        return self.shortened(direction, x, correct)[0]

    def shortened(self, direction: Tensor, x: Tensor, correct: Correct) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        factor = self.norm / length.clamp(min=self.norm)
        return direction * factor, (factor < 1).sum()


@dataclass(frozen=True)
class decay:
    """Stage: add weight decay."""

    rate: float

    def __call__(self, direction: Tensor, x: Tensor, correct: Correct) -> Tensor:
        return direction + self.rate * x


class Usual(NamedTuple):
    """The usual chain, corrections -> clip -> decay, as two numbers: an engine may compute it in
    one go."""

    clip: float | None
    decay: float

    @staticmethod
    def of(stages: Sequence[Stage]) -> Usual | None:
        """None where the chain is another."""
        rest = list(stages)
        if not rest or rest.pop(0) is not corrections:
            return None
        norms = [stage.norm for stage in rest[:1] if type(stage) is clip]
        rates = [stage.rate for stage in rest if type(stage) is decay]
        if len(norms) + len(rates) < len(rest):
            return None
        return Usual(norms[0] if norms else None, sum(rates, 0.0))


@dataclass(frozen=True)
class Leaf:
    """The chain every client runs: the learning rate, the stages between the gradient and the
    optimiser, and the optimiser.

    The optimiser's state starts anew whenever a client gets a model from its parent, or is kept.
    """

    lr: LearningRate
    stages: tuple[Stage, ...] = (corrections,)
    optimiser: Optimiser = PLAIN
    optimiser_state: OptimiserState = "restart"
    epochs: int | None = None
    """Passes that each client makes over its own data between two meetings, in the place of steps:
    a schedule then counts passes."""

    @property
    def clips(self) -> bool:
        """Whether anything in it may shorten a direction."""
        return any(map(clips, self.stages))

    @property
    def keeps(self) -> bool:
        """Whether the optimiser's state outlives a meeting."""
        return self.optimiser_state == "keep"

    @property
    def bends(self) -> bool:
        """Whether how far a model moves does not tell what its directions were: all but SGD that
        starts anew scale or delay them by what they do not say, and with passes clients make as
        many steps as they have data for. A rule that wants to know then needs the path (see
        `core.optimise.path`)."""
        sgd = self.optimiser if type(self.optimiser) is SGD else None
        return sgd is None or (self.keeps and sgd.momentum > 0) or self.epochs is not None

    def rate(self, round: int, steps: int) -> float:
        """The sum of the learning rates used in these steps, each with the weight momentum gives
        it: how far the model moves if every gradient is one. Where the chain bends, the sum alone;
        a pass counts as one step then."""
        reach = steps if self.bends or type(self.optimiser) is not SGD else self.optimiser.reach(steps)
        return float(self.lr(round)) * reach


def leaf(
    lr: float | LearningRate = 0.1,
    *,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    optimiser: object = None,
    optimiser_state: OptimiserState = "restart",
    epochs: int | None = None,
) -> Leaf:
    """The usual chain: corrections, then clip by norm, then weight decay, then the optimiser.

    It is a name ("sgd", "adam", "adamw"), a table with its parameters, or a value (see
    `core.optimise`); SGD with this momentum unless given. With `epochs`, clients make so many
    passes over their own data between two meetings, and periods say nothing of the lowest level.
    """
    stages: list[Stage] = [corrections]
    if clip_norm is not None:
        stages.append(clip(check_number("leaf.clip", clip_norm, above=0, at_most=1e30)))
    strength = check_number("leaf.weight_decay", weight_decay, at_least=0)
    if strength > 0:
        stages.append(decay(strength))
    check_number("leaf.momentum", momentum, at_least=0, below=1)
    chosen = SGD(momentum) if optimiser is None else optimiser_of(optimiser)
    if optimiser is not None and momentum:
        allowed = 'is an optimiser\'s own: optimiser = { name = "sgd", momentum = 0.9, nesterov = true }'
        raise InvalidInput("leaf.momentum", momentum, allowed)
    if isinstance(chosen, AdamW) and strength > 0:
        allowed = 'AdamW has a decay of its own: optimiser = { name = "adamw", weight_decay = 0.01 }'
        raise InvalidInput("leaf.weight_decay", weight_decay, allowed)
    check_choice("leaf.optimiser_state", optimiser_state, get_args(OptimiserState))
    schedule = lr if callable(lr) else constant(lr)
    passes = None if epochs is None else check_integer("leaf.epochs", epochs, at_least=1)
    return Leaf(schedule, tuple(stages), chosen, optimiser_state, passes)


def constant(lr: float) -> LearningRate:
    """A learning rate that stays as it is."""
    lr = check_number("leaf.lr", lr, above=0)
    return lambda round: lr


def step_decay(lr: float, every: int, factor: float = 0.1) -> LearningRate:
    """Multiply by `factor` after each `every` global rounds."""
    lr = check_number("leaf.lr", lr, above=0)
    check_integer("leaf.schedule.every", every, at_least=1)
    check_number("leaf.schedule.factor", factor, above=0, at_most=1)
    return lambda round: lr * factor ** (round // every)


def cosine(lr: float, rounds: int, floor: float = 0.0) -> LearningRate:
    """A learning rate that falls from `lr` towards `floor` along half a cosine over `rounds` global
    rounds."""
    lr = check_number("leaf.lr", lr, above=0)
    check_integer("leaf.schedule.rounds", rounds, at_least=1)
    check_number("leaf.schedule.floor", floor, at_least=0, at_most=lr)
    return lambda round: floor + (lr - floor) * (1 + math.cos(math.pi * min(round, rounds) / rounds)) / 2
