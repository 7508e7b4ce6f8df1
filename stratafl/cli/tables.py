"""Tables and sentences that fit the terminal, however narrow it is.

No cell is cut and no word broken. A column of names, numbers or commands is as wide as its longest
cell; a column of prose is broken between words. Where the columns do not fit beside each other,
those that matter least are left out, and where even the others do not fit, every row becomes a
heading with its values below it, each with its title. What an encoding has no letters for is spelt
out in those it has.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stratafl.base.errors import escape_control

GAP = "  "
"""Spaces between two columns, and before what is below a heading."""
READABLE = 24
"""Columns of a terminal that prose needs if it is to be read beside other columns."""
HELD = "\N{NO-BREAK SPACE}"
PLAIN = {"─": "-", "±": "+-", "×": "x", "→": "->"}
"""What the commands' own texts have beyond ASCII."""
SPELT = "stratafl.spelt"


def spell_out() -> None:
    """Let both streams write any text, so that in ASCII, too, a table is no traceback."""
    codecs.register_error(SPELT, _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELT)


def _spelt(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    return "".join(PLAIN.get(each) or each.encode("unicode_escape").decode("ascii") for each in text), problem.end


def unbroken(text: str) -> str:
    """A text that stays on one line, such as a command to copy."""
    return text.replace(" ", HELD)


@dataclass(frozen=True)
class Column:
    """What a table has to know of a column."""

    title: str
    right: bool = False
    """Whether the cells end below each other, as numbers do."""
    prose: bool = False
    """May be broken between words, and speaks without its title."""
    minor: bool = False
    """Left out where there is not room for all."""


@dataclass(frozen=True)
class _Placed:
    """A column with its place in a row, and the room it has."""

    column: Column
    at: int
    least: int
    wish: int

    @property
    def title(self) -> str:
        return self.column.title


class Table:
    """A table whose rows are printed one by one.

    `rows` are those to come, or such as are as wide as them, where they are not known yet.
    """

    def __init__(self, columns: Iterable[Column | str], rows: Sequence[Sequence[str]], console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.columns = [Column(each) if isinstance(each, str) else each for each in columns]
        known = [[_plain(cell) for cell in row] for row in rows]
        self._side_by_side = _fitting([_placed(c, n, known) for n, c in enumerate(self.columns)], self.console.width)

    def head(self, title: str = "") -> None:
        """The title and the columns' headings."""
        if title:
            self._print(*_broken(title, self.console.width), style="bold")
        if self._side_by_side:
            headings = [_broken(each.title, each.least) for each in self._side_by_side]
            self._grid(headings, style="bold")
            self._print("─" * (sum(e.least for e in self._side_by_side) + len(GAP) * (len(self._side_by_side) - 1)))

    def add(self, cells: Sequence[str]) -> None:
        """Add one row."""
        plain = [_plain(cell) for cell in cells]
        if self._side_by_side:
            self._grid([_broken(plain[each.at], each.least) for each in self._side_by_side])
        else:
            self._stack(plain)

    def _grid(self, cells: Sequence[Sequence[str]], style: str = "") -> None:
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [_padded(part, each) for part, each in zip(parts, self._side_by_side, strict=True)]
            self._print(GAP.join(padded).rstrip(), style=style)

    def _stack(self, cells: Sequence[str]) -> None:
        """The first cell as a heading, below it the values with their titles, then the prose."""
        self._print(cells[0], style="bold")
        rest = [(column, cell) for column, cell in zip(self.columns[1:], cells[1:], strict=True) if cell]
        values = GAP.join(unbroken(f"{column.title}: {cell}") for column, cell in rest if not column.prose)
        for text in filter(None, (values, *(cell for column, cell in rest if column.prose))):
            self._print(*(GAP + part for part in _broken(text, self.console.width - len(GAP))))

    def _print(self, *lines: str, style: str = "") -> None:
        for line in lines:
            _print_line(self.console, line, style)


def print_table(columns: Iterable[Column | str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A whole table on the standard output."""
    table = Table(columns, rows)
    table.head(title)
    for row in rows:
        table.add(row)


def print_sentence(text: str, below: str = GAP) -> None:
    """A text broken between words, its second and later lines further in."""
    console = Console(highlight=False)
    first, *more = _broken(_plain(text), console.width, len(below))
    for line in (first, *(below + part for part in more)):
        _print_line(console, line)


def _print_line(console: Console, line: str, style: str = "") -> None:
    """A line that is longer than the terminal is left to it: what is copied from there is whole."""
    console.print(Text(line.replace(HELD, " "), style), soft_wrap=True)


def _plain(text: str) -> str:
    """A text as a terminal only shows it, with whatever stands in backticks kept in one piece."""
    shown = HELD.join(map(escape_control, text.split(HELD)))
    return re.sub("`[^`]*`", lambda command: unbroken(command.group()), shown)


def _placed(column: Column, at: int, rows: Sequence[Sequence[str]]) -> _Placed:
    """How wide a column must be, and would like to be."""
    cells = [row[at] for row in rows]
    widest = max(map(cell_len, cells), default=0)
    words = [word for text in (column.title, *(cells if column.prose else ())) for word in text.split(" ")]
    least = max([min(widest, READABLE) if column.prose else widest, *map(cell_len, words)])
    return _Placed(column, at, least, max(widest, cell_len(column.title)))


def _fitting(columns: list[_Placed], width: int) -> list[_Placed]:
    """The columns that have room beside each other, each as wide as it will be; none if that is too
    few."""
    columns = list(columns)
    while (spare := width - sum(each.least for each in columns) - len(GAP) * (len(columns) - 1)) < 0:
        minor = [each for each in columns if each.column.minor]
        if not minor:
            return []
        columns.remove(minor[-1])
    while spare and (narrow := [each for each in columns if each.least < each.wish]):
        one = min(narrow, key=lambda each: each.least)
        columns[columns.index(one)] = replace(one, least=one.least + 1)
        spare -= 1
    return columns


def _padded(text: str, placed: _Placed) -> str:
    blank = " " * (placed.least - cell_len(text))
    return blank + text if placed.column.right else text + blank


def _broken(text: str, width: int, indent: int = 0) -> list[str]:
    """A text in lines of at most so many columns, broken between words only, all but the first by
    `indent` narrower; a longer word has a line of its own."""
    lines: list[str] = []
    for word in re.findall(r" *[^ ]+", text):
        room = width - (indent if len(lines) > 1 else 0)
        if lines and cell_len(lines[-1]) + cell_len(word) <= room:
            lines[-1] += word
        else:
            lines.append(word.lstrip(" ") if lines else word)
    return lines or [""]
