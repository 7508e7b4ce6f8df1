"""Results of a series as data, tables and pages, and the page of all claims."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from papers.harness.claims import OPEN, Claim
from papers.harness.paper import Paper
from papers.harness.results import Results, Value, span
from papers.harness.runs import RunCurve
from papers.harness.series import PARTITIONS, Options, Panel, Scale, Series
from stratafl.base.errors import InvalidInput
from stratafl.base.files import atomic_write, make_folder, read_json, write_json

FORMAT = 2
NAMES: dict[Scale, str] = {"paper": "README.md", "quick": "README_quick.md"}
NEARER = 0.75
"""Lower target, reported for lines that do not reach the target of their series."""
CLAIMS_ABOVE: dict[Scale, str] = {
    "paper": "The paper's claims",
    "quick": "The paper's claims, looked for in small, which is no evidence for or against them",
}
FAR = 0.3
"""Relative difference from the paper's number beyond which a page mentions it."""


def stem(series: Series, options: Options) -> str:
    """Stem of a series' file names, which names options that differ from the paper's."""
    parts = [series.name, *([options.partition] if options.partition != PARTITIONS[0] else [])]
    parts += [*(options.methods or ()), *([f"{options.rounds}_rounds"] if options.rounds else [])]
    return "_".join([*parts, *(["quick"] if options.quick else [])])


def describe(paper: Paper, results: Results, seeds: int) -> dict[str, Any]:
    """Results of a series as plain data."""
    series, options = results.series, results.options
    values: dict[str, Any] = {
        "format": FORMAT,
        "what": series.name,
        "title": series.titled(options.scale) + _variant(paper, options),
        "where": series.where,
        "note": "" if options.quick or not options.whole else series.note,
        "scale": options.scale,
        "partition": options.partition,
        "whole": options.whole,
        "divided_by": results.divided_by,
        "target": results.target,
        "seeds": seeds,
        "rows": [_row(paper, results, panel, line, seeds) for panel, line in results.measured],
        "claims": [],
        "made_with": made_with(results),
    }
    for claim in paper.claims_of(series.name):
        verdict, text = claim.judge(results, paper.label), claim.stated(series, options.scale)
        values["claims"].append({"id": claim.id, "text": text, "where": claim.where, **vars(verdict)})
    return {**values, **paper.extra_results(results)}


def _variant(paper: Paper, options: Options) -> str:
    """Suffix of a title that names options which differ from the series' own."""
    parts = [] if options.partition == PARTITIONS[0] else ["with a true Dirichlet"]
    parts += [] if options.methods is None else [f"only {', '.join(paper.methods[name] for name in options.methods)}"]
    parts += [] if options.rounds is None else [f"at most {options.rounds} rounds"]
    return "".join(f", {part}" for part in parts)


def _row(paper: Paper, results: Results, panel: Panel, line: str, seeds: int) -> dict[str, Any]:
    measured = results.measured[panel, line]
    until = results.until(panel)
    row: dict[str, Any] = {
        "panel": list(panel),
        "line": line,
        "seeds": len(measured.curves),
        "complete": measured.complete,
        "of": seeds,
        "rounds": measured.last,
        "limit": measured.case.experiment.rounds,
    }
    row |= paper.published(results, panel, line)
    if not measured.curves:
        return row
    died = [curve.diverged for curve in measured.curves if curve.diverged is not None]
    if died:
        row["diverged"] = ", ".join(map(str, died))
    if results.series.form == "rounds":
        if results.target is not None and results.target > NEARER:
            row |= _numbers("rounds_to_nearer", measured.reach(NEARER), 1)
        row |= _numbers("best", measured.best(measured.last), 4) | {"best_at": measured.last}
    else:
        row |= _numbers("accuracy", measured.accuracy(until), 4) | {"accuracy_at": until}
        row |= _numbers("best", measured.best(until), 4)
    if results.target is not None:
        row |= _numbers("rounds_to_target", measured.reach(results.target), 1)
        row |= _numbers("seconds_to_target", measured.seconds_to(results.target), 1)
    row |= _numbers("seconds", measured.seconds_for(until), 1)
    return row


def _numbers(name: str, value: Value | None, digits: int) -> dict[str, Any]:
    if value is None:
        return {}
    return {
        name: round(value.mean, digits + 2),
        f"{name}_deviation": None if value.deviation is None else round(value.deviation, digits + 2),
        f"{name}_text": value.text(digits),
    }


def made_with(results: Results) -> dict[str, Any]:
    """Commits, hardware, versions and precisions of the runs, with their steps and seconds."""
    curves = [(m.case, curve) for m in results.measured.values() for curve in m.curves]
    values: dict[str, Any] = {}
    for key in ("commit", "gpu", "processor", "torch", "precision", "device"):
        values[key] = sorted(
            {str(environment.get(key, "unknown")) for _, curve in curves for environment in curve.made_with}
        )
    if any(environment.get("changed_since_commit") for _, curve in curves for environment in curve.made_with):
        values["changed_since_commit"] = True
    steps = sum(case.steps_per_round * curve.rounds[-1] for case, curve in curves)
    seconds = time_taken([curve for _, curve in curves])
    rate = round(steps / seconds) if seconds else 0
    return {**values, "client_steps": steps, "seconds": round(seconds, 1), "client_steps_a_second": rate}


