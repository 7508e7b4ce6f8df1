"""Summary table of a report, also as CSV and LaTeX.

The page lets its reader choose the metric and targets: assets/summary.js computes the same columns
and exports there.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from stratafl.base.statistics import MeanStd
from stratafl.metrics.metrics import Better
from stratafl.runs.curves import (
    ABSENT,
    MINUS,
    NETWORK,
    TOP_LINK,
    Curve,
    MetricInfo,
    first_round,
    mean_std_if_complete,
    number_text,
)
from stratafl.runs.groups import RunGroup

TARGET_STEP = 0.05
MEGA = 1e-6


@dataclass(frozen=True)
class SummaryCell:
    """A cell's text and, if it is a number, its mean, by which rows are sorted, and deviation."""

    text: str
    mean: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class SummaryColumn:
    """Column of the summary, with a cell per group."""

    title: str
    cells: list[SummaryCell]
    better: Better | Literal[""] = ""
    """Direction of the best value; empty if no value is marked."""

    @property
    def best(self) -> set[int]:
        """Rows with the best value; empty if all rows have it."""
        means = {row: cell.mean for row, cell in enumerate(self.cells) if cell.mean is not None}
        if not self.better or len(self.cells) < 2 or not means:
            return set()
        best = (max if self.better == "higher" else min)(means.values())
        # cells with equal texts are equally good
        texts = {self.cells[row].text for row, value in means.items() if value == best}
        best_texts = {text.partition(" ±")[0] for text in texts}
        best_rows = {row for row in means if self.cells[row].text.partition(" ±")[0] in best_texts}
        return best_rows if len(best_rows) < len(self.cells) else set()

    @property
    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "better": self.better, "cells": [asdict(cell) for cell in self.cells]}


def columns(
    groups: Sequence[RunGroup],
    metrics: Sequence[MetricInfo],
    metric: MetricInfo | None = None,
    targets: Sequence[float] = (),
) -> list[SummaryColumn]:
    """Columns of the whole table; with a metric also its best value and the rounds to each
    target."""
    before, after = fixed_columns(groups, metrics)
    return before + ([] if metric is None else target_columns(groups, metric, targets)) + after


def fixed_columns(
    groups: Sequence[RunGroup], metrics: Sequence[MetricInfo]
) -> tuple[list[SummaryColumn], list[SummaryColumn]]:
    """Columns that do not depend on the chosen metric and targets: those before and
    those after the others."""
    before = [
        SummaryColumn("setting", [SummaryCell(group.label) for group in groups]),
        SummaryColumn("runs", [_count(len(group.runs)) for group in groups]),
        SummaryColumn("rounds", [_count(min(len(curve.x["rounds"]) for curve in group.curves)) for group in groups]),
    ]
    for metric in metrics:
        before.append(SummaryColumn(_metric_title(metric), [_final(group, metric) for group in groups], metric.better))
    after = [_cost_column("MB per client", groups, lambda curve: _last(curve, "bytes"), MEGA)]
    if any(TOP_LINK in curve.x for group in groups for curve in group.curves):
        after.append(_cost_column("MB on the top link", groups, lambda curve: _last(curve, TOP_LINK), MEGA))
    if any(NETWORK in curve.x for group in groups for curve in group.curves):
        after.append(_cost_column("s on the network", groups, lambda curve: _last(curve, NETWORK)))
    # how fast a machine was says nothing about a method: no value is marked as the best
    after.append(replace(_cost_column("s per round", groups, _per_round), better=""))
    for reason in ("refused", "absent", "late"):
        counts = [sum(sum(run.left_out.get(reason, {}).values()) for run in group.runs) for group in groups]
        after += [SummaryColumn(reason, list(map(_count, counts)))] if any(counts) else []
    return before, after


def target_columns(groups: Sequence[RunGroup], metric: MetricInfo, targets: Sequence[float]) -> list[SummaryColumn]:
    """Columns of the runs' best value and of the first round that reaches each target, means over a
    group's runs."""
    top = max if metric.better == "higher" else min
    best = [
        mean_std_if_complete(
            [top((value for _, value in curve.points_of(metric.name)), default=None) for curve in group.curves]
        )
        for group in groups
    ]
    cells = [_cell(value, metric) for value in best]
    table = [SummaryColumn(f"best {_metric_title(metric)}", cells, metric.better)]
    for target in targets:
        cells = [reached(group.curves, metric, target) for group in groups]
        table.append(SummaryColumn(f"rounds to {metric.goal_text(target)}", cells, "lower"))
    return table


def reached(curves: Sequence[Curve], metric: MetricInfo, target: float) -> SummaryCell:
    """Cell of the round in which a target was reached, as papers write it: "52.7 ± 1.2", or ">500"
    if a run did not reach it; a dash without this metric."""
    if not any(metric.name in curve.y for curve in curves):
        return SummaryCell(ABSENT)
    rounds = [first_round(curve, metric.goal(target)) for curve in curves]
    mean = mean_std_if_complete(rounds)
    if mean is None:
        lengths = [len(curve.x["rounds"]) for curve, round in zip(curves, rounds, strict=True) if round is None]
        return SummaryCell(f">{min(lengths, default=0)}")
    return SummaryCell(number_text(mean, 0 if mean.deviation is None else 1), *mean)


