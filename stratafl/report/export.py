"""The summary for other programs: as CSV with every number in full, and as a table for LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from decimal import Decimal

from stratafl.report.measures import ABSENT, MINUS
from stratafl.report.summary import Cell, Column

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
        cells = [_cell(column.cells[place], place in column.best) for column in columns]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _with(spread: Sequence[bool], columns: Sequence[Column]) -> list[tuple[Column, bool]]:
    return list(zip(columns, spread, strict=True))


def _cell(cell: Cell, is_best: bool) -> str:
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
