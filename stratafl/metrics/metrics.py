"""Metrics by name, import path or function; torchmetrics and functions of all predictions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.validation import check_choice, check_integer
from stratafl.core.losses import NotConcatenable, concatenate_outputs, load_user_object, match_shapes

Better = Literal["higher", "lower"]

Directions = Mapping[str, Better]
"""Direction of every measured metric."""

MetricsLike = Mapping[str, Any] | Sequence[Any] | str
"""Metrics by name, or a list of them: each a name, an import path, a function or an object, or a
table of one with its parameters and its direction, `better`."""

LOSS, ACCURACY = "loss", "accuracy"

DEFAULT_DIRECTIONS: Directions = {LOSS: "lower", ACCURACY: "higher"}
"""Metrics that are always measured; the accuracy where targets are classes."""

Part = tuple[Any, Tensor]
"""Scores and targets of some samples."""


class Metric(NamedTuple):
    """A metric, with either `partial` and `combine` or `compute_all`."""

    name: str = ""
    better: Better = "higher"
    partial: Callable[[Tensor, Tensor, int], list[float]] | None = None
    """(scores, targets, ignored label) -> sums over one part of the samples."""
    combine: Callable[[Sequence[float]], float] | None = None
    """(sums of all parts) -> value."""
    compute_all: Callable[[Sequence[Part]], object] | None = None
    """(all parts) -> value."""

    @property
    def is_additive(self) -> bool:
        """Whether the metric is computed from sums over parts of the samples."""
        return self.partial is not None

    def compute(self, parts: Sequence[Part]) -> float:
        """Value over all parts, of a metric that is not additive."""
        assert self.compute_all is not None
        field = f"metrics.{self.name}"
        with convert_errors(field, self.name), torch.no_grad():
            value: Any = self.compute_all(parts)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InvalidInput(field, type(value).__name__, "must give one number") from None


class BuiltinMetric(NamedTuple):
    """Constructor of a metric with the names of its parameters, and its direction."""

    make: Callable[..., Metric]
    better: Better
    parameters: tuple[str, ...] = ()


def is_classification(outputs: object, targets: Tensor) -> bool:
    """Whether targets are class numbers, and outputs have a score per class in dimension 1."""
    if not isinstance(outputs, Tensor):
        return False
    integers = not (targets.is_floating_point() or targets.is_complex())
    return integers and outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]


def has_classes(scores: Tensor, targets: Tensor) -> bool:
    """Whether the outputs are scores of at least two classes, and the targets are classes."""
    return is_classification(scores, targets) and scores.shape[1] > 1


def _scored_classes(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Scores per class (N, K) and true classes (N) of the samples whose label is not ignored."""
    if has_classes(scores, targets):
        counted = (targets >= 0) & (targets != ignored)
        class_N = targets[counted].long()
        if len(class_N) and int(class_N.max()) >= scores.shape[1]:
            raise ValueError(f"there is a label {int(class_N.max())}, and scores of {scores.shape[1]} classes")
        return scores.movedim(1, -1)[counted], class_N
    if scores.numel() == targets.numel() == len(targets):
        # a single score of a binary label: positive above zero
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ValueError("there is one score, which is for yes or no, and targets that are not from 0 to 1")
        yes_N1 = scores.reshape(-1, 1)
        return torch.cat([torch.zeros_like(yes_N1), yes_N1], dim=1), (targets.reshape(-1) > 0.5).long()
    shapes = f"{tuple(scores.shape)} and {tuple(targets.shape)} of {targets.dtype}"
    raise ValueError(f"needs classes and a score for each, or one score and yes or no, not {shapes}")


def _topk(k: int = 5) -> Metric:
    """Share of samples whose class is among the k with the highest scores."""
    k = check_integer("k", k, at_least=1)

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        scores_NK, class_N = _scored_classes(scores, targets, ignored)
        if k > scores_NK.shape[1]:
            raise ValueError(f"there are {scores_NK.shape[1]} classes, so no top {k}")
        best = scores_NK.argmax(dim=1, keepdim=True) if k == 1 else scores_NK.topk(k, dim=1).indices
        return [float((best == class_N[:, None]).sum()), float(len(class_N))]

    return Metric(partial=sums, combine=_mean)


