"""`stratafl runs`: list, show, compare and export stored runs."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from stratafl.base.errors import InvalidInput, escape_control, join_names, unknown_name
from stratafl.cli.options import AsJson, Commands, RunArgument, RunsFolder
from stratafl.cli.tables import Column, print_table
from stratafl.runs import format
from stratafl.runs.reader import StoredRun, UnreadableRun, pack_runs, read_run, scan

runs = typer.Typer(cls=Commands, help="Stored runs: list, show, compare, export.", no_args_is_help=True)


class Status(StrEnum):
    """States of a run; an enumeration, since Typer takes no lists of Literals."""

    RUNNING = format.RUNNING
    DONE = format.DONE
    INTERRUPTED = format.INTERRUPTED
    FAILED = format.FAILED


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of runs.")]
Statuses = Annotated[list[Status] | None, typer.Option("--status", help="Only those that are so; repeatable.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SECTION.KEY=VALUE", help="Only those whose config says so, also with != < <= > >=; repeatable."
    ),
]
LATEST = "latest"
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*(!=|<=|>=|=|<|>)\s*(.*)", re.DOTALL)
SORT_KEYS = ("created", "name", "method", "status", "round", "seconds")


class Condition(NamedTuple):
    """A comparison that the config of a run has to fulfil."""

    key: str
    sign: str
    value: Any

    @staticmethod
    def parse(text: str) -> Condition:
        """Read "section.key=value", or with another comparison; the value is TOML or plain text."""
        from stratafl.experiment.toml import plain_value

        match = CONDITION.fullmatch(text)
        if match is None or not all(match[1].split(".")):
            raise InvalidInput("--where", text, "must look like section.key=value, or with !=, <, <=, > or >=")
        return Condition(match[1], match[2], plain_value("--where", match[3]))

    def is_met(self, run: StoredRun) -> bool:
        """Whether a run fulfils it; values that cannot be compared do not."""
        value = value_of(run.config, self.key)
        if isinstance(value, dict) and not isinstance(self.value, dict):
            value = value.get("name")
        try:
            return OPERATORS[self.sign](value, self.value)
        except TypeError:
            return False


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key in nested tables; None without it."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


@runs.command("list")
def list_command(
    folder: Folder = Path("runs"),
    status: Statuses = None,
    where: Where = None,
    sort: Annotated[
        str, typer.Option(metavar="KEY", help=f"{', '.join(SORT_KEYS)} or a metric; the highest or newest first.")
    ] = "created",
    limit: Annotated[int | None, typer.Option("--limit", "-n", metavar="N", help="Only the first N.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """List stored runs, newest first, with what became of them."""
    chosen, broken, absent = _select(folder, status, where)
    rows = {run.path: _row(run) for run in chosen}
    chosen = _sorted(chosen, rows, sort)[:limit]
    if as_json:
        unreadable = [{"path": str(run.path), "reason": run.reason} for run in broken]
        print(json.dumps({"runs": [rows[run.path] for run in chosen], "unreadable": unreadable}))
        return
    if chosen:
        _print_table(chosen, [rows[run.path] for run in chosen], folder)
    elif not broken:
        print(_nothing(folder, status, where, absent))
    for run in broken:
        print(escape_control(f"unreadable: {run.reason}"))


@runs.command("show")
def show_command(run: RunArgument, folder: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Show a run: what became of it, its last metrics, its config and its environment."""
    stored = read_run(find_run(run, folder))
    row = _row(stored)
    if as_json:
        print(json.dumps({**row, "config": stored.config, "environment": stored.environment, "files": stored.files}))
        return
    reason = f": {stored.reason}" if stored.reason else ""
    facts = {
        "run": row["path"],
        "status": f"{stored.status}, {stored.round} of {stored.total} rounds{reason}",
        "created": stored.created,
        "trained": f"{row['seconds']:.1f} s, {stored.how} {stored.precision}".rstrip(),
        "metrics": "  ".join(f"{name} {value:.4f}" for name, value in row["final"].items()) or "none yet",
        **{f"note {number}": note for number, note in enumerate(stored.notes, 1)},
        **{f"continued after round {entry['after']}": entry["time"] for entry in stored.continued},
    }
    print_table(["what", Column("value", prose=True)], list(facts.items()), stored.name)
    for title, table in (("Config", stored.config), ("Environment", stored.environment)):
        print()
        print_table(["key", Column("value", prose=True)], [(k, _text(v)) for k, v in _flat(table).items()], title)


