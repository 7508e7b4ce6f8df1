"""`stratafl price`: what stored runs cost on networks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.files import atomic_write, check_writable
from stratafl.base.validation import check_number
from stratafl.cli.options import TARGET_HELP, AsJson
from stratafl.cli.report import gathered
from stratafl.cli.tables import Column, print_sentence, print_table

if TYPE_CHECKING:
    from stratafl.cost.costs import PriceBatch
    from stratafl.cost.pricing import GroupCosts
    from stratafl.cost.pricing import TextColumn as Texts
    from stratafl.network.specification import Network
    from stratafl.runs import StoredRun


def price_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run folders, folders of runs, archives of runs; runs unless given."),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option("--network", "-n", help="A preset (stratafl networks), a .toml file, or own (the runs')."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help=f"{TARGET_HELP} The way there is priced, too; repeatable."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw where the time goes (.png, .svg or .pdf).", show_default=False)
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Draw who does what in a global round of the first run that is priced.", show_default=False),
    ] = None,
    timeline_round: Annotated[int, typer.Option("--round", help="Which round that is.", min=1)] = 1,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every number in full.", show_default=False)
    ] = None,
    flops_per_sample: Annotated[
        float | None,
        typer.Option("--flops", help="Operations of training on one sample, instead of those counted for a run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how long stored runs would take on a network, and what they would cost there."""
    from stratafl.cost.costs import PriceBatch
    from stratafl.cost.figures import plot_round, plot_time_breakdown
    from stratafl.cost.pricing import ALL_ROUNDS, as_csv
    from stratafl.cost.workload import named_networks, resolved
    from stratafl.network.specification import LARGEST

    if not network:
        raise InvalidInput("--network", None, "must be given: a preset (see `stratafl networks`) or a .toml file")
    named = named_networks(network)
    if flops_per_sample is not None:
        check_number("--flops", flops_per_sample, above=0, at_most=LARGEST)
    _check_places(figure, timeline, csv_file)
    runs = _runs(folders or [Path("runs")])
    pricing = PriceBatch(flops_per_sample)
    found = _priced(runs, resolved(named, runs), target or (), pricing)
    _print(found, as_json)
    if csv_file is not None:
        with atomic_write(csv_file, sync=False) as file:
            file.write(as_csv(found).encode())
    if figure is not None:
        plot_time_breakdown(figure, found, found[0].milestones[0].until if target else ALL_ROUNDS)
    if timeline is not None:
        plot_round(timeline, *pricing.done[0], timeline_round)
    for drawn in (figure, timeline):
        if drawn is not None and not as_json:
            print(f"picture: {escape_control(drawn)}")
    if pricing.problems:
        raise typer.Exit(1)


def _check_places(figure: Path | None, timeline: Path | None, csv_file: Path | None) -> None:
    """Refuse what cannot be written before the work."""
    from stratafl.base.plotting import check_picture, pyplot

    for option, path in (("--figure", figure), ("--timeline", timeline)):
        if path is not None:
            check_picture(path, option)
            pyplot()
    if csv_file is not None:
        check_writable("--csv", csv_file, is_file=True)


def _runs(places: Sequence[Path]) -> list[StoredRun]:
    """The runs that have a round."""
    runs = [run for run in gathered(places, "RUN")[0] if run.rounds]
    if not runs:
        raise InvalidInput("RUN", [str(place) for place in places], "no run in it has a round yet")
    return runs


def _priced(
    runs: Sequence[StoredRun], networks: Sequence[Network], targets: Sequence[str], pricing: PriceBatch
) -> list[GroupCosts]:
    from stratafl.cost.pricing import priced
    from stratafl.runs.groups import group_runs

    found = priced(group_runs(runs), networks, pricing, targets)
    for line in pricing.problems:
        print(escape_control(f"left out: {line}"), file=sys.stderr)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        print(escape_control(f"note: {note}"), file=sys.stderr)
    return found


def _print(found: Sequence[GroupCosts], as_json: bool = False) -> None:
    from stratafl.cost.pricing import as_rows, cost_columns, part_columns

    if as_json:
        print(json.dumps(as_rows(found)))
        return
    for name in dict.fromkeys(each.network for each in found):
        here = [each for each in found if each.network == name]
        about = f": {here[0].about}" if here[0].about else ""
        _table(f"On {name}{about}", cost_columns(here))
        print()
        _table(f"Where the time goes on {name}, % of all rounds' time", part_columns(here))
        print()
    print_sentence("Bytes are those of all links of a tier, both ways. What else is counted how: docs/clock.md.")


def _table(title: str, columns: Sequence[Texts]) -> None:
    head = [Column(each.title, right=place > 0, prose=each.title == "setting") for place, each in enumerate(columns)]
    print_table(head, [list(cells) for cells in zip(*(each.cells for each in columns), strict=True)], title)
