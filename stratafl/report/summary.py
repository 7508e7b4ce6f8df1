"""The summary table of a report, also as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal

from stratafl.base.statistics import OverSeeds
from stratafl.metrics.metrics import Better
from stratafl.runs import StoredRun
from stratafl.runs.curves import ABSENT, MINUS, Curve, MetricInfo, first_round, mean_std_if_complete, number_text
from stratafl.runs.groups import RunGroup

TARGET_STEP = 0.05

MEGA = 1e-6


@dataclass(frozen=True)
class SummaryCell:
    """What a table shows, and the number it is ordered by; None where there is none."""

    text: str
    mean: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class Column:
    """One column of the summary, with a cell per setting."""

    title: str
    cells: list[SummaryCell]
    better: Better | Literal[""] = ""
    """Which of its values is marked as the best, if one is."""

    @property
    def best(self) -> set[int]:
        """The settings that are best in it; nobody where there is nobody else."""
        known = {place: cell.mean for place, cell in enumerate(self.cells) if cell.mean is not None}
        if not self.better or len(self.cells) < 2 or not known:
            return set()
        top = (max if self.better == "higher" else min)(known.values())
        # what reads the same is as good
        texts = {self.cells[place].text for place, value in known.items() if value == top}
        alike = {text.partition(" ±")[0] for text in texts}
        found = {place for place in known if self.cells[place].text.partition(" ±")[0] in alike}
        return found if len(found) < len(self.cells) else set()

    @property
    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "better": self.better, "cells": [asdict(cell) for cell in self.cells]}


def columns(
    found: Sequence[RunGroup],
    metrics: Sequence[MetricInfo],
    metric: MetricInfo | None = None,
    targets: Sequence[float] = (),
) -> list[Column]:
    """The whole table: with a metric, also the best of it, and the rounds to each target."""
    before, after = fixed_columns(found, metrics)
    return before + ([] if metric is None else chosen_columns(found, metric, targets)) + after


def fixed_columns(found: Sequence[RunGroup], metrics: Sequence[MetricInfo]) -> tuple[list[Column], list[Column]]:
    """What is there whatever metric and targets are chosen: before them, and behind them."""
    before = [
        Column("setting", [SummaryCell(setting.label) for setting in found]),
        Column("runs", [_count(len(setting.runs)) for setting in found]),
        Column("rounds", [_count(min(len(curve.x["rounds"]) for curve in setting.curves)) for setting in found]),
    ]
    for metric in metrics:
        before.append(Column(_titled(metric), [_final(setting, metric) for setting in found], metric.better))
    after = [
        _cost(
            "MB per client",
            found,
            lambda curve: _last(curve, "bytes"),
            lambda mean: f"{mean:.2f}" if mean >= 1 else f"{mean:.3g}",
            MEGA,
        ),
        _cost("s per round", found, _per_round, lambda mean: f"{mean:.3g}"),
    ]
    for why in ("refused", "absent", "late"):
        counts = [sum(_times(run, why) for run in setting.runs) for setting in found]
        after += [Column(why, list(map(_count, counts)))] if any(counts) else []
    return before, after


def chosen_columns(found: Sequence[RunGroup], metric: MetricInfo, targets: Sequence[float]) -> list[Column]:
    """The best value of each run on the way, and the first round that was as good as a target."""
    top = max if metric.better == "higher" else min
    best = [
        mean_std_if_complete(
            [top((value for _, value in curve.known(metric.name)), default=None) for curve in setting.curves]
        )
        for setting in found
    ]
    cells = [_cell(value, metric) for value in best]
    made = [Column(f"best {_titled(metric)}", cells, metric.better)]
    for target in targets:
        cells = [reached(setting.curves, metric, target) for setting in found]
        made.append(Column(f"rounds to {metric.goal_text(target)}", cells, "lower"))
    return made


def reached(curves: Sequence[Curve], metric: MetricInfo, target: float) -> SummaryCell:
    """When a target was reached, as the paper writes it: "52.7 ± 1.2", or ">500" where a run did
    not get there; of a metric that none of them has, nothing."""
    if not any(metric.name in curve.y for curve in curves):
        return SummaryCell(ABSENT)
    when = [first_round(curve, metric.goal(target)) for curve in curves]
    mean = mean_std_if_complete(when)
    if mean is None:
        lacking = [len(curve.x["rounds"]) for curve, at in zip(curves, when, strict=True) if at is None]
        return SummaryCell(f">{min(lacking, default=0)}")
    return SummaryCell(number_text(mean, 0 if mean.deviation is None else 1), *mean)


def default_targets(found: Sequence[RunGroup], metric: MetricInfo | None) -> list[float]:
    """A round number that at least half of the settings reached with every run: for a share, the
    highest multiple of five per cent."""
    if metric is None or not found:
        return []
    sign = 1 if metric.better == "higher" else -1
    best = sorted(
        min(max((sign * value for _, value in curve.known(metric.name)), default=-math.inf) for curve in setting.curves)
        for setting in found
    )
    value = sign * best[len(best) // 2]
    if not math.isfinite(value):
        return []
    if metric.percent:
        # counted in whole steps, since 0.9 / 0.05 is a hair below 18
        steps = int(value / TARGET_STEP + 1e-9)
        return [round(steps * TARGET_STEP, 2)] if steps > 0 else []
    return [_round_number(value, sign)]


def _round_number(value: float, sign: int) -> float:
    """Two digits of a value, not better than it."""
    if value == 0:
        return 0.0
    unit = math.floor(math.log10(abs(value))) - 1
    steps = value / 10.0**unit
    whole = math.floor(steps + 1e-9) if sign > 0 else math.ceil(steps - 1e-9)
    return float(f"{whole}e{unit}")


def _final(setting: RunGroup, metric: MetricInfo) -> SummaryCell:
    dead = [curve.diverged for curve in setting.curves if curve.diverged is not None]
    if dead:
        return SummaryCell(diverged_text(dead, len(setting.curves)))
    return _cell(mean_std_if_complete([curve.last(metric.name) for curve in setting.curves]), metric)


def _cell(value: OverSeeds | None, metric: MetricInfo) -> SummaryCell:
    """Text such as "91.2 ± 0.3", in per cent where it is a share, without the sign."""
    if value is None:
        return SummaryCell(ABSENT)
    scaled = metric.scaled(value)
    return SummaryCell(number_text(scaled, metric.digits), *scaled)


def diverged_text(rounds: Sequence[int], runs: int) -> str:
    """What stands in the place of a final value."""
    if runs == 1:
        return f"diverged at round {rounds[0]}"
    return f"{len(rounds)} of {runs} diverged, the first at round {min(rounds)}"


def _titled(metric: MetricInfo) -> str:
    return f"{metric.name}, %" if metric.percent else metric.name


def _count(number: int) -> SummaryCell:
    return SummaryCell(str(number), float(number))


def _cost(
    title: str,
    found: Sequence[RunGroup],
    value: Callable[[Curve], float | None],
    text: Callable[[float], str],
    scale: float = 1.0,
) -> Column:
    """What is the better the less it is; the deviation says little, and is left to the exports."""
    means = [mean_std_if_complete([value(curve) for curve in setting.curves]) for setting in found]
    scaled = [mean and OverSeeds(scale * mean.mean, mean.deviation and scale * mean.deviation) for mean in means]
    return Column(
        title,
        [SummaryCell(ABSENT) if mean is None else SummaryCell(text(mean.mean), *mean) for mean in scaled],
        "lower",
    )


def _last(curve: Curve, axis: str) -> float | None:
    return curve.x[axis][-1] if curve.x[axis] else None


def _per_round(curve: Curve) -> float | None:
    total = _last(curve, "seconds")
    return None if total is None else total / len(curve.x["seconds"])


def _times(run: StoredRun, why: str) -> int:
    """How often a node was left out of a meeting."""
    return sum(run.left_out.get(why, {}).values())


SPECIAL = {
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

_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL)))


def as_csv(columns: Sequence[Column]) -> str:
    """A column of means, and one of standard deviations where there are any; what is no number is
    as the table shows it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spread = [any(cell.deviation is not None for cell in column.cells) for column in columns]
    head = [
        (column.title, f"{column.title}, std") if wide else (column.title,) for column, wide in _with(spread, columns)
    ]
    writer.writerow([title for titles in head for title in titles])
    for place in range(len(columns[0].cells)):
        row: list[str] = []
        for column, wide in _with(spread, columns):
            cell = column.cells[place]
            row.append(_safe(cell.text) if cell.mean is None else _number(cell.mean))
            row += ["" if cell.deviation is None else _number(cell.deviation)] if wide else []
        writer.writerow(row)
    return text.getvalue()


