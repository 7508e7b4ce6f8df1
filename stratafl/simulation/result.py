"""Result of a run: models and history, as a table, a plot or a notebook card."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.topology import Tree
from stratafl.base.validation import check_choice
from stratafl.core.flat_module import FlatModule
from stratafl.metrics.communication import Communication
from stratafl.metrics.records import RoundResult, diverged

WIDE, HIGH, LINE = 160, 32, 1.5
"""The little curve of a card, in pixels."""


def to_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Records as a pandas table with a row per round and a column per value
    ("metrics.accuracy")."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("a table of rounds", "pandas", "tables") from None
    return pandas.json_normalize(list(records))


def metric_curve(history: Sequence[RoundResult], metric: str | None = None) -> tuple[str, list[int], list[float]]:
    """A metric's name, the rounds in which it was measured, and its values; the accuracy unless one
    is named, or whatever there is."""
    known = list(dict.fromkeys(name for record in history for name in record.metrics))
    if not known:
        raise InvalidInput("metric", metric, "no round was evaluated: give test data, or run a round first")
    name = (
        ("accuracy" if "accuracy" in known else known[0]) if metric is None else check_choice("metric", metric, known)
    )
    points = [(record.round, record.metrics[name]) for record in history if name in record.metrics]
    return name, [round for round, _ in points], [value for _, value in points]


def plot_metric(history: Sequence[RoundResult], metric: str | None, ax: Any, label: str) -> Any:
    """A metric over the rounds, on these axes of matplotlib's or on new ones, which it gives."""
    name, rounds, values = metric_curve(history, metric)
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise MissingExtra("a plot", "matplotlib") from None
        ax = pyplot.subplots()[1]
    ax.plot(rounds, values, marker="." if len(rounds) < 30 else None, label=label or None)
    ax.set_xlabel("global round")
    ax.set_ylabel(name)
    return ax


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics in a line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def last_metrics(history: Sequence[RoundResult]) -> dict[str, float]:
    """The metrics of the last round that was evaluated."""
    return next((record.metrics for record in reversed(history) if record.metrics), {})


def notebook_card(title: str, facts: Mapping[str, object], history: Sequence[RoundResult]) -> str:
    """A small table of facts with a metric's curve, as HTML that takes its colours from where it
    stands."""
    cell = 'style="text-align:left;padding:1px 12px 1px 0;border:0;background:none;color:inherit'
    rows = [
        f'<tr style="background:none"><td {cell};opacity:.65">{escape(name)}</td>'
        f'<td {cell}">{escape(str(value))}</td></tr>'
        for name, value in {**facts, **_measured(history)}.items()
    ]
    head = f'<div style="font-weight:600;margin-bottom:2px">{escape(title)}</div>'
    body = f'<table style="border-collapse:collapse;font-size:90%">{"".join(rows)}</table>'
    return f'<div style="color:inherit">{head}{body}{_sparkline(history)}</div>'


def _measured(history: Sequence[RoundResult]) -> dict[str, str]:
    metrics = last_metrics(history)
    return {"last metrics": format_metrics(metrics)} if metrics else {}


def _sparkline(history: Sequence[RoundResult]) -> str:
    """A metric's curve as a little picture; nothing where there is no curve yet."""
    if sum(bool(record.metrics) for record in history) < 2:
        return ""
    name, rounds, values = metric_curve(history)
    points = [(round, value) for round, value in zip(rounds, values, strict=True) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    room, span = HIGH - 2 * LINE, (high - low) or 1.0
    places = " ".join(
        f"{WIDE * (round - first) / (last - first):.1f},{LINE + room * (high - value) / span:.1f}"
        for round, value in points
    )
    told = escape(f"{name} from {low:.4g} to {high:.4g}")
    return (
        f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{told}">'
        f'<title>{told}</title><polyline points="{places}" fill="none" stroke="currentColor" '
        f'stroke-width="{LINE}" stroke-opacity=".8"/></svg>'
    )


@dataclass(frozen=True)
class Result:
    """A run as it stands: rows are nodes in the tree's order, columns parameters in the module's
    order."""

    tree: Tree
    module: nn.Module
    """The root's model."""
    models: list[Tensor]
    """Per level, root first: each node's model just before its parent's replaced it."""
    corrections: list[Tensor | None]
    """Per edge level, root first: what each node's subtree adds to its gradients."""
    history: list[RoundResult]
    communication: Communication
    flat: FlatModule = field(repr=False)
    buffers: list[Tensor] = field(repr=False)
    method: str = ""
    """The rules in a few words."""

    def __repr__(self) -> str:
        told = f"<Result of {self.method or 'a run'} on {self.tree.leaves:,} clients after {len(self.history)} rounds"
        metrics = format_metrics(last_metrics(self.history))
        return f"{told}: {metrics}>" if metrics else f"{told}>"

    def _repr_html_(self) -> str:
        facts = {"method": self.method, "tree": " > ".join(f"{size:,}" for size in self.tree.sizes)}
        facts |= {"parameters": f"{self.models[0].shape[1]:,}", "rounds": str(len(self.history))}
        if self.diverged is not None:
            facts["diverged"] = f"at round {self.diverged}"
        return notebook_card("Result", facts, self.history)

    def frame(self) -> Any:
        """A pandas table with a row per round and a column per value: "round",
        "metrics.accuracy", "drift.1.drift" and so on, as a stored run's `frame` has them."""
        return to_frame([asdict(record) for record in self.history])

    def plot(self, metric: str | None = None, ax: Any = None) -> Any:
        """Draw a metric over the rounds, the accuracy unless one is named, on these axes of
        matplotlib's or on new ones; they are returned, and nothing is shown."""
        return plot_metric(self.history, metric, ax, self.method)

    def model_of(self, name: str) -> nn.Module:
        """A named node's model as a module."""
        level, number = self.tree.find(name)
        return self.flat.build(self.models[level][number], self.buffers[level][number])

    @property
    def refused(self) -> dict[str, int]:
        """How often each node's update was refused."""
        return dict(Counter(name for each in self.history for name in each.refused))

    @property
    def too_large(self) -> dict[str, int]:
        """How often of these because it was finite, but far too large."""
        return dict(Counter(name for each in self.history for name in each.too_large))

    @property
    def diverged(self) -> int | None:
        """The round from which on the test loss is not finite; None where the run lives."""
        return diverged(vars(each) for each in self.history)
