"""Style of all figures: colours and dashes of methods, fonts, and how static figures are saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.base.files import atomic_write, check_writable, make_folder

VERMILION, BLUE, GREEN, PINK, OCHRE, VIOLET, SLATE = PALETTE = (
    "#d55e00", "#0072b2", "#009e73", "#c2629b", "#a87400", "#6b4fbb", "#5b6470",
)  # fmt: skip
"""Colours of lines: those of Okabe and Ito, which readers with any colour vision can distinguish,
with a violet instead of their second blue."""

DARK_PALETTE = ("#ff9257", "#6cb4ee", "#34c79a", "#e7a3c8", "#efb93c", "#b9a2ff", "#c2c8d2")
"""The same colours on a dark page."""

DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (4, 2),
    (1, 1.4),
    (5, 1.6, 1, 1.6),
    (9, 2),
    (5, 1.4, 1, 1.4, 1, 1.4),
    (8, 1.6, 3, 1.6),
    (1, 3),
)
"""Lengths of dashes and gaps in widths of the line; a solid line has none."""

MAX_DISTINCT_STYLES = len(PALETTE) * len(DASHES)

METHODS = {
    "mtgc": "MTGC",
    "hfedavg": "HFedAvg",
    "local_correction": "local correction",
    "group_correction": "group correction",
    "scaffold": "SCAFFOLD",
    "fedprox": "FedProx",
    "feddyn": "FedDyn",
    "momentum": "FedAvgM",
    "adam": "FedAdam",
    "yogi": "FedYogi",
}
"""Names of methods in papers, in the order of their colours and dashes. New ones are appended, so
that the others keep theirs; other methods have their own names."""

INK, QUIET, FAINT = "#1b1f24", SLATE, "#c3c8cf"
"""Colours of text, of what explains, and of what stands back."""


class LineStyle(NamedTuple):
    """Places of a line's colour in `PALETTE` and of its dash in `DASHES`."""

    colour: int
    dash: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of Matplotlib's `plot`."""
        dash = DASHES[self.dash]
        return {"color": PALETTE[self.colour], "linestyle": (0, dash) if dash else "-"}


def line_styles(methods: Sequence[str]) -> list[LineStyle]:
    """Choose the styles of lines by their methods.

    The first line of a method has its own colour and dash, the same in every figure: built-in
    methods by their order in `METHODS`, then others by name. Further lines of it have its colour,
    and a dash that no other line has, as far as possible. Lines for which a method has no dash left
    borrow a colour, at first one of no method in the figure.
    """
    order = [*METHODS, *sorted(set(methods) - set(METHODS))]
    own = {name: LineStyle(place % len(PALETTE), place % len(DASHES)) for place, name in enumerate(order)}
    taken = Counter(own[name] for name in set(methods))
    colours, dashes = {style.colour for style in taken}, Counter(style.dash for style in taken.elements())
    styles: list[LineStyle] = []
    for place, method in enumerate(methods):
        first = style = own[method]
        if method in methods[:place]:
            keys = {
                other: (
                    taken[other],
                    other.colour != first.colour and (other.colour in colours) + 1,
                    (other.colour - first.colour) % len(PALETTE),
                    dashes[other.dash],
                    (other.dash - first.dash) % len(DASHES),
                )
                for other in starmap(LineStyle, product(range(len(PALETTE)), range(len(DASHES))))
            }
            style = min(keys, key=keys.__getitem__)
            taken[style] += 1
            dashes[style.dash] += 1
        styles.append(style)
    return styles


def pyplot() -> Any:
    """Import Matplotlib without a display."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("a picture", "matplotlib") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def style() -> Iterator[Any]:
    """Context in which Matplotlib, which it yields, draws in the style of this package."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        yield plt


STYLE = {
    "font.size": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    "legend.columnspacing": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "stratafl",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}
"""Text stays text in SVG and PDF files, and dollar signs in names do not start formulas."""

WITHOUT_DATE: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None, "ModDate": None}}
"""Metadata that would make equal figures different files."""


def check_picture(path: Path, option: str = "--out") -> None:
    """Check that a figure can be written to a path, before the work it will show."""
    if path.is_dir() or path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidInput(option, str(path), "must be a file that ends in .png, .svg or .pdf")
    check_writable(option, path, is_file=True)


def save(figure: Any, *paths: Path) -> None:
    """Write a figure to files of any format, each atomically, and close it."""
    for path in paths:
        make_folder(path.parent)
        with atomic_write(path, sync=False) as file:
            figure.savefig(file, dpi=150, format=path.suffix[1:], metadata=WITHOUT_DATE.get(path.suffix))
    pyplot().close(figure)
