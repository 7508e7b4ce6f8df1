"""How a module enters the zoo: its name, what it takes, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from stratafl.data.inputs import NamedInputs

Sampler = Callable[[int, Generator], Any]
"""(number of samples, generator) -> samples."""
Loss = Callable[[Any, Tensor], Tensor]


def reals(*shape: int) -> Sampler:
    return lambda count, random: torch.randn(count, *shape, generator=random, dtype=torch.float64)


def codes(vocabulary: int, *shape: int) -> Sampler:
    return lambda count, random: torch.randint(vocabulary, (count, *shape), generator=random)


def fields(**samplers: Sampler) -> Sampler:
    """Inputs by name."""
    return lambda count, random: NamedInputs({name: each(count, random) for name, each in samplers.items()})


CLASSES = codes(3)


@dataclass(frozen=True)
class Entry:
    build: Callable[[], nn.Module]
    inputs: Sampler
    targets: Sampler = CLASSES
    loss: Loss = F.cross_entropy
    draws: bool = False
    """Whether it draws random numbers, which another type of float would draw differently."""
    pairs: bool = False
    """Whether a batch must hold two samples at least."""

    def module(self) -> nn.Module:
        """The same module every time, with the training flags that its builder set."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build().double()


@dataclass
class Zoo:
    """Modules by name."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, inputs: Sampler, build: Callable[[], nn.Module], **more: Any) -> None:
        assert name not in self.entries, name
        self.entries[name] = Entry(build, inputs, **more)

    def net(self, name: str, inputs: Sampler, parts: Callable[[], dict[str, Any]], **more: Any) -> Callable:
        """Decorates the forward function of a module with these layers, parameters and buffers."""

        def decorated(forward: Callable[..., Any]) -> None:
            self.add(name, inputs, lambda: Net(forward, **parts()), **more)

        return decorated


class Net(nn.Module):
    """Layers, parameters and buffers, and a forward function of them."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self, *inputs, **named)


def pair() -> dict[str, nn.Module]:
    """Two layers."""
    return {"a": nn.Linear(4, 6), "out": nn.Linear(6, 3)}


def three() -> dict[str, nn.Module]:
    """Three layers."""
    return {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "out": nn.Linear(6, 3)}


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)
