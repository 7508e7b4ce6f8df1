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
        values, true = match_shapes(scores, targets)
        return [float(of(values.double() - true.double()).sum()), float(true.numel())]

    return Sums(sums, lambda found: value(_mean(found)))


def _mean(found: Sequence[float]) -> float:
    return found[0] / found[1] if found[1] else math.nan


def _r2(scores: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that is explained, of several columns the mean of theirs;
    not a number where they have no variance."""
    values_NC, true_NC = (each.double().reshape(len(each), -1) for each in match_shapes(scores, targets))
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


Better = Literal["higher", "lower"]

Directions = Mapping[str, Better]
"""Which way each metric that is measured is better."""

MetricsLike = Mapping[str, Any] | Sequence[Any] | str
"""Metrics by name, or a list of them: each a name, an import path, a function or an object, or a
table of one with parameters and which way is `better`."""

LOSS, ACCURACY = "loss", "accuracy"

DEFAULT_DIRECTIONS: Directions = {LOSS: "lower", ACCURACY: "higher"}
"""The metrics that are measured unless asked for: the accuracy where targets are classes."""

Part = tuple[Any, Tensor]
"""Scores and targets of some samples."""


class Metric(NamedTuple):
    """Either `sums` and `value`, or `whole`."""

    name: str
    better: Better
    sums: Callable[[Tensor, Tensor, int], list[float]] | None = None
    """(scores, targets, the label to pass over) -> numbers of a part of the data that add up."""
    value: Callable[[Sequence[float]], float] | None = None
    """The metric, of these numbers added up."""
    whole: Callable[[Sequence[Part]], object] | None = None
    """The metric, of all parts."""

    @property
    def adds_up(self) -> bool:
        return self.sums is not None

    def of_parts(self, parts: Sequence[Part]) -> float:
        """The value over all parts, of a metric that does not add up."""
        assert self.whole is not None
        field = f"metrics.{self.name}"
        with convert_errors(field, self.name), torch.no_grad():
            found = self.whole(parts)
        return _one_number(field, found)


def metric_directions(metrics: Iterable[Metric], accuracy: bool) -> dict[str, Better]:
    """Which way everything that is measured is better; `accuracy`: whether there are classes to be
    right about."""
    usual = {name: way for name, way in DEFAULT_DIRECTIONS.items() if accuracy or name != ACCURACY}
    return {**usual, **{metric.name: metric.better for metric in metrics}}


def parse_metrics(given: MetricsLike | None, field: str = "metrics") -> tuple[Metric, ...]:
    """The metrics that a user asked for."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        made = [_metric(f"{field}.{name}", each, name) for name, each in given.items()]
    elif isinstance(given, str) or not isinstance(given, Sequence):
        made = [_metric(field, given, "")]
    else:
        made = [_metric(f"{field}[{place}]", each, "") for place, each in enumerate(given)]
    names = [metric.name for metric in made]
    for name in [*names, *(given if isinstance(given, Mapping) else ())]:
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or set(name) & set("<>="):
            raise InvalidInput(field, name, "a metric's name must be a text without <, > and =")
        if name == LOSS or names.count(name) > 1:
            told = "is the loss itself" if name == LOSS else "is there twice: give a table of metrics by name"
            raise InvalidInput(field, name, told)
    return tuple(made)


def _metric(field: str, given: Any, called: str) -> Metric:
    """One of them, by the name it is called, or its own."""
    params = dict(given) if isinstance(given, Mapping) else {"fn": given}
    better = params.pop("better", None)
    if better is not None:
        check_choice(f"{field}.better", better, get_args(Better))
    if ("fn" in params) == ("name" in params):
        raise InvalidInput(field, given, "must be a name, a function, or a table with either: name or fn")
    what = params.pop("fn", None) if "fn" in params else params.pop("name")
    if isinstance(what, str) and ":" not in what:
        return _builtin(field, what, params, called, better)
    if isinstance(what, str):
        called, what = called or what.rpartition(":")[2], load_user_object(field, what, params)
    elif params:
        raise unknown_name(f"{field} key", next(iter(params)), ("fn", "name", "better"))
    streams = all(callable(getattr(what, each, None)) for each in ("reset", "update", "compute"))
    if isinstance(what, type) or not (streams or callable(what)):
        wanted = "must be a function (outputs, targets), or an object with reset, update and compute"
        raise InvalidInput(field, what, wanted)
    name = called or str(getattr(what, "__name__", type(what).__name__))
    return Metric(name, better or _way_of(what, name), whole=_streamed(what) if streams else _at_once(what))


def _builtin(field: str, name: str, params: Mapping[str, Any], called: str, better: Better | None) -> Metric:
    found = find(name)
    if found is None:
        raise unknown_name(field, name, NAMES)
    make, known = found
    for key in params:
        if key not in make.takes:
            raise unknown_name(f"{field} key", key, make.takes)
    parts = make.parts(**known, **params)
    name = f"top{params['k']}" if "k" in params else name
    way = better or ("higher" if make.higher else "lower")
    if isinstance(parts, Sums):
        return Metric(called or name, way, sums=parts.sums, value=parts.value)
    return Metric(called or name, way, whole=_at_once(parts))


def _way_of(what: object, name: str) -> Better:
    """Which way a user's own metric is better, where they do not say: as torchmetrics knows, or as
    the one of that name here, or higher."""
    told = getattr(what, "higher_is_better", None)
    if not isinstance(told, bool):
        known = find(name)
        told = known is None or known[0].higher
    return "higher" if told else "lower"


def _at_once(function: Callable[[Any, Tensor], object]) -> Callable[[Sequence[Part]], object]:
    def whole(parts: Sequence[Part]) -> object:
        outputs, targets = zip(*parts, strict=True)
        try:
            return function(concatenate_outputs(outputs, [len(each) for each in targets]), torch.cat(targets))
        except NotConcatenable:
            told = "the model's output has something without an entry for each sample, so parts cannot be put together"
            raise TypeError(told) from None

    return whole


def _streamed(metric: Any) -> Callable[[Sequence[Part]], object]:
    """A metric taken by an object that is shown part after part, and remembers nothing from one
    time to the next."""

    def whole(parts: Sequence[Part]) -> object:
        device = parts[0][1].device
        if callable(getattr(metric, "to", None)):
            metric.to(device)
        metric.reset()
        for outputs, targets in parts:
            metric.update(outputs, targets)
        found = metric.compute()
        metric.reset()
        return found

    return whole


def _one_number(field: str, found: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidInput(field, type(found).__name__, "must give one number") from None
