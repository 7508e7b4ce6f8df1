"""`stratafl report`: stored runs as one page."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.cli.options import AsJson, Networks, Targets
from stratafl.cli.tables import Column, print_table

if TYPE_CHECKING:
    from stratafl.reports.reporting import Comparison
    from stratafl.runs import StoredRun


def report_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Run folders, or folders of runs; runs unless given."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the page goes.")] = Path("report.html"),
    figures_folder: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="DIR",
            help="Also write figures for a paper (PNG, SVG, PDF) and the summary (CSV, LaTeX) here.",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="What settings are judged by; accuracy, or what there is, unless given.")
    ] = None,
    target: Targets = None,
    network: Networks = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS",
            help="What the figures, and at first the page, draw curves against: rounds, steps, bytes (per client), "
            "seconds, network, or traffic.1 (bytes on the top link), traffic.2, ...; repeatable.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="What stands above the page.")] = "stratafl report",
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page live on this machine instead.")] = False,
    port: Annotated[int, typer.Option(help="For --watch; a free one unless given.", min=0, max=65535)] = 0,
    as_json: AsJson = False,
) -> None:
    """Make one page of runs that opens offline: summary, curves, drift, trees, configs."""
    from stratafl.base.plotting import pyplot
    from stratafl.costs.workload import named_networks
    from stratafl.reports.reporting import check_page, compare

    places = folders or [Path("runs")]
    targets = _sound(target or [], metric) or None
    networks = named_networks(network or ())
    check_page(out)
    if figures_folder is not None:
        pyplot()
    if watch:
        return _watch(places, targets, metric, network or [], axis or [], title, port)
    runs, left_out = gathered(places)
    if not runs:
        return print(json.dumps({"settings": []}) if as_json else nothing_in(places))
    compared = compare(runs, left_out, metric, targets, networks, axis or ())
    compared.write(out, title)
    drawn = [] if figures_folder is None else compared.draw(figures_folder)
    if as_json:
        document = {"metric": compared.metric, "targets": compared.targets, "settings": compared.as_rows()}
        print(json.dumps({**document, "report": str(out), "figures": list(map(str, drawn))}))
        return
    _print_summary(compared)
    print(f"report: {escape_control(out)}")
    if figures_folder is not None:
        print(f"figures: {len(drawn)} files in {escape_control(figures_folder)}")


def gathered(places: Sequence[Path]) -> tuple[list[StoredRun], list[str]]:
    """The runs in some places, and what cannot be read there, which is told, as is which of several
    runs of one seed is left out."""
    from stratafl.runs.groups import collect_runs, one_of_each

    if list(places) == [Path("runs")] and not places[0].exists():
        return [], []
    runs, unreadable = collect_runs(places)
    runs, repeated = one_of_each(runs)
    left_out = [*unreadable, *repeated]
    for line in left_out:
        print(escape_control(f"left out: {line}"), file=sys.stderr)
    return runs, left_out


def nothing_in(places: Sequence[Path]) -> str:
    """A sentence for places without runs."""
    return escape_control(f"no runs in {join_names(list(map(str, places)))} yet: stratafl run CONFIG")


def _sound(targets: list[str], metric: str | None) -> list[str]:
    """The targets, if each can be read as one, whatever the runs have; before the work."""
    from stratafl.metrics.objective import parse_goal

    for each in targets:
        parse_goal("--target", each, metric or "")
    return targets


def _watch(
    places: list[Path],
    targets: list[str] | None,
    metric: str | None,
    networks: list[str],
    axes: list[str],
    title: str,
    port: int,
) -> None:
    from stratafl.reports.page import HOST, Live, ReportServer, page
    from stratafl.runs.groups import collect_runs

    collect_runs(places)
    live = Live(places, networks, targets, metric, (axes or [""])[0])
    try:
        server = ReportServer(live.read, lambda data: page(data, title, live=True), port)
    except OSError as problem:
        raise InvalidInput("--port", port, f"cannot listen on {HOST}: {problem.strerror}") from None
    print(f"serving on {server.address} until Ctrl-C", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.2)
    print("stopped")


def _print_summary(compared: Comparison) -> None:
    """What fits on a terminal: how good, and how soon; the page has the rest."""
    from stratafl.reports.summary import columns
    from stratafl.runs.groups import select_metric

    _, judged = select_metric(compared.groups, compared.metric)
    judging = [] if judged is None else [judged]
    first, _, _, *rest = columns(compared.groups, judging, judged, compared.targets)
    shown = [first, *(column for place, column in enumerate(rest) if place == 0 or column.title.startswith("rounds"))]
    head = [Column(column.title, right=place > 0, prose=place == 0) for place, column in enumerate(shown)]
    print_table(head, [[cell.text for cell in cells] for cells in zip(*(each.cells for each in shown), strict=True)])
