"""Figures in the paper's form: all methods, mean and range over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from papers.harness.results import MeasuredLine, Results, Value, span
from papers.harness.runs import RunCurve
from papers.harness.series import Panel
from papers.mtgc.published import Rounds, table1
from papers.mtgc.settings import DISTRIBUTIONS, METHODS, TITLES, TUNED, heading, word
from stratafl.base.plotting import PALETTE, line_styles, pyplot, save

COLOUR = {line: PALETTE[line_styles([line.removesuffix("_released")])[0].colour] for line in METHODS}
MARKER = {"hfedavg": "o", "local_correction": "s", "group_correction": "^", "mtgc": "D"}
DASHED = tuple(TUNED)
"""Lines that share method and colour with another, at another value of their parameter."""
INK = "#444444"
LADDER = ("#f4a3bd", "#d6517f", "#7d1238", "#3d0519")
"""Colours for lines of one method, from few to many steps."""


CLIMB = 3
"""Largest range of an axis, as a multiple of the range of the later rounds."""


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw a PNG and an SVG; nothing if there are no results."""
    if not any(measured.curves for measured in results.measured.values()):
        return []
    make = {"rounds": _rounds, "curves": _curves, "communication": _communication, "time": _time}[results.series.form]
    written = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        save(make(results), path)
    return written


def _curves(results: Results) -> Any:
    return _panels(results, "global rounds", lambda curve: curve.rounds)


def _communication(results: Results) -> Any:
    most = max(curve.sent[-1] for m in results.measured.values() for curve in m.curves)
    unit, size = ("GB", 1e9) if most > 1e9 else ("MB", 1e6)
    return _panels(
        results, f"sent and received per client ({unit})", lambda curve: [sent / size for sent in curve.sent]
    )


def _panels(results: Results, x: str, along: Callable[[RunCurve], Sequence[float]]) -> Any:
    grid = _grid(results.panels)
    rows, columns = len(grid), len(grid[0])
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(max(3.1 * columns + 1.2, 6.0), 2.7 * rows + 1.2), layout="constrained", squeeze=False
    )
    one_legend = len({tuple(results.lines(panel)) for panel in results.panels}) == 1
    for r, row in enumerate(grid):
        for c, panel in enumerate(row):
            ax, data = axes[r][c], results.data(panel)
            lines = results.lines(panel)
            alike = [other for other in row if results.data(other) == data and results.seen(other)]
            if panel in alike[1:]:  # panels of one data set side by side have one axis
                ax.sharey(axes[r][row.index(alike[0])])
            for number, line in enumerate(lines):
                curves = results.get(panel, line)
                colour = COLOUR.get(line) or LADDER[number % len(LADDER)]
                if curves is not None:
                    _line(ax, curves, along, colour, line)
            if results.target is not None:
                ax.axhline(results.target, color=INK, linewidth=0.8, linestyle=":")
            ax.set_title(_short(panel, rows), fontsize=9)
            if r == rows - 1:
                ax.set_xlabel(x)
            if c == 0:
                ax.set_ylabel("test accuracy" if rows == 1 else f"{DISTRIBUTIONS[panel[1]]}\ntest accuracy", fontsize=8)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
            if not results.seen(panel):
                ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes, color="#888888")
                ax.set(xticks=[], yticks=[])
                continue
            shown = [m for other in alike for line in results.lines(other) if (m := results.get(other, line))]
            _focus(ax, [curve for m in shown for curve in m.curves], results.target)
            note = f"unfinished: {at}" if (at := results.unfinished(panel)) else None
            if not one_legend:
                small = {"fontsize": 7, "title_fontsize": 7}
                ax.legend(title=note, framealpha=0.85, edgecolor="none", loc="lower right", **small)
            elif note:
                corner = {"ha": "right", "va": "bottom", "transform": ax.transAxes}
                ax.text(0.97, 0.04, note, color=INK, fontsize=8, **corner)
    if one_legend:
        _one_legend(figure, axes, [_title(line) for line in results.lines(results.panels[0])])
    _headline(figure, results)
    return figure


