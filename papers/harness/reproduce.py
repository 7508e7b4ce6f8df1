"""Work of `stratafl reproduce`: select series, train missing runs, report, and print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers.harness.estimate import Rates, expected_steps, needs
from papers.harness.paper import SEARCH, Paper
from papers.harness.report import CLAIMS_ABOVE, claim_text, describe, stem, table, write, write_overview
from papers.harness.results import measure
from papers.harness.runs import StoredRuns, failures, missing_names, missing_runs, required_runs, train
from papers.harness.series import Case, Options, Series
from stratafl.base import plotting
from stratafl.base.errors import InvalidInput
from stratafl.base.files import check_writable, make_folder
from stratafl.base.validation import check_integer, check_number
from stratafl.cli.display import SweepDisplay
from stratafl.cli.tables import Column, print_sentence, print_table, unbroken

READY = ("embedded", "generated", "prepared")
"""States of a data set that can be trained on."""


def select_series(paper: Paper, what: Sequence[str] | None, listing: bool) -> list[Series]:
    """Series of the given names, without repetition; a listing without names covers all."""
    names = list(what or (("all", SEARCH) if listing else ()))
    if not names:
        raise InvalidInput("WHAT", None, f"give one or more of all, {', '.join(paper.all)}, {SEARCH}")
    expanded = [name for argument in names for name in (paper.all if argument == "all" else (argument,))]
    return [paper.find(name) for name in dict.fromkeys(expanded)]


def options_of(
    scale: str, partition: str, methods: str | None, rounds: int | None, device: str, precision: str | None
) -> Options:
    """Options for all series, from those of the command line."""
    return Options(
        scale=scale,  # type: ignore[arg-type]  # checked by Options
        partition=partition,
        methods=None if methods is None else tuple(dict.fromkeys(name.strip() for name in methods.split(","))),
        rounds=rounds,
        device=device,
        precision=precision or ("fp32" if device == "cpu" else "tf32"),
    )


@dataclass(frozen=True)
class Request:
    """Series to reproduce, with their options and the number of seeds."""

    paper: Paper

    options: Options
    fitting: dict[Series, Options]
    """Options of each series; one with a partition of its own keeps it."""
    cases: dict[Series, list[Case]]
    """Cases of each series that are to be trained."""
    seeds: int

    @staticmethod
    def of(paper: Paper, chosen: Sequence[Series], options: Options, seeds: int | None, only: Sequence[str]) -> Request:
        """Check the arguments of the command line."""
        count = check_integer("--seeds", seeds, at_least=1) if seeds is not None else 1 if options.quick else 3
        fitting = {series: series.fitting(options) for series in chosen}
        cases = {series: series.cases(fitted, only) for series, fitted in fitting.items()}
        if not any(cases.values()):
            examples = ", ".join(case.name for series, fitted in fitting.items() for case in series.cases(fitted)[:4])
            raise InvalidInput("--only", list(only), f"no case has this in its name; there are {examples}, ...")
        return Request(paper, options, fitting, cases, count)


@dataclass(frozen=True)
class Limits:
    """Number of processes that train, and seconds they may take."""

    workers: int | None
    seconds: float | None

    @staticmethod
    def of(workers: int | None, seconds: float | None) -> Limits:
        """Check the limits of the command line."""
        if seconds is not None:
            check_number("--max-seconds", seconds, above=0)
        if workers is not None:
            check_integer("--workers", workers, at_least=1)
        return Limits(workers, seconds)


@dataclass(frozen=True)
class Training:
    """Outcome of training: unfinished runs, failures, and notes about them."""

    unfinished: int = 0
    """Number of runs that are not done yet."""
    failed: bool = False
    notes: tuple[str, ...] = ()


def check_folders(runs: Path, out: Path, report_only: bool) -> None:
    """Check before any work that figures can be drawn and written, and that runs can be read."""
    plotting.pyplot()
    check_writable("--out", out)
    if report_only and not runs.is_dir():
        raise InvalidInput("--runs", runs, "is not a folder, and --report-only trains nothing")


def train_missing(request: Request, runs: Path, out: Path, limits: Limits, quiet: bool) -> Training:
    """Train missing runs of all cases whose data is prepared; notes name the other data sets."""
    every = [case for cases in request.cases.values() for case in cases]
    lacking = {name: state for name, state in needs(every).items() if state not in READY}
    able = [case for case in every if case.experiment.data.source not in lacking]
    if not able:
        named, states = list(lacking), ", ".join(dict.fromkeys(lacking.values()))
        raise InvalidInput("data set", ", ".join(named), f"{states}; run: stratafl data prepare {named[0]}")
    notes = [f"left out: {name} is {state}; run: stratafl data prepare {name}" for name, state in lacking.items()]
    for folder in (out, runs):
        make_folder(folder)
    experiments = required_runs(able, request.seeds)
    with SweepDisplay("reproduce", len(missing_names(experiments, runs)), quiet) as display:
        outcomes = train(experiments, runs, limits.workers, display.show, display.say, limits.seconds)
    failed = failures(outcomes)
    notes += [f"{outcome.name}: failed: {outcome.reason}" for outcome in failed]
    left = len(missing_runs(experiments, runs))
    if left:
        notes.append(f"{left} of {len(experiments)} runs are not done; the same command goes on")
    return Training(left, bool(failed), tuple(notes))


def write_reports(request: Request, runs: Path, out: Path) -> list[dict[str, Any]]:
    """Write table and figure of each series, and the page of claims; return the tables as data."""
    make_folder(out)
    stored = StoredRuns.of(runs)
    reports = []
    for series, options in request.fitting.items():
        results = measure(series, series.cases(options), options, request.seeds, stored)
        values = describe(request.paper, results, request.seeds)
        reports.append(values)
        if results.comparable:
            name = stem(series, options)
            write(request.paper, values, out, name, request.paper.draw(results, out / name))
    write_overview(request.paper, out, request.options.scale)
    return reports


MINOR = ("rounds to 75%", "best so far", "in rounds", "at round", "seeds done")
"""Headings of columns that are left out on a narrow terminal."""


def print_results(
    request: Request, reports: Sequence[dict[str, Any]], training: Training, out: Path, as_json: bool
) -> None:
    """Print the table and claims of each series, and the notes of training."""
    if as_json:
        notes = list(training.notes)
        print(json.dumps({"results": reports, "unfinished": training.unfinished, "notes": notes}))
        return
    for series, values in zip(request.cases, reports, strict=True):
        _print_result(request.paper, series, values)
    for note in training.notes:
        print_sentence(note)
    print(f"written to {out}")


def _print_result(paper: Paper, series: Series, values: dict[str, Any]) -> None:
    headings, rows = table(paper, values, paper.label)
    columns = [Column(heading, right=column > 1, minor=heading in MINOR) for column, heading in enumerate(headings)]
    measured = [bool(row["seeds"]) for row in values["rows"]]
    shown = [row for row, has_seeds in zip(rows, measured, strict=True) if has_seeds]
    print_table(columns, shown, f"{values['title']}: {series.where}")
    if not all(measured):
        print(f"not measured: {measured.count(False)} of {len(measured)} lines")
    if values["claims"]:
        print_sentence(f"{CLAIMS_ABOVE[values['scale']]}:")
    for claim in values["claims"]:
        print_sentence(f"  {claim['status']}: {claim_text(claim)}", below="    ")


def print_listing(request: Request, as_json: bool) -> None:
    """Print what each series needs and how long it takes here."""
    options, seeds = request.options, request.seeds
    rates = Rates(options)
    rows: list[dict[str, Any]] = []
    for series, cases in request.cases.items():
        seconds = seeds * rates.seconds(request.paper, series, cases)
        steps = seeds * expected_steps(request.paper, series, cases)
        rows.append({
            "name": series.name, "figure": series.figure, "where": series.where, "title": series.title,
            "data": needs(cases),
            "runs": seeds * len(cases), "client_steps_at_most": seeds * sum(case.steps for case in cases),
            "client_steps_expected": round(steps), "seconds": round(seconds),
            "rates": {str(case.experiment.model.name): vars(rates.of(case)) for case in cases},
        })  # fmt: skip
    if as_json:
        print(json.dumps({"scale": options.scale, "seeds": seeds, "recipes": rows}))
        return
    _listing_table(rows, f"{options.scale} scale, {seeds} seed{'s' if seeds > 1 else ''}, {options.device}")
    lacking = {name: state for row in rows for name, state in row["data"].items() if state not in READY}
    if lacking:
        print_sentence(f"*: {', '.join(dict.fromkeys(lacking.values()))}; run: `stratafl data prepare NAME`")
    print_sentence("M steps: million client-steps; where a run stops at a target, as many as the paper's own needed")
    print("time: at these rates")
    named = {name: rate for row in rows for name, rate in row["rates"].items()}
    for name, rate in named.items():
        print_sentence(f"  {name}: {rate['steps']:,.0f} client-steps a second, {rate['source']}", below="    ")
    print_sentence("recipes share runs: all of them together take less than the sum")


def _listing_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    columns = (
        Column("name"),
        Column("paper", minor=True),
        Column("needs", prose=True),
        Column("runs", right=True, minor=True),
        Column("M steps", right=True),
        Column("time", right=True),
    )
    cells = []
    for row in rows:
        needed = ", ".join(name if state in READY else unbroken(f"{name} *") for name, state in row["data"].items())
        cost = f"{row['client_steps_expected'] / 1e6:,.1f}", duration(row["seconds"])
        cells.append((row["name"], row["figure"], needed, str(row["runs"]), *cost))
    print_table(columns, cells, title)


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
