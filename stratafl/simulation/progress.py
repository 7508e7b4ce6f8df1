"""Progress of a run: a live bar on a terminal, a line that is overwritten in a notebook, and plain
lines elsewhere, also on a terminal that cannot overwrite its lines. The bar and the overwritten
line move whenever clients synchronise; plain lines come once per global round."""

from __future__ import annotations

import os
import shutil
import sys
from types import TracebackType
from typing import Any, TextIO

from stratafl.base.errors import escape_control, join_names
from stratafl.metrics.records import RoundResult

NARROW = 60
"""Columns of a terminal below which a line has no room for a bar."""


def in_notebook() -> bool:
    """Whether output is shown below a notebook's cell."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def is_interactive() -> bool:
    """Whether output is seen at once: at a terminal, or in a notebook."""
    return in_notebook() or sys.stderr.isatty()


def cannot_rewrite_lines() -> bool:
    """Whether a terminal cannot overwrite its lines."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


class ProgressBar:
    """Shows the progress of a run on the error stream, so that a command's output can be piped, or
    below a notebook's cell."""

    def __init__(self, title: str, rounds: int, quiet: bool = False, done: int = 0):
        """done: number of global rounds that were completed before."""
        self.title, self.rounds, self.quiet, self.done = title, rounds, quiet, done
        self._bar = None if quiet or in_notebook() else _bar()
        self._rewrites = (
            not quiet and self._bar is None and (in_notebook() or (is_interactive() and not cannot_rewrite_lines()))
        )
        self._task = None if self._bar is None else self._bar.add_task(
            _escaped(title), total=rounds, completed=done, done=done, within_round="", metrics=""
        )  # fmt: skip
        self._metrics, self._width = "", 0

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._end_line()

    def on_sync(self, syncs: int, syncs_per_round: int) -> None:
        """Show the number of the clients' synchronisations of a global round that are done."""
        self._draw(self.done + syncs / syncs_per_round, f"sync {syncs}/{syncs_per_round}")

    def show(self, result: RoundResult) -> None:
        """Show the metrics of a global round that is done."""
        self.done = result.round
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items()))
        if result.refused:
            text += escape_control(f"  refused {join_names(sorted(set(result.refused)))}")
        # bar and overwritten line: a round that was not evaluated keeps earlier metrics
        self._metrics = text or self._metrics
        if self._bar is not None or self._rewrites:
            self._draw(self.done, "")
        elif not self.quiet:
            self._write(f"{self.title}: round {result.round}/{self.rounds}  {text}  {result.seconds:.1f}s")

    def print_line(self, text: str) -> None:
        """Print a line between those of the rounds."""
        if not self.quiet:
            self._end_line()
            self._write(escape_control(f"{self.title}: {text}"))

    def _draw(self, completed: float, within_round: str) -> None:
        if self._bar is not None:
            values = {"done": self.done, "within_round": within_round, "metrics": _escaped(self._metrics)}
            self._bar.update(self._task, completed=completed, **values)
        elif self._rewrites:
            parts = (f"{self.title}: round {self.done}/{self.rounds}", within_round, self._metrics)
            text = "  ".join(filter(None, parts))
            if not in_notebook():
                # a line that is wrapped cannot be written over
                text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text:{self._width}}", end="", file=_stream(), flush=True)
            self._width = len(text)

    def _end_line(self) -> None:
        if self._width:
            print(file=_stream(), flush=True)
            self._width = 0

    def _write(self, text: str) -> None:
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _stream() -> TextIO:
    return sys.stdout if in_notebook() else sys.stderr


def _bar() -> Any:
    """Live bar of one line on a terminal; None elsewhere, or where `rich` is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
    except ImportError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal or cannot_rewrite_lines():
        return None

    def text(words: str) -> TextColumn:
        return TextColumn(words, table_column=Column(no_wrap=True, overflow="ellipsis"))

    if console.width < NARROW:
        # a single column, so that its end is cut off
        return Progress(
            text("round {task.fields[done]}/{task.total:.0f} {task.fields[within_round]} {task.fields[metrics]}"),
            console=console,
        )
    return Progress(
        text("{task.description}"),
        BarColumn(bar_width=20 if console.width >= 80 else 8),
        text("round {task.fields[done]}/{task.total:.0f}"),
        text("{task.fields[within_round]}"),
        text("{task.fields[metrics]}"),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=console,
    )


def _escaped(text: str) -> str:
    """Escape text that the bar would read as markup."""
    return text.replace("[", "\\[")
