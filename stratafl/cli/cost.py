"""`stratafl cost`: what stored runs cost on networks."""

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
from stratafl.cli.options import AsJson, Networks, RunArgument, RunsFolder, Targets
from stratafl.cli.report import gathered, nothing_in
from stratafl.cli.runs import find_run
from stratafl.cli.tables import Column, print_sentence, print_table

if TYPE_CHECKING:
    from stratafl.costs.costs import PriceBatch
    from stratafl.costs.pricing import GroupCosts
    from stratafl.costs.pricing import TextColumn as Texts
    from stratafl.network.specification import Network
    from stratafl.runs import StoredRun


Flops = Annotated[
    float | None,
    typer.Option("--flops", help="Operations of training on one sample, instead of those of the run."),
]
PICTURES = (".png", ".svg", ".pdf")


def cost_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run folders, folders of runs, archives of runs; runs unless given."),
    ] = None,
    network: Networks = None,
    target: Targets = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", "-o", metavar="FILE",
            help="Write every number (.csv), or draw where the time goes (.png, .svg, .pdf); repeatable.",
        ),
    ] = None,
    flops_per_sample: Flops = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say how long stored runs would take on a network, and what they would cost there.

    `stratafl cost timeline RUN` draws one of their rounds, node by node.
    """
    from stratafl.costs.costs import PriceBatch
    from stratafl.costs.figures import plot_time_breakdown
    from stratafl.costs.pricing import ALL_ROUNDS, as_csv
    from stratafl.costs.workload import named_networks, resolved

    named = named_networks(_needed(network))
    _check_flops(flops_per_sample)
    for path in out or ():
        _check_out(path, (".csv", *PICTURES))
    places = folders or [Path("runs")]
    runs = [run for run in gathered(places)[0] if run.rounds]
    if not runs:
        return print("[]" if as_json else nothing_in(places))
    pricing = PriceBatch(flops_per_sample)
    found = _priced(runs, resolved(named, runs), target or (), pricing)
    _print(found, as_json)
    for path in out or ():
        if path.suffix == ".csv":
            with atomic_write(path, sync=False) as file:
                file.write(as_csv(found).encode())
        else:
            plot_time_breakdown(path, found, found[0].milestones[0].until if target else ALL_ROUNDS)
        if not as_json:
            print(f"written: {escape_control(path)}")
    if pricing.problems:
        raise typer.Exit(1)


def timeline_command(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The picture (.png, .svg or .pdf).")],
    network: Networks = None,
    timeline_round: Annotated[int, typer.Option("--round", help="The global round to draw.", min=1)] = 1,
    runs: RunsFolder = Path("runs"),
    flops_per_sample: Flops = None,
) -> None:
    """Draw who does what in a global round of a stored run on a network."""
    from stratafl.costs.costs import PriceBatch
    from stratafl.costs.figures import plot_round
    from stratafl.costs.workload import named_networks, resolved
    from stratafl.runs import read_run

    named = named_networks(_needed(network))
    if len(named) > 1:
        raise InvalidInput("--network", network, "a round is drawn on one network")
    _check_flops(flops_per_sample)
    _check_out(out, PICTURES)
    stored = read_run(find_run(run, runs))
    if not stored.rounds:
        raise InvalidInput("RUN", run, "has no round yet")
    batch = PriceBatch(flops_per_sample)
    priceable = batch.load(stored)
    (chosen,) = resolved(named, [stored])
    if priceable is None or batch.cost_on(priceable, chosen) is None:
        raise next(iter(batch.problems.values()))
    plot_round(out, priceable, chosen, timeline_round)
    print(f"picture: {escape_control(out)}")


def _needed(network: list[str] | None) -> list[str]:
    if not network:
        raise InvalidInput("--network", None, "must be given: a preset (see `stratafl list networks`) or a .toml file")
    return network


def _check_flops(flops_per_sample: float | None) -> None:
    from stratafl.network.specification import LARGEST

    if flops_per_sample is not None:
        check_number("--flops", flops_per_sample, above=0, at_most=LARGEST)


def _check_out(path: Path, endings: Sequence[str]) -> None:
    """Refuse what cannot be written before the work."""
    from stratafl.base.plotting import check_picture, pyplot

    if path.suffix not in endings:
        raise InvalidInput("--out", path, f"must end in {', '.join(endings[:-1])} or {endings[-1]}")
    if path.suffix in PICTURES:
        check_picture(path, "--out")
        pyplot()
    else:
        check_writable("--out", path, is_file=True)


def _priced(
    runs: Sequence[StoredRun], networks: Sequence[Network], targets: Sequence[str], pricing: PriceBatch
) -> list[GroupCosts]:
    from stratafl.costs.pricing import priced
    from stratafl.runs.groups import group_runs

    found = priced(group_runs(runs), networks, pricing, targets)
    for line in pricing.problems:
        print(escape_control(f"left out: {line}"), file=sys.stderr)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        print(escape_control(f"note: {note}"), file=sys.stderr)
    return found


def _print(found: Sequence[GroupCosts], as_json: bool = False) -> None:
    from stratafl.costs.pricing import as_rows, cost_columns, part_columns

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