def _focus(axes: Any, curves: Sequence[RunCurve], target: float | None) -> None:
    """Set the axis so that lines can be told apart; it may cut off the first rounds."""
    halves = [accuracy for curve in curves for accuracy in curve.accuracy[len(curve.accuracy) // 2 :]]
    later = [accuracy for accuracy in halves if not math.isnan(accuracy)]
    if not later:
        return
    top, low = max(later), min(later)
    bottom = top - CLIMB * (top - low)
    if target is not None:
        bottom = min(bottom, target - 0.1 * (top - low))
    if bottom < top and any(accuracy < bottom for curve in curves for accuracy in curve.accuracy):
        axes.set_ylim(bottom, top + 0.1 * (top - bottom))


def _one_legend(figure: Any, axes: Any, order: Sequence[str]) -> None:
    shown: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            shown.setdefault(text, handle)
    shown = {text: shown[text] for text in order if text in shown}
    place = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    columns = min(len(shown), max(4, 2 * axes.shape[1]))
    while columns > 1 and _legend_width(list(shown), columns) > figure.get_figwidth():
        columns -= 1
    figure.legend(shown.values(), shown.keys(), ncols=columns, **place)


def _legend_width(titles: Sequence[str], columns: int) -> float:
    """Approximate width of a legend in inches: each column has a sample and its longest title."""
    rows = -(-len(titles) // columns)
    return sum(0.55 + 0.06 * max(map(len, titles[at : at + rows])) for at in range(0, len(titles), rows))


def _line(
    axes: Any, measured: MeasuredLine, along: Callable[[RunCurve], Sequence[float]], colour: str, line: str
) -> None:
    """Plot mean and range over seeds up to the last common round, with a cross at a divergence."""
    curves, bold = measured.curves, line == "mtgc"
    style = {"linestyle": "--" if line in DASHED else "-", "linewidth": 2.2 if bold else 1.5}
    shortest = min(len(curve.rounds) for curve in curves)
    xs = list(along(curves[0]))[:shortest]
    values = [[curve.accuracy[i] for curve in curves] for i in range(shortest)]
    mean = [statistics.fmean(values_at) for values_at in values]
    axes.plot(xs, mean, color=colour, label=_title(line), zorder=3 if bold else 2, **style)
    if any(curve.diverged is not None for curve in curves):
        ends = [place for place, value in enumerate(mean) if not math.isnan(value)]
        x, y = (xs[ends[-1]], mean[ends[-1]]) if ends else (xs[0], 0.0)
        axes.plot([x], [y], color=colour, marker="x", linestyle="", zorder=4)
        axes.annotate("diverged", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
    if len(curves) > 1:
        finite = [v if not any(map(math.isnan, v)) else [math.nan] for v in values]
        axes.fill_between(xs, [min(v) for v in finite], [max(v) for v in finite], color=colour, alpha=0.18, linewidth=0)


def _title(line: str) -> str:
    return METHODS.get(line) or word(line.replace("=", " = "))


def _grid(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Arrange panels: one row per distribution if there are several, otherwise one row."""
    kinds = list(dict.fromkeys(panel[1] for panel in panels if len(panel) > 1))
    if len(kinds) < 2 or len(panels) == len(kinds):
        return [list(panels)]
    return [[panel for panel in panels if panel[1] == kind] for kind in kinds]


def _short(panel: Panel, rows: int) -> str:
    if panel[0] in ("H", "E"):
        return {"H": "more local steps", "E": "more group rounds"}[panel[0]]
    if "x" in panel[0] and panel[0].replace("x", "").isdigit():
        groups, _, clients = panel[0].partition("x")
        return f"{groups} groups of {clients} clients"
    if panel[0] in TUNED:
        return TUNED[panel[0]]
    return TITLES[panel[0]] if rows > 1 else heading(panel).replace(", ", "\n")


def _rounds(results: Results) -> Any:
    """Plot rounds to the target: measured filled, the paper's hollow, an arrow if not reached."""
    distributions = list(dict.fromkeys(panel[0] for panel in results.panels))
    distributions = [name for name in DISTRIBUTIONS if name in distributions]
    settings = list(dict.fromkeys(panel[1] for panel in results.panels))
    lines = list(dict.fromkeys(line for _, line in results.measured))
    ordered = [line for line in METHODS if line in lines]
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(distributions), figsize=(3.4 * len(distributions) + 1, 0.72 * len(settings) + 1.9), layout="constrained",
        sharey=True, sharex=True, squeeze=False,
    )  # fmt: skip
    for ax, distribution in zip(axes[0], distributions, strict=True):
        for row, setting in enumerate(settings):
            for number, line in enumerate(ordered):
                panel = (distribution, setting)
                height = row + 0.17 * (number - (len(ordered) - 1) / 2)
                colour, marker = COLOUR[line], MARKER.get(line, "o")
                own = results.reach(panel, line) if (panel, line) in results.measured else None
                paper_rounds = None if results.options.quick else table1(panel, line)
                for value, filled in ((paper_rounds, False), (own, True)):
                    if value is not None:
                        _point(ax, value, height, colour, marker, filled)
        ax.set_title(DISTRIBUTIONS[distribution], fontsize=9)
        ax.set_xscale("log")
        ticks = (10, 20, 50, 100, 200, 500) if not results.options.quick else (1, 2, 5, 10)
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_xlim(right=1.6 * ticks[-1])  # room for an arrow
        ax.set_xlabel(f"global rounds to {results.target:.0%}")
        ax.set_yticks(range(len(settings)), [word(name) for name in settings])
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    handles = [
        plt.Line2D([], [], color=COLOUR[line], marker=MARKER.get(line, "o"), linestyle="", label=METHODS[line])
        for line in ordered
    ]
    if not results.options.quick:
        handles.append(plt.Line2D([], [], color=INK, marker="o", linestyle="", fillstyle="none", label="the paper's"))
    handles.append(plt.Line2D([], [], color=INK, marker="$→$", linestyle="", markersize=9, label="not reached"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    _headline(figure, results)
    return figure


def _point(axes: Any, value: Value | Rounds, height: float, colour: str, marker: str, filled: bool) -> None:
    spread = value.deviation if filled and value.deviation else None
    axes.errorbar([value.mean], [height], xerr=spread, fmt=marker, color=colour, markersize=5.5,
                  fillstyle="full" if filled else "none", linewidth=1, zorder=3 if filled else 2)  # fmt: skip
    if value.beyond:
        axes.annotate("", (value.mean, height), xytext=(16, 0), textcoords="offset points", annotation_clip=False,
                      arrowprops={"arrowstyle": "<-", "color": colour})  # fmt: skip


def _time(results: Results) -> Any:
    (panel,) = results.panels
    goal = results.target or 1.0
    lines = {line: m for line in results.lines(panel) if (m := results.get(panel, line)) is not None}
    until = results.until(panel)
    figure, axes = pyplot().subplots(1, 2, figsize=(8.4, 0.5 * len(lines) + 1.5), layout="constrained", sharey=True)
    asked: dict[str, dict[str, Value | None]] = {
        f"seconds to {goal:.0%} test accuracy": {line: m.seconds_to(goal) for line, m in lines.items()},
        f"seconds for {until} global rounds": {
            line: Value.of([curve.seconds[curve.rounds.index(until)] for curve in m.curves])
            for line, m in lines.items()
        },
    }
    for ax, (x, values) in zip(axes, asked.items(), strict=True):
        for number, (line, value) in enumerate(values.items()):
            if value is not None:
                beyond = {"hatch": "//", "edgecolor": "white"} if value.beyond else {}
                ax.barh(number, value.mean, xerr=value.deviation, color=COLOUR[line], height=0.62, **beyond)
                ax.annotate(value.text(), (value.mean + (value.deviation or 0), number), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        ax.set_xlabel(x)
        ax.set_xlim(0, 1.25 * max((v.mean + (v.deviation or 0) for v in values.values() if v is not None), default=1))
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_yticks(range(len(lines)), [METHODS[line] for line in lines])
    axes[0].invert_yaxis()
    _headline(figure, results)
    return figure


def _headline(figure: Any, results: Results) -> None:
    options = results.options
    seeds = [len(m.curves) for m in results.measured.values() if m.curves]
    what = f", {', '.join(results.divided_by)}"
    counted = f"{span(seeds)} seed{'s' if max(seeds) > 1 else ''}"
    title = results.series.titled(options.scale)
    figure.suptitle(f"{title}\n{results.series.where}; {counted}{what}", fontsize=9.5)