@runs.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, a part of its name, or latest.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="The other run.")],
    folder: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compare two runs: the options, files and last metrics in which they differ."""
    stored = [read_run(find_run(name, folder)) for name in (first, second)]
    tables = [_comparable(run) for run in stored]
    keys = dict.fromkeys(key for table in tables for key in table)
    differing = {key: [table.get(key) for table in tables] for key in keys if tables[0].get(key) != tables[1].get(key)}
    if as_json:
        print(json.dumps({"runs": [str(run.path) for run in stored], "differences": differing}))
    elif differing:
        rows = [(key, *map(_text, values)) for key, values in differing.items()]
        print_table(["key", *(Column(run.path.name, prose=True) for run in stored)], rows)
    else:
        print("the runs do not differ")


@runs.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="The archive to write.")],
    folder: Folder = Path("runs"),
    status: Statuses = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Put the records of runs into one file, without models and checkpoints."""
    chosen, _, absent = _select(folder, status, where)
    if not chosen and not as_json:
        print(_nothing(folder, status, where, absent))
        return
    size = pack_runs(chosen, folder, file)
    if as_json:
        print(json.dumps({"file": str(file), "bytes": size, "runs": [str(run.path) for run in chosen]}))
    else:
        print(f"{len(chosen)} runs in {escape_control(file)}, {size / 1e6:.2f} MB")


def find_run(name: str, folder: Path) -> Path:
    """The folder of a run that is named by its path, by a part of its folder's name or as the
    latest one in a folder of runs."""
    if Path(name).exists():
        return Path(name)
    entries = scan(folder) if folder.is_dir() else []
    if name == LATEST:
        readable = [run for run in entries if isinstance(run, StoredRun)]
        if not readable:
            raise InvalidInput("RUN", name, f"no runs in {folder} yet")
        return readable[-1].path
    paths = {str(run.path.relative_to(folder)): run.path for run in entries}
    matches = [text for text in paths if name in text]
    if not matches:
        raise unknown_name("RUN", name, [*paths, LATEST])
    if len(matches) > 1:
        raise InvalidInput("RUN", name, f"is a part of several names: {join_names(matches)}")
    return paths[matches[0]]


def _select(
    folder: Path, status: Sequence[str] | None, where: Sequence[str] | None
) -> tuple[list[StoredRun], list[UnreadableRun], str]:
    """The runs that are asked for, all that cannot be read unless some are, and keys that no run
    has, which are probably misspelt."""
    conditions = [Condition.parse(text) for text in where or ()]
    if folder == Path("runs") and not folder.exists():
        return [], [], ""
    entries = scan(folder)
    readable = [run for run in entries if isinstance(run, StoredRun)]
    broken = [] if status or where else [run for run in entries if isinstance(run, UnreadableRun)]
    chosen = [run for run in readable if not status or run.status in status]
    chosen = [run for run in chosen if all(condition.is_met(run) for condition in conditions)]
    keys = [key for key, _, _ in conditions if all(value_of(run.config, key) is None for run in readable)]
    return chosen, broken, f": none has {', '.join(keys)}" if readable and keys else ""


def _nothing(folder: Path, status: object, where: object, absent: str) -> str:
    """A sentence for no runs, or for none of those asked for."""
    if status or where:
        return escape_control(f"no such runs in {folder}{absent}")
    return escape_control(f"no runs in {folder} yet: stratafl run CONFIG")


def _sorted(chosen: Sequence[StoredRun], rows: dict[Path, dict[str, Any]], key: str) -> list[StoredRun]:
    """The runs with the highest value of a key first; those without one last."""
    metrics = {name for row in rows.values() for name in row["final"]}
    if rows and key not in (*SORT_KEYS, *metrics):
        raise unknown_name("--sort", key, [*SORT_KEYS, *sorted(metrics)])

    def value(run: StoredRun) -> Any:
        # the list is by time, which ids tell more finely than `created` does
        row = rows[run.path]
        return run.id if key == "created" else row["final"].get(key) if key in metrics else row[key]

    known = [run for run in chosen if value(run) is not None]
    return sorted(known, key=value, reverse=key not in ("name", "method", "status")) + [
        run for run in chosen if value(run) is None
    ]


def _comparable(run: StoredRun) -> dict[str, Any]:
    """Everything of a run that may differ from another: options, files, engine and last metrics."""
    from stratafl.runs.groups import flat_options
    from stratafl.runs.provenance import files_of

    row = _row(run)
    return {
        **flat_options(run),
        **{f"files.{name}": f"#{digest[:6]}" for name, digest in files_of(run).items()},
        "status": run.status,
        "rounds done": run.round,
        "engine": run.engine,
        **{f"metrics.{name}": value for name, value in row["final"].items()},
    }


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in format.flat_config(table).items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, default=str)


def _print_table(runs: Sequence[StoredRun], summaries: Sequence[dict[str, Any]], folder: Path) -> None:
    """A line for each run, and below the table why some of them ended as they did."""
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
