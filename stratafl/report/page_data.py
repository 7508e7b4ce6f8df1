"""Everything the report's page shows, as plain data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stratafl.base.errors import InvalidInput, join_names
from stratafl.cost.pricing import CostAxes
from stratafl.cost.round_chart import GroupOnNetwork, timelines
from stratafl.metrics.objective import Goal, GoalLike
from stratafl.report.summary import default_targets, fixed_columns
from stratafl.runs import StoredRun, format, groups
from stratafl.runs.curves import AXES, Curve, MetricInfo, Points, Target, is_metric, levels_of, plain_number, targets_of
from stratafl.runs.groups import RunGroup, select_metric
from stratafl.runs.sweep.plan import noted_target


def run_remarks(run: StoredRun, curve: Curve) -> tuple[bool, list[str]]:
    """Whether something went wrong with it, and what there is to say."""
    bad = []
    if curve.diverged is not None:
        bad.append(f"diverged at round {curve.diverged}: from there on its test loss is not finite")
    if run.status in (format.FAILED, format.INTERRUPTED):
        why = f": {run.reason}" if run.reason else ""
        bad.append(f"{run.status} after {run.round} of {run.total} rounds{why}")
    told = bad + _left_out(run)
    # a run that has noted these itself says it better
    noted = {note.partition(" ")[0] for note in run.notes}
    found = {"engine": _engine(run), "precision": _precision(run)}
    told += [line for word, line in found.items() if line and word not in noted]
    told += run.notes
    for each in run.continued:
        changed = each.get("changed")
        told += (
            [f"went on after round {each['after']} with {join_names(format.strings_in(changed))}"] if changed else []
        )
    return bool(bad), told


def _left_out(run: StoredRun) -> list[str]:
    """Who was refused, and in which rounds, and who was absent: a line for each."""
    lines = []
    for why in ("refused", "absent"):
        rounds: dict[str, list[int]] = {}
        for record in run.rounds:
            for name in dict.fromkeys(format.excluded_nodes(record, why)):
                rounds.setdefault(name, []).append(record["round"])
        told = [f"{name} in {_rounds_text(numbers)}" for name, numbers in rounds.items()]
        lines += [f"{why}: {join_names(told)}"] if told else []
    return lines


def _engine(run: StoredRun) -> str:
    """Why it was trained in another way than was asked for."""
    asked = _asked(run, "engine")
    _, because, reason = run.how.partition(": ")
    if because and asked != run.engine:
        return f"trained by the {run.engine} engine: {reason}"
    is_other = asked not in ("", "auto", run.engine)
    return f"engine {asked} was asked for, and {run.engine} trained it" if is_other else ""


def _precision(run: StoredRun) -> str:
    asked = _asked(run, "precision")
    if not asked or not run.precision or asked == run.precision:
        return ""
    return f"precision {asked} was asked for, and it was computed in {run.precision}"


def _asked(run: StoredRun, key: str) -> str:
    table = run.config.get("run")
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else ""


def _rounds_text(numbers: Sequence[int]) -> str:
    """Which rounds, as in "rounds 1-3, 7"."""
    spans: list[list[int]] = []
    for round in numbers:
        if spans and spans[-1][-1] == round - 1:
            spans[-1].append(round)
        else:
            spans.append([round])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"round{'' if len(numbers) == 1 else 's'} {join_names(texts)}"


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
    found = plain_number(value)
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
                "weights": [plain_number(weight) for weight in level["weights"]],
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


QUANTITIES = {
    "drift": ("drift", "norm of parameters"),
    "correction": ("correction", "norm of a gradient"),
    "progress": ("progress", "norm of parameters"),
    "bias": ("bias", "norm of a gradient"),
    "cosine": ("cosine to ideal", "−1 to 1"),
    "clipped": ("clipped steps", "share"),
    "refused": ("refused", "updates a round"),
    "absent": ("absent", "nodes a round"),
}
"""Diagnostics in the order in which they are offered, how they read, and their units."""

COARSE = 5
"""Significant digits of what no target is held against."""


def page_data(
    runs: Sequence[StoredRun],
    targets: Sequence[GoalLike | Goal] | None = None,
    unreadable: Sequence[str] = (),
    metric: str | None = None,
    further: CostAxes | None = None,
) -> dict[str, Any]:
    """targets: values of metrics whose first round the summary names; those of the sweeps that the
    runs are part of unless given, and fitting ones of metrics that these do not name. metric: the
    targets', or else the default one, unless given. further: axes of networks."""
    further = further or CostAxes()
    runs, repeated = groups.one_of_each(runs)
    found = groups.group_runs(runs, further.points)
    metrics, judged = select_metric(found, metric)
    chosen = _targets(runs, targets, metrics, judged)
    if metric is None and chosen:
        judged = chosen[0].measure
    depths = {len(run.tree["levels"]) - 1 for run in runs if run.tree.get("levels")}
    goals = {each.name: default_targets(found, each) for each in metrics}
    goals |= {
        each.name: [goal.value for measure, goal in chosen if measure == each]
        for each in metrics
        if any(measure == each for measure, _ in chosen)
    }
    before, after = fixed_columns(found, metrics)
    ordered = [run for setting in found for run in setting.runs]
    named = [name for setting in found for name in run_names(setting)]
    drawn, where = trees(ordered, named)
    values = _node_values(ordered, drawn, where)
    shown = iter(zip(named, where, values, strict=True))
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "axes": {**AXES, **further.titles},
        "metrics": [each.as_dict for each in metrics],
        "metric": None if judged is None else judged.name,
        "targets": goals,
        "quantities": {name: {"title": title, "unit": unit} for name, (title, unit) in QUANTITIES.items()},
        "levels": [_level_title(level, depths) for level in range(max(depths, default=0) + 1)],
        "settings": [_setting(setting, [next(shown) for _ in setting.runs]) for setting in found],
        "summary": {"before": [each.as_dict for each in before], "after": [each.as_dict for each in after]},
        "differences": groups.config_differences(found),
        "shared": groups.common_config(found),
        "environments": _environments(runs),
        "trees": drawn,
        "timelines": timelines(_clocked(found, further)),
        "unreadable": [*unreadable, *repeated, *further.notes],
    }


