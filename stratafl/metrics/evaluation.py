"""Evaluation of a model: sums over samples that can be added, then metrics."""

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
"""Samples of one forward pass."""
WHOLE = 1 << 30
"""Bytes of outputs kept so that a user's loss is computed of all samples at once. It may divide by
anything (weights of classes, labels that are not ignored), so that a mean over parts may be another
number; beyond this size the mean over parts is used."""


class EvaluationSums(NamedTuple):
    """Sums over some samples, which can be added to those of others."""

    loss: float
    loss_weight: float
    """Weight of the samples in the mean loss."""
    correct: float
    """Number of correct classes; NaN where scores are not finite."""
    labelled: int
    """Number of samples with a class label; 0 where targets are no classes."""
    sums: Mapping[str, list[float]] = {}
    """Sums of each further metric that is additive."""
    values: Mapping[str, float] = {}
    """Values of the other further metrics, where all samples were evaluated."""


@torch.no_grad()
def evaluate(
    predict: Predict,
    loss: Loss,
    inputs: Inputs,
    targets: Tensor,
    chunk: int = CHUNK,
    metrics: Sequence[Metric] = (),
) -> EvaluationSums:
    """Evaluate a model on these samples; the model gets copies, so that it cannot change them."""
    correct, labelled = 0.0, 0
    losses: list[tuple[float, float]] = []
    kept: list[Part] = []
    extra = _ExtraMetrics(metrics, ignore_index(loss))
    free_bytes = 0 if is_additive(loss) else WHOLE
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        if len(x) == 0:
            continue
        outputs = predict(x.clone())
        scores = find_scores(outputs)
        if scores is not None and has_classes(scores, y):
            is_counted = (y >= 0) & (y != ignore_index(loss))
            is_correct = (scores.argmax(dim=1) == y) & is_counted
            correct += int(is_correct.sum()) if _are_scores(scores) else math.nan
            labelled += int(is_counted.sum())
        extra.add(outputs if scores is None else scores, y)
        if (free_bytes := free_bytes - output_bytes(outputs)) >= 0:
            kept.append((outputs, y))
            continue
        weight = float((y != IGNORED).sum()) if is_additive(loss) else len(x)
        if weight:
            losses.append((float(loss(outputs, y.clone())) * weight, weight))
    losses += _losses(loss, kept)
    total, weight = (sum(numbers) for numbers in zip(*losses, strict=True)) if losses else (0, 0)
    return EvaluationSums(
        loss=total,
        loss_weight=weight,
        correct=correct,
        labelled=labelled,
        sums=extra.sums,
        values=extra.values(),
    )


def _losses(loss: Loss, kept: Sequence[Part]) -> list[tuple[float, float]]:
    """Losses and weights of a user's loss: of all samples at once, or, where outputs cannot be
    concatenated, of each part."""
    if not kept:
        return []
    outputs, targets = zip(*kept, strict=True)
    lengths = [len(part) for part in targets]
    try:
        parts = [(concatenate_outputs(outputs, lengths), torch.cat(targets))]
    except NotConcatenable:
        parts = [(part, y.clone()) for part, y in kept]
    return [(float(loss(part, y)) * len(y), len(y)) for part, y in parts]


class _ExtraMetrics:
    """Metrics besides the loss and the accuracy, updated part by part."""

    def __init__(self, metrics: Sequence[Metric], ignored: int):
        self._ignored = ignored
        self._additive = [metric for metric in metrics if metric.is_additive]
        self._others = [metric for metric in metrics if not metric.is_additive]
        self._parts: list[Part] = []
        self._finite = True
        self.sums: dict[str, list[float]] = {}

    def add(self, outputs: Any, targets: Tensor) -> None:
        if not (self._additive or self._others):
            return
        finite = _are_numbers(outputs, targets)
        self._finite = self._finite and finite
        for metric in self._additive:
            assert metric.partial is not None
            with convert_errors(f"evaluation.metrics.{metric.name}", metric.name):
                partial = metric.partial(outputs, targets, self._ignored) if finite else [math.nan]
            self.sums[metric.name] = _add_sums(self.sums.get(metric.name), partial)
        if self._others:
            self._parts.append((outputs, targets))

    def values(self) -> dict[str, float]:
        if not self._parts:
            return {}
        return {metric.name: metric.compute(self._parts) if self._finite else math.nan for metric in self._others}


def _add_sums(before: list[float] | None, more: list[float]) -> list[float]:
    """Sums of two parts; NaN where either is NaN."""
    if before is None or math.isnan(more[0]):
        return more
    return before if math.isnan(before[0]) else [one + other for one, other in zip(before, more, strict=True)]


def _are_scores(outputs: Tensor) -> bool:
    """Whether outputs are valid scores: minus infinity excludes a class, but not all of them."""
    largest = outputs.amax(dim=1)
    return bool(largest.isfinite().all() & ~outputs.isnan().any())


def _are_numbers(outputs: object, targets: Tensor) -> bool:
    if not isinstance(outputs, Tensor):
        return True  # only the user's own metrics know these
    return _are_scores(outputs) if has_classes(outputs, targets) else bool(outputs.isfinite().all())


def finalize_metrics(parts: Sequence[EvaluationSums], metrics: Sequence[Metric] = ()) -> dict[str, float]:
    """Mean loss, accuracy where targets are classes and outputs their scores, and further metrics;
    all but the loss are NaN where the loss is not finite."""
    losses, weight = sum(part.loss for part in parts), sum(part.loss_weight for part in parts)
    labelled = sum(part.labelled for part in parts)
    result = {LOSS: losses / weight if weight else math.nan}
    if labelled:
        result[ACCURACY] = sum(part.correct for part in parts) / labelled
    for metric in metrics:
        result[metric.name] = _value(metric, parts)
    return result if math.isfinite(losses) else {LOSS: result.pop(LOSS), **dict.fromkeys(result, math.nan)}


def _value(metric: Metric, parts: Sequence[EvaluationSums]) -> float:
    if metric.combine is None:
        value = next((part.values[metric.name] for part in parts if metric.name in part.values), math.nan)
    else:
        total: list[float] | None = None
        for part in parts:
            if metric.name in part.sums:
                total = _add_sums(total, part.sums[metric.name])
        value = math.nan if total is None or math.isnan(total[0]) else metric.combine(total)
    return value if math.isfinite(value) else math.nan


def rounds_to(target: float, rounds: Iterable[int], values: Iterable[float]) -> int | None:
    """First round whose value reaches the target, or None, for a metric whose higher values are
    better."""
    return Goal(ACCURACY, target, ">=").first_round(rounds, values)
