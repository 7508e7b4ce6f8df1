"""The command that lists stored runs."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratafl.divergence import measured
from stratafl.errors import InvalidInput, printable, unknown
from stratafl.store import layout
from stratafl.store.carry import pack_runs
from stratafl.store.read import Broken, StoredRun, scan

NARROW = 60
"""Columns of a terminal below which only what matters most is shown."""


def runs_command(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    status: Annotated[
        list[str] | None, typer.Option(help=f"Only those that are {', '.join(layout.STATUSES)}; repeatable.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="Only those whose config says so; repeatable."),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Put their records into one file, without models.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List stored runs, oldest first, with what became of them."""
    for wanted in status or ():
        if wanted not in layout.STATUSES:
            raise unknown("--status", wanted, layout.STATUSES)
    conditions = [_condition(text) for text in where or ()]
    found = scan(folder)
    runs = [run for run in found if isinstance(run, StoredRun)]
    broken = [] if status or where else [run for run in found if isinstance(run, Broken)]
    chosen = [
        run
        for run in runs
        if (not status or run.status in status)
        and all(_lookup(run.config, keys) == value for keys, value in conditions)
    ]
    if pack is not None:
        size = pack_runs(chosen, folder, pack)
        told = f"{len(chosen)} runs in {printable(pack)}, {size / 1e6:.2f} MB"
        print(told, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps({"runs": [_row(run) for run in chosen],
                          "unreadable": [{"path": str(b.path), "reason": b.reason} for b in broken]}))  # fmt: skip
        return
    if pack is not None:
        return
    if not chosen and not broken:
        nowhere = [".".join(keys) for keys, _ in conditions if all(_lookup(run.config, keys) is None for run in runs)]
        told = f": none has {', '.join(nowhere)}" if runs and nowhere else ""
        print(f"no such runs in {folder}{told}" if status or where else f"no runs in {folder}")
        return
    console = Console()
    details = ("accuracy", "seconds") if console.width >= NARROW else ()
    table = Table()
    table.add_column("run", overflow="fold")
    for heading in ("status", "rounds", *details):
        table.add_column(heading, no_wrap=True)
    for run in chosen:
        row = _row(run)
        accuracy = "" if row["final"].get("accuracy") is None else f"{row['final']['accuracy']:.4f}"
        cells = [accuracy if row["diverged"] is None else "diverged", f"{row['seconds']:.1f}"]
        name = escape(printable(run.path.relative_to(folder)))
        table.add_row(name, run.status, f"{run.round}/{run.total}", *cells[: len(details)])
    console.print(table)
    for run in chosen:
        name = printable(run.path.relative_to(folder))
        if run.reason:
            print(f"{name}: {run.status}: {printable(run.reason)}")
        if run.diverged is not None:
            print(f"{name}: diverged at round {run.diverged}")
    for each in broken:
        print(printable(f"unreadable: {each.reason}"))


def _row(run: StoredRun) -> dict[str, Any]:
    last = next((found for record in reversed(run.rounds) if (found := measured(record))), {})
    return {
        "path": str(run.path),
        "name": run.name,
        "id": run.id,
        "status": run.status,
        "reason": run.reason,
        "round": run.round,
        "rounds": run.total,
        "created": run.created,
        "updated": run.updated,
        "final": last,
        "diverged": run.diverged,
        "seconds": sum(r.get("seconds", 0.0) for r in run.rounds),
    }


def _condition(text: str) -> tuple[Sequence[str], Any]:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InvalidInput("--where", text, "must look like section.key=value")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def _lookup(config: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if not isinstance(config, dict):
            return None
        config = config.get(key)
    return config
