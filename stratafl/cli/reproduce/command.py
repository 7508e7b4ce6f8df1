"""The command that makes the paper's tables and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratafl import plots
from stratafl.checks import place
from stratafl.errors import InvalidInput, number, printable, whole
from stratafl.launch import check_parent
from stratafl.progress import SweepDisplay
from stratafl.recipes import ALL, Case, Options, Recipe, recipe
from stratafl.recipes.cost import Rates, expected_steps, needs
from stratafl.reproduce.draw import draw
from stratafl.reproduce.judge import label
from stratafl.reproduce.measure import measure
from stratafl.reproduce.overview import write_overview
from stratafl.reproduce.report import CLAIMS_ABOVE, describe, said, stem, table, write
from stratafl.reproduce.stock import Stock
from stratafl.reproduce.train import failures, missing, to_do, train, wanted
from stratafl.store.files import make_folder

UNFINISHED = 3
"""The exit code when there was not enough time: the same command goes on."""
NARROW = 78
"""Columns below which a terminal is not shown everything."""
READY = ("embedded", "generated", "prepared")


def reproduce_command(
    what: Annotated[list[str] | None, typer.Argument(help="table1, fig3, ..., or all; see --list.")] = None,
    scale: Annotated[str, typer.Option(help="quick (minutes on a laptop, digits) or paper.")] = "paper",
    seeds: Annotated[int | None, typer.Option(help="3 as in the paper, 1 for quick, unless given.")] = None,
    methods: Annotated[str | None, typer.Option(help="Instead of the figure's own: mtgc,hfedavg,...")] = None,
    partition: Annotated[str, typer.Option(help="release_dirichlet or dirichlet.")] = "release_dirichlet",
    only: Annotated[
        list[str] | None, typer.Option(help="Train only cases with this in their name: both/E10H20; repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the recipe's limit.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="fp32 on a CPU, tf32 on a GPU, unless given.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one per GPU or core unless given.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop in time; the same command goes on.")] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing; report what is there.")] = False,
    runs: Annotated[Path, typer.Option(help="Where runs are kept and looked for.")] = Path("runs/reproduce"),
    out: Annotated[Path, typer.Option(help="Where tables and figures go.")] = Path("reproduced"),
    listing: Annotated[bool, typer.Option("--list", help="Say what each needs and how long it takes here.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make the paper's tables and figures: train what is missing, then say whether its claims held."""
    chosen = _chosen(what, listing)
    options = Options(
        scale=scale,  # type: ignore[arg-type]  # it checks it
        partition=partition,
        methods=None if methods is None else tuple(dict.fromkeys(each.strip() for each in methods.split(","))),
        rounds=rounds,
        device=device,
        precision=precision or ("fp32" if device == "cpu" else "tf32"),
    )
    count = whole("--seeds", seeds, at_least=1) if seeds is not None else 1 if options.quick else 3
    if max_seconds is not None:
        number("--max-seconds", max_seconds, above=0)
    if workers is not None:
        whole("--workers", workers, at_least=1)
    asked = {each: each.fitting(options) for each in chosen}
    cases = {each: each.cases(its, only or ()) for each, its in asked.items()}
    if not any(cases.values()):
        known = ", ".join(case.name for each, its in asked.items() for case in each.cases(its)[:4])
        raise InvalidInput("--only", only, f"no case has this in its name; there are {known}, ...")
    if not report_only:
        place(device)
    if listing:
        _list(cases, options, count, as_json)
        return
    plots.pyplot()
    check_parent(out, "--out")
    notes: list[str] = []
    unfinished, failed = 0, False
    if report_only and not runs.is_dir():
        raise InvalidInput("--runs", runs, "is not a folder, and --report-only trains nothing")
    able = [] if report_only else _able(cases, notes)
    make_folder(out)
    if not report_only:
        make_folder(runs)
        unfinished, failed = _train(able, count, runs, workers, max_seconds, quiet, notes)
    found = _report(asked, count, runs, out)
    write_overview(out, options.scale)
    if as_json:
        print(json.dumps({"results": found, "unfinished": unfinished, "notes": notes}))
    else:
        for each, values in zip(chosen, found, strict=True):
            _print(each, values)
        for note in notes:
            print(printable(note))
        print(f"written to {out}")
    if failed:
        raise typer.Exit(1)
    if unfinished:
        raise typer.Exit(UNFINISHED)


def _chosen(what: Sequence[str] | None, listing: bool) -> list[Recipe]:
    names = list(what or (("all", "search") if listing else ()))
    if not names:
        raise InvalidInput("WHAT", None, f"give one or more of all, {', '.join(ALL)}, search")
    flat = [each for name in names for each in (ALL if name == "all" else (name,))]
    return [recipe(name) for name in dict.fromkeys(flat)]


