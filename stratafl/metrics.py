"""How good a model is, and how long it took to get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def evaluate(predict: Predict, loss: Loss, inputs: Tensor, targets: Tensor, chunk: int = 2048) -> dict[str, float]:
    """Mean loss, and the accuracy where the targets are classes and the outputs their scores."""
    total_loss, right, seen = 0.0, 0, 0
    classifies = False
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        outputs = predict(x)
        total_loss += float(loss(outputs, y)) * len(x)
        classifies = is_classification(outputs, y)
        if classifies:
            right += int((outputs.argmax(dim=1) == y).sum())
            seen += y.numel()
    result = {"loss": total_loss / len(inputs)}
    if classifies:
        result["accuracy"] = right / seen
    return result


def is_classification(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the targets are class numbers and the outputs hold a score per class in dimension 1."""
    integers = not (targets.is_floating_point() or targets.is_complex())
    return integers and outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]


def rounds_to(target: float, rounds: Iterable[int], values: Iterable[float]) -> int | None:
    """The first round whose value is at least the target, None if there is none."""
    return next((r for r, value in zip(rounds, values, strict=True) if value >= target), None)
