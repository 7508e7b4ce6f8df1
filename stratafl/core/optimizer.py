"""Optimizers over rows of parameters, one row per node, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.rng import ALIKE, seeded_rng
from stratafl.base.user_code import load_attribute
from stratafl.base.validation import check_integer, check_number, name_and_params
from stratafl.core.rule import Rows

STEP_COUNT = "steps"
"""The name of Adam's count of a client's steps, one whole number per row."""


@runtime_checkable
class Optimiser(Protocol):
    """Makes a client's step of its direction; whatever it remembers is a state that it is given and
    returns."""

    def init(self, x: Tensor) -> Rows:
        """The clients' states, given their models: matrices with a row for each; may be empty."""
        ...

    def step(self, state: Rows, direction: Tensor, x: Tensor, lr: float | Tensor) -> tuple[Rows, Tensor]:
        """The next states, and what is subtracted from the models. Nothing of what is given may be
        changed; `lr` is a number, or a scalar beside the rows."""
        ...


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with the heavy ball's or Nesterov's momentum where one is given."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_number("leaf.momentum", self.momentum, at_least=0, below=1)
        if not isinstance(self.nesterov, bool):
            raise InvalidInput("leaf.optimiser.nesterov", self.nesterov, "must be true or false")
        if self.nesterov and not self.momentum:
            raise InvalidInput("leaf.optimiser.nesterov", True, "needs a momentum above 0")

    def init(self, x: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(x)} if self.momentum else {}

    def step(self, state: Rows, direction: Tensor, x: Tensor, lr: float | Tensor) -> tuple[Rows, Tensor]:
        if not self.momentum:
            return state, lr * direction
        velocity = self.momentum * state["velocity"] + direction
        return {"velocity": velocity}, lr * (direction + self.momentum * velocity if self.nesterov else velocity)

    def reach(self, steps: int) -> float:
        """How far so many steps from rest go where every direction and the learning rate are
        one."""
        m, ahead = self.momentum, int(self.nesterov)
        if m == 0:
            return steps
        return math.fsum((1 - m ** (h + 1 + ahead)) / (1 - m) for h in range(steps))


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction. What its first moment is made of has been clipped and decayed
    before."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise InvalidInput("leaf.optimiser.betas", self.betas, "must be two numbers")
        betas = tuple(check_number("leaf.optimiser.betas", beta, at_least=0, below=1) for beta in self.betas)
        object.__setattr__(self, "betas", betas)  # a config has a list
        check_number("leaf.optimiser.eps", self.eps, above=0)

    @property
    def decoupled(self) -> float:
        """The weight decay beside the moments."""
        return 0.0

    def init(self, x: Tensor) -> Rows:
        count = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        return {"m": torch.zeros_like(x), "v": torch.zeros_like(x), STEP_COUNT: count}

    def step(self, state: Rows, direction: Tensor, x: Tensor, lr: float | Tensor) -> tuple[Rows, Tensor]:
        (beta1, beta2), count = self.betas, state[STEP_COUNT] + 1
        m = beta1 * state["m"] + (1 - beta1) * direction
        v = beta2 * state["v"] + (1 - beta2) * direction * direction
        first, second = self.unbiased(count, x.dtype)
        change = lr * (first * m / (second * v.sqrt() + self.eps))
        if self.decoupled:
            change = change + lr * self.decoupled * x
        return {"m": m, "v": v, STEP_COUNT: count}, change

    def unbiased(self, count: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the first moment, and the root of the second, are multiplied with after so many
        steps, one number per row; computed in float64, since a beta's power may be close to one."""
        beta1, beta2 = self.betas
        first, second = (1 - torch.pow(beta, count.double()) for beta in (beta1, beta2))
        return (1 / first).to(dtype), second.rsqrt().to(dtype)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay beside its moments: it is not scaled by them, and no gradient of
    anything."""

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("leaf.optimiser.weight_decay", self.weight_decay, at_least=0)

    @property
    def decoupled(self) -> float:
        return self.weight_decay


OPTIMIZERS: dict[str, type[SGD | Adam]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def parse_optimizer(given: object) -> Optimiser:
    """An optimiser, from one, from its name, or from a table with its name and parameters. A user's
    own has the name "package.module:make" or "file.py:make", where `make` gives one."""
    if not isinstance(given, str | Mapping):
        if not (isinstance(given, Optimiser) and not isinstance(given, type)):
            allowed = "must be a name, a table, or a value with the functions init and step (docs/optimisers.md)"
            raise InvalidInput("leaf.optimiser", given, allowed)
        return given
    name, params = name_and_params("leaf.optimiser", given)
    if ":" in name:
        return _own(name, params)
    if name not in OPTIMIZERS:
        raise unknown_name("leaf.optimiser", name, OPTIMIZERS)
    kind = OPTIMIZERS[name]
    for key in params:
        if key not in kind.__dataclass_fields__:
            raise unknown_name(f"leaf.optimiser.{name} key", key, kind.__dataclass_fields__)
    return kind(**params)


def _own(name: str, params: Mapping[str, Any]) -> Optimiser:
    """What a user's own function or class makes."""
    make = load_attribute("leaf.optimiser", name)
    with convert_errors("leaf.optimiser", name, "cannot be made"), seeded_rng(ALIKE):
        made = make(**params)
    if not isinstance(made, Optimiser):
        raise InvalidInput("leaf.optimiser", name, f"must make a value with init and step, not {type(made).__name__}")
    return made


LearningRate = Callable[[int], float]
"""The learning rate of a global round, counted from 0."""


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
