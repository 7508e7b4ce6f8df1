"""Tables and sentences on terminals of any width: nothing is cut, and no word is broken."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from stratafl.cli.tables import Column, Table, print_sentence, print_table, unbroken

WIDTHS = (40, 60, 80, 120)
LONG = "a-sweep-of-many/digits-5x4-local_correction-4-10-s0-3d311369-20261117-020505-984ba"
COMMAND = "stratafl data prepare emnist_letters --from hub"
COLUMNS = (
    Column("run"),
    Column("bytes in", right=True),
    Column("what it is", prose=True),
    Column("engine", minor=True),
)
ROWS = [
    ("short", "12,345,678,901", f"one sentence about it, and then: `{COMMAND}`; or nothing", "stacked"),
    ("digits-5x4-mtgc", "7", "unquestionably", "vmap"),
    ("[red]not markup[/red]", "", "", "loop"),
]


def shown(width: int, columns: Sequence[Column | str], rows: Sequence[Sequence[str]], title: str = "") -> list[str]:
    """The lines of a table on a terminal of that width."""
    written = io.StringIO()
    table = Table(columns, rows, Console(file=written, width=width, highlight=False))
    table.head(title)
    for row in rows:
        table.add(row)
    return written.getvalue().splitlines()


def words(rows: Sequence[Sequence[str]]) -> set[str]:
    return {word for row in rows for cell in row for word in cell.replace("`", " ").split()}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_word_is_whole_and_every_line_fits(width: int) -> None:
    lines = shown(width, COLUMNS, ROWS, "A title of a few words, which is longer than a narrow terminal is wide")
    text = "\n".join(lines)
    gone = {row[3] for row in ROWS} if "engine" not in text else set()
    assert words(ROWS) - gone <= set(re.split(r"[\s`]+", text))
    assert any(COMMAND in line for line in lines)
    assert all(len(line) <= width for line in lines if COMMAND not in line)
    assert "…" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_longer_than_the_terminal_stays_in_one_piece(width: int) -> None:
    lines = shown(width, ("run", Column("rounds", right=True)), [(LONG, "12/500")])
    assert any(LONG in line for line in lines)
    assert any("12/500" in line for line in lines)


def test_columns_stand_below_each_other_where_they_fit() -> None:
    head, rule, *rows = shown(160, COLUMNS, ROWS)
    assert [head.index(each.title) for each in COLUMNS[2:]] == [rows[0].index("one"), rows[0].index("stacked")]
    assert set(rule) == {"─"}
    end = head.index("bytes in") + len("bytes in")
    assert all(row[:end].rstrip().endswith(cells[1] or cells[0]) for row, cells in zip(rows, ROWS, strict=True))


def test_what_matters_least_goes_first_and_then_rows_become_paragraphs() -> None:
    columns = ("name", Column("number", right=True), Column("detail", minor=True))
    row = ("a" * 20, "1" * 20, "d" * 20)
    assert shown(70, columns, [row])[0].split() == ["name", "number", "detail"]
    assert shown(60, columns, [row])[0].split() == ["name", "number"]
    assert shown(30, columns, [row]) == ["a" * 20, f"  number: {'1' * 20}", f"  detail: {'d' * 20}"]


def test_a_title_is_broken_before_its_column_is_widened() -> None:
    columns = ("n", Column("rounds to target", right=True), Column("speed-up", right=True))
    assert shown(26, columns, [("mtgc", "6.0", ">2x")])[0].split() == ["n", "rounds", "to", "speed-up"]


def test_what_would_steer_a_terminal_is_spelt_out() -> None:
    (_, _, row) = shown(80, ("name", "method"), [("a\x1b[31m", "b\nc")])
    assert row.split() == ["a\\x1b[31m", "b\\nc"]


def test_rows_of_unknown_width_are_laid_out_by_the_widest() -> None:
    written = io.StringIO()
    table = Table(
        ("engine", Column("ms", right=True)), [("graphed loop", "99999.999")], Console(file=written, width=60)
    )
    table.head()
    table.add(("vmap", "1.5"))
    *_, row = written.getvalue().splitlines()
    assert row == f"{'vmap':12}  {'1.5':>9}"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sentence_is_broken_between_words(width: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = f"held in part: MTGC needs the fewest rounds; run: `{COMMAND}` and unquestionably more"
    print_sentence(text)
    first, *more = capsys.readouterr().out.splitlines()
    assert " ".join([first, *map(str.strip, more)]) == text
    assert all(line.startswith("  ") for line in more)
    assert all(len(line) <= width for line in (first, *more) if COMMAND not in line)


def test_wide_characters_take_two_columns() -> None:
    _, _, first, second = shown(80, ("name", "state"), [("おきす", "x"), ("ascii", "x")])
    assert first == "おきす  x" and second == "ascii   x"


def test_a_whole_table_goes_to_the_standard_output(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("name", Column("needs", prose=True)), [("fig3", unbroken("cifar10 *"))], "Figures")
    title, head, _, row = capsys.readouterr().out.splitlines()
    assert (title, head, row) == ("Figures", "name  needs", "fig3  cifar10 *")