def default_targets(groups: Sequence[RunGroup], metric: MetricInfo | None) -> list[float]:
    """Rounded value that all runs of at least half of the groups reached; for a share, the highest
    multiple of five per cent."""
    if metric is None or not groups:
        return []
    sign = 1 if metric.better == "higher" else -1
    best = sorted(
        min(
            max((sign * value for _, value in curve.points_of(metric.name)), default=-math.inf)
            for curve in group.curves
        )
        for group in groups
    )
    value = sign * best[len(best) // 2]
    if not math.isfinite(value):
        return []
    if metric.percent:
        # 0.9 / 0.05 is slightly below 18
        steps = int(value / TARGET_STEP + 1e-9)
        return [round(steps * TARGET_STEP, 2)] if steps > 0 else []
    return [_round_number(value, sign)]


def _round_number(value: float, sign: int) -> float:
    """Round a value to two digits, to the worse side."""
    if value == 0:
        return 0.0
    unit = math.floor(math.log10(abs(value))) - 1
    steps = value / 10.0**unit
    rounded = math.floor(steps + 1e-9) if sign > 0 else math.ceil(steps - 1e-9)
    return float(f"{rounded}e{unit}")


def _final(group: RunGroup, metric: MetricInfo) -> SummaryCell:
    diverged, runs = [curve.diverged for curve in group.curves if curve.diverged is not None], len(group.curves)
    if diverged:
        several = f"{len(diverged)} of {runs} diverged, the first at round {min(diverged)}"
        return SummaryCell(f"diverged at round {diverged[0]}" if runs == 1 else several)
    return _cell(mean_std_if_complete([curve.last(metric.name) for curve in group.curves]), metric)


def _cell(value: MeanStd | None, metric: MetricInfo) -> SummaryCell:
    """Cell such as "91.2 ± 0.3"; shares are in per cent."""
    if value is None:
        return SummaryCell(ABSENT)
    scaled = metric.scaled(value)
    return SummaryCell(number_text(scaled, metric.digits), *scaled)


def _metric_title(metric: MetricInfo) -> str:
    return f"{metric.name}, %" if metric.percent else metric.name


def _count(number: int) -> SummaryCell:
    return SummaryCell(str(number), float(number))


def _cost_column(
    title: str, groups: Sequence[RunGroup], value: Callable[[Curve], float | None], scale: float = 1.0
) -> SummaryColumn:
    """Column of a cost, where lower is better.

    All values have as many decimals as the largest needs for three digits, and the smallest for
    one. Standard deviations appear only in exports.
    """
    means = [mean_std_if_complete([value(curve) for curve in group.curves]) for group in groups]
    scaled = [mean and MeanStd(scale * mean.mean, mean.deviation and scale * mean.deviation) for mean in means]
    exponents = [math.floor(math.log10(mean.mean)) for mean in scaled if mean is not None and mean.mean > 0]
    decimals = max(0, 2 - max(exponents), -min(exponents)) if exponents else 0
    return SummaryColumn(
        title,
        [SummaryCell(ABSENT) if mean is None else SummaryCell(f"{mean.mean:.{decimals}f}", *mean) for mean in scaled],
        "lower",
    )


def _last(curve: Curve, axis: str) -> float | None:
    return next(iter(curve.x.get(axis, [])[-1:]), None)


def _per_round(curve: Curve) -> float | None:
    total = _last(curve, "seconds")
    return None if total is None else total / len(curve.x["seconds"])


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "±": r"$\pm$",
    MINUS: r"$-$",
    ABSENT: "---",
    "…": r"\dots{}",
}

_SPECIAL_CHARACTERS = re.compile("|".join(map(re.escape, LATEX)))


def as_csv(columns: Sequence[SummaryColumn]) -> str:
    """Format the table as CSV, with a column of standard deviations where there are any; cells that
    are no number keep their text."""
    table = []
    for column in columns:
        cells = [_without_formula(cell.text) if cell.mean is None else _number(cell.mean) for cell in column.cells]
        table.append([column.title, *cells])
        if any(cell.deviation is not None for cell in column.cells):
            deviations = ["" if cell.deviation is None else _number(cell.deviation) for cell in column.cells]
            table.append([f"{column.title}, std", *deviations])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*table, strict=True))
    return text.getvalue()


def as_latex(columns: Sequence[SummaryColumn]) -> str:
    """Format the table as a LaTeX tabular with booktabs; the best cell of each column is bold."""
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        "\\toprule",
        " & ".join(_latex(column.title) for column in columns) + " \\\\",
        "\\midrule",
    ]
    for row_number in range(len(columns[0].cells)):
        cells = [_text_cell(column.cells[row_number], row_number in column.best) for column in columns]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _text_cell(cell: SummaryCell, is_best: bool) -> str:
    value, sign, deviation = cell.text.partition(" ± ")
    text = f"\\textbf{{{_latex(value)}}}" if is_best else _latex(value)
    return f"{text} $\\pm$ {_latex(deviation)}" if sign else text


def _latex(text: str) -> str:
    return _SPECIAL_CHARACTERS.sub(lambda match: LATEX[match.group()], text)


def _number(value: float) -> str:
    """Format a number with at most twelve digits, so that 0.30000000000000004 is 0.3, as a browser
    does."""
    exact = Decimal(f"{value:.12g}").normalize()
    if exact and not 1e-6 <= abs(exact) < 1e21:
        mantissa, _, power = f"{exact:e}".partition("e")
        return f"{mantissa}e{int(power):+d}"
    return f"{exact:f}"


def _without_formula(text: str) -> str:
    """Escape a text that a spreadsheet would take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