def as_latex(columns: Sequence[Column]) -> str:
    """A tabular with the rules of booktabs; the best of each column is bold."""
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        "\\toprule",
        " & ".join(_latex(column.title) for column in columns) + " \\\\",
        "\\midrule",
    ]
    for place in range(len(columns[0].cells)):
        cells = [_text_cell(column.cells[place], place in column.best) for column in columns]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _with(spread: Sequence[bool], columns: Sequence[Column]) -> list[tuple[Column, bool]]:
    return list(zip(columns, spread, strict=True))


def _text_cell(cell: SummaryCell, is_best: bool) -> str:
    value, sign, deviation = cell.text.partition(" ± ")
    shown = f"\\textbf{{{_latex(value)}}}" if is_best else _latex(value)
    return f"{shown} $\\pm$ {_latex(deviation)}" if sign else shown


def _latex(text: str) -> str:
    return _SPECIAL.sub(lambda found: SPECIAL[found.group()], text)


def _number(value: float) -> str:
    """Twelve digits at most, so that 0.30000000000000004 is 0.3; written out as a browser does."""
    exact = Decimal(f"{value:.12g}").normalize()
    if exact and not 1e-6 <= abs(exact) < 1e21:
        mantissa, _, power = f"{exact:e}".partition("e")
        return f"{mantissa}e{int(power):+d}"
    return f"{exact:f}"


def _safe(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
