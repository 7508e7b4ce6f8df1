"""`stratafl tune`: the cheapest setting on a network, found by training and pricing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stratafl.base.errors import TIME_IS_OVER, escape_control
from stratafl.base.units import parse_duration
from stratafl.cli.options import CONFIG_FILE, TARGET_HELP, AsJson, Changes, KeepStale, Quiet, shorthands
from stratafl.cli.tables import Column, print_sentence, print_table

if TYPE_CHECKING:
    from stratafl.tuning.result import NetworkResult, TuningCandidate, TuningResult

PICTURES = ("frontier.png", "frontier.pdf")


def tune_command(
    config: Annotated[Path, CONFIG_FILE],
    network: Annotated[
        list[str] | None,
        typer.Option("--network", "-n", help="A preset (stratafl list networks) or a .toml file; repeatable."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="TARGET", help=TARGET_HELP)] = None,
    minimize: Annotated[
        Literal["seconds", "bytes", "joules", "money"], typer.Option(help="What it shall cost least.")
    ] = "seconds",
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="COST=VALUE", help="The most it may cost, such as bytes=1e9; repeatable."),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after 90, 90s, 30m or 8h; the same command goes on.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Settings to try, besides the config as given.")] = 20,
    seeds: Annotated[int, typer.Option(help="Runs of each of the best settings, with as many seeds.")] = 3,
    search_space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file whose tune table counts, instead of the config's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Its folder; plans/ and the config's name unless given."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the folder; refuse to begin anew.")
    ] = False,
    change: Changes = None,
    device: Annotated[str | None, typer.Option(help="Where to train, such as cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="Such as bf16.")] = None,
    keep_stale: KeepStale = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the periods, method and rates that reach a target at least cost on a network."""
    from stratafl.base.plotting import pyplot
    from stratafl.cli.display import SweepDisplay
    from stratafl.experiment.experiment import TUNE, Experiment
    from stratafl.experiment.toml import read_tables
    from stratafl.tuning.result import search_and_repeat
    from stratafl.tuning.study import FINALISTS, optuna
    from stratafl.tuning.task import budgets_of
    from stratafl.tuning.tuning import default_folder, task_of

    optuna()
    pyplot()
    given = {"execution.device": device, "execution.precision": precision}
    tables = read_tables(config, [*(change or ()), *shorthands(given)])
    task = task_of(
        Experiment.from_table(tables), search_space or tables.get(TUNE), network or [], target,
        minimise=minimize, budgets=budgets_of(budget or []), trials=trials, seeds=seeds,
    )  # fmt: skip
    seconds = None if time_limit is None else parse_duration("--time-limit", time_limit)
    folder = out or default_folder(config.stem)
    runs = 1 + task.trials + (task.seeds - 1) * (FINALISTS + 1)
    with SweepDisplay(f"tune {config.stem}", runs, quiet) as display:
        made = search_and_repeat(
            task,
            folder,
            seconds=seconds,
            must_exist=resume,
            keep_stale=keep_stale,
            say=display.say,
            show=display.show,
        )
    _show(made, folder, as_json)


def _show(made: TuningResult, folder: Path, as_json: bool) -> None:
    """Write everything down and print it; what ended the search early ends the command, too."""
    from stratafl.tuning.output import as_dict, plot_frontiers, write

    written = [*write(made, folder), *(folder / name for name in PICTURES)]
    plot_frontiers(made, *written[-len(PICTURES) :])
    if as_json:
        print(json.dumps(as_dict(made)))
    else:
        _print(made)
        print_sentence(f"written to {escape_control(folder)}: {', '.join(path.name for path in written)}")
    if made.interrupted is not None:
        raise made.interrupted
    if not made.is_complete:
        raise typer.Exit(TIME_IS_OVER)
    if not made.is_reached:
        print(escape_control(f"target not reached: {_shortfall(made)}"), file=sys.stderr)
        raise typer.Exit(1)


