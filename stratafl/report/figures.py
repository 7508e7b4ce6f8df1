"""The same curves as files for a paper: PNG and SVG, one figure per metric and per diagnostic quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratafl.errors import InvalidInput, printable
from stratafl.plots import pyplot, save
from stratafl.report.compare import Setting
from stratafl.report.curves import AXES
from stratafl.report.payload import QUANTITIES
from stratafl.store.layout import slug

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a87400", "#3d9bd1", "#5b6470")
"""Okabe and Ito's, which people with any colour vision can tell apart."""
DASHES = ("-", "--", ":", "-.")
TOLD_APART = len(COLOURS) * len(DASHES)
LETTERS, LINE, SAMPLE = 13, 0.21, 5
"""Of a legend: an inch holds so many letters, a line takes so many inches, and a name's sample as much as so many
letters."""


def figures(folder: Path, found: Sequence[Setting], targets: Sequence[float] = ()) -> list[Path]:
    """Draw everything the settings have; the files written."""
    pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InvalidInput("--figures", str(folder), problem.strerror or str(problem)) from None
    names = list(dict.fromkeys(name for setting in found for name in setting.mean.y))
    written = []
    for name in (name for name in names if not name.startswith("drift.")):
        goals = targets if name == "accuracy" else ()
        written += _write(folder / slug(name), [("", name)], f"test {printable(name)}", found, goals)
    parts = [name.split(".") for name in names if name.startswith("drift.")]
    for quantity, told in QUANTITIES.items():
        levels = sorted({part[1] for part in parts if len(part) == 3 and part[1].isdigit() and part[2] == quantity})
        panels = [(f"level {level}", f"drift.{level}.{quantity}") for level in levels]
        if panels:
            written += _write(folder / f"drift_{quantity}", panels, told, found)
    return written


def _write(
    stem: Path, panels: Sequence[tuple[str, str]], label: str, found: Sequence[Setting], targets: Sequence[float] = ()
) -> list[Path]:
    """One row of panels with a common legend."""
    plt = pyplot()
    # texts stay texts in an SVG, and dollar signs in users' names are no formulas
    with plt.rc_context({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "stratafl"}):
        width = 3.6 * len(panels) + 0.6
        # a legend has room of its own below
        room = int(LETTERS * width)
        columns = min(4, max(1, room // (max(len(_told(setting)) for setting in found) + SAMPLE)))
        size = (width, 2.9 + LINE * (math.ceil(len(found) / columns) if len(found) <= TOLD_APART else 1))
        figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, (title, name) in zip(row[0], panels, strict=True):
            _panel(axes, found, name)
            axes.set(xlabel=AXES["rounds"], ylabel=label)
            axes.set_title(title, fontsize=10)
            for target in targets:
                axes.axhline(target, color="#5b6470", linewidth=0.8, linestyle=":")
        if len(found) > TOLD_APART:
            figure.supxlabel(f"{len(found)} settings: the report names them", fontsize=9)
        elif len(found) > 1 or found[0].mean.diverged is not None:
            handles, labels = row[0][0].get_legend_handles_labels()
            longest = room - SAMPLE
            labels = [label if len(label) <= longest else f"{label[: longest - 1]}…" for label in labels]
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        written = [stem.with_suffix(ending) for ending in (".png", ".svg")]
        for path in written[1:]:
            figure.savefig(path, metadata={"Date": None})
        save(figure, written[0])
    return written


def _told(setting: Setting) -> str:
    """A setting in a legend."""
    died = setting.mean.diverged
    return setting.label if died is None else f"{setting.label} (diverged at round {died})"


def _panel(axes: Any, found: Sequence[Setting], name: str) -> None:
    for number, setting in enumerate(found):
        curve = setting.mean
        points = [
            (x, y, s)
            for x, y, s in zip(
                curve.x["rounds"], curve.y.get(name, []), curve.spread.get(name) or [0.0] * len(curve.x["rounds"]),
                strict=False,
            )
            if x is not None and y is not None and s is not None
        ]  # fmt: skip
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        xs, ys, spread = ([point[part] for point in points] for part in range(3))
        # a leading underscore would keep a name out of the legend
        label = f" {_told(setting)}" if setting.label.startswith("_") else _told(setting)
        if curve.diverged is not None:
            axes.plot(xs[-1:], ys[-1:], color=colour, marker="x", markersize=7, linestyle="")
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.8, marker="o" if len(xs) == 1 else "", label=label)
        if name in curve.spread:
            low, high = ([y + sign * s for y, s in zip(ys, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
