"""Metrics: one number of a model on test data, and whether higher or lower is better.

A metric adds up where numbers of parts of the test data add up to those of the whole: then it
needs no room for all outputs, and ranks share the work. Any other is asked once, of everything: a
function (outputs, targets) -> number, or an object with `reset`, `update` and `compute`, as
torchmetrics has them. Both are given the scores, where the model's output has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, guarded, unknown
from stratafl.base.validation import check_choice
from stratafl.core.objective import builtin
from stratafl.core.objective.losses import own
from stratafl.core.objective.outputs import Apart, joined

Better = Literal["higher", "lower"]
Directions = Mapping[str, Better]
"""Which way each metric that is measured is better."""
MetricsLike = Mapping[str, Any] | Sequence[Any] | str
"""Metrics by name, or a list of them: each a name, an import path, a function or an object, or a
table of one with parameters and which way is `better`."""
LOSS, ACCURACY = "loss", "accuracy"
USUAL: Directions = {LOSS: "lower", ACCURACY: "higher"}
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
        with guarded(field, self.name), torch.no_grad():
            found = self.whole(parts)
        return _one_number(field, found)


def directions(metrics: Iterable[Metric], accuracy: bool) -> dict[str, Better]:
    """Which way everything that is measured is better; `accuracy`: whether there are classes to be
    right about."""
    usual = {name: way for name, way in USUAL.items() if accuracy or name != ACCURACY}
    return {**usual, **{metric.name: metric.better for metric in metrics}}


def metrics_of(given: MetricsLike | None, field: str = "metrics") -> tuple[Metric, ...]:
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
        called, what = called or what.rpartition(":")[2], own(field, what, params)
    elif params:
        raise unknown(f"{field} key", next(iter(params)), ("fn", "name", "better"))
    streams = all(callable(getattr(what, each, None)) for each in ("reset", "update", "compute"))
    if isinstance(what, type) or not (streams or callable(what)):
        wanted = "must be a function (outputs, targets), or an object with reset, update and compute"
        raise InvalidInput(field, what, wanted)
    name = called or str(getattr(what, "__name__", type(what).__name__))
    return Metric(name, better or _way_of(what, name), whole=_streamed(what) if streams else _at_once(what))


def _builtin(field: str, name: str, params: Mapping[str, Any], called: str, better: Better | None) -> Metric:
    found = builtin.find(name)
    if found is None:
        raise unknown(field, name, builtin.NAMES)
    make, known = found
    for key in params:
        if key not in make.takes:
            raise unknown(f"{field} key", key, make.takes)
    parts = make.parts(**known, **params)
    name = f"top{params['k']}" if "k" in params else name
    way = better or ("higher" if make.higher else "lower")
    if isinstance(parts, builtin.Sums):
        return Metric(called or name, way, sums=parts.sums, value=parts.value)
    return Metric(called or name, way, whole=_at_once(parts))


def _way_of(what: object, name: str) -> Better:
    """Which way a user's own metric is better, where they do not say: as torchmetrics knows, or as
    the one of that name here, or higher."""
    told = getattr(what, "higher_is_better", None)
    if not isinstance(told, bool):
        known = builtin.find(name)
        told = known is None or known[0].higher
    return "higher" if told else "lower"


def _at_once(function: Callable[[Any, Tensor], object]) -> Callable[[Sequence[Part]], object]:
    def whole(parts: Sequence[Part]) -> object:
        outputs, targets = zip(*parts, strict=True)
        try:
            return function(joined(outputs, [len(each) for each in targets]), torch.cat(targets))
        except Apart:
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
