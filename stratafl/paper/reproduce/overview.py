"""The page with every claim of the paper and what was measured; made from the results beside it,
never by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.files import atomic_write, read_json
from stratafl.paper.recipes import RECIPES
from stratafl.paper.recipes.base import Scale
from stratafl.paper.recipes.chosen import CANDIDATES, CHOSEN, RELEASED
from stratafl.paper.recipes.published import TABLE1
from stratafl.paper.recipes.settings import TUNED
from stratafl.paper.reproduce.claims import CLAIMS
from stratafl.paper.reproduce.judge import OPEN, Claim
from stratafl.paper.reproduce.measure import span
from stratafl.paper.reproduce.report import FORMAT, as_table, provenance, said, table

NAMES: dict[Scale, str] = {"paper": "README.md", "quick": "README_quick.md"}
CANNOT = {"cinic10": "the data set is not at hand"}
ALONE = "cifar10_mtgc.json"
THEORY = "theory.json"


def results_in(folder: Path, scale: Scale) -> list[dict[str, Any]]:
    """What the command wrote there before, in the order of the recipes."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = read_json(path)
        except InvalidInput:
            continue
        ours = isinstance(values, dict) and values.get("format") == FORMAT and values.get("what") in RECIPES
        if ours and values.get("scale") == scale:
            found.append({**values, "stem": path.stem})
    order = list(RECIPES)
    return sorted(found, key=lambda each: (order.index(each["what"]), each["stem"]))


def overview(folder: Path, scale: Scale) -> str:
    """All claims and what was measured, as a page in Markdown."""
    results = results_in(folder, scale)
    main = {each["what"]: each for each in results if each["partition"] == "release_dirichlet" and each["whole"]}
    lines = ["# The paper's claims, and what was measured", ""]
    if scale == "quick":
        lines += [
            "Scaled down: every data set is the embedded digits, on a small tree. No evidence, a first look.",
            "",
        ]
    how = " ([how](../reproduce.md))" if (folder.parent / "reproduce.md").exists() else ""
    lines += [
        f"Written by `stratafl reproduce` from the results beside it{how}; every claim of Section 5",
        "and Appendices B to E is a row. The partition is `release_dirichlet`, the procedure in the code released with",
        "the paper, but for Figures 8a and 9a, which have their own. Seeds: how many the lines compared have.",
        "",
        "| claim | in the paper | measured | seeds | held? |",
        "|---|---|---|---|---|",
    ]
    lines += [_claim_row(claim, main.get(claim.recipe), scale) for claim in CLAIMS] + [""]
    for each in results:
        if each["partition"] != "release_dirichlet" and each["whole"]:
            lines += [f"## {each['title']}", "", *_measured(each), ""]
    lines += ["## Results", ""]
    lines += [f"- [{each['title']}]({each['stem']}.md). {provenance(each['made_with'])}" for each in results]
    if not results:
        lines += ["None yet."]
    lines += ["", "## What the paper leaves open", "", *_chosen(main.get("search"), scale), ""]
    lines += _elsewhere(folder) if scale == "paper" else []
    return "\n".join(lines).rstrip() + "\n"


def _measured(each: dict[str, Any]) -> list[str]:
    """The rows there is something for, and the claims they are enough for."""
    rows = [row for row in each["rows"] if row["seeds"]]
    headings, cells = table({**each, "rows": rows}, RECIPES[each["what"]].form)
    judged = [claim for claim in each["claims"] if claim["status"] != OPEN]
    return as_table(headings, cells) + [f"- **{claim['status']}**: {said(claim)}" for claim in judged]


def _claim_row(claim: Claim, found: dict[str, Any] | None, scale: Scale) -> str:
    judged = next((each for each in found["claims"] if each["id"] == claim.id), None) if found else None
    if found is None or judged is None or judged["status"] == OPEN:
        why = CANNOT.get(claim.recipe)
        status = f"{OPEN}: {why}" if why else OPEN
        return f"| {claim.stated(scale)} | {claim.where} | | | {status} |"
    seeds = span(row["seeds"] for row in found["rows"] if row["seeds"])
    return f"| {claim.stated(scale)} | {claim.where} | {judged['sentence']} | {seeds} | {judged['status']} |"


def _chosen(search: dict[str, Any] | None, scale: Scale) -> list[str]:
    lines = []
    for method, title in TUNED.items():
        name, _ = CANDIDATES[method]
        released, chosen = RELEASED[method][name], CHOSEN[method][name]
        best = f"{chosen:g}, {_found(search, method, name)}"
        lines.append(f"- {title}'s {name}: {released:g} in the code released with the paper; and {best}.")
    if scale == "paper":
        lines += [f"- {recipe.figure}: {recipe.note}" for recipe in RECIPES.values() if recipe.note]
    return lines


def _found(search: dict[str, Any] | None, method: str, name: str) -> str:
    """What the search says about the value that was chosen."""
    if search is None:
        return "found by `stratafl reproduce search`, which was not done here"
    link, best = f"[search]({search['stem']}.md)", search["best"].get(method)
    if best is None:
        return f"the best so far of a {link} in which some candidates are {OPEN}"
    return f"the best of a {link}" if best == CHOSEN[method] else f"though the {link} here found {best[name]:g} better"


def _elsewhere(folder: Path) -> list[str]:
    """Measurements that were made by other commands."""
    lines = []
    if (folder / ALONE).exists():
        alone = json.loads((folder / ALONE).read_text())
        runs, made = alone["runs"], alone["environment"]
        rounds = [run["rounds_to_80"] for run in runs]
        seeds, precisions = ({run[key] for run in runs} for key in ("seed", "precision"))
        theirs = TABLE1["both", 10, 20]["mtgc"]
        lines.append(
            f"- [{ALONE}]({ALONE}): MTGC alone at E = 10, H = 20, both levels non-i.i.d., on CIFAR-10: "
            f"{min(rounds)} to {max(rounds)} rounds to 80 % ({len(runs)} runs, {len(seeds)} seeds, {len(precisions)} "
            f"precisions; the paper: {theirs.mean} ± {theirs.deviation}), on {made['gpu']}, commit {made['commit']}. "
            "One method alone judges no claim above."
        )
    if (folder / THEORY).exists():
        lines.append(f"- [{THEORY}]({THEORY}), [theory.png](theory.png): Section 4's theory in numbers, on quadratics.")
    return ["## Measured elsewhere", "", *lines] if lines else []


def write_overview(folder: Path, scale: Scale) -> Path:
    """Write the overview beside the results that it is of."""
    path = folder / NAMES[scale]
    with atomic_write(path) as file:
        file.write(overview(folder, scale).encode())
    return path
