"""A recipe's results as data and as tables: the paper's number, ours, and the ratio."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stratafl.base.files import atomic_write, make_folder, write_json
from stratafl.paper.recipes.base import Options, Recipe, Scale
from stratafl.paper.recipes.chosen import CANDIDATES
from stratafl.paper.recipes.published import TEXT_DISAGREES, WHY_FAR, Rounds, table1
from stratafl.paper.recipes.settings import METHODS
from stratafl.paper.reproduce.claims import claims_of
from stratafl.paper.reproduce.judge import OPEN, Panel, heading
from stratafl.paper.reproduce.measure import Measured, Results, Value, extra_models, times
from stratafl.paper.reproduce.stored_runs import RunCurve

FORMAT = 2
NEARER = 0.75
"""A second target of Table 1, for lines that do not reach its own."""
CLAIMS_ABOVE: dict[Scale, str] = {
    "paper": "The paper's claims",
    "quick": "The paper's claims, looked for in small, which is no evidence for or against them",
}
FAR = 0.3
"""Ours over the paper's, less one: beyond this it is said."""


def stem(recipe: Recipe, options: Options) -> str:
    """What the names of a recipe's files begin with; what is not the paper's own setting has a name
    of its own."""
    parts = [recipe.name, *([options.partition] if options.partition != "release_dirichlet" else [])]
    parts += [*(options.methods or ()), *([f"{options.rounds}_rounds"] if options.rounds else [])]
    return "_".join([*parts, *(["quick"] if options.quick else [])])


def describe(results: Results, seeds: int) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    recipe, options = results.recipe, results.options
    found: dict[str, Any] = {
        "format": FORMAT,
        "what": recipe.name,
        "title": recipe.titled(options.scale) + _variant(options),
        "where": recipe.where,
        "note": "" if options.quick or not options.whole else recipe.note,
        "scale": options.scale,
        "partition": options.partition,
        "whole": options.whole,
        "divided_by": results.divided_by,
        "target": results.target,
        "seeds": seeds,
        "rows": [_row(results, panel, line, seeds) for panel, line in results.measured],
        "claims": [],
        "made_with": made_with(results),
    }
    for claim in claims_of(recipe.name):
        verdict, text = claim.judge(results), claim.stated(options.scale)
        found["claims"].append({"id": claim.id, "text": text, "where": claim.where, **vars(verdict)})
    if recipe.name == "search":
        found["best"] = best_candidates(results)
    return found


def _variant(options: Options) -> str:
    """What is not the recipe's own."""
    parts = [] if options.partition == "release_dirichlet" else ["with a true Dirichlet"]
    parts += [] if options.methods is None else [f"only {', '.join(METHODS[name] for name in options.methods)}"]
    parts += [] if options.rounds is None else [f"at most {options.rounds} rounds"]
    return "".join(f", {part}" for part in parts)


def _row(results: Results, panel: Panel, line: str, seeds: int) -> dict[str, Any]:
    measured = results.measured[panel, line]
    until = results.until(panel)
    row: dict[str, Any] = {
        "panel": list(panel),
        "line": line,
        "seeds": len(measured.curves),
        "complete": measured.complete,
        "of": seeds,
        "rounds": measured.last,
        "limit": measured.case.config.run.rounds,
    }
    if results.recipe.name == "table1":
        row |= _beside_table1(results, panel, line)
    if not measured.curves:
        return row
    died = [curve.diverged for curve in measured.curves if curve.diverged is not None]
    if died:
        row["diverged"] = ", ".join(map(str, died))
    if results.recipe.form == "rounds":
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
    if results.recipe.form == "communication":
        row |= _communication(results, panel, line, measured)
    return row


def _numbers(name: str, value: Value | None, digits: int) -> dict[str, Any]:
    if value is None:
        return {}
    return {
        name: round(value.mean, digits + 2),
        f"{name}_deviation": None if value.deviation is None else round(value.deviation, digits + 2),
        f"{name}_text": value.text(digits),
    }


def _beside_table1(results: Results, panel: Panel, line: str) -> dict[str, Any]:
    ours = results.reach(panel, line)
    beside: dict[str, Any] = {}
    gain = times(results.reach(panel, "hfedavg"), ours)
    if gain is not None:
        beside["speedup"] = gain.text(unit="×")
    theirs = None if results.options.quick else table1(panel, line)
    if theirs is not None:
        beside |= {"paper": _paper_text(theirs), "paper_speedup": f"{theirs.speedup:.1f}×"}
        if ours is not None and not ours.beyond and not theirs.beyond:
            beside["ratio"] = round(ours.mean / theirs.mean, 3)
    return beside


def _paper_text(theirs: Rounds) -> str:
    return f">{theirs.mean:g}" if theirs.beyond else f"{theirs.mean:.1f} ± {theirs.deviation:.1f}"


def _communication(results: Results, panel: Panel, line: str, measured: Measured) -> dict[str, Any]:
    sent = measured.curves[0].last_sent
    beside: dict[str, Any] = {"megabytes_a_round": round(sent / 1e6, 3)}
    plain = results.get(panel, "hfedavg")
    if plain is not None:
        beside["times_hfedavg"] = round(sent / plain.curves[0].last_sent, 4)
        beside["extra_models"] = round(extra_models(measured, plain, measured.case.config.schedule.periods[0]), 4)
        if line == "mtgc":
            beside |= {"paper": "1", "ratio": beside["extra_models"]}
    return beside


