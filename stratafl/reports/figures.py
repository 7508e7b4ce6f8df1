"""Figures for papers: curves as PNG, SVG and PDF, one figure per metric and diagnostic quantity,
and the summary as CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.files import atomic_write
from stratafl.base.plotting import MAX_DISTINCT_STYLES, PALETTE, QUIET, save, style
from stratafl.reports.page_data import QUANTITIES
from stratafl.reports.summary import as_csv, as_latex, columns
from stratafl.runs.curves import (
    NETWORK,
    TOP_LINK,
    CurveAxis,
    MetricInfo,
    axes_of,
    check_axis,
    first_round,
    mean_std_if_complete,
)
from stratafl.runs.format import slug
from stratafl.runs.groups import RunGroup, select_metric

COLUMN, PAGE = 3.4, 7.0
"""Width of one and of two columns of a paper, in inches."""

LETTERS_PER_INCH, LINE_HEIGHT, SAMPLE_WIDTH = 15, 0.16, 9
"""Measures of a legend: letters per inch, inches per line, and width of a sample in letters."""

BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Units of an axis of bytes, with their sizes."""


def figures(
    folder: Path,
    groups: Sequence[RunGroup],
    targets: Sequence[float] = (),
    metric: str | None = None,
    against: Sequence[str] = (),
    extra_axes: Mapping[str, CurveAxis] | None = None,
) -> list[Path]:
    """Write all figures and tables; returns their paths.

    targets: values of the metric, which is by default accuracy or the first one. against: axes of
    the curves; by default global rounds and, for metrics, bytes on the top link. extra_axes: axes
    of networks that the curves have.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InvalidInput("--figures", str(folder), problem.strerror or str(problem)) from None
    metrics, main = select_metric(groups, metric)
    table = columns(groups, metrics, main, targets)
    texts = {folder / "summary.csv": as_csv(table), folder / "summary.tex": as_latex(table)}
    for path, text in texts.items():
        with atomic_write(path, sync=False) as file:
            file.write(text.encode())
    written = list(texts)
    axes = axes_of([curve for group in groups for curve in group.curves], extra_axes)
    chosen = [check_axis(name, axes) for name in against] or ["rounds"]
    of_metrics = [*chosen, *([TOP_LINK] if TOP_LINK in axes and not against else [])]
    for info in metrics:
        unit, factor = (" (%)", 100) if info.percent else ("", 1)
        label, goals = f"test {escape_control(info.name)}{unit}", targets if info == main else ()
        for axis in of_metrics:
            stem = folder / _stem(info.name, axis)
            written += _plot_curves(stem, [("", info.name)], label, groups, axis, axes[axis], goals, factor)
    names = list(dict.fromkeys(name for group in groups for name in group.mean.y))
    parts = [name.split(".") for name in names if name.startswith("drift.")]
    for quantity, (title, unit) in QUANTITIES.items():
        levels = sorted(
            {int(part[1]) for part in parts if len(part) == 3 and part[1].isdigit() and part[2] == quantity}
        )
        panels = [(f"level {level}", f"drift.{level}.{quantity}") for level in levels]
        for axis in chosen if panels else ():
            stem = folder / _stem(f"drift_{quantity}", axis)
            written += _plot_curves(stem, panels, f"{title} ({unit})", groups, axis, axes[axis])
    if main is not None and targets:
        written += _plot_time_to_target(folder / "to_target", groups, main, targets[-1], axes)
    return written


def _stem(name: str, axis: str) -> str:
    """Name of a figure's files, without their endings."""
    return slug(name) if axis == "rounds" else f"{slug(name)}_by_{slug(axis).replace('.', '-')}"