def time_taken(curves: Sequence[RunCurve]) -> float:
    """Seconds that the runs took together.

    Only the rounds of an interrupted run count, since the times of its parts are not known.
    """
    uninterrupted = covered(curve.span for curve in curves if not curve.paused)
    return uninterrupted + sum(curve.seconds[-1] for curve in curves if curve.paused)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in the union of the spans, so that runs at the same time count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


# -- as tables -------------------------------------------------------------------------------------

COLUMNS = {
    "rounds_to_target_text": "rounds to target",
    "paper": "paper",
    "ratio": "ours / paper",
    "speedup": "speed-up",
    "paper_speedup": "paper's speed-up",
    "accuracy_text": "accuracy",
    "accuracy_at": "at round",
    "best_text": "best so far",
    "rounds_to_nearer_text": f"rounds to {NEARER:.0%}",
    "best_at": "in rounds",
    "seconds_to_target_text": "seconds to target",
    "seconds_text": "seconds",
    "megabytes_a_round": "MB a round",
    "times_hfedavg": "times HFedAvg, both ways",
    "extra_models": "models more a round",
    "diverged": "diverged at round",
}
SHOWN = {
    "rounds": (
        "rounds_to_target_text",
        "paper",
        "ratio",
        "speedup",
        "paper_speedup",
        "rounds_to_nearer_text",
        "best_text",
        "best_at",
    ),
    "curves": ("accuracy_text", "accuracy_at", "best_text", "rounds_to_target_text"),
    "communication": (
        "accuracy_text",
        "accuracy_at",
        "megabytes_a_round",
        "times_hfedavg",
        "extra_models",
        "paper",
        "ratio",
    ),
    "time": ("seconds_to_target_text", "rounds_to_target_text", "seconds_text", "accuracy_at"),
}


