"""What `stratafl reproduce` prints: the list of recipes, and the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratafl.cli.reproduce.work import READY, Request, Training
from stratafl.cli.tables import Column, print_sentence, print_table, unbroken
from stratafl.paper.recipes import Recipe
from stratafl.paper.recipes.cost import Rates, expected_steps, needs
from stratafl.paper.reproduce.judge import label
from stratafl.paper.reproduce.report import CLAIMS_ABOVE, said, table

MINOR = ("rounds to 75%", "best so far", "in rounds", "at round", "seeds done")
"""Headings of columns that a narrow terminal is not shown."""


def results(request: Request, reports: Sequence[dict[str, Any]], training: Training, out: Path, as_json: bool) -> None:
    """Every recipe's table and claims, and what training has to say."""
    if as_json:
        notes = list(training.notes)
        print(json.dumps({"results": reports, "unfinished": training.unfinished, "notes": notes}))
        return
    for each, values in zip(request.cases, reports, strict=True):
        _result(each, values)
    for note in training.notes:
        print_sentence(note)
    print(f"written to {out}")


def _result(each: Recipe, values: dict[str, Any]) -> None:
    headings, rows = table(values, each.form, label)
    columns = [Column(each, right=at > 1, minor=each in MINOR) for at, each in enumerate(headings)]
    measured = [bool(row["seeds"]) for row in values["rows"]]
    shown = [row for row, there in zip(rows, measured, strict=True) if there]
    print_table(columns, shown, f"{values['title']}: {each.where}")
    if not all(measured):
        print(f"not measured: {measured.count(False)} of {len(measured)} lines")
    if values["claims"]:
        print_sentence(f"{CLAIMS_ABOVE[values['scale']]}:")
    for claim in values["claims"]:
        print_sentence(f"  {claim['status']}: {said(claim)}", below="    ")


def listing(request: Request, as_json: bool) -> None:
    """Each recipe with what it needs and how long it takes here."""
    options, seeds = request.options, request.seeds
    rates = Rates(options)
    rows: list[dict[str, Any]] = []
    for each, its in request.cases.items():
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
        needed = ", ".join(each if state in READY else unbroken(f"{each} *") for each, state in row["data"].items())
        cost = f"{row['client_steps_expected'] / 1e6:,.1f}", duration(row["seconds"])
        cells.append((row["name"], row["figure"], needed, str(row["runs"]), *cost))
    print_table(columns, cells, title)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
