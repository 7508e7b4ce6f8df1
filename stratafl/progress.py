"""How a run shows itself while it goes on: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stratafl.simulate import RoundResult


class Display:
    """Writes to the error stream, so that what a command prints can be piped."""

    def __init__(self, title: str, rounds: int, quiet: bool = False):
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
        self._task = self._bar.add_task(title, total=rounds, metrics="")

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
            text += f"  refused {', '.join(sorted(set(result.refused)))}"
        if self.live:
            self._bar.update(self._task, completed=result.round, metrics=text)
        elif not self.quiet:
            self.console.print(
                f"{self.title}: round {result.round}/{self.rounds}  {text}  {result.seconds:.1f}s",
                highlight=False,
                soft_wrap=True,
            )

    def say(self, text: str) -> None:
        """One line besides the rounds."""
        if not self.quiet:
            self.console.print(f"{self.title}: {text}", highlight=False, soft_wrap=True)