def _targets(
    runs: Sequence[StoredRun],
    given: Sequence[GoalLike | Goal] | None,
    metrics: Sequence[MetricInfo],
    judged: MetricInfo | None,
) -> list[Target]:
    """The targets that are asked for, or those that the sweeps of these runs note, as far as the
    runs have such metrics."""
    if given is not None:
        chosen = [] if judged is None else targets_of(given, metrics, judged, "--target")
        for target in chosen:
            if not target.is_usual:
                told = "is the wrong way round for a report, which counts the rounds to"
                raise InvalidInput("--target", str(target.goal), f"{told} {target.measure.goal(target.goal.value)}")
        return chosen
    known = {each.name for each in metrics}
    noted = [goal for folder in dict.fromkeys(run.path.parent for run in runs) if (goal := noted_target(folder))]
    chosen = targets_of([goal for goal in noted if goal.metric in known], metrics, judged, "--target")
    return [target for target in dict.fromkeys(chosen) if target.is_usual]


def run_names(setting: RunGroup) -> list[str]:
    """A setting's runs, told apart by their seeds."""
    return [setting.label if seed is None else f"{setting.label}, seed {seed}" for seed in setting.seeds]


def _clocked(found: Sequence[RunGroup], further: CostAxes) -> list[GroupOnNetwork]:
    """One run of each setting on each network: seeds differ in what is drawn only."""
    return [
        GroupOnNetwork(setting.label, run, network)
        for setting in found
        for priced in [further.priced[each.path] for each in setting.runs if each.path in further.priced][:1]
        for run, network in priced
    ]


def _node_values(
    runs: Sequence[StoredRun], drawn: Sequence[dict[str, Any]], where: Sequence[int | None]
) -> list[dict[str, Any] | None]:
    room = MOST // max(1, len(runs))
    return [
        None if place is None else node_values(run, drawn[place], room) for run, place in zip(runs, where, strict=True)
    ]


def _setting(setting: RunGroup, shown: Sequence[tuple[str, int | None, dict[str, Any] | None]]) -> dict[str, Any]:
    runs = []
    for (title, tree, values), run, curve, seed in zip(shown, setting.runs, setting.curves, setting.seeds, strict=True):
        is_bad, told = run_remarks(run, curve)
        runs.append(
            {
                "title": title,
                "name": run.name,
                "id": run.id,
                "seed": seed,
                "status": run.status,
                "round": run.round,
                "total": run.total,
                "diverged": curve.diverged,
                "bad": is_bad,
                "notes": told,
                "tree": tree,
                "nodes": values,
                "curve": _curve(curve),
            }
        )
    # one run is its own mean
    return {"label": setting.label, "mean": None if len(runs) == 1 else _curve(setting.mean), "runs": runs}


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "x": {name: _column(points) for name, points in curve.x.items()},
        "y": {name: points if is_metric(name) else _coarse(points) for name, points in curve.y.items()},
        "spread": {name: _coarse(points) for name, points in curve.spread.items()},
    }


def _column(points: Points) -> Any:
    """Points; those in even steps, as rounds are, by the first, the step and how many there are."""
    if len(points) > 2 and points[0] is not None and points[1] is not None:
        first, step = points[0], points[1] - points[0]
        if all(point == first + step * place for place, point in enumerate(points)):
            return {"first": first, "step": step, "count": len(points)}
    return points


def _coarse(points: Points) -> Points:
    return [None if point is None else float(f"{point:.{COARSE}g}") for point in points]


def _level_title(level: int, depths: set[int]) -> dict[str, str]:
    """How the drift of a level reads: the paper's names where it has one and all trees mean the
    same by it."""
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


def _environments(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """The environments that the runs were computed in, each one once."""
    found = [each for run in runs for each in run.environments() or [run.environment]]
    texts = {json.dumps(each, sort_keys=True, default=str): each for each in found}
    return [{str(key): str(value) for key, value in each.items()} for each in texts.values()]
