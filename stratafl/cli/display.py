"""How the runs of a sweep show themselves while they go on; a single one is in
`simulation.progress`."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from stratafl.base.errors import escape_control
from stratafl.runs import format
from stratafl.simulation.progress import cannot_rewrite_lines
from stratafl.sweeps.sweep import Event


class SweepDisplay:
    """All runs of a sweep.

    On a terminal there is a bar for the whole and one for each run in progress, elsewhere a line
    for each that ended.
    """

    def __init__(self, title: str, runs: int, quiet: bool = False):
        self.title, self.runs, self.quiet = title, runs, quiet
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not cannot_rewrite_lines() and not quiet
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
                escape(escape_control(name)), total=values["rounds"], completed=values["done"], text=""
            )
        elif event.kind == "round":
            self._bar.update(self._tasks[name], completed=values["round"])
            if "accuracy" in values["metrics"]:
                self._bar.update(self._tasks[name], text=f"{values['metrics']['accuracy']:.3f}")
        elif event.kind == "said":
            self.say(f"{name}: {values['text']}")
        elif event.kind == "ended":
            self._ended += values["status"] == format.DONE
            self._bar.update(self._whole, completed=self._ended)
            if name in self._tasks:
                self._bar.remove_task(self._tasks.pop(name))
            reason = f": {values['reason']}" if values["reason"] else ""
            if not self.live or values["status"] != format.DONE:
                self.say(f"{name}: {values['status']}{reason}  ({self._ended}/{self.runs} done)")

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(escape_control(text), highlight=False, soft_wrap=True, markup=False)
