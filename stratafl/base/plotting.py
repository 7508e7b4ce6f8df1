"""Style of all static figures, drawn by Matplotlib without a display, and how they are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.files import atomic_write, check_writable, make_folder

Line = tuple[Sequence[float], Sequence[float]]

COLOURS = ("#8a8f98", "#2f7ed8", "#e08a1e", "#c2255c", "#2b8a3e", "#7048e8", "#0b7285", "#5c3c10")


def pyplot() -> Any:
    """Import Matplotlib without a display."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("a picture", "matplotlib") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def check_picture(path: Path, option: str = "--out") -> None:
    """Check that a figure can be written to a path, before the work it will show."""
    if path.is_dir() or path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidInput(option, str(path), "must be a file that ends in .png, .svg or .pdf")
    check_writable(option, path, is_file=True)


def curves(
    path: Path,
    lines: Mapping[str, Line],
    *,
    title: str,
    target: float | None = None,
) -> None:
    """Draw the test accuracy of each run, the last one on top, with a legend."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for number, (name, (xs, ys)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(xs, ys, label=name, color=colour, linewidth=2, marker="o", markersize=3)
    if target is not None:
        axes.axhline(target, color="#444444", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{target:g}", (1, target), xycoords=("axes fraction", "data"), xytext=(4, -3),
            textcoords="offset points", fontsize=8, color="#444444", annotation_clip=False,
        )  # fmt: skip
    axes.set(xlabel="global rounds", ylabel="test accuracy")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically."""
    make_folder(path.parent)
    with atomic_write(path, sync=False) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:])
    pyplot().close(figure)


STYLE = {
    "font.size": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "stratafl",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}
"""Text stays text in SVG and PDF files, and dollar signs in names do not start formulas."""
