"""Trees as the page draws them: who belongs to whom, what each holds, and how each did."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from stratafl.report.curves import levels_of, number
from stratafl.runs import StoredRun

WIDEST = 2000
"""Nodes of a level that a picture of the tree can tell apart; a larger level is left out."""
STOPS = 100
"""Rounds of a run that the slider over its nodes stops at."""
MOST = 400_000
"""Values of nodes that a page holds; where there are more, the slider has fewer stops."""


def trees(runs: Sequence[StoredRun], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Each tree and split once, with the names of the runs that have it; and whose is which."""
    found: dict[str, dict[str, Any]] = {}
    where: list[int | None] = []
    for run, name in zip(runs, names, strict=True):
        tree = tree_of(run.tree)
        if tree is None:
            where.append(None)
            continue
        key = json.dumps(tree)
        found.setdefault(key, {**tree, "runs": []})["runs"].append(name)
        where.append(list(found).index(key))
    return list(found.values()), where


def node_values(run: StoredRun, tree: dict[str, Any], room: int) -> dict[str, Any] | None:
    """The metrics of single nodes, by name and level: a list of the level's nodes for each of the
    rounds the slider stops at. None where no node was evaluated."""
    levels = levels_of({"levels": tree["levels"]})
    records = [record for record in run.rounds if isinstance(record.get("nodes"), dict) and record["nodes"]]
    metrics = list(dict.fromkeys(name for record in records for node in record["nodes"].values() for name in node))
    nodes = sum(len(level["names"]) for level in tree["levels"])
    stops = min(STOPS, max(2, room // max(1, nodes * len(metrics))))
    kept = _spread(records, stops)
    values: dict[str, dict[str, list[list[float | None]]]] = {}
    for name in metrics:
        for level, each in enumerate(tree["levels"]):
            if any(levels.get(node) == level for record in kept for node in record["nodes"]):
                rows = [[_short(record["nodes"].get(node, {}).get(name)) for node in each["names"]] for record in kept]
                values.setdefault(name, {})[str(level)] = rows
    return {"rounds": [record["round"] for record in kept], "values": values} if values else None


def _spread(records: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many of the numbers, evenly spread, with the first and the last."""
    if len(records) <= most:
        return list(records)
    return [records[round(place * (len(records) - 1) / (most - 1))] for place in range(most)]


def _short(value: object) -> float | None:
    found = number(value)
    return None if found is None else float(f"{found:.4g}")


def tree_of(stored: dict[str, Any]) -> dict[str, Any] | None:
    """Names, parents, sizes and label counts per level, down to the last level that can be
    drawn."""
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