def made_with(results: Results) -> dict[str, Any]:
    """Commits, hardware, versions and precisions of the runs, and what they cost."""
    curves = [(m.case, curve) for m in results.measured.values() for curve in m.curves]
    kept: dict[str, Any] = {}
    for key in ("commit", "gpu", "processor", "torch", "precision", "device"):
        kept[key] = sorted({str(each.get(key, "unknown")) for _, curve in curves for each in curve.made_with})
    if any(each.get("changed_since_commit") for _, curve in curves for each in curve.made_with):
        kept["changed_since_commit"] = True
    steps = sum(case.steps_per_round * curve.rounds[-1] for case, curve in curves)
    seconds = time_taken([curve for _, curve in curves])
    rate = round(steps / seconds) if seconds else 0
    return {**kept, "client_steps": steps, "seconds": round(seconds, 1), "client_steps_a_second": rate}


def time_taken(curves: Sequence[RunCurve]) -> float:
    """Seconds the runs took together; of those that were interrupted their rounds', as when these
    were is not known."""
    whole = covered(curve.span for curve in curves if not curve.paused)
    return whole + sum(curve.seconds[-1] for curve in curves if curve.paused)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of the spans: runs that shared a machine count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def best_candidates(results: Results) -> dict[str, dict[str, float]]:
    """Each method's candidate that ended highest, once all were tried."""
    best = {}
    for name, (parameter, values) in CANDIDATES.items():
        scores = {value: results.accuracy((name,), f"{parameter}={value:g}") for value in values}
        known = {value: score.mean for value, score in scores.items() if score is not None}
        if len(known) == len(values):
            best[name] = {parameter: max(known, key=lambda value: known[value])}
    return best


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
    found: dict[str, Any], form: str, name: Callable[[Panel], str] = heading, missing: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a column nobody has a value for is left out. `missing` stands where a
    line has none."""
    keys = [key for key in (*SHOWN[form], "diverged") if any(key in row for row in found["rows"])]
    rows = [
        [name(tuple(row["panel"])), METHODS.get(row["line"], row["line"]), f"{row['complete']}/{row['of']}",
         *(str(row.get(key, missing if key == keys[0] and not row["seeds"] else "")) for key in keys)]
        for row in found["rows"]
    ]  # fmt: skip
    return ["setting", "method", "seeds done", *(COLUMNS[key] for key in keys)], rows


def markdown(found: dict[str, Any], form: str, pictures: Sequence[Path]) -> str:
    """A recipe's results as a page in Markdown."""
    headings, rows = table(found, form, missing=OPEN)
    lines = [f"# {found['title']}", "", f"{found['where']} of the paper. {_conditions(found)}", ""]
    lines += [f"![{found['title']}]({path.name})" for path in pictures if path.suffix == ".png"] + [""]
    lines += as_table(headings, rows)
    if found["claims"]:
        lines += [f"{CLAIMS_ABOVE[found['scale']]}:", ""]
        lines += [f"- **{claim['status']}**: {said(claim)}" for claim in found["claims"]] + [""]
    far = [row for row in found["rows"] if abs(row.get("ratio", 1.0) - 1) > FAR]
    if far:
        named = ", ".join(f"{' '.join(row['panel'])} {row['line']} ({row['ratio']:.2f})" for row in far)
        why = [WHY_FAR[panel] for panel in dict.fromkeys(row["panel"][0] for row in far) if panel in WHY_FAR]
        lines += [" ".join([f"More than {FAR:.0%} from the paper's: {named}.", *why]), ""]
    if found["what"] == "search":
        lines += [f"Best: {json.dumps(found['best'])}.", ""]
    notes = [found["note"], TEXT_DISAGREES if found["what"] == "table1" else "", provenance(found["made_with"])]
    lines += [note for note in notes if note]
    return "\n".join(lines) + "\n"


def as_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown, an empty one last."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def said(claim: dict[str, Any]) -> str:
    """A claim in words, with what was found."""
    return f"{claim['text']} ({claim['sentence']})" if claim["sentence"] else claim["text"]


def _conditions(found: dict[str, Any]) -> str:
    target = "" if found["target"] is None else f" Target: {found['target']:.0%} test accuracy."
    scale = " The data are the embedded digits, on a small tree." if found["scale"] == "quick" else ""
    partition = ", ".join(f"`{name}`" for name in found["divided_by"])
    seeds = "1 seed" if found["seeds"] == 1 else f"up to {found['seeds']} seeds"
    return f"Partition {partition}, {seeds}.{target}{scale}"


def provenance(made: dict[str, Any]) -> str:
    """With which code and on which machine results were computed, in a sentence."""
    if not made["client_steps"]:
        return "Nothing was measured yet."
    where = (
        ", ".join(made["gpu"]) if any(d.startswith("cuda") for d in made["device"]) else ", ".join(made["processor"])
    )
    changed = " (with changes)" if made.get("changed_since_commit") else ""
    return (
        f"Measured on {where}, {', '.join(made['precision'])}, torch {', '.join(made['torch'])}, "
        f"commit {', '.join(made['commit'])}{changed}: {made['client_steps']:,} client-steps in {made['seconds']:,.0f} "
        f"seconds, {made['client_steps_a_second']:,} a second."
    )


def write(found: dict[str, Any], form: str, folder: Path, name: str, pictures: Sequence[Path]) -> list[Path]:
    """JSON, CSV and Markdown."""
    make_folder(folder)
    paths = [folder / f"{name}{suffix}" for suffix in (".json", ".csv", ".md")]
    write_json(paths[0], found, indent=1)
    text = io.StringIO()
    headings, rows = table(found, form)
    csv.writer(text, lineterminator="\n").writerows([headings, *rows])
    for path, content in zip(paths[1:], (text.getvalue(), markdown(found, form, pictures)), strict=True):
        with atomic_write(path) as file:
            file.write(content.encode())
    return paths
