"""The command that runs a sweep and prints its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratafl.errors import number, printable
from stratafl.progress import SweepDisplay
from stratafl.store import layout
from stratafl.store.read import StoredRun, read_run
from stratafl.sweep import Outcome, Plan, Row, run_all, table


def sweep_command(
    file: Annotated[Path, typer.Argument(help="A TOML file; see docs/runs.md.")],
    runs: Annotated[Path, typer.Option(help="The sweep's folder goes into this one.")] = Path("runs"),
    workers: Annotated[int | None, typer.Option(help="Processes; one per GPU or core unless given.")] = None,
    target: Annotated[float | None, typer.Option(help="An accuracy, instead of the file's.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run a grid of configs, several at a time; what is done is skipped, what was interrupted goes on."""
    plan = Plan.load(file)
    goal = plan.target if target is None else number("--target", target, above=0, at_most=1)
    folder = runs / plan.name
    with SweepDisplay(plan.name, len(plan.entries), quiet) as display:
        outcomes = run_all({e.name: e.config for e in plan.entries}, folder, workers, display.show, display.say)
    stored = {o.name: read_run(o.path) for o in outcomes if o.status == layout.DONE and o.path is not None}
    rows = table(plan.entries, stored, goal)
    if as_json:
        print(json.dumps({
            "name": plan.name, "target": goal, "groups": [row.as_dict() for row in rows],
            "runs": [
                {**vars(outcome), "path": str(outcome.path or ""),
                 "diverged": stored[outcome.name].diverged if outcome.name in stored else None}
                for outcome in outcomes
            ],
        }))  # fmt: skip
    else:
        _print(plan.name, rows, goal, outcomes, stored)
        print(f"written to {printable(folder)}")
    if any(outcome.status != layout.DONE for outcome in outcomes):
        raise typer.Exit(1)


def _print(
    title: str, rows: list[Row], target: float | None, outcomes: list[Outcome], stored: dict[str, StoredRun]
) -> None:
    shown = Table(title=escape(title))
    shown.add_column("runs of", overflow="fold")
    shown.add_column("done", justify="right")
    shown.add_column("final accuracy", justify="right")
    if target is not None:
        shown.add_column(f"rounds to {target:g}", justify="right")
    for row in rows:
        cells = [escape(printable(row.group)), f"{row.done}/{row.runs}", row.accuracy_text]
        shown.add_row(*cells, *([row.rounds_text] if target is not None else []))
    Console().print(shown)
    skipped = sum(outcome.was_done for outcome in outcomes)
    if skipped:
        print(f"{skipped} of {len(outcomes)} runs were done before")
    for outcome in outcomes:
        if outcome.status != layout.DONE:
            print(printable(f"{outcome.name}: {outcome.status}: {outcome.reason}"))
        elif stored[outcome.name].diverged is not None:
            print(printable(f"{outcome.name}: diverged at round {stored[outcome.name].diverged}"))
