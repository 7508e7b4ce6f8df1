"""The same curves as files for a paper: PNG, SVG and PDF, one figure per metric and per diagnostic
quantity, and the summary as CSV and LaTeX."""

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
"""Okabe and Ito's, which people with any colour vision can tell apart; a violet for their second
blue."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.6, 1, 1.6)), (0, (8, 2)))
"""Five to seven colours, as on the page: 35 settings look different, and neighbours do in grey."""

TOLD_APART = len(COLOURS) * len(DASHES)

COLUMN, PAGE = 3.4, 7.0
"""Inches: the width of a column of a paper, and of two."""

LETTERS, LINE, SAMPLE = 15, 0.16, 5
"""A legend's measures: an inch holds so many letters, a line takes so many inches, and a name's
sample as much as so many letters."""

UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None, "ModDate": None}}


def figures(
    folder: Path, found: Sequence[RunGroup], targets: Sequence[float] = (), metric: str | None = None
) -> list[Path]:
    """targets: values of the metric, which is accuracy, or what there is, unless given."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InvalidInput("--figures", str(folder), problem.strerror or str(problem)) from None
    metrics, judged = select_metric(found, metric)
    written = _tables(folder, found, metrics, judged, targets)
    for each in metrics:
        unit = " (%)" if each.percent else ""
        goals = targets if each == judged else ()
        panel = [("", each.name)]
        factor = 100 if each.percent else 1
        written += _write(
            folder / slug(each.name), panel, f"test {escape_control(each.name)}{unit}", found, goals, factor
        )
    names = list(dict.fromkeys(name for setting in found for name in setting.mean.y))
    parts = [name.split(".") for name in names if name.startswith("drift.")]
    for quantity, (told, unit) in QUANTITIES.items():
        levels = sorted({part[1] for part in parts if len(part) == 3 and part[1].isdigit() and part[2] == quantity})
        panels = [(f"level {level}", f"drift.{level}.{quantity}") for level in levels]
        if panels:
            written += _write(folder / f"drift_{quantity}", panels, f"{told} ({unit})", found)
    if judged is not None and targets:
        written += _bars(folder / "to_target", found, judged, targets[-1])
    return written


def _tables(
    folder: Path,
    found: Sequence[RunGroup],
    metrics: Sequence[MetricInfo],
    judged: MetricInfo | None,
    targets: Sequence[float],
) -> list[Path]:
    table = columns(found, metrics, judged, targets)
    texts = {folder / "summary.csv": as_csv(table), folder / "summary.tex": as_latex(table)}
    for path, text in texts.items():
        with atomic_write(path, sync=False) as file:
            file.write(text.encode())
    return list(texts)


def _write(
    stem: Path,
    panels: Sequence[tuple[str, str]],
    label: str,
    found: Sequence[RunGroup],
    targets: Sequence[float] = (),
    factor: float = 1.0,
) -> list[Path]:
    """One row of panels with a common legend: one is as wide as a column of a paper, several as two
    columns."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        width = COLUMN if len(panels) == 1 else max(PAGE, 2.3 * len(panels))
        # a legend has room of its own below
        room = int(LETTERS * width)
        across = min(4, max(1, room // (max(len(_told(setting)) for setting in found) + SAMPLE)))
        size = (width, 2.25 + LINE * (math.ceil(len(found) / across) if len(found) <= TOLD_APART else 1))
        figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, (title, name) in zip(row[0], panels, strict=True):
            _panel(axes, found, name, factor)
            axes.set(xlabel=AXES["rounds"], ylabel=label)
            axes.set_title(title, fontsize=8)
            for target in targets:
                axes.axhline(factor * target, color="#5b6470", linewidth=0.6, linestyle=":")
        if len(found) > TOLD_APART:
            figure.supxlabel(f"{len(found)} settings: the report names them", fontsize=8)
        elif len(found) > 1 or found[0].mean.diverged is not None:
            handles, labels = row[0][0].get_legend_handles_labels()
            longest = room - SAMPLE
            labels = [label if len(label) <= longest else f"{label[: longest - 1]}…" for label in labels]
            figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, handlelength=2.8)
        return _saved(figure, stem)


def _bars(stem: Path, found: Sequence[RunGroup], metric: MetricInfo, target: float) -> list[Path]:
    """What each setting needs to get to a target, in rounds, bytes and seconds; who did not get
    there has no bar."""
    plt = pyplot()
    units = {"rounds": (AXES["rounds"], 1.0), "bytes": ("MB per client", 1e-6), "seconds": ("seconds", 1.0)}
    shown = found[:TOLD_APART]
    labels = [each.label if len(each.label) <= 40 else f"{each.label[:39]}…" for each in shown]
    with plt.rc_context(STYLE):
        size = (PAGE, 0.9 + 0.22 * len(shown))
        figure, row = plt.subplots(1, len(units), figsize=size, layout="constrained", sharey=True)
        for axes, (axis, (title, factor)) in zip(row, units.items(), strict=True):
            for place, setting in enumerate(shown):
                cost = mean_std_if_complete(
                    [_at(curve, axis, first_round(curve, metric.goal(target))) for curve in setting.curves]
                )
                if cost is None:
                    axes.text(0, place, " not reached", va="center", fontsize=7, color="#5b6470")
                    continue
                error = None if cost.deviation is None else factor * cost.deviation
                axes.barh(place, factor * cost.mean, xerr=error, height=0.62, color=COLOURS[place % len(COLOURS)],
                          error_kw={"elinewidth": 0.8, "capsize": 2})  # fmt: skip
            axes.set(xlabel=title, xlim=(0, None), ylim=(len(shown) - 0.4, -0.6))
            axes.set_yticks(range(len(shown)), labels)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"until {escape_control(metric.name)} is {metric.goal_text(target)}", fontsize=8)
        return _saved(figure, stem)


def _at(curve: Any, axis: str, round: float | None) -> float | None:
    """What a run had spent after a round."""
    return None if round is None else curve.x[axis][curve.x["rounds"].index(round)]


def _saved(figure: Any, stem: Path) -> list[Path]:
    written = [stem.with_suffix(ending) for ending in (".png", ".svg", ".pdf")]
    for path in written[1:]:
        figure.savefig(path, metadata=UNDATED[path.suffix])
    save(figure, written[0])
    return written


def _told(setting: RunGroup) -> str:
    """A setting in a legend."""
    died = setting.mean.diverged
    return setting.label if died is None else f"{setting.label} (diverged at round {died})"


def _panel(axes: Any, found: Sequence[RunGroup], name: str, factor: float) -> None:
    for number, setting in enumerate(found):
        curve = setting.mean
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
        label = f" {_told(setting)}" if setting.label.startswith("_") else _told(setting)
        if curve.diverged is not None:
            axes.plot(xs[-1:], ys[-1:], color=colour, marker="x", markersize=5, linestyle="")
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.3, marker="o" if len(xs) == 1 else "", label=label)
        if name in curve.spread:
            low, high = ([y + sign * s for y, s in zip(ys, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
