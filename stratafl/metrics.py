"""How good a model is, and how long it took to get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Tally(NamedTuple):
    """What a model did on some samples, in sums, so that several parts add up."""

    loss: float
    samples: int
    right: float
    """NaN where a score is no number: it has no best class."""
    seen: int
    """Classes that were asked for; 0 where there are none to ask for."""


@torch.no_grad()
def tally(predict: Predict, loss: Loss, inputs: Tensor, targets: Tensor, chunk: int = 2048) -> Tally:
    total_loss, right, seen = 0.0, 0.0, 0
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        if len(x) == 0:
            continue
        outputs = predict(x)
        total_loss += float(loss(outputs, y)) * len(x)
        if is_classification(outputs, y):
            # a score of minus infinity only rules its class out
            right += int((outputs.argmax(dim=1) == y).sum()) if bool((outputs < math.inf).all()) else math.nan
            seen += y.numel()
    return Tally(total_loss, len(inputs), right, seen)


def metrics(parts: Sequence[Tally]) -> dict[str, float]:
    """Mean loss, and the accuracy where the targets are classes and the outputs their scores; with a loss that is not
    finite there is no accuracy."""
    losses, samples, right, seen = (sum(numbers) for numbers in zip(*parts, strict=True))
    result = {"loss": losses / samples}
    if seen:
        result["accuracy"] = right / seen if math.isfinite(losses) else math.nan
    return result


def evaluate(predict: Predict, loss: Loss, inputs: Tensor, targets: Tensor, chunk: int = 2048) -> dict[str, float]:
    """The metrics of a model on test data."""
    return metrics([tally(predict, loss, inputs, targets, chunk)])


def is_classification(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the targets are class numbers and the outputs hold a score per class in dimension 1."""
    integers = not (targets.is_floating_point() or targets.is_complex())
    return integers and outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]


def rounds_to(target: float, rounds: Iterable[int], values: Iterable[float]) -> int | None:
    """The first round whose value is at least the target, None if there is none."""
    return next((r for r, value in zip(rounds, values, strict=True) if value >= target), None)
