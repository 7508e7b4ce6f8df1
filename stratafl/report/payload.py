"""Everything the page shows, as plain data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stratafl.report import compare
from stratafl.report.compare import Number, Row, Setting
from stratafl.report.curves import AXES, Curve, number
from stratafl.store import StoredRun

WIDEST = 2000
"""Nodes of a level that a picture of the tree can tell apart; a larger level is left out."""
QUANTITIES = {
    "drift": "drift",
    "correction": "correction",
    "progress": "progress",
    "bias": "bias",
    "cosine": "cosine to ideal",
    "clipped": "clipped steps",
    "refused": "refused",
}
"""Diagnostics in the order in which they are offered, and how they read."""


def payload(
    runs: Sequence[StoredRun], targets: Sequence[float] | None = None, unreadable: Sequence[str] = ()
) -> dict[str, Any]:
    """targets: accuracies whose first round the summary names; a fitting one is chosen unless given."""
    found = compare.settings(runs)
    goals = compare.usual_targets(found) if targets is None else list(targets)
    rows = compare.summary(found, goals)
    depths = {len(run.tree["levels"]) - 1 for run in runs if run.tree.get("levels")}
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "axes": AXES,
        "quantities": QUANTITIES,
        "levels": [_level_title(level, depths) for level in range(max(depths, default=0) + 1)],
        "targets": goals,
        "settings": [_setting(setting) for setting in found],
        "summary": _table(rows, goals),
        "differences": compare.differences(found),
        "shared": compare.shared(found),
        "environments": _environments(runs),
        "trees": _trees(found),
        "unreadable": list(unreadable),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "label": setting.label,
        "mean": _curve(setting.mean),
        "runs": [
            {
                "name": run.name,
                "id": run.id,
                "seed": seed,
                "status": run.status,
                "reason": run.reason,
                "round": run.round,
                "total": run.total,
                "diverged": curve.diverged,
                "curve": _curve(curve),
            }
            for run, curve, seed in zip(setting.runs, setting.curves, setting.seeds, strict=True)
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"x": curve.x, "y": curve.y, "spread": curve.spread}


def _level_title(level: int, depths: set[int]) -> dict[str, str]:
    """How the drift of a level reads: the paper's names where it has one and all trees mean the same by it."""
    if level == 0:
        return {"title": "Root", "note": "the global model"}
    if len(depths) > 1:
        return {"title": f"Level {level}", "note": "counted from the root, in trees of different depth"}
    if level in depths:
        below = "the root" if level == 1 else "their groups"
        return {"title": "Clients", "note": f"client model drift: clients around {below}"}
    if level == 1:
        return {"title": "Groups", "note": "group model drift: groups around the root"}
    return {"title": f"Level {level}", "note": f"nodes of level {level} around their parents"}


def _table(rows: Sequence[Row], targets: Sequence[float]) -> dict[str, Any]:
    """Texts, with the first column for names and the others for numbers."""
    has_accuracy = any("accuracy" in row.final or row.best is not None for row in rows)
    head = ["setting", "runs", "rounds"]
    if has_accuracy:
        head += ["accuracy, %", "best, %", *(f"rounds to {100 * target:g} %" for target in targets)]
    head += ["loss", "MB per client", "s per round"]
    refused = any(row.refused for row in rows)
    if refused:
        head.append("refused")
    body = []
    for row in rows:
        cells = [row.label, str(row.runs), str(row.rounds)]
        dead = compare.diverged_text(row.diverged, row.runs) if row.diverged else None
        if has_accuracy:
            cells += [dead or _scaled(row.final.get("accuracy"), 100, 1), _scaled(row.best, 100, 1)]
            cells += [compare.reached_text(each) for each in row.targets]
        cells.append(dead or compare.number_text(row.final.get("loss"), 3))
        cells.append(
            _scaled(None if row.bytes_per_client is None else Number(row.bytes_per_client.mean, None), 1e-6, 2)
        )
        seconds = row.seconds_per_round
        cells.append(compare.ABSENT if seconds is None else f"{seconds.mean:.3g}")
        body.append([*cells, str(row.refused)] if refused else cells)
    return {"head": head, "rows": body}


def _scaled(value: Number | None, factor: float, digits: int) -> str:
    if value is None:
        return compare.ABSENT
    std = None if value.std is None else factor * value.std
    return compare.number_text(Number(factor * value.mean, std), digits)


def _environments(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Each one once."""
    found = [each for run in runs for each in run.environments() or [run.environment]]
    texts = {json.dumps(each, sort_keys=True, default=str): each for each in found}
    return [{str(key): str(value) for key, value in each.items()} for each in texts.values()]


def _trees(found: Sequence[Setting]) -> list[dict[str, Any]]:
    """Each tree and split once, named by the runs that have it."""
    trees: dict[str, dict[str, Any]] = {}
    for setting in found:
        for run, seed in zip(setting.runs, setting.seeds, strict=True):
            tree = _tree(run.tree)
            if tree is None:
                continue
            mine = trees.setdefault(json.dumps(tree), {**tree, "runs": []})
            mine["runs"].append(setting.label if seed is None else f"{setting.label}, seed {seed}")
    return list(trees.values())


def _tree(stored: dict[str, Any]) -> dict[str, Any] | None:
    """Names, parents, sizes and label counts per level, down to the last level that can be drawn."""
    try:
        levels: list[dict[str, list[Any]]] = [
            {
                "names": [str(name) for name in level["names"]],
                "parents": [int(parent) for parent in level["parents"]],
                "samples": [int(count) for count in level["samples"]],
                "weights": [number(weight) for weight in level["weights"]],
                "labels": [[int(count) for count in counts] for counts in level["labels"]],
            }
            for level in stored["levels"]
            if len(level["names"]) <= WIDEST
        ]
        sound = all(
            len(level["names"]) == len(level["samples"]) == len(level["labels"]) == len(level["weights"])
            for level in levels
        ) and all(
            len(below["parents"]) == len(below["names"])
            and all(0 <= parent < len(above["names"]) for parent in below["parents"])
            for above, below in itertools.pairwise(levels)
        )
        classes = [str(name) for name in stored["classes"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not sound or not levels or len(levels[0]["names"]) != 1:
        return None
    left_out = [len(level["names"]) for level in stored["levels"][len(levels) :]]
    return {"classes": classes, "levels": levels, "left_out": left_out}
