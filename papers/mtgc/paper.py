"""Description of the paper for the harness: its series, claims, vocabulary and remarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.harness.claims import OPEN
from papers.harness.paper import SEARCH, Paper
from papers.harness.results import Results, ratio
from papers.harness.series import Case, Panel, Scale, Series
from papers.mtgc.claims import CLAIMS, extra_models
from papers.mtgc.experiments import SERIES
from papers.mtgc.figures import draw
from papers.mtgc.published import TABLE1, TEXT_DISAGREES, WHY_FAR, Rounds, table1
from papers.mtgc.settings import CANDIDATES, CHOSEN, METHODS, RELEASED, TUNED, heading, label

ALONE = "cifar10_mtgc.json"
THEORY = "theory.json"


def published(results: Results, panel: Panel, line: str) -> dict[str, Any]:
    """Cells that compare a row with the paper: rounds of Table 1, communication of Appendix B."""
    if results.series.name == "table1":
        return _beside_table1(results, panel, line)
    return _communication(results, panel, line) if results.series.form == "communication" else {}


def published_rounds(series: Series, case: Case) -> float | None:
    """Rounds of the paper to the target of Table 1."""
    cell = table1(case.panel, case.line) if series.name == "table1" else None
    return None if cell is None else cell.mean


def _beside_table1(results: Results, panel: Panel, line: str) -> dict[str, Any]:
    """Measured speed-up over HFedAvg, the paper's number, and the ratio of the rounds."""
    own = results.reach(panel, line)
    cells: dict[str, Any] = {}
    gain = ratio(results.reach(panel, "hfedavg"), own)
    if gain is not None:
        cells["speedup"] = gain.text(unit="×")
    paper_rounds = None if results.options.quick else table1(panel, line)
    if paper_rounds is not None:
        cells |= {"paper": _paper_text(paper_rounds), "paper_speedup": f"{paper_rounds.speedup:.1f}×"}
        if own is not None and not own.beyond and not paper_rounds.beyond:
            cells["ratio"] = round(own.mean / paper_rounds.mean, 3)
    return cells


def _paper_text(rounds: Rounds) -> str:
    return f">{rounds.mean:g}" if rounds.beyond else f"{rounds.mean:.1f} ± {rounds.deviation:.1f}"


def _communication(results: Results, panel: Panel, line: str) -> dict[str, Any]:
    """Bytes of a round, and their ratio to HFedAvg's."""
    measured = results.get(panel, line)
    if measured is None:
        return {}
    sent = measured.curves[0].last_sent
    cells: dict[str, Any] = {"megabytes_a_round": round(sent / 1e6, 3)}
    plain = results.get(panel, "hfedavg")
    if plain is not None:
        cells["times_hfedavg"] = round(sent / plain.curves[0].last_sent, 4)
        cells["extra_models"] = round(extra_models(measured, plain, measured.case.experiment.schedule.periods[0]), 4)
        if line == "mtgc":
            cells |= {"paper": "1", "ratio": cells["extra_models"]}
    return cells


def best_candidates(results: Results) -> dict[str, dict[str, float]]:
    """Candidate with the highest final accuracy, for each method with all candidates measured."""
    best = {}
    for name, (parameter, values) in CANDIDATES.items():
        scores = {value: results.accuracy((name,), f"{parameter}={value:g}") for value in values}
        measured = {value: score.mean for value, score in scores.items() if score is not None}
        if len(measured) == len(values):
            best[name] = {parameter: max(measured, key=lambda value: measured[value])}
    return best


def open_settings(search: Mapping[str, Any] | None, scale: Scale) -> list[str]:
    """Values of mu and alpha, released and searched."""
    lines = []
    for method, title in TUNED.items():
        name, _ = CANDIDATES[method]
        released, chosen = RELEASED[method][name], CHOSEN[method][name]
        best = f"{chosen:g}, {_found(search, method, name)}"
        lines.append(f"- {title}'s {name}: {released:g} in the code released with the paper; and {best}.")
    return lines


def _found(search: Mapping[str, Any] | None, method: str, name: str) -> str:
    """Sentence about the chosen value and the best of a search."""
    if search is None:
        return "found by `stratafl reproduce search`, which was not done here"
    link, best = f"[search]({search['stem']}.md)", search["best"].get(method)
    if best is None:
        return f"the best so far of a {link} in which some candidates are {OPEN}"
    return f"the best of a {link}" if best == CHOSEN[method] else f"though the {link} here found {best[name]:g} better"


def elsewhere(folder: Path) -> list[str]:
    """Lines about measurements made by other commands."""
    lines = []
    if (folder / ALONE).exists():
        alone = json.loads((folder / ALONE).read_text())
        runs, made = alone["runs"], alone["environment"]
        rounds = [run["rounds_to_80"] for run in runs]
        seeds, precisions = ({run[key] for run in runs} for key in ("seed", "precision"))
        paper_rounds = TABLE1["both", 10, 20]["mtgc"]
        lines.append(
            f"- [{ALONE}]({ALONE}): MTGC alone at E = 10, H = 20, both levels non-i.i.d., on CIFAR-10: "
            f"{min(rounds)} to {max(rounds)} rounds to 80 % ({len(runs)} runs, {len(seeds)} seeds, {len(precisions)} "
            f"precisions; the paper: {paper_rounds.mean} ± {paper_rounds.deviation}), on {made['gpu']}, "
            f"commit {made['commit']}. One method alone judges no claim above."
        )
    if (folder / THEORY).exists():
        lines.append(f"- [{THEORY}]({THEORY}), [theory.png](theory.png): Section 4's theory in numbers, on quadratics.")
    return ["## Measured elsewhere", "", *lines] if lines else []


def extra_results(results: Results) -> dict[str, Any]:
    """Best candidates of a search, as further results."""
    return {"best": best_candidates(results)} if results.series.name == SEARCH else {}


def remarks(values: Mapping[str, Any]) -> list[str]:
    """Best candidates of a search, as Markdown."""
    return [f"Best: {json.dumps(values['best'])}.", ""] if values["what"] == SEARCH else []


MTGC = Paper(
    series=SERIES,
    claims=CLAIMS,
    methods=METHODS,
    label=label,
    heading=heading,
    draw=draw,
    published=published,
    published_rounds=published_rounds,
    extra_results=extra_results,
    remarks=remarks,
    introduction="every claim of Section 5\n"
    "and Appendices B to E is a row. The partition is `release_dirichlet`, the procedure in the code released with\n"
    "the paper, but for Figures 8a and 9a, which have their own. Seeds: how many the lines compared have.",
    open_settings=open_settings,
    elsewhere=elsewhere,
    why_far=WHY_FAR,
    errata={"table1": TEXT_DISAGREES},
    missing_data={"cinic10": "the data set is not at hand"},
)
"""Fang et al., Hierarchical Federated Learning with Multi-Timescale Gradient Correction (2024)."""
