"""How good a model is, and how long it took to get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratafl.base.errors import convert_errors
from stratafl.core.losses import (
    IGNORED,
    Loss,
    NotConcatenable,
    concatenate_outputs,
    find_scores,
    ignore_index,
    is_additive,
    output_bytes,
)
from stratafl.data.inputs import Inputs
from stratafl.metrics.metrics import ACCURACY, LOSS, Metric, Part, has_classes
from stratafl.metrics.objective import Goal

Predict = Callable[[Tensor], Any]

CHUNK = 2048
"""Samples that a model is given at once."""
WHOLE = 1 << 30
"""Bytes of outputs kept so that a user's loss sees all samples at once. What it divides by is its
own affair (weights of classes, labels it ignores), and a mean over parts may be another number;
beyond this it is what there is."""


class EvaluationSums(NamedTuple):
    """What a model did on some samples, in sums, so that several parts add up."""

    loss: float
    weight: float
    """What the loss is a mean over."""
    right: float
    """How many classes were right; not a number where scores are not."""
    seen: int
    """Classes that were asked for; 0 where there are none to ask for."""
    sums: Mapping[str, list[float]] = {}
    """The sums of each further metric that adds up."""
    values: Mapping[str, float] = {}
    """The other further metrics, where all samples were seen."""


@torch.no_grad()
def evaluate(
    predict: Predict,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    chunk: int = CHUNK,
    metrics: Sequence[Metric] = (),
) -> EvaluationSums:
    """What a model did on these samples; it is given copies, so that it cannot change them."""
    right, seen = 0.0, 0
    losses: list[tuple[float, float]] = []
    kept: list[Part] = []
    further = _ExtraMetrics(metrics, ignore_index(loss))
    room = 0 if is_additive(loss) else WHOLE
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        if len(x) == 0:
            continue
        outputs = predict(x.clone())
        found = find_scores(outputs)
        if found is not None and has_classes(found, y):
            counted = (y >= 0) & (y != ignore_index(loss))
            right += int(((found.argmax(dim=1) == y) & counted).sum()) if _are_scores(found) else math.nan
            seen += int(counted.sum())
        further.add(outputs if found is None else found, y)
        if (room := room - output_bytes(outputs)) >= 0:
            kept.append((outputs, y))
            continue
        weight = float((y != IGNORED).sum()) if is_additive(loss) else len(x)
        if weight:
            losses.append((float(loss(outputs, y.clone())) * weight, weight))
    losses += _losses(loss, kept)
    total, weight = (sum(numbers) for numbers in zip(*losses, strict=True)) if losses else (0, 0)
    return EvaluationSums(total, weight, right, seen, further.sums, further.values())


def _losses(loss: Loss, kept: Sequence[Part]) -> list[tuple[float, float]]:
    """A user's loss of all samples at once; where outputs cannot be put together, of each part."""
    if not kept:
        return []
    outputs, targets = zip(*kept, strict=True)
    lengths = [len(each) for each in targets]
    try:
        parts = [(concatenate_outputs(outputs, lengths), torch.cat(targets))]
    except NotConcatenable:
        parts = [(each, y.clone()) for each, y in kept]
    return [(float(loss(each, y)) * len(y), len(y)) for each, y in parts]


class _ExtraMetrics:
    """What is measured besides the loss and the accuracy, part after part."""

    def __init__(self, metrics: Sequence[Metric], ignored: int):
        self._ignored = ignored
        self._adding = [metric for metric in metrics if metric.adds_up]
        self._others = [metric for metric in metrics if not metric.adds_up]
        self._parts: list[Part] = []
        self._finite = True
        self.sums: dict[str, list[float]] = {}

    def add(self, outputs: Any, targets: Tensor) -> None:
        if not (self._adding or self._others):
            return
        finite = _are_numbers(outputs, targets)
        self._finite = self._finite and finite
        for metric in self._adding:
            assert metric.sums is not None
            with convert_errors(f"metrics.{metric.name}", metric.name):
                more = metric.sums(outputs, targets, self._ignored) if finite else [math.nan]
            self.sums[metric.name] = _added(self.sums.get(metric.name), more)
        if self._others:
            self._parts.append((outputs, targets))

    def values(self) -> dict[str, float]:
        if not self._parts:
            return {}
        return {each.name: each.of_parts(self._parts) if self._finite else math.nan for each in self._others}


def _added(before: list[float] | None, more: list[float]) -> list[float]:
    """Sums of two parts; of one that is not a number, nothing else is left."""
    if before is None or math.isnan(more[0]):
        return more
    return before if math.isnan(before[0]) else [one + other for one, other in zip(before, more, strict=True)]


def _are_scores(outputs: Tensor) -> bool:
    """A class may be ruled out by a score of minus infinity, but not all of them."""
    largest = outputs.amax(dim=1)
    return bool(largest.isfinite().all() & ~outputs.isnan().any())


def _are_numbers(outputs: object, targets: Tensor) -> bool:
    if not isinstance(outputs, Tensor):
        return True  # whoever asked for them knows what they are
    return _are_scores(outputs) if has_classes(outputs, targets) else bool(outputs.isfinite().all())


def finalize_metrics(parts: Sequence[EvaluationSums], further: Sequence[Metric] = ()) -> dict[str, float]:
    """Mean loss, the accuracy where the targets are classes and the outputs their scores, and the
    further metrics; with a loss that is not finite there is nothing else."""
    losses, weight, right, seen = (sum(numbers) for numbers in zip(*(part[:4] for part in parts), strict=True))
    result = {LOSS: losses / weight if weight else math.nan}
    if seen:
        result[ACCURACY] = right / seen
    for metric in further:
        result[metric.name] = _value(metric, parts)
    return result if math.isfinite(losses) else {LOSS: result.pop(LOSS), **dict.fromkeys(result, math.nan)}


def _value(metric: Metric, parts: Sequence[EvaluationSums]) -> float:
    if metric.value is None:
        value = next((part.values[metric.name] for part in parts if metric.name in part.values), math.nan)
    else:
        total: list[float] | None = None
        for part in parts:
            if metric.name in part.sums:
                total = _added(total, part.sums[metric.name])
        value = math.nan if total is None or math.isnan(total[0]) else metric.value(total)
    return value if math.isfinite(value) else math.nan


def rounds_to(target: float, rounds: Iterable[int], values: Iterable[float]) -> int | None:
    """The first round whose accuracy, or whatever is better the higher it is, is at least the
    target; None if there is none."""
    return Goal(ACCURACY, target, ">=").first(rounds, values)
