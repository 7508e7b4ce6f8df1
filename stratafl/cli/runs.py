"""`stratafl runs`: a list of stored runs."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.base.validation import check_choice
from stratafl.cli.options import AsJson
from stratafl.cli.tables import Column, print_table
from stratafl.runs import format
from stratafl.runs.reader import StoredRun, UnreadableRun, pack_runs, scan

Condition = tuple[Sequence[str], Any]


def runs_command(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    status: Annotated[
        list[str] | None, typer.Option(help=f"Only those that are {', '.join(format.STATUSES)}; repeatable.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="Only those whose config says so; repeatable."),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Put their records into one file, without models.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List stored runs, oldest first, with what became of them."""
    for name in status or ():
        check_choice("--status", name, format.STATUSES)
    conditions = [_condition(text) for text in where or ()]
    entries = scan(folder)
    readable = [run for run in entries if isinstance(run, StoredRun)]
    broken = [] if status or where else [run for run in entries if isinstance(run, UnreadableRun)]
    chosen = [run for run in readable if (not status or run.status in status) and _meets(run, conditions)]
    if pack is not None:
        size = pack_runs(chosen, folder, pack)
        summary = f"{len(chosen)} runs in {escape_control(pack)}, {size / 1e6:.2f} MB"
        print(summary, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps({"runs": [_row(run) for run in chosen],
                          "unreadable": [{"path": str(b.path), "reason": b.reason} for b in broken]}))  # fmt: skip
    elif pack is None and not chosen and not broken:
        filtered = bool(status or where)
        print(f"no such runs in {folder}{_nowhere(readable, conditions)}" if filtered else f"no runs in {folder}")
    elif pack is None:
        _print_table(chosen, folder)
        for each in broken:
            print(escape_control(f"unreadable: {each.reason}"))


def _print_table(runs: Sequence[StoredRun], folder: Path) -> None:
    """A line for each run, and below the table why some of them ended as they did."""
    summaries = [_row(run) for run in runs]
    # where nothing is classified, there is no accuracy
    metric = "accuracy" if any("accuracy" in row["final"] for row in summaries) else "loss"
    columns = (
        Column("run"),
        Column("method"),
        Column("status"),
        Column("rounds", right=True),
        Column(metric, right=True),
        Column("seconds", right=True, minor=True),
        Column("engine", minor=True),
    )
    cells = []
    for run, row in zip(runs, summaries, strict=True):
        value = row["final"].get(metric)
        outcome = "diverged" if row["diverged"] is not None else "" if value is None else f"{value:.4f}"
        name, rounds = str(run.path.relative_to(folder)), f"{run.round}/{run.total}"
        cells.append((name, row["method"], run.status, rounds, outcome, f"{row['seconds']:.1f}", run.engine))
    print_table(columns, cells)
    for run in runs:
        name = escape_control(run.path.relative_to(folder))
        if run.reason:
            print(f"{name}: {run.status}: {escape_control(run.reason)}")
        if run.diverged is not None:
            print(f"{name}: diverged at round {run.diverged}")
        for why, nodes in run.left_out.items():
            if nodes and why != "too_large":
                print(f"{name}: {why} {sum(nodes.values()):,} times: {escape_control(join_names(list(nodes)))}")


def _row(run: StoredRun) -> dict[str, Any]:
    from stratafl.metrics.records import measured

    last = next(filter(None, map(measured, reversed(run.rounds))), {})
    return {
        "path": str(run.path),
        "name": run.name,
        "id": run.id,
        "method": run.method,
        "status": run.status,
        "reason": run.reason,
        "round": run.round,
        "rounds": run.total,
        "created": run.created,
        "updated": run.updated,
        "engine": run.engine,
        "how": run.how,
        "notes": list(run.notes),
        "precision": run.precision,
        "final": last,
        "diverged": run.diverged,
        **run.left_out,
        "seconds": sum(r.get("seconds", 0.0) for r in run.rounds),
    }


def _condition(text: str) -> Condition:
    """A key's path and the value it must have, TOML or plain text, from section.key=value."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InvalidInput("--where", text, "must look like section.key=value")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def _meets(run: StoredRun, conditions: Sequence[Condition]) -> bool:
    return all(_lookup(run.config, keys) == value for keys, value in conditions)


def _nowhere(runs: Sequence[StoredRun], conditions: Sequence[Condition]) -> str:
    """Names the keys asked for that no run has: they are probably misspelt."""
    absent = [".".join(keys) for keys, _ in conditions if all(_lookup(run.config, keys) is None for run in runs)]
    return f": none has {', '.join(absent)}" if runs and absent else ""


def _lookup(config: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if not isinstance(config, dict):
            return None
        config = config.get(key)
    return config
