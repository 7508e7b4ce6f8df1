"""What a module does in training besides computing, found by trying it on a few samples.

An engine that trains many clients with one module must know: whether it draws random numbers, whether it changes its
buffers, and what its counters count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.engine.work import Training
from stratafl.flat import Flat, Loss

FEW = 4
"""Samples that a module is tried on."""
ORDINARY = 1e6
"""What a sample's values are below."""


class Habits(NamedTuple):
    """What a module did when its gradient was computed twice, from the same weights, samples and torch seed."""

    draws: bool
    """From torch's generator, which every client has to itself, or from another."""
    draws_from: tuple[str, ...]
    """Whose generators, where they are not torch's: no engine sets these."""
    writes: bool
    """To its buffers."""
    repeats: bool
    """Whether both gradients are the same."""


def plain(values: Tensor) -> Tensor:
    """Samples to try a module on: what is no number there, or no ordinary one, says nothing about the module."""
    if not values.is_floating_point():
        return values.clone()
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
    return torch.where(values.abs() < ORDINARY, values, noise)


def habits(flat: Flat, loss: Loss, x_P: Tensor, b_B: Tensor, inputs: Tensor, targets: Tensor) -> Habits:
    """A module's habits in training, at these rows and samples; nothing that is given is changed."""
    flat.train()
    gradients = []
    drawn = wrote = False
    before_B, before = b_B.clone(), flat.integers()
    with as_before(inputs.device):
        python, numpy = _other_generators()
        for _ in range(2):
            generator = generator_of(inputs.device).manual_seed(0)
            seeded = generator.get_state()
            after_B, after = b_B.clone(), flat.integers()
            gradients.append(flat.gradient(x_P.clone(), after_B, inputs.clone(), targets.clone(), loss, after))
            drawn = drawn or not torch.equal(generator.get_state(), seeded)
            # some of the library's operations write without saying so
            same = _equal(before_B, after_B) and all(_equal(value, after[name]) for name, value in before.items())
            wrote = wrote or flat.wrote or not same
        python_now, numpy_now = _other_generators()
    others = tuple(name for name, same in (("Python", python == python_now), ("NumPy", numpy == numpy_now)) if not same)
    first, second = (gradient.nan_to_num() for gradient in gradients)
    # a GPU may add up in another order each time
    close = bool((first - second).norm() <= 1e-3 * first.norm())
    return Habits(drawn or bool(others), others, wrote, close)


def peculiarities(known: Habits) -> list[str]:
    """What keeps a run with such a module from being repeated, in words for the user."""
    if known.draws_from:
        whose = " and ".join(known.draws_from)
        return [
            f"the model or loss draws from {whose}'s generator, which no seed here sets: this run cannot be repeated"
        ]
    if known.repeats:
        return []
    again = "the model or loss gives another gradient the second time, from the same weights, batch and torch seed"
    return [f"{again}: it keeps something between calls, which all clients share, and this run cannot be repeated"]


def counters(training: Training) -> dict[str, Tensor]:
    """How much each integer buffer grows with every step, where that is always the same.

    So a client's counters follow from the number of the step, wherever and whenever it trains. Other integer buffers
    that training changes begin anew at every meeting.
    """
    flat = training.flat
    counts = [flat.integers()]
    if not counts[0]:
        return {}
    device = training.inputs.device
    few = max(training.partition, key=len)[:FEW].to(device)
    x_P, b_B = (row.to(device) for row in flat.row(flat.module))
    flat.train()
    with as_before(device):
        for _ in range(2):
            counts.append({name: value.clone() for name, value in counts[-1].items()})
            samples = training.inputs[few], training.targets[few]
            try:
                flat.gradient(x_P.clone(), b_B.clone(), *samples, training.loss, counts[-1])
            except Exception:
                return {}  # what is wrong with the module is said where it is used in earnest
    numbers = [name for name, value in counts[0].items() if value.dtype != torch.bool]
    first, second = ({name: after[name] - before[name] for name in numbers} for before, after in pairwise(counts))
    return {name: more for name, more in first.items() if bool(more.any()) and torch.equal(more, second[name])}


def _other_generators() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())


def generator_of(device: torch.device) -> torch.Generator:
    """What torch's operations on a device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def as_before(device: torch.device) -> Iterator[None]:
    """Leave every generator as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _equal(a: Tensor, b: Tensor) -> bool:
    """The same values; to this question a value that is not a number is equal to itself."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