def _shortfall(made: TuningResult) -> str:
    """How far the best came, which may be there, and beyond the budget."""
    budget = " and ".join(f"{limit:g} {kind}" for kind, limit in made.task.budgets.items())
    goal, within = made.baseline.goal, f" within {budget}" if budget else ""
    values = [tried.best for _, _, tried in made.all_trials if tried.best is not None]
    pick = min if goal.sign == "<=" else max
    best = f"{pick(values):.4g}" if values else "nothing"
    return f"no setting of {len(made.search.trials)} reached {goal}{within}; the best got to {best}"


def _print(made: TuningResult) -> None:
    from stratafl.tuning.output import gain, outcomes

    for answer in made.network_results:
        _candidates(made, answer)
        gained = gain(made, answer)
        if answer.choice is None:
            within = " within the budget" if made.task.budgets else ""
            print_sentence(f"No setting reached the target here{within}.")
        elif answer.choice.is_baseline:
            print_sentence("The config as given is the cheapest that was found.")
        elif gained is not None:
            print_sentence(f"The choice takes {_times(gained)} {made.task.minimise} of the config as given.")
        print()
        _frontier(made, answer)
        print()
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(made).items())
    print_sentence(f"Tried {made.search.count} settings of {made.task.space.size:,} and the config as given: {counts}.")
    if made.search.is_exhausted:
        print_sentence("That is every setting there is to try.")
    elif not made.is_complete and made.interrupted is None:
        print_sentence("The time was over before all was tried; the same command goes on.")


def _times(gained: float) -> str:
    return f"{100 / gained:.0f} % of the" if gained >= 1 else f"{1 / gained:.2f} times the"


def _candidates(made: TuningResult, answer: NetworkResult) -> None:
    """The best settings and the config as given, with their costs to the target."""
    from stratafl.costs.pricing import BYTES, ENERGY, NO_UNIT, TIME, Unit
    from stratafl.tuning.task import COSTS

    found = list(answer.candidates)
    if answer.baseline not in found:
        found.append(answer.baseline)
    task, network = made.task, next(e for e in made.task.networks if e.name == answer.network)
    units = {"seconds": ("time", TIME), "bytes": ("bytes", BYTES), "joules": ("energy", ENERGY)}
    cells = [
        [_place(each, answer), each.label, f"{each.reached(answer.network, task)}/{len(each.runs)}",
         NO_UNIT.text(each.rounds())]
        for each in found
    ]  # fmt: skip
    columns = [Column("place"), Column("setting", prose=True), Column("reached", right=True),
               Column("rounds", right=True, minor=True)]  # fmt: skip
    for kind in (task.minimise, *(each for each in COSTS if each != task.minimise)):
        values = [each.mean_cost(answer.network, kind) for each in found]
        known = [value.mean for value in values if value is not None]
        if kind == task.minimise or any(known):
            title, choices = units.get(kind, (network.currency or "money", (("", 1.0),)))
            unit = Unit.of(choices, known)
            heading = f"{title}, {unit.name}" if unit.name else title
            columns.append(Column(heading, right=True, minor=kind != task.minimise))
            for row, value in zip(cells, values, strict=True):
                row.append(unit.text(value))
    goal = made.baseline.goal
    print_table(columns, cells, f"On {answer.network}: least {task.minimise} to {goal}, mean ± deviation over seeds")


def _place(each: TuningCandidate, answer: NetworkResult) -> str:
    if each.is_baseline:
        return "as given"
    return "choice" if each is answer.choice else f"{answer.candidates.index(each) + 1}."


def _frontier(made: TuningResult, answer: NetworkResult) -> None:
    """Where each setting leads: nothing that was tried was as good for less."""
    from stratafl.base.statistics import MeanStd
    from stratafl.tuning.output import TITLES, unit_of
    from stratafl.tuning.result import frontier_segments

    points = frontier_segments(answer.frontier)
    unit = unit_of(made, answer.network, [point.cost for point in points])
    kind = TITLES[made.task.minimise]
    columns = (Column(made.baseline.goal.metric, right=True), Column(f"{kind}, {unit.name}", right=True),
               Column("setting", prose=True))  # fmt: skip
    trial_rows = [(f"{point.value:.4f}", unit.text(MeanStd(point.cost, None)), point.label) for point in points]
    print_table(columns, trial_rows, f"The frontier on {answer.network}: nothing that was tried is as good for less")
