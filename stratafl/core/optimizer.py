"""Optimizers over rows of parameters, one row per client, and learning-rate schedules."""

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
from stratafl.base.validation import check_integer, check_number, find_name, name_and_params
from stratafl.core.rule import Rows

STEP_COUNT = "steps"
"""Name of Adam's step counts in its state, one whole number per row."""


@runtime_checkable
class Optimizer(Protocol):
    """A client's optimizer as pure functions over rows, one row per client."""

    def init(self, x: Tensor) -> Rows:
        """The initial state for these models: matrices with one row per client, or none."""
        ...

    def step(self, state: Rows, direction: Tensor, x: Tensor, lr: float | Tensor) -> tuple[Rows, Tensor]:
        """The next state, and the change that is subtracted from the models. No argument may be
        modified; `lr` is a number, or a scalar on the rows' device."""
        ...


@dataclass(frozen=True)
class SGD:
    """Gradient descent with optional momentum, heavy-ball or Nesterov's, as in PyTorch."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_number("client.optimizer.momentum", self.momentum, at_least=0, below=1)
        if not isinstance(self.nesterov, bool):
            raise InvalidInput("client.optimizer.nesterov", self.nesterov, "must be true or false")
        if self.nesterov and not self.momentum:
            raise InvalidInput("client.optimizer.nesterov", True, "needs a momentum above 0")

    def init(self, x: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(x)} if self.momentum else {}

    def step(self, state: Rows, direction: Tensor, x: Tensor, lr: float | Tensor) -> tuple[Rows, Tensor]:
        if not self.momentum:
            return state, lr * direction
        velocity = self.momentum * state["velocity"] + direction
        return {"velocity": velocity}, lr * (direction + self.momentum * velocity if self.nesterov else velocity)

    def reach(self, steps: int) -> float:
        """Displacement after so many steps, if the learning rate and every direction are 1, and the
        velocity is 0 at first."""
        m, lookahead = self.momentum, int(self.nesterov)
        if m == 0:
            return steps
        return math.fsum((1 - m ** (h + 1 + lookahead)) / (1 - m) for h in range(steps))


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction (Kingma and Ba, 2015), after clipping and coupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise InvalidInput("client.optimizer.betas", self.betas, "must be two numbers")
        betas = tuple(check_number("client.optimizer.betas", beta, at_least=0, below=1) for beta in self.betas)
        object.__setattr__(self, "betas", betas)  # a config has a list
        check_number("client.optimizer.eps", self.eps, above=0)

    @property
    def decoupled(self) -> float:
        """Decoupled weight decay."""
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
        """Bias corrections after `count` steps: factors of the first moment and of the root of the
        second. Computed in float64, since the power of a beta may be close to 1."""
        beta1, beta2 = self.betas
        first, second = (1 - torch.pow(beta, count.double()) for beta in (beta1, beta2))
        return (1 / first).to(dtype), second.rsqrt().to(dtype)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, which the moments do not scale (Loshchilov and Hutter,
    2019)."""

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("client.optimizer.weight_decay", self.weight_decay, at_least=0)

    @property
    def decoupled(self) -> float:
        return self.weight_decay


OPTIMIZERS: dict[str, type[SGD | Adam]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def parse_optimizer(optimizer: object) -> Optimizer:
    """Parse an optimizer, a name, or a table of a name and parameters. The name of a user's
    optimizer is the import path of a class or function, "package.module:make" or "file.py:make"."""
    if not isinstance(optimizer, str | Mapping):
        if not (isinstance(optimizer, Optimizer) and not isinstance(optimizer, type)):
            allowed = "must be a name, a table, or a value with the functions init and step (docs/optimisers.md)"
            raise InvalidInput("client.optimizer", optimizer, allowed)
        return optimizer
    name, params = name_and_params("client.optimizer", optimizer)
    if ":" in name:
        return _load_optimizer(name, params)
    name = find_name("client.optimizer", name, OPTIMIZERS)
    kind = OPTIMIZERS[name]
    for key in params:
        if key not in kind.__dataclass_fields__:
            raise unknown_name(f"client.optimizer.{name} key", key, kind.__dataclass_fields__)
    return kind(**params)


def _load_optimizer(path: str, params: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer with a user's class or function."""
    make = load_attribute("client.optimizer", path)
    with convert_errors("client.optimizer", path, "cannot be made"), seeded_rng(ALIKE):
        optimizer = make(**params)
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise InvalidInput("client.optimizer", path, f"must make a value with init and step, not {kind}")
    return optimizer


LearningRate = Callable[[int], float]
"""Learning rate as a function of the global round, counted from 0."""


def constant(lr: float) -> LearningRate:
    """Constant learning rate."""
    lr = check_number("client.lr", lr, above=0)
    return lambda round: lr


def step_decay(lr: float, every: int, factor: float = 0.1) -> LearningRate:
    """Learning rate that is multiplied by `factor` after every `every` global rounds."""
    lr = check_number("client.lr", lr, above=0)
    check_integer("client.lr_schedule.every", every, at_least=1)
    check_number("client.lr_schedule.factor", factor, above=0, at_most=1)
    return lambda round: lr * factor ** (round // every)


def cosine(lr: float, rounds: int, floor: float = 0.0) -> LearningRate:
    """Learning rate that falls from `lr` to `floor` along half a cosine over `rounds` global
    rounds."""
    lr = check_number("client.lr", lr, above=0)
    check_integer("client.lr_schedule.rounds", rounds, at_least=1)
    check_number("client.lr_schedule.floor", floor, at_least=0, at_most=lr)
    return lambda round: floor + (lr - floor) * (1 + math.cos(math.pi * min(round, rounds) / rounds)) / 2