def table(
    paper: Paper, values: dict[str, Any], name: Callable[[Panel], str] | None = None, missing: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table, without empty columns; `missing` fills unmeasured rows."""
    shown = SHOWN[paper.series[values["what"]].form]
    name = name or paper.heading
    keys = [key for key in (*shown, "diverged") if any(key in row for row in values["rows"])]
    rows = [
        [name(tuple(row["panel"])), paper.methods.get(row["line"], row["line"]), f"{row['complete']}/{row['of']}",
         *(str(row.get(key, missing if key == keys[0] and not row["seeds"] else "")) for key in keys)]
        for row in values["rows"]
    ]  # fmt: skip
    return ["setting", "method", "seeds done", *(COLUMNS[key] for key in keys)], rows


def markdown(paper: Paper, values: dict[str, Any], pictures: Sequence[Path]) -> str:
    """Page of a series' results in Markdown."""
    headings, rows = table(paper, values, missing=OPEN)
    lines = [f"# {values['title']}", "", f"{values['where']} of the paper. {_conditions(values)}", ""]
    lines += [f"![{values['title']}]({path.name})" for path in pictures if path.suffix == ".png"] + [""]
    lines += as_table(headings, rows)
    if values["claims"]:
        lines += [f"{CLAIMS_ABOVE[values['scale']]}:", ""]
        lines += [f"- **{claim['status']}**: {claim_text(claim)}" for claim in values["claims"]] + [""]
    far = [row for row in values["rows"] if abs(row.get("ratio", 1.0) - 1) > FAR]
    if far:
        named = ", ".join(f"{' '.join(row['panel'])} {row['line']} ({row['ratio']:.2f})" for row in far)
        why = [
            paper.why_far[panel] for panel in dict.fromkeys(row["panel"][0] for row in far) if panel in paper.why_far
        ]
        lines += [" ".join([f"More than {FAR:.0%} from the paper's: {named}.", *why]), ""]
    lines += paper.remarks(values)
    lines += [note for note in (values["note"], paper.errata.get(values["what"], "")) if note]
    lines += [provenance(values["made_with"])]
    return "\n".join(lines) + "\n"


def as_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Table as lines of Markdown, followed by an empty line."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def claim_text(claim: dict[str, Any]) -> str:
    """Text of a claim with its findings."""
    return f"{claim['text']} ({claim['sentence']})" if claim["sentence"] else claim["text"]


def _conditions(values: dict[str, Any]) -> str:
    target = "" if values["target"] is None else f" Target: {values['target']:.0%} test accuracy."
    scale = " The data are the embedded digits, on a small tree." if values["scale"] == "quick" else ""
    partition = ", ".join(f"`{name}`" for name in values["divided_by"])
    seeds = "1 seed" if values["seeds"] == 1 else f"up to {values['seeds']} seeds"
    return f"Partition {partition}, {seeds}.{target}{scale}"


def provenance(values: dict[str, Any]) -> str:
    """Sentence about the code and hardware that results were computed with."""
    if not values["client_steps"]:
        return "Nothing was measured yet."
    hardware = (
        ", ".join(values["gpu"])
        if any(d.startswith("cuda") for d in values["device"])
        else ", ".join(values["processor"])
    )
    changed = " (with changes)" if values.get("changed_since_commit") else ""
    return (
        f"Measured on {hardware}, {', '.join(values['precision'])}, torch {', '.join(values['torch'])}, "
        f"commit {', '.join(values['commit'])}{changed}: {values['client_steps']:,} client-steps in "
        f"{values['seconds']:,.0f} seconds, {values['client_steps_a_second']:,} a second."
    )


def write(paper: Paper, values: dict[str, Any], folder: Path, name: str, pictures: Sequence[Path]) -> list[Path]:
    """Write results as JSON, CSV and Markdown."""
    make_folder(folder)
    paths = [folder / f"{name}{suffix}" for suffix in (".json", ".csv", ".md")]
    write_json(paths[0], values, indent=1)
    text = io.StringIO()
    headings, rows = table(paper, values)
    csv.writer(text, lineterminator="\n").writerows([headings, *rows])
    for path, content in zip(paths[1:], (text.getvalue(), markdown(paper, values, pictures)), strict=True):
        with atomic_write(path) as file:
            file.write(content.encode())
    return paths


def results_in(paper: Paper, folder: Path, scale: Scale) -> list[dict[str, Any]]:
    """Results in a folder, in the order of the paper's series."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = read_json(path)
        except InvalidInput:
            continue
        is_result = isinstance(values, dict) and values.get("format") == FORMAT and values.get("what") in paper.series
        if is_result and values.get("scale") == scale:
            results.append({**values, "stem": path.stem})
    order = list(paper.series)
    return sorted(results, key=lambda result: (order.index(result["what"]), result["stem"]))


def overview(paper: Paper, folder: Path, scale: Scale) -> str:
    """Page of all claims and their verdicts in Markdown."""
    results = results_in(paper, folder, scale)
    main = {result["what"]: result for result in results if result["partition"] == PARTITIONS[0] and result["whole"]}
    lines = ["# The paper's claims, and what was measured", ""]
    if scale == "quick":
        lines += [
            "Scaled down: every data set is the embedded digits, on a small tree. No evidence, a first look.",
            "",
        ]
    link = " ([how](../reproduce.md))" if (folder.parent / "reproduce.md").exists() else ""
    lines += [
        f"Written by `stratafl reproduce` from the results beside it{link}; {paper.introduction}",
        "",
        "| claim | in the paper | measured | seeds | held? |",
        "|---|---|---|---|---|",
    ]
    lines += [_claim_row(paper, claim, main.get(claim.series), scale) for claim in paper.claims] + [""]
    for result in results:
        if result["partition"] != PARTITIONS[0] and result["whole"]:
            lines += [f"## {result['title']}", "", *_measured(paper, result), ""]
    lines += ["## Results", ""]
    lines += [f"- [{result['title']}]({result['stem']}.md). {provenance(result['made_with'])}" for result in results]
    if not results:
        lines += ["None yet."]
    lines += ["", "## What the paper leaves open", "", *paper.open_settings(main.get("search"), scale)]
    if scale == "paper":
        lines += [f"- {series.figure}: {series.note}" for series in paper.series.values() if series.note]
        lines += ["", *paper.elsewhere(folder)]
    return "\n".join(lines).rstrip() + "\n"


def _measured(paper: Paper, values: dict[str, Any]) -> list[str]:
    """Table of the measured rows, and the claims that could be judged."""
    rows = [row for row in values["rows"] if row["seeds"]]
    headings, cells = table(paper, {**values, "rows": rows})
    judged = [claim for claim in values["claims"] if claim["status"] != OPEN]
    return as_table(headings, cells) + [f"- **{claim['status']}**: {claim_text(claim)}" for claim in judged]


def _claim_row(paper: Paper, claim: Claim, result: dict[str, Any] | None, scale: Scale) -> str:
    text = claim.stated(paper.series[claim.series], scale)
    judged = next((verdict for verdict in result["claims"] if verdict["id"] == claim.id), None) if result else None
    if result is None or judged is None or judged["status"] == OPEN:
        reason = paper.missing_data.get(claim.series)
        status = f"{OPEN}: {reason}" if reason else OPEN
        return f"| {text} | {claim.where} | | | {status} |"
    seeds = span(row["seeds"] for row in result["rows"] if row["seeds"])
    return f"| {text} | {claim.where} | {judged['sentence']} | {seeds} | {judged['status']} |"


def write_overview(paper: Paper, folder: Path, scale: Scale) -> Path:
    """Write the page of claims beside the results."""
    path = folder / NAMES[scale]
    with atomic_write(path) as file:
        file.write(overview(paper, folder, scale).encode())
    return path
