"""Figures for papers: curves as PNG, SVG and PDF, one figure per metric and diagnostic quantity,
and the summary as CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.files import atomic_write
from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.report.page_data import QUANTITIES
from stratafl.report.summary import as_csv, as_latex, columns
from stratafl.runs.curves import AXES, MetricInfo, first_round, mean_std_if_complete
from stratafl.runs.format import slug
from stratafl.runs.groups import RunGroup, select_metric

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c2629b", "#a87400", "#6b4fbb", "#5b6470")
"""Colours of Okabe and Ito, which readers with any colour vision can distinguish; a violet replaces
their second blue."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.6, 1, 1.6)), (0, (8, 2)))
"""Line styles, as on the page: with seven colours they distinguish 35 groups, neighbours also in
grey."""

MAX_DISTINCT_STYLES = len(COLOURS) * len(DASHES)
COLUMN, PAGE = 3.4, 7.0
"""Width of one and of two columns of a paper, in inches."""

LETTERS_PER_INCH, LINE_HEIGHT, SAMPLE_WIDTH = 15, 0.16, 5
"""Measures of a legend: letters per inch, inches per line, and width of a sample in letters."""

WITHOUT_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None, "ModDate": None}}


def figures(
    folder: Path, groups: Sequence[RunGroup], targets: Sequence[float] = (), metric: str | None = None
) -> list[Path]:
    """Write all figures and tables; returns their paths.

    targets: values of the metric, which is by default accuracy or the first one.
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
    for info in metrics:
        unit, factor = (" (%)", 100) if info.percent else ("", 1)
        label, goals = f"test {escape_control(info.name)}{unit}", targets if info == main else ()
        written += _plot_curves(folder / slug(info.name), [("", info.name)], label, groups, goals, factor)
    names = list(dict.fromkeys(name for group in groups for name in group.mean.y))
    parts = [name.split(".") for name in names if name.startswith("drift.")]
    for quantity, (title, unit) in QUANTITIES.items():
        levels = sorted({part[1] for part in parts if len(part) == 3 and part[1].isdigit() and part[2] == quantity})
        panels = [(f"level {level}", f"drift.{level}.{quantity}") for level in levels]
        if panels:
            written += _plot_curves(folder / f"drift_{quantity}", panels, f"{title} ({unit})", groups)
    if main is not None and targets:
        written += _plot_time_to_target(folder / "to_target", groups, main, targets[-1])
    return written


def _plot_curves(
    stem: Path,
    panels: Sequence[tuple[str, str]],
    label: str,
    groups: Sequence[RunGroup],
    targets: Sequence[float] = (),
    factor: float = 1.0,
) -> list[Path]:
    """Plot a row of panels with a common legend: a single panel is one column wide, several are
    two."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        width = COLUMN if len(panels) == 1 else max(PAGE, 2.3 * len(panels))
        # a legend has room of its own below
        letters = int(LETTERS_PER_INCH * width)
        legend_columns = min(4, max(1, letters // (max(len(_legend_label(group)) for group in groups) + SAMPLE_WIDTH)))
        size = (
            width,
            2.25 + LINE_HEIGHT * (math.ceil(len(groups) / legend_columns) if len(groups) <= MAX_DISTINCT_STYLES else 1),
        )
        figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, (title, name) in zip(row[0], panels, strict=True):
            _panel(axes, groups, name, factor)
            axes.set(xlabel=AXES["rounds"], ylabel=label)
            axes.set_title(title, fontsize=8)
            for target in targets:
                axes.axhline(factor * target, color="#5b6470", linewidth=0.6, linestyle=":")
        if len(groups) > MAX_DISTINCT_STYLES:
            figure.supxlabel(f"{len(groups)} settings: the report names them", fontsize=8)
        elif len(groups) > 1 or groups[0].mean.diverged is not None:
            handles, labels = row[0][0].get_legend_handles_labels()
            max_length = letters - SAMPLE_WIDTH
            labels = [label if len(label) <= max_length else f"{label[: max_length - 1]}…" for label in labels]
            figure.legend(
                handles, labels, loc="outside lower center", ncols=legend_columns, frameon=False, handlelength=2.8
            )
        return _save_all(figure, stem)


def _plot_time_to_target(stem: Path, groups: Sequence[RunGroup], metric: MetricInfo, target: float) -> list[Path]:
    """Plot the rounds, bytes and seconds that each group needs to reach a target; groups that did
    not reach it have no bar."""
    plt = pyplot()
    units = {"rounds": (AXES["rounds"], 1.0), "bytes": ("MB per client", 1e-6), "seconds": ("seconds", 1.0)}
    shown = groups[:MAX_DISTINCT_STYLES]
    labels = [group.label if len(group.label) <= 40 else f"{group.label[:39]}…" for group in shown]
    with plt.rc_context(STYLE):
        size = (PAGE, 0.9 + 0.22 * len(shown))
        figure, row = plt.subplots(1, len(units), figsize=size, layout="constrained", sharey=True)
        for axes, (axis, (title, factor)) in zip(row, units.items(), strict=True):
            for position, group in enumerate(shown):
                ends = [(curve.x, first_round(curve, metric.goal(target))) for curve in group.curves]
                cost = mean_std_if_complete(
                    [None if end is None else x[axis][x["rounds"].index(end)] for x, end in ends]
                )
                if cost is None:
                    axes.text(0, position, " not reached", va="center", fontsize=7, color="#5b6470")
                    continue
                error = None if cost.deviation is None else factor * cost.deviation
                axes.barh(position, factor * cost.mean, xerr=error, height=0.62, color=COLOURS[position % len(COLOURS)],
                          error_kw={"elinewidth": 0.8, "capsize": 2})  # fmt: skip
            axes.set(xlabel=title, xlim=(0, None), ylim=(len(shown) - 0.4, -0.6))
            axes.set_yticks(range(len(shown)), labels)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"until {escape_control(metric.name)} is {metric.goal_text(target)}", fontsize=8)
        return _save_all(figure, stem)


def _save_all(figure: Any, stem: Path) -> list[Path]:
    written = [stem.with_suffix(ending) for ending in (".png", ".svg", ".pdf")]
    for path in written[1:]:
        figure.savefig(path, metadata=WITHOUT_DATE[path.suffix])
    save(figure, written[0])
    return written


def _legend_label(group: RunGroup) -> str:
    """Label of a group in a legend."""
    diverged = group.mean.diverged
    return group.label if diverged is None else f"{group.label} (diverged at round {diverged})"


def _panel(axes: Any, groups: Sequence[RunGroup], name: str, factor: float) -> None:
    for number, group in enumerate(groups):
        curve = group.mean
        points = [
            (x, factor * y, factor * s)
            for x, y, s in zip(
                curve.x["rounds"], curve.y.get(name, []), curve.spread.get(name) or [0.0] * len(curve.x["rounds"]),
                strict=False,
            )
            if x is not None and y is not None and s is not None
        ]  # fmt: skip
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number % len(DASHES)]
        xs, ys, spread = ([point[part] for point in points] for part in range(3))
        # a leading underscore would keep a name out of the legend
        label = f" {_legend_label(group)}" if group.label.startswith("_") else _legend_label(group)
        if curve.diverged is not None:
            axes.plot(xs[-1:], ys[-1:], color=colour, marker="x", markersize=5, linestyle="")
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.3, marker="o" if len(xs) == 1 else "", label=label)
        if name in curve.spread:
            low, high = ([y + sign * s for y, s in zip(ys, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
