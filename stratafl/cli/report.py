"""`stratafl report`: stored runs as one page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.base.files import atomic_write
from stratafl.cli.options import TARGET_HELP
from stratafl.cli.tables import Column, print_table

if TYPE_CHECKING:
    from stratafl.runs import StoredRun
    from stratafl.runs.groups import RunGroup


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
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help=f"{TARGET_HELP} Its first round is named; repeatable."),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            "--network", "-n", help="Also draw seconds, cost and a round on this network, or the runs' own; repeatable."
        ),
    ] = None,
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
) -> None:
    """Make one page of runs that opens offline: summary, curves, drift, trees, configs."""
    from stratafl.base.plotting import pyplot
    from stratafl.cost.pricing import network_axes
    from stratafl.cost.workload import named_networks, resolved
    from stratafl.report.figures import figures
    from stratafl.report.page import page
    from stratafl.report.page_data import page_data
    from stratafl.runs.groups import group_runs

    places = folders or [Path("runs")]
    targets = _sound(target or [], metric) or None
    networks = named_networks(network or ())
    _check_out(out)
    if figures_folder is not None:
        pyplot()
    if watch:
        return _watch(places, targets, metric, network or [], axis or [], title, port)
    runs, unreadable = gathered(places, "DIR")
    extra_axes = network_axes(runs, resolved(networks, runs))
    data = page_data(runs, targets, unreadable, metric, extra_axes, (axis or [""])[0])
    _check_metric(data, metric)
    with atomic_write(out, sync=False) as file:
        file.write(page(data, title).encode())
    goals = data["targets"].get(data["metric"], [])
    compared = group_runs(runs, extra_axes.points)
    _print_summary(compared, data["metric"], goals)
    print(f"report: {escape_control(out)}")
    if figures_folder is not None:
        drawn = figures(figures_folder, compared, goals, data["metric"], axis or [], extra_axes.axes)
        print(f"figures: {len(drawn)} files in {escape_control(figures_folder)}")


def gathered(places: Sequence[Path], field: str) -> tuple[list[StoredRun], list[str]]:
    """The runs in some places, one at least, and what cannot be read there, which is told, as is
    which of several runs of one seed is left out."""
    from stratafl.runs.groups import collect_runs, one_of_each

    runs, unreadable = collect_runs(places)
    runs, repeated = one_of_each(runs)
    left_out = [*unreadable, *repeated]
    for line in left_out:
        print(escape_control(f"left out: {line}"), file=sys.stderr)
    if not runs:
        raise InvalidInput(field, [str(place) for place in places], "no runs in it that can be read")
    return runs, left_out


def _sound(targets: list[str], metric: str | None) -> list[str]:
    """The targets, if each can be read as one, whatever the runs have; before the work."""
    from stratafl.metrics.objective import parse_goal

    for each in targets:
        parse_goal("--target", each, metric or "")
    return targets


def _check_metric(data: dict[str, Any], metric: str | None) -> None:
    """Refuse a metric that the runs do not have."""
    if metric is not None and data["metric"] is None:
        raise InvalidInput(
            "--metric", metric, f"these runs have {join_names([each['name'] for each in data['metrics']])}"
        )


def _watch(
    places: list[Path],
    targets: list[str] | None,
    metric: str | None,
    networks: list[str],
    axes: list[str],
    title: str,
    port: int,
) -> None:
    from stratafl.report.page import HOST, Live, ReportServer, page
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


def _check_out(out: Path) -> None:
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise InvalidInput("--out", str(out), "must be a file that ends in .html")
    parent = out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidInput("--out", str(out), f"cannot write in {parent}")


def _print_summary(compared: Sequence[RunGroup], metric: str | None, targets: Sequence[float]) -> None:
    """What fits on a terminal: how good, and how soon; the page has the rest."""
    from stratafl.report.summary import columns
    from stratafl.runs.groups import select_metric

    _, judged = select_metric(compared, metric)
    first, _, _, *rest = columns(compared, [] if judged is None else [judged], judged, targets)
    shown = [first, *(column for place, column in enumerate(rest) if place == 0 or column.title.startswith("rounds"))]
    head = [Column(column.title, right=place > 0, prose=place == 0) for place, column in enumerate(shown)]
    print_table(head, [[cell.text for cell in cells] for cells in zip(*(each.cells for each in shown), strict=True)])
