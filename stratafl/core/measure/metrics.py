"""How good a model is, and how long it took to get there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Predict = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

IGNORED = -100
"""The label that the library's losses pass over, unless they are told of another."""
WHOLE = 1 << 30
"""Bytes of outputs kept so that a user's loss sees all samples at once. What it divides by is its own affair (weights
of classes, labels it ignores), and a mean over parts may be another number; beyond this it is what there is."""


class Tally(NamedTuple):
    """What a model did on some samples, in sums, so that several parts add up."""

    loss: float
    weight: float
    """What the loss is a mean over."""
    right: float
    """How many classes were right; not a number where scores are not."""
    seen: int
    """Classes that were asked for; 0 where there are none to ask for."""


@torch.no_grad()
def tally(predict: Predict, loss: Loss, inputs: Tensor, targets: Tensor, chunk: int = 2048) -> Tally:
    """What a model did on these samples; it is given copies, so that it cannot change them."""
    right, seen = 0.0, 0
    losses: list[tuple[float, float]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    room = 0 if adds_up(loss) else WHOLE
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        if len(x) == 0:
            continue
        outputs = predict(x.clone())
        if is_classification(outputs, y):
            counted = (y >= 0) & (y != ignored(loss))
            right += int(((outputs.argmax(dim=1) == y) & counted).sum()) if _are_scores(outputs) else math.nan
            seen += int(counted.sum())
        # what has no entry for each sample cannot be put together
        in_rows = isinstance(outputs, Tensor) and outputs.shape[:1] == x.shape[:1]
        if in_rows and (room := room - outputs.nbytes) >= 0:
            kept.append((outputs, y))
            continue
        weight = float((y != IGNORED).sum()) if adds_up(loss) else len(x)
        if weight:
            losses.append((float(loss(outputs, y.clone())) * weight, weight))
    if kept:
        all_outputs, all_targets = (torch.cat(each) for each in zip(*kept, strict=True))
        losses.append((float(loss(all_outputs, all_targets)) * len(all_targets), len(all_targets)))
    return Tally(sum(total for total, _ in losses), sum(weight for _, weight in losses), right, seen)


def adds_up(loss: Loss) -> bool:
    """Whether the losses of parts give that of the whole, each weighted by its labels that are not ignored."""
    return loss is F.cross_entropy


def ignored(loss: Loss) -> int:
    """The label a loss passes over."""
    given = loss.keywords if isinstance(loss, functools.partial) else {}
    label = given.get("ignore_index", getattr(loss, "ignore_index", IGNORED))
    return label if isinstance(label, int) else IGNORED


def _are_scores(outputs: Tensor) -> bool:
    """A class may be ruled out by a score of minus infinity, but not all of them."""
    largest = outputs.amax(dim=1)
    return bool(largest.isfinite().all() & ~outputs.isnan().any())


def metrics(parts: Sequence[Tally]) -> dict[str, float]:
    """Mean loss, and the accuracy where the targets are classes and the outputs their scores; with a loss that is not
    finite there is no accuracy."""
    losses, weight, right, seen = (sum(numbers) for numbers in zip(*parts, strict=True))
    result = {"loss": losses / weight if weight else math.nan}
    if seen:
        result["accuracy"] = right / seen if math.isfinite(losses) else math.nan
    return result


def evaluate(predict: Predict, loss: Loss, inputs: Tensor, targets: Tensor, chunk: int = 2048) -> dict[str, float]:
    """The metrics of a model on test data."""
    return metrics([tally(predict, loss, inputs, targets, chunk)])


def is_classification(outputs: object, targets: Tensor) -> bool:
    """Whether the targets are class numbers and the outputs hold a score per class in dimension 1."""
    if not isinstance(outputs, Tensor):
        return False
    integers = not (targets.is_floating_point() or targets.is_complex())
    return integers and outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]


def rounds_to(target: float, rounds: Iterable[int], values: Iterable[float]) -> int | None:
    """The first round whose value is at least the target, None if there is none."""
    return next((r for r, value in zip(rounds, values, strict=True) if value >= target), None)
