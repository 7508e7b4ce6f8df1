"""The metrics known by name.

All but r2 add up: of some samples there are sums, of the sums of all samples the value. Labels
below zero, and the one that the loss passes over, are not asked for.

Shape suffixes: N samples or places of them, K classes, C columns of values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.base.validation import check_integer
from stratafl.core.objective.losses import matched


class Sums(NamedTuple):
    """A metric that adds up."""

    sums: Callable[[Tensor, Tensor, int], list[float]]
    value: Callable[[Sequence[float]], float]


class BuiltinMetric(NamedTuple):
    """How a metric is made of its parameters, and which way it is better."""

    parts: Callable[..., Sums | Callable[[Tensor, Tensor], float]]
    higher: bool
    takes: tuple[str, ...] = ()


def is_classification(outputs: object, targets: Tensor) -> bool:
    """Whether the targets are class numbers and the outputs hold a score per class in dimension
    1."""
    if not isinstance(outputs, Tensor):
        return False
    integers = not (targets.is_floating_point() or targets.is_complex())
    return integers and outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]


def has_classes(scores: Tensor, targets: Tensor) -> bool:
    """Whether there are at least two classes to tell apart."""
    return is_classification(scores, targets) and scores.shape[1] > 1


def _asked(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The scores per class (N, K) and the classes (N) that are asked for."""
    if has_classes(scores, targets):
        counted = (targets >= 0) & (targets != ignored)
        class_N = targets[counted].long()
        if len(class_N) and int(class_N.max()) >= scores.shape[1]:
            raise ValueError(f"there is a label {int(class_N.max())}, and scores of {scores.shape[1]} classes")
        return scores.movedim(1, -1)[counted], class_N
    if scores.numel() == targets.numel() == len(targets):
        # one score for yes or no: above zero it is yes
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ValueError("there is one score, which is for yes or no, and targets that are not from 0 to 1")
        yes_N1 = scores.reshape(-1, 1)
        return torch.cat([torch.zeros_like(yes_N1), yes_N1], dim=1), (targets.reshape(-1) > 0.5).long()
    shapes = f"{tuple(scores.shape)} and {tuple(targets.shape)} of {targets.dtype}"
    raise ValueError(f"needs classes and a score for each, or one score and yes or no, not {shapes}")


def _accuracy() -> Sums:
    return _topk(1)


def _topk(k: int = 5) -> Sums:
    """Whether the class is among the k with the highest scores."""
    k = check_integer("k", k, at_least=1)

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        scores_NK, class_N = _asked(scores, targets, ignored)
        if k > scores_NK.shape[1]:
            raise ValueError(f"there are {scores_NK.shape[1]} classes, so no top {k}")
        best = scores_NK.argmax(dim=1, keepdim=True) if k == 1 else scores_NK.topk(k, dim=1).indices
        return [float((best == class_N[:, None]).sum()), float(len(class_N))]

    return Sums(sums, _mean)


def _confusion(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
    """How often each class was right, how often it was said, and how often it was there."""
    scores_NK, class_N = _asked(scores, targets, ignored)
    said_N, classes = scores_NK.argmax(dim=1), scores_NK.shape[1]
    three = (class_N[said_N == class_N], said_N, class_N)
    return [float(count) for each in three for count in each.bincount(minlength=classes).tolist()]


def _macro(score: Callable[[float, float, float], float | None]) -> Sums:
    """The mean over the classes that were there or were said."""

    def value(counts: Sequence[float]) -> float:
        classes = len(counts) // 3
        each = [score(*counts[number::classes]) for number in range(classes)]
        known = [one for one in each if one is not None]
        return math.fsum(known) / len(known) if known else math.nan

    return Sums(_confusion, value)


def _f1() -> Sums:
    return _macro(lambda right, said, there: 2 * right / (said + there) if said + there else None)


def _balanced_accuracy() -> Sums:
    return _macro(lambda right, said, there: right / there if there else None)


def _perplexity() -> Sums:
    """The exponential of the mean negative logarithm of the probability of the class that is
    there."""

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        scores_NK, class_N = _asked(scores, targets, ignored)
        wide = scores_NK.double() if scores_NK.is_floating_point() else scores_NK
        return [float(F.cross_entropy(wide, class_N, reduction="sum")), float(len(class_N))]

    return Sums(sums, lambda found: math.exp(mean) if (mean := _mean(found)) < 700 else math.inf)


def _error(of: Callable[[Tensor], Tensor], value: Callable[[float], float]) -> Sums:
    """A mean over all values of a function of how far they are off."""

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        values, true = matched(scores, targets)
        return [float(of(values.double() - true.double()).sum()), float(true.numel())]

    return Sums(sums, lambda found: value(_mean(found)))


def _mean(found: Sequence[float]) -> float:
    return found[0] / found[1] if found[1] else math.nan


def _r2(scores: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that is explained, of several columns the mean of theirs;
    not a number where they have no variance."""
    values_NC, true_NC = (each.double().reshape(len(each), -1) for each in matched(scores, targets))
    variance_C = (true_NC - true_NC.mean(dim=0)).square().sum(dim=0)
    share_C = 1 - (values_NC - true_NC).square().sum(dim=0) / variance_C
    return float(share_C[variance_C > 0].mean())


METRICS = {
    "accuracy": BuiltinMetric(_accuracy, higher=True),
    "balanced_accuracy": BuiltinMetric(_balanced_accuracy, higher=True),
    "f1": BuiltinMetric(_f1, higher=True),
    "topk": BuiltinMetric(_topk, higher=True, takes=("k",)),
    "perplexity": BuiltinMetric(_perplexity, higher=False),
    "mae": BuiltinMetric(lambda: _error(torch.abs, float), higher=False),
    "mse": BuiltinMetric(lambda: _error(torch.square, float), higher=False),
    "rmse": BuiltinMetric(lambda: _error(torch.square, math.sqrt), higher=False),
    "r2": BuiltinMetric(lambda: _r2, higher=True),
}
NAMES = (*METRICS, "top5")
_TOP = re.compile(r"top([1-9][0-9]{0,5})")


def find(name: str) -> tuple[BuiltinMetric, dict[str, Any]] | None:
    """The metric of this name, and the parameters that its name says: "top5" is topk with k = 5."""
    top = _TOP.fullmatch(name)
    if top is not None:
        return METRICS["topk"]._replace(takes=()), {"k": int(top[1])}
    return (METRICS[name], {}) if name in METRICS else None
