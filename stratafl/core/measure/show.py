"""A run's records as a table, a curve and a small card for a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.validation import check_choice
from stratafl.core.measure.record import RoundResult

WIDE, HIGH, LINE = 160, 32, 1.5
"""The little curve of a card, in pixels."""


def table(records: Sequence[Mapping[str, Any]]) -> Any:
    """Records as a pandas table with a row per round and a column per value
    ("metrics.accuracy")."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("a table of rounds", "pandas", "tables") from None
    return pandas.json_normalize(list(records))


def curve(history: Sequence[RoundResult], metric: str | None = None) -> tuple[str, list[int], list[float]]:
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


def plotted(history: Sequence[RoundResult], metric: str | None, ax: Any, label: str) -> Any:
    """A metric over the rounds, on these axes of matplotlib's or on new ones, which it gives."""
    name, rounds, values = curve(history, metric)
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


def numbers(metrics: Mapping[str, float]) -> str:
    """Metrics in a line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def last_metrics(history: Sequence[RoundResult]) -> dict[str, float]:
    """The metrics of the last round that was evaluated."""
    return next((record.metrics for record in reversed(history) if record.metrics), {})


def card(title: str, facts: Mapping[str, object], history: Sequence[RoundResult]) -> str:
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
    return {"last metrics": numbers(metrics)} if metrics else {}


def _sparkline(history: Sequence[RoundResult]) -> str:
    """A metric's curve as a little picture; nothing where there is no curve yet."""
    if sum(bool(record.metrics) for record in history) < 2:
        return ""
    name, rounds, values = curve(history)
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
