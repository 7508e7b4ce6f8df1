"""How a run shows itself while it goes on: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from stratafl.errors import printable
from stratafl.record import listed
from stratafl.simulate import RoundResult
from stratafl.store import layout
from stratafl.sweep.pool import Event


class Display:
    """Writes to the error stream, so that what a command prints can be piped."""

    def __init__(self, title: str, rounds: int, quiet: bool = False, done: int = 0):
        self.title, self.rounds, self.quiet = title, rounds, quiet
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}  {task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.live,
        )
        self._task = self._bar.add_task(escape(title), total=rounds, completed=done, metrics="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, result: RoundResult) -> None:
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items()))
        if result.refused:
            text += escape(printable(f"  refused {listed(sorted(set(result.refused)))}"))
        if self.live:
            self._bar.update(self._task, completed=result.round, metrics=text)
        elif not self.quiet:
            self.console.print(
                f"{escape(self.title)}: round {result.round}/{self.rounds}  {text}  {result.seconds:.1f}s",
                highlight=False,
                soft_wrap=True,
            )

    def say(self, text: str) -> None:
        """One line besides the rounds."""
        if not self.quiet:
            self.console.print(printable(f"{self.title}: {text}"), highlight=False, soft_wrap=True, markup=False)


class SweepDisplay:
    """All runs of a sweep: a bar for the whole and one for each run in progress, or a line for each that ended."""

    def __init__(self, title: str, runs: int, quiet: bool = False):
        self.title, self.runs, self.quiet = title, runs, quiet
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("{task.description}", table_column=Column(ratio=1, overflow="ellipsis", no_wrap=True)),
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[text]}", table_column=Column(no_wrap=True)),
            console=self.console,
            disable=not self.live,
        )
        self._whole = self._bar.add_task(escape(title), total=runs, text="runs")
        self._tasks: dict[str, TaskID] = {}
        self._ended = 0

    def __enter__(self) -> SweepDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        name, values = event.name, event.values
        if event.kind == "began":
            self._tasks[name] = self._bar.add_task(
                escape(printable(name)), total=values["rounds"], completed=values["done"], text=""
            )
        elif event.kind == "round":
            self._bar.update(self._tasks[name], completed=values["round"])
            if "accuracy" in values["metrics"]:
                self._bar.update(self._tasks[name], text=f"{values['metrics']['accuracy']:.3f}")
        elif event.kind == "said":
            self.say(f"{name}: {values['text']}")
        elif event.kind == "ended":
            self._ended += values["status"] == layout.DONE
            self._bar.update(self._whole, completed=self._ended)
            if name in self._tasks:
                self._bar.remove_task(self._tasks.pop(name))
            reason = f": {values['reason']}" if values["reason"] else ""
            if not self.live or values["status"] != layout.DONE:
                self.say(f"{name}: {values['status']}{reason}  ({self._ended}/{self.runs} done)")

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(printable(text), highlight=False, soft_wrap=True, markup=False)