def _plot_curves(
    stem: Path,
    panels: Sequence[tuple[str, str]],
    label: str,
    groups: Sequence[RunGroup],
    axis: str,
    shown_axis: CurveAxis,
    targets: Sequence[float] = (),
    factor: float = 1.0,
) -> list[Path]:
    """Plot a row of panels with a common legend: a single panel is one column wide, several are
    two."""
    with style() as plt:
        width = COLUMN if len(panels) == 1 else max(PAGE, 2.3 * len(panels))
        # a legend has room of its own below
        letters = int(LETTERS_PER_INCH * width)
        legend_columns = min(4, max(1, letters // (max(len(_legend_label(group)) for group in groups) + SAMPLE_WIDTH)))
        size = (
            width,
            2.25 + LINE_HEIGHT * (math.ceil(len(groups) / legend_columns) if len(groups) <= MAX_DISTINCT_STYLES else 1),
        )
        figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        title_of_x, scale = _unit(shown_axis, [x for group in groups for x in group.mean.x.get(axis, []) if x])
        for axes, (title, name) in zip(row[0], panels, strict=True):
            _panel(axes, groups, axis, name, scale, factor)
            axes.set(xlabel=title_of_x, ylabel=label)
            axes.set_title(title, fontsize=8)
            axes.xaxis.get_major_locator().set_params(integer=shown_axis.unit == "rounds")
            for target in targets:
                axes.axhline(factor * target, color=QUIET, linewidth=0.6, linestyle=":")
        if len(groups) > MAX_DISTINCT_STYLES:
            figure.supxlabel(f"{len(groups)} settings: the report names them", fontsize=8)
        elif len(groups) > 1 or groups[0].mean.diverged is not None:
            handles, labels = row[0][0].get_legend_handles_labels()
            max_length = letters - SAMPLE_WIDTH // 2
            labels = [label if len(label) <= max_length else f"{label[: max_length - 1]}…" for label in labels]
            figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns)
        return _save_all(figure, stem)


def _unit(axis: CurveAxis, values: Sequence[float]) -> tuple[str, float]:
    """Title of an axis, with a unit for bytes, and the factor from its values to what is shown."""
    if axis.unit != "bytes":
        return axis.title, 1.0
    size, unit = next((entry for entry in BYTES if max(values, default=0.0) >= 2 * entry[0]), (1.0, "bytes"))
    return axis.title.replace("bytes", unit, 1), 1 / size


def _plot_time_to_target(
    stem: Path, groups: Sequence[RunGroup], metric: MetricInfo, target: float, axes_by_name: dict[str, CurveAxis]
) -> list[Path]:
    """Plot the rounds, bytes and seconds that each group needs to reach a target; groups that did
    not reach it have no bar. Seconds are those on the runs' network where they have one."""
    seconds = NETWORK if NETWORK in axes_by_name else "seconds"
    units = [name for name in ("rounds", "bytes", TOP_LINK, seconds) if name in axes_by_name]
    shown = groups[:MAX_DISTINCT_STYLES]
    labels = [group.label if len(group.label) <= 40 else f"{group.label[:39]}…" for group in shown]
    with style() as plt:
        size = (PAGE, 0.9 + 0.22 * len(shown))
        figure, row = plt.subplots(1, len(units), figsize=size, layout="constrained", sharey=True)
        for axes, axis in zip(row, units, strict=True):
            ends = [[_cost(curve.x.get(axis), curve.x["rounds"], first_round(curve, metric.goal(target)))
                     for curve in group.curves] for group in shown]  # fmt: skip
            title, factor = _unit(axes_by_name[axis], [end for costs in ends for end in costs if end])
            for position, (group, costs) in enumerate(zip(shown, ends, strict=True)):
                cost = mean_std_if_complete(costs)
                if cost is None:
                    axes.text(0, position, " not reached", va="center", fontsize=7, color=QUIET)
                    continue
                error = None if cost.deviation is None else factor * cost.deviation
                axes.barh(position, factor * cost.mean, xerr=error, height=0.62, color=PALETTE[group.style.colour],
                          error_kw={"elinewidth": 0.8, "capsize": 2})  # fmt: skip
            axes.set(xlabel=title, xlim=(0, None), ylim=(len(shown) - 0.4, -0.6))
            axes.set_yticks(range(len(shown)), labels)
        figure.suptitle(f"until {escape_control(metric.name)} is {metric.goal_text(target)}", fontsize=8)
        return _save_all(figure, stem)


def _cost(values: Sequence[float | None] | None, rounds: Sequence[float | None], end: int | None) -> float | None:
    """Value of an axis at the end of a round."""
    return None if values is None or end is None else values[rounds.index(end)]


def _save_all(figure: Any, stem: Path) -> list[Path]:
    written = [stem.with_suffix(ending) for ending in (".png", ".svg", ".pdf")]
    save(figure, *written)
    return written


def _legend_label(group: RunGroup) -> str:
    """Label of a group in a legend."""
    diverged = group.mean.diverged
    return group.label if diverged is None else f"{group.label} (diverged at round {diverged})"


def _panel(axes: Any, groups: Sequence[RunGroup], axis: str, name: str, scale: float, factor: float) -> None:
    for group in groups:
        curve = group.mean
        along = curve.x.get(axis, [None] * len(curve.x["rounds"]))
        points = [
            (scale * x, factor * y, factor * s)
            for x, y, s in zip(along, curve.y.get(name, []), curve.spread.get(name) or [0.0] * len(along), strict=False)
            if x is not None and y is not None and s is not None
        ]
        xs, ys, spread = ([point[part] for point in points] for part in range(3))
        line = group.style.options
        # a leading underscore would keep a name out of the legend
        label = f" {_legend_label(group)}" if group.label.startswith("_") else _legend_label(group)
        if curve.diverged is not None:
            axes.plot(xs[-1:], ys[-1:], color=line["color"], marker="x", markersize=5, linestyle="")
        axes.plot(xs, ys, **line, linewidth=1.3, marker="o" if len(xs) == 1 else "", label=label)
        if name in curve.spread:
            low, high = ([y + sign * s for y, s in zip(ys, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=line["color"], alpha=0.13, linewidth=0)
    axes.grid(True)
