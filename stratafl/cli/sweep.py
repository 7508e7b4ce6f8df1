"""`stratafl sweep`: a grid of runs, and its table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.cli.options import TARGET_HELP, AsJson, Changes, KeepStale, Quiet, Workers
from stratafl.cli.tables import Column, print_table
from stratafl.runs import format
from stratafl.runs.reader import StoredRun

if TYPE_CHECKING:
    from stratafl.metrics.objective import Goal
    from stratafl.sweeps import GroupSummary, Outcome, RunState


def sweep_command(
    file: Annotated[Path, typer.Argument(help="A TOML file; see docs/runs.md.")],
    change: Changes = None,
    runs: Annotated[Path, typer.Option("--runs", "-d", help="The sweep's folder goes into this one.")] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The sweep's folder; RUNS/NAME unless given.")
    ] = None,
    workers: Workers = None,
    executor: Annotated[
        str, typer.Option(metavar="EXECUTOR", help="Where runs execute: local, slurm, ray, or file.py:Class.")
    ] = "local",
    target: Annotated[str | None, typer.Option(metavar="TARGET", help=f"{TARGET_HELP} Instead of the file's.")] = None,
    keep_stale: KeepStale = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which runs are current, stale, interrupted and new; train none.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of configs, several at a time; what is done is skipped."""
    from stratafl.cli.display import SweepDisplay
    from stratafl.metrics.objective import parse_goal
    from stratafl.metrics.records import measured
    from stratafl.sweeps import Sweep, run_all, run_states, table
    from stratafl.sweeps.sweep import stored_runs

    plan = Sweep.load(file, change or ())
    goal = plan.target if target is None else parse_goal("--target", target)
    folder = out or runs / plan.name
    experiments = {entry.name: entry.experiment for entry in plan.entries}
    if dry_run:
        _print_states(plan.name, run_states(experiments, folder, _say, keep_stale), as_json)
        return
    with SweepDisplay(plan.name, len(plan.entries), quiet) as display:
        # what is run again, or kept although it is stale, is no progress
        say = _say if quiet else display.say
        outcomes = run_all(
            experiments, folder, workers, display.show, say, keep_stale=keep_stale, target=goal, executor=executor
        )
    stored = stored_runs(outcomes)
    better = {name: way for run in stored.values() for name, way in run.better.items()}
    records = [record for run in stored.values() for record in run.rounds]
    metrics = sorted(better.keys() | {name for record in records for name in measured(record)})
    if goal is not None and stored and goal.metric not in metrics:
        field, value = ("target", goal) if target is None else ("--target", target)
        raise InvalidInput(field, str(value), f"these runs have {join_names(metrics) or 'no metrics'}")
    goal = goal and goal.with_direction(better)
    rows = table(plan.entries, stored, goal)
    if as_json:
        print(json.dumps({
            "name": plan.name, "target": None if goal is None else asdict(goal),
            "groups": [row.as_dict() for row in rows],
            "runs": [
                {**vars(outcome), "path": str(outcome.path or ""),
                 "diverged": stored[outcome.name].diverged if outcome.name in stored else None}
                for outcome in outcomes
            ],
        }))  # fmt: skip
    else:
        _print(plan.name, rows, goal, outcomes, stored)
        print(f"written to {escape_control(folder)}")
    if any(outcome.status != format.DONE for outcome in outcomes):
        raise typer.Exit(1)


def _print_states(title: str, states: Mapping[str, RunState], as_json: bool) -> None:
    from stratafl.sweeps import summary_line

    if as_json:
        print(json.dumps({"name": title, "runs": [state.as_dict() for state in states.values()]}))
        return
    for name, state in states.items():
        print(escape_control(f"{name}: {state}"))
    print(escape_control(summary_line(states.values())))


def _say(text: str) -> None:
    print(escape_control(text), file=sys.stderr)


def _print(
    title: str, rows: list[GroupSummary], target: Goal | None, outcomes: list[Outcome], stored: dict[str, StoredRun]
) -> None:
    final = f"final {rows[0].metric}" if rows else "final"
    numbers = ["done", final, *([] if target is None else [f"rounds to {target.value:g}"])]
    cells = [
        (row.group, f"{row.done}/{row.runs}", row.final_text, *([] if target is None else [row.rounds_text]))
        for row in rows
    ]
    print_table(["runs of", *(Column(each, right=True) for each in numbers)], cells, title)
    skipped = sum(outcome.was_done for outcome in outcomes)
    if skipped:
        print(f"{skipped} of {len(outcomes)} runs were done before")
    for outcome in outcomes:
        if outcome.status != format.DONE:
            print(escape_control(f"{outcome.name}: {outcome.status}: {outcome.reason}"))
        elif stored[outcome.name].diverged is not None:
            print(escape_control(f"{outcome.name}: diverged at round {stored[outcome.name].diverged}"))