def _able(cases: dict[Recipe, list[Case]], notes: list[str]) -> list[Case]:
    """The cases whose data is there; the others are named."""
    every = [case for each in cases.values() for case in each]
    lacking = {name: state for name, state in needs(every).items() if state not in READY}
    able = [case for case in every if case.config.data.name not in lacking]
    if not able:
        named, states = list(lacking), ", ".join(dict.fromkeys(lacking.values()))
        raise InvalidInput("data set", ", ".join(named), f"{states}; run: stratafl data prepare {named[0]}")
    notes += [f"left out: {name} is {state}; run: stratafl data prepare {name}" for name, state in lacking.items()]
    return able


def _train(
    cases: Sequence[Case],
    seeds: int,
    runs: Path,
    workers: int | None,
    seconds: float | None,
    quiet: bool,
    notes: list[str],
) -> tuple[int, bool]:
    configs = wanted(cases, seeds)
    with SweepDisplay("reproduce", len(to_do(configs, runs)), quiet) as display:
        outcomes = train(configs, runs, workers, display.show, display.say, seconds)
    failed = failures(outcomes)
    notes += [f"{outcome.name}: failed: {outcome.reason}" for outcome in failed]
    left = len(missing(configs, runs))
    if left:
        notes.append(f"{left} of {len(configs)} runs are not done; the same command goes on")
    return left, bool(failed)


def _report(asked: dict[Recipe, Options], seeds: int, runs: Path, out: Path) -> list[dict[str, Any]]:
    stock = Stock.of(runs)
    found = []
    for each, options in asked.items():
        results = measure(each, each.cases(options), options, seeds, stock)
        values = describe(results, seeds)
        found.append(values)
        if results.comparable:
            name = stem(each, options)
            write(values, each.form, out, name, draw(results, out / name))
    return found


def _print(each: Recipe, values: dict[str, Any]) -> None:
    headings, rows = table(values, each.form, label)
    shown = Table(title=f"{escape(values['title'])}\n{escape(each.where)}")
    for number_of, heading in enumerate(headings):
        shown.add_column(heading, overflow="fold", justify="left" if number_of < 2 else "right")
    measured = [bool(row["seeds"]) for row in values["rows"]]
    for row, there in zip(rows, measured, strict=True):
        if there:
            shown.add_row(*map(escape, row))
    Console().print(shown)
    if not all(measured):
        print(f"not measured: {measured.count(False)} of {len(measured)} lines")
    if values["claims"]:
        print(f"{CLAIMS_ABOVE[values['scale']]}:")
    for claim in values["claims"]:
        print(f"  {claim['status']}: {said(claim)}")


def _list(cases: dict[Recipe, list[Case]], options: Options, seeds: int, as_json: bool) -> None:
    rates = Rates(options)
    rows: list[dict[str, Any]] = []
    for each, its in cases.items():
        seconds = seeds * rates.seconds(each, its)
        rows.append({
            "name": each.name, "figure": each.figure, "where": each.where, "title": each.title, "data": needs(its),
            "runs": seeds * len(its), "client_steps_at_most": seeds * sum(case.steps for case in its),
            "client_steps_expected": round(seeds * expected_steps(each, its)), "seconds": round(seconds),
            "rates": {str(case.config.model["name"]): vars(rates.of(case)) for case in its},
        })  # fmt: skip
    if as_json:
        print(json.dumps({"scale": options.scale, "seeds": seeds, "recipes": rows}))
        return
    console = Console()
    wide = console.width >= NARROW
    shown = Table(title=f"{options.scale} scale, {seeds} seed{'s' if seeds > 1 else ''}, {options.device}")
    for heading in ("name", *(["paper"] if wide else [])):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("needs", min_width=16)
    for heading in (*(["runs"] if wide else []), "M steps", "time"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        needed = "\n".join(name if state in READY else f"{name} [bold]*[/bold]" for name, state in row["data"].items())
        cost = f"{row['client_steps_expected'] / 1e6:,.1f}", duration(row["seconds"])
        cells = (row["figure"], needed, str(row["runs"])) if wide else (needed,)
        shown.add_row(row["name"], *cells, *cost)
    console.print(shown)
    lacking = {name: state for row in rows for name, state in row["data"].items() if state not in READY}
    if lacking:
        print(f"*: {', '.join(dict.fromkeys(lacking.values()))}; run: stratafl data prepare NAME")
    print("M steps: million client-steps; where a run stops at a target, as many as the paper's own needed")
    print("time: at these rates")
    named = {name: rate for row in rows for name, rate in row["rates"].items()}
    for name, rate in named.items():
        print(f"  {name}: {rate['steps']:,.0f} client-steps a second, {rate['source']}")
    print("recipes share runs: all of them together take less than the sum")


def duration(seconds: float) -> str:
    """In the unit that suits it."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
