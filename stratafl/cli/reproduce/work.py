"""What `stratafl reproduce` does between reading its options and showing its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.base import plotting
from stratafl.base.errors import InvalidInput
from stratafl.base.files import check_writable, make_folder
from stratafl.base.validation import check_integer, check_number
from stratafl.cli.display import SweepDisplay
from stratafl.paper.recipes import ALL, Case, Options, Recipe, recipe
from stratafl.paper.recipes.cost import needs
from stratafl.paper.reproduce import train as trainer
from stratafl.paper.reproduce.draw import draw
from stratafl.paper.reproduce.measure import measure
from stratafl.paper.reproduce.overview import write_overview
from stratafl.paper.reproduce.report import describe, stem, write
from stratafl.paper.reproduce.stored_runs import StoredRuns

READY = ("embedded", "generated", "prepared")
"""States of a data set that can be trained on."""


def recipes(what: Sequence[str] | None, listing: bool) -> list[Recipe]:
    """The recipes that were named, each once; a list without names is of all."""
    names = list(what or (("all", "search") if listing else ()))
    if not names:
        raise InvalidInput("WHAT", None, f"give one or more of all, {', '.join(ALL)}, search")
    flat = [each for name in names for each in (ALL if name == "all" else (name,))]
    return [recipe(name) for name in dict.fromkeys(flat)]


def options(
    scale: str, partition: str, methods: str | None, rounds: int | None, device: str, precision: str | None
) -> Options:
    """The options of all recipes, from what the command line says."""
    return Options(
        scale=scale,  # type: ignore[arg-type]  # it checks it
        partition=partition,
        methods=None if methods is None else tuple(dict.fromkeys(each.strip() for each in methods.split(","))),
        rounds=rounds,
        device=device,
        precision=precision or ("fp32" if device == "cpu" else "tf32"),
    )


@dataclass(frozen=True)
class Request:
    """What is to be reproduced, with how many seeds."""

    options: Options
    fitting: dict[Recipe, Options]
    """Each recipe with the options that fit it."""
    cases: dict[Recipe, list[Case]]
    """Each recipe with the cases of it that are to be trained."""
    seeds: int

    @staticmethod
    def of(recipes: Sequence[Recipe], options: Options, seeds: int | None, only: Sequence[str]) -> Request:
        count = check_integer("--seeds", seeds, at_least=1) if seeds is not None else 1 if options.quick else 3
        fitting = {each: each.fitting(options) for each in recipes}
        cases = {each: each.cases(its, only) for each, its in fitting.items()}
        if not any(cases.values()):
            known = ", ".join(case.name for each, its in fitting.items() for case in each.cases(its)[:4])
            raise InvalidInput("--only", list(only), f"no case has this in its name; there are {known}, ...")
        return Request(options, fitting, cases, count)


@dataclass(frozen=True)
class Limits:
    """How many processes may train, and for how long."""

    workers: int | None
    seconds: float | None

    @staticmethod
    def of(workers: int | None, seconds: float | None) -> Limits:
        if seconds is not None:
            check_number("--max-seconds", seconds, above=0)
        if workers is not None:
            check_integer("--workers", workers, at_least=1)
        return Limits(workers, seconds)


@dataclass(frozen=True)
class Training:
    """What training left behind."""

    unfinished: int = 0
    """Runs that are not done yet."""
    failed: bool = False
    notes: tuple[str, ...] = ()


def check_folders(runs: Path, out: Path, report_only: bool) -> None:
    """Refuse before any work what would fail at its end.

    That is plots that cannot be drawn or have no place, or runs that are not there to be read.
    """
    plotting.pyplot()
    check_writable("--out", out)
    if report_only and not runs.is_dir():
        raise InvalidInput("--runs", runs, "is not a folder, and --report-only trains nothing")


def train(request: Request, runs: Path, out: Path, limits: Limits, quiet: bool) -> Training:
    """Train what is missing of the cases whose data is there; the others are named."""
    every = [case for cases in request.cases.values() for case in cases]
    lacking = {name: state for name, state in needs(every).items() if state not in READY}
    able = [case for case in every if case.config.data.name not in lacking]
    if not able:
        named, states = list(lacking), ", ".join(dict.fromkeys(lacking.values()))
        raise InvalidInput("data set", ", ".join(named), f"{states}; run: stratafl data prepare {named[0]}")
    notes = [f"left out: {name} is {state}; run: stratafl data prepare {name}" for name, state in lacking.items()]
    for folder in (out, runs):
        make_folder(folder)
    configs = trainer.wanted(able, request.seeds)
    with SweepDisplay("reproduce", len(trainer.to_do(configs, runs)), quiet) as display:
        outcomes = trainer.train(configs, runs, limits.workers, display.show, display.say, limits.seconds)
    failed = trainer.failures(outcomes)
    notes += [f"{outcome.name}: failed: {outcome.reason}" for outcome in failed]
    left = len(trainer.missing(configs, runs))
    if left:
        notes.append(f"{left} of {len(configs)} runs are not done; the same command goes on")
    return Training(left, bool(failed), tuple(notes))


def report(request: Request, runs: Path, out: Path) -> list[dict[str, Any]]:
    """Write each recipe's table and figure, and the overview; return what they say, in order."""
    make_folder(out)
    stored = StoredRuns.of(runs)
    reports = []
    for each, options in request.fitting.items():
        results = measure(each, each.cases(options), options, request.seeds, stored)
        values = describe(results, request.seeds)
        reports.append(values)
        if results.comparable:
            name = stem(each, options)
            write(values, each.form, out, name, draw(results, out / name))
    write_overview(out, request.options.scale)
    return reports
