"""Result of a run: models and history, as a table, a plot or a notebook card."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.topology import Topology
from stratafl.base.validation import check_choice
from stratafl.core.flat_module import FlatModule
from stratafl.metrics.communication import Communication, Total
from stratafl.metrics.records import RoundResult, diverged

WIDE, HIGH, LINE = 160, 32, 1.5
"""Size of a card's curve, and width of its line, in pixels."""


def to_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Records as a pandas table with a row per round and a column per value
    ("metrics.accuracy")."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("a table of rounds", "pandas", "tables") from None
    return pandas.json_normalize(list(records))


def metric_curve(history: Sequence[RoundResult], metric: str | None = None) -> tuple[str, list[int], list[float]]:
    """Name of a metric, the rounds in which it was measured, and its values; unless one is named,
    the accuracy, or the first metric there is."""
    measured = list(dict.fromkeys(name for record in history for name in record.metrics))
    if not measured:
        raise InvalidInput("metric", metric, "no round was evaluated: give test data, or run a round first")
    if metric is None:
        name = "accuracy" if "accuracy" in measured else measured[0]
    else:
        name = check_choice("metric", metric, measured)
    points = [(record.round, record.metrics[name]) for record in history if name in record.metrics]
    return name, [round for round, _ in points], [value for _, value in points]


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as one line of text."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def last_metrics(history: Sequence[RoundResult]) -> dict[str, float]:
    """The metrics of the last round that was evaluated."""
    return next((record.metrics for record in reversed(history) if record.metrics), {})


def notebook_card(title: str, facts: Mapping[str, object], history: Sequence[RoundResult]) -> str:
    """Small table of facts with a metric's curve, as HTML in the colours of its surroundings."""
    metrics = last_metrics(history)
    last = {"last metrics": format_metrics(metrics)} if metrics else {}
    cell = 'style="text-align:left;padding:1px 12px 1px 0;border:0;background:none;color:inherit'
    rows = [
        f'<tr style="background:none"><td {cell};opacity:.65">{escape(name)}</td>'
        f'<td {cell}">{escape(str(value))}</td></tr>'
        for name, value in {**facts, **last}.items()
    ]
    head = f'<div style="font-weight:600;margin-bottom:2px">{escape(title)}</div>'
    body = f'<table style="border-collapse:collapse;font-size:90%">{"".join(rows)}</table>'
    return f'<div style="color:inherit">{head}{body}{_sparkline(history)}</div>'


def _sparkline(history: Sequence[RoundResult]) -> str:
    """Small picture of a metric's curve, as SVG; empty where there is no curve yet."""
    if sum(bool(record.metrics) for record in history) < 2:
        return ""
    name, rounds, values = metric_curve(history)
    points = [(round, value) for round, value in zip(rounds, values, strict=True) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    height, span = HIGH - 2 * LINE, (high - low) or 1.0
    coordinates = " ".join(
        f"{WIDE * (round - first) / (last - first):.1f},{LINE + height * (high - value) / span:.1f}"
        for round, value in points
    )
    title = escape(f"{name} from {low:.4g} to {high:.4g}")
    return (
        f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{title}">'
        f'<title>{title}</title><polyline points="{coordinates}" fill="none" stroke="currentColor" '
        f'stroke-width="{LINE}" stroke-opacity=".8"/></svg>'
    )


def not_kept(what: str) -> InvalidInput:
    """Error for a question that a finished run without its state cannot answer."""
    return InvalidInput(
        "storage.keep_state", False, f"{what} were not kept when this run was finished; true keeps them"
    )


class RootOnly(list[Any]):
    """Values by level of a finished run that has kept those of the root alone; any other is an
    error."""

    def __getitem__(self, level: Any) -> Any:
        if level != 0 or not super().__len__():
            raise not_kept("models and corrections of the nodes")
        return super().__getitem__(0)

    def __iter__(self) -> Iterator[Any]:
        raise not_kept("models and corrections of the nodes")

    def __len__(self) -> int:
        raise not_kept("models and corrections of the nodes")


class LevelTotals(Communication):
    """Communication of a finished run that has kept the totals of the levels alone."""

    def __init__(self, tree: Topology, totals: Mapping[int, Total], bytes_per_client: float):
        super().__init__(tree)
        self._totals, self._bytes_per_client = totals, bytes_per_client

    def level(self, level: int) -> Total:
        if level not in self._totals:
            raise not_kept(f"messages of level {level}")
        return self._totals[level]

    def node(self, level: int, number: int) -> Total:
        raise not_kept("messages of single nodes")

    @property
    def client_bytes(self) -> int:
        raise not_kept("messages of single nodes")

    @property
    def bytes_per_client(self) -> float:
        return self._bytes_per_client


@dataclass(frozen=True)
class Result:
    """Models and history of a run so far: rows are nodes in the tree's order, columns parameters in
    the module's order."""

    tree: Topology
    module: nn.Module
    """The root's model."""
    models: list[Tensor]
    """By level, root first: each node's model just before its parent's model replaced it."""
    corrections: list[Tensor | None]
    """By edge level, root first: the corrections that each node's subtree adds to its gradients."""
    history: list[RoundResult]
    communication: Communication
    flat: FlatModule = field(repr=False)
    buffers: list[Tensor] = field(repr=False)
    method: str = ""
    """The rules in a few words."""

    def __repr__(self) -> str:
        run = f"{self.method or 'a run'} on {self.tree.leaves:,} clients after {len(self.history)} rounds"
        metrics = format_metrics(last_metrics(self.history))
        return f"<Result of {run}: {metrics}>" if metrics else f"<Result of {run}>"

    def _repr_html_(self) -> str:
        facts = {"method": self.method, "tree": " > ".join(f"{size:,}" for size in self.tree.sizes)}
        facts |= {"parameters": f"{self.models[0].shape[1]:,}", "rounds": str(len(self.history))}
        if self.diverged is not None:
            facts["diverged"] = f"at round {self.diverged}"
        return notebook_card("Result", facts, self.history)

    def frame(self) -> Any:
        """Pandas table with a row per round and a column per value, such as "round",
        "metrics.accuracy" and "drift.1.drift", as a stored run's `frame`."""
        return to_frame([asdict(record) for record in self.history])

    def plot(self, metric: str | None = None, ax: Any = None) -> Any:
        """Plot a metric over the rounds, the accuracy unless one is named, on these axes of
        matplotlib or on new ones; return the axes, and show nothing."""
        name, rounds, values = metric_curve(self.history, metric)
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError:
                raise MissingExtra("a plot", "matplotlib") from None
            ax = pyplot.subplots()[1]
        ax.plot(rounds, values, marker="." if len(rounds) < 30 else None, label=self.method or None)
        ax.set_xlabel("global round")
        ax.set_ylabel(name)
        return ax

    def model_of(self, name: str) -> nn.Module:
        """Model of a named node, as a module."""
        level, number = self.tree.find(name)
        return self.flat.build(self.models[level][number], self.buffers[level][number])

    @property
    def refused(self) -> dict[str, int]:
        """Number of times that each node's update was rejected."""
        return dict(Counter(name for record in self.history for name in record.refused))

    @property
    def too_large(self) -> dict[str, int]:
        """Number of times that each node's update was rejected as finite, but far too large."""
        return dict(Counter(name for record in self.history for name in record.too_large))

    @property
    def diverged(self) -> int | None:
        """Round from which on the test loss is not finite; None for a run that has not diverged."""
        return diverged(vars(record) for record in self.history)
