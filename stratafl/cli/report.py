"""The command that shows stored runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratafl.errors import InvalidInput, number, printable
from stratafl.report.compare import settings, usual_targets
from stratafl.report.figures import figures
from stratafl.report.gather import gather
from stratafl.report.page import page, plotly_source
from stratafl.report.payload import payload
from stratafl.report.serve import HOST, Server
from stratafl.store.files import writing


def report_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Run folders, or folders of runs; runs unless given."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the page goes.")] = Path("report.html"),
    figures_folder: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Also write figures for a paper, PNG and SVG, here.")
    ] = None,
    target: Annotated[
        list[float] | None, typer.Option(help="An accuracy whose first round is named, such as 0.8; repeatable.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page live on this machine instead.")] = False,
    port: Annotated[int, typer.Option(help="For --watch; a free one unless given.", min=0, max=65535)] = 0,
) -> None:
    """Make one page of runs that opens offline: curves, drift, trees, config differences and a summary."""
    places = folders or [Path("runs")]
    targets = None if not target else [number("--target", each, above=0, at_most=1) for each in target]
    plotly_source()
    _check_out(out)
    if watch:
        _watch(places, targets, port)
        return
    runs, unreadable = gather(places)
    for line in unreadable:
        print(printable(f"left out: {line}"), file=sys.stderr)
    if not runs:
        raise InvalidInput("DIR", [str(place) for place in places], "no runs in it that can be read")
    data = payload(runs, targets, unreadable)
    with writing(out, sync=False) as file:
        file.write(page(data).encode())
    _print_summary(data)
    print(f"report: {printable(out)}")
    if figures_folder is not None:
        found = settings(runs)
        goals = usual_targets(found) if targets is None else targets
        drawn = figures(figures_folder, found, goals)
        print(f"figures: {len(drawn)} in {printable(figures_folder)}")


def _watch(places: list[Path], targets: list[float] | None, port: int) -> None:
    def read() -> dict[str, Any]:
        try:
            runs, unreadable = gather(places)
        except InvalidInput as problem:
            # a folder that goes away is told on the page; the server stays
            runs, unreadable = [], [str(problem)]
        return payload(runs, targets, unreadable)

    gather(places)
    try:
        server = Server(read, lambda data: page(data, live=True), port)
    except OSError as problem:
        raise InvalidInput("--port", port, f"cannot listen on {HOST}: {problem.strerror}") from None
    print(f"serving on {server.address} until Ctrl-C", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.2)
    print("stopped")


def _check_out(out: Path) -> None:
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise InvalidInput("--out", str(out), "must be a file that ends in .html")
    parent = out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidInput("--out", str(out), f"cannot write in {parent}")


def _print_summary(data: dict[str, Any]) -> None:
    """What fits on a terminal: how good, and how soon; the page has the rest."""
    head, rows = data["summary"]["head"], data["summary"]["rows"]
    shown = [n for n, name in enumerate(head) if name.startswith(("setting", "accuracy", "rounds to"))]
    if "accuracy, %" not in head:
        shown.append(head.index("loss"))
    table = Table()
    for column in shown:
        table.add_column(escape(head[column]), justify="right" if column else "left", min_width=0 if column else 10)
    for row in rows:
        table.add_row(*(escape(printable(row[column])) for column in shown))
    Console().print(table)