def _confusion(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
    """Numbers of true positives of all classes, then of predictions, then of samples."""
    scores_NK, class_N = _scored_classes(scores, targets, ignored)
    predicted_N, classes = scores_NK.argmax(dim=1), scores_NK.shape[1]
    counted = (class_N[predicted_N == class_N], predicted_N, class_N)
    return [float(count) for class_M in counted for count in class_M.bincount(minlength=classes).tolist()]


def _macro(score: Callable[[float, float, float], float | None]) -> Metric:
    """Mean of a score over the classes that have one (macro average)."""

    def value(counts: Sequence[float]) -> float:
        classes = len(counts) // 3
        by_class = [score(*counts[number::classes]) for number in range(classes)]
        defined = [value for value in by_class if value is not None]
        return math.fsum(defined) / len(defined) if defined else math.nan

    return Metric(partial=_confusion, combine=value)


def _f1(correct: float, predicted: float, samples: float) -> float | None:
    return 2 * correct / (predicted + samples) if predicted + samples else None


def _recall(correct: float, predicted: float, samples: float) -> float | None:
    return correct / samples if samples else None


def _perplexity() -> Metric:
    """Exponential of the mean negative log-likelihood of the true classes."""

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        scores_NK, class_N = _scored_classes(scores, targets, ignored)
        wide = scores_NK.double() if scores_NK.is_floating_point() else scores_NK
        return [float(F.cross_entropy(wide, class_N, reduction="sum")), float(len(class_N))]

    return Metric(partial=sums, combine=lambda sums: math.exp(mean) if (mean := _mean(sums)) < 700 else math.inf)


def _error(penalty: Callable[[Tensor], Tensor], transform: Callable[[float], float]) -> Metric:
    """Transformed mean of a penalty of the errors of all values."""

    def sums(scores: Tensor, targets: Tensor, ignored: int) -> list[float]:
        values, true = match_shapes(scores, targets)
        return [float(penalty(values.double() - true.double()).sum()), float(true.numel())]

    return Metric(partial=sums, combine=lambda sums: transform(_mean(sums)))


def _mean(sums: Sequence[float]) -> float:
    return sums[0] / sums[1] if sums[1] else math.nan


def _r2(scores: Tensor, targets: Tensor) -> float:
    """Coefficient of determination, mean over the columns whose targets vary; NaN if none does."""
    values_NC, true_NC = (rows.double().reshape(len(rows), -1) for rows in match_shapes(scores, targets))
    variance_C = (true_NC - true_NC.mean(dim=0)).square().sum(dim=0)
    share_C = 1 - (values_NC - true_NC).square().sum(dim=0) / variance_C
    return float(share_C[variance_C > 0].mean())


METRICS = {
    "accuracy": BuiltinMetric(lambda: _topk(1), "higher"),
    "balanced_accuracy": BuiltinMetric(lambda: _macro(_recall), "higher"),
    "f1": BuiltinMetric(lambda: _macro(_f1), "higher"),
    "topk": BuiltinMetric(_topk, "higher", parameters=("k",)),
    "perplexity": BuiltinMetric(_perplexity, "lower"),
    "mae": BuiltinMetric(lambda: _error(torch.abs, float), "lower"),
    "mse": BuiltinMetric(lambda: _error(torch.square, float), "lower"),
    "rmse": BuiltinMetric(lambda: _error(torch.square, math.sqrt), "lower"),
    "r2": BuiltinMetric(lambda: Metric(compute_all=_from_all_samples(_r2)), "higher"),
}

NAMES = (*METRICS, "top5")

_TOP = re.compile(r"top([1-9][0-9]{0,5})")


def find_builtin(name: str) -> tuple[BuiltinMetric, dict[str, Any]] | None:
    """Built-in metric of this name, and the parameters in the name: "top5" is topk with k = 5."""
    top = _TOP.fullmatch(name)
    if top is not None:
        return METRICS["topk"]._replace(parameters=()), {"k": int(top[1])}
    return (METRICS[name], {}) if name in METRICS else None


def metric_directions(metrics: Iterable[Metric], accuracy: bool) -> dict[str, Better]:
    """Direction of all measured metrics; accuracy: whether the accuracy is measured."""
    always = {name: better for name, better in DEFAULT_DIRECTIONS.items() if accuracy or name != ACCURACY}
    return {**always, **{metric.name: metric.better for metric in metrics}}


def parse_metrics(value: MetricsLike | None, field: str = "evaluation.metrics") -> tuple[Metric, ...]:
    """Parse metrics in any of the forms of `MetricsLike`."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        metrics = [_metric(f"{field}.{name}", entry, name) for name, entry in value.items()]
    elif isinstance(value, str) or not isinstance(value, Sequence):
        metrics = [_metric(field, value, "")]
    else:
        metrics = [_metric(f"{field}[{place}]", entry, "") for place, entry in enumerate(value)]
    names = [metric.name for metric in metrics]
    for name in [*names, *(value if isinstance(value, Mapping) else ())]:
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or set(name) & set("<>="):
            raise InvalidInput(field, name, "a metric's name must be a text without <, > and =")
        if name == LOSS or names.count(name) > 1:
            problem = "is the loss itself" if name == LOSS else "is there twice: give a table of metrics by name"
            raise InvalidInput(field, name, problem)
    return tuple(metrics)


def _metric(field: str, value: Any, label: str) -> Metric:
    """Parse a metric, named by the label or, without one, by its own name."""
    params = dict(value) if isinstance(value, Mapping) else {"fn": value}
    better = params.pop("better", None)
    if better is not None:
        check_choice(f"{field}.better", better, get_args(Better))
    if ("fn" in params) == ("name" in params):
        raise InvalidInput(field, value, "must be a name, a function, or a table with either: name or fn")
    source = params.pop("fn", None) if "fn" in params else params.pop("name")
    if isinstance(source, str) and ":" not in source:
        return _builtin(field, source, params, label, better)
    if isinstance(source, str):
        label, source = label or source.rpartition(":")[2], load_user_object(field, source, params)
    elif params:
        raise unknown_name(f"{field} key", next(iter(params)), ("fn", "name", "better"))
    streams = all(callable(getattr(source, method, None)) for method in ("reset", "update", "compute"))
    if isinstance(source, type) or not (streams or callable(source)):
        expected = "must be a function (outputs, targets), or an object with reset, update and compute"
        raise InvalidInput(field, source, expected)
    name = label or str(getattr(source, "__name__", type(source).__name__))
    compute_all = _from_updates(source) if streams else _from_all_samples(source)
    return Metric(name, better or _direction_of(source, name), compute_all=compute_all)


def _builtin(field: str, name: str, params: Mapping[str, Any], label: str, better: Better | None) -> Metric:
    entry = find_builtin(name := name.lower())
    if entry is None:
        raise unknown_name(field, name, NAMES)
    builtin, params_of_name = entry
    for key in params:
        if key not in builtin.parameters:
            raise unknown_name(f"{field} key", key, builtin.parameters)
    metric = builtin.make(**params_of_name, **params)
    name = f"top{params['k']}" if "k" in params else name
    return metric._replace(name=label or name, better=better or builtin.better)


def _direction_of(metric: object, name: str) -> Better:
    """Direction of a user's own metric: its own attribute, as torchmetrics has it, or that of the
    built-in metric of its name, or higher."""
    higher_is_better = getattr(metric, "higher_is_better", None)
    if isinstance(higher_is_better, bool):
        return "higher" if higher_is_better else "lower"
    entry = find_builtin(name := name.lower())
    return "higher" if entry is None else entry[0].better


def _from_all_samples(function: Callable[[Any, Tensor], object]) -> Callable[[Sequence[Part]], object]:
    """`compute_all` of a function of the outputs and targets of all samples."""

    def compute_all(parts: Sequence[Part]) -> object:
        outputs, targets = zip(*parts, strict=True)
        try:
            return function(concatenate_outputs(outputs, [len(part) for part in targets]), torch.cat(targets))
        except NotConcatenable:
            problem = (
                "the model's output has something without an entry for each sample, so parts cannot be put together"
            )
            raise TypeError(problem) from None

    return compute_all


def _from_updates(metric: Any) -> Callable[[Sequence[Part]], object]:
    """`compute_all` of an object that is updated part by part, and reset before and after."""

    def compute_all(parts: Sequence[Part]) -> object:
        device = parts[0][1].device
        if callable(getattr(metric, "to", None)):
            metric.to(device)
        metric.reset()
        for outputs, targets in parts:
            metric.update(outputs, targets)
        value = metric.compute()
        metric.reset()
        return value

    return compute_all
