"""Data of the report's page, as plain values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stratafl.base.errors import InvalidInput, join_names
from stratafl.costs.figures import GroupOnNetwork, timelines
from stratafl.costs.pricing import CostAxes
from stratafl.metrics.objective import Goal, GoalLike
from stratafl.reports.summary import default_targets, fixed_columns
from stratafl.runs import StoredRun, format
from stratafl.runs.curves import (
    Curve,
    CurveCache,
    MetricInfo,
    Points,
    Target,
    axes_of,
    check_axis,
    is_metric,
    levels_of,
    plain_number,
    targets_of,
)
from stratafl.runs.groups import RunGroup, group_runs, one_of_each, select_metric, split_config
from stratafl.sweeps.grid import noted_target


def run_remarks(run: StoredRun, curve: Curve) -> tuple[bool, list[str]]:
    """Remarks about a run, and whether any of them is a problem."""
    problems = []
    if curve.diverged is not None:
        problems.append(f"diverged at round {curve.diverged}: from there on its test loss is not finite")
    if run.status in (format.FAILED, format.INTERRUPTED):
        reason = f": {run.reason}" if run.reason else ""
        problems.append(f"{run.status} after {run.round} of {run.total} rounds{reason}")
    remarks = problems + _exclusions(run)
    # the notes of a run are more precise
    noted = {note.partition(" ")[0] for note in run.notes}
    substitutions = {"engine": _engine(run), "precision": _precision(run)}
    remarks += [line for word, line in substitutions.items() if line and word not in noted]
    remarks += run.notes
    for continuation in run.continued:
        changed = continuation.get("changed")
        if changed:
            changes = join_names(format.strings_in(changed))
            remarks.append(f"went on after round {continuation['after']} with {changes}")
    return bool(problems), remarks


def _exclusions(run: StoredRun) -> list[str]:
    """Lines for rejected and absent nodes, with the rounds."""
    lines = []
    for reason in ("refused", "absent"):
        rounds: dict[str, list[int]] = {}
        for record in run.rounds:
            for name in dict.fromkeys(format.strings_in(record.get(reason))):
                rounds.setdefault(name, []).append(record["round"])
        entries = [f"{name} in {_rounds_text(numbers)}" for name, numbers in rounds.items()]
        lines += [f"{reason}: {join_names(entries)}"] if entries else []
    return lines


def _engine(run: StoredRun) -> str:
    """Reason why another engine trained the run than was requested."""
    requested = _requested(run, "engine")
    _, has_reason, reason = run.how.partition(": ")
    if has_reason and requested != run.engine:
        return f"trained by the {run.engine} engine: {reason}"
    is_other = requested not in ("", "auto", run.engine)
    return f"engine {requested} was asked for, and {run.engine} trained it" if is_other else ""


def _precision(run: StoredRun) -> str:
    requested = _requested(run, "precision")
    if not requested or not run.precision or requested == run.precision:
        return ""
    return f"precision {requested} was asked for, and it was computed in {run.precision}"


def _requested(run: StoredRun, key: str) -> str:
    table = run.config.get("execution")
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else ""


def _rounds_text(numbers: Sequence[int]) -> str:
    """Text of a list of rounds, such as "rounds 1-3, 7"."""
    spans: list[list[int]] = []
    for round in numbers:
        if spans and spans[-1][-1] == round - 1:
            spans[-1].append(round)
        else:
            spans.append([round])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"round{'' if len(numbers) == 1 else 's'} {join_names(texts)}"


MAX_LEVEL_SIZE = 2000
"""Maximum number of nodes of a level in the drawing of the tree; larger levels are left out."""

MAX_SLIDER_STOPS = 100
"""Maximum number of rounds at which the slider over node values stops."""

MAX_NODE_VALUES = 400_000
"""Maximum number of node values on a page; with more, the slider has fewer stops."""


def trees(runs: Sequence[StoredRun], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Distinct trees with the names of their runs, and the index of each run's tree."""
    unique: dict[str, dict[str, Any]] = {}
    indices: list[int | None] = []
    for run, name in zip(runs, names, strict=True):
        tree = tree_of(run.tree)
        if tree is None:
            indices.append(None)
            continue
        key = json.dumps(tree)
        unique.setdefault(key, {**tree, "runs": []})["runs"].append(name)
        indices.append(list(unique).index(key))
    return list(unique.values()), indices


def node_values(run: StoredRun, tree: dict[str, Any], max_values: int) -> dict[str, Any] | None:
    """Metrics of nodes by name and level: one list per round at which the slider stops. None if no
    node was evaluated."""
    levels = levels_of({"levels": tree["levels"]})
    records = [record for record in run.rounds if isinstance(record.get("nodes"), dict) and record["nodes"]]
    metrics = list(dict.fromkeys(name for record in records for node in record["nodes"].values() for name in node))
    nodes = sum(len(level["names"]) for level in tree["levels"])
    stops = min(MAX_SLIDER_STOPS, max(2, max_values // max(1, nodes * len(metrics))))
    shown = _evenly_spaced(records, stops)
    values: dict[str, dict[str, list[list[float | None]]]] = {}
    for name in metrics:
        for level, stored_level in enumerate(tree["levels"]):
            if any(levels.get(node) == level for record in shown for node in record["nodes"]):
                rows = [
                    [_rounded(record["nodes"].get(node, {}).get(name)) for node in stored_level["names"]]
                    for record in shown
                ]
                values.setdefault(name, {})[str(level)] = rows
    return {"rounds": [record["round"] for record in shown], "values": values} if values else None


def _evenly_spaced(records: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Select records at even distances, with the first and the last."""
    if len(records) <= limit:
        return list(records)
    return [records[round(index * (len(records) - 1) / (limit - 1))] for index in range(limit)]


def _rounded(value: object) -> float | None:
    number = plain_number(value)
    return None if number is None else float(f"{number:.4g}")


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
            if len(level["names"]) <= MAX_LEVEL_SIZE
        ]
        is_consistent = all(
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
    if not is_consistent or not levels or len(levels[0]["names"]) != 1:
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
"""Titles and units of the diagnostics, in the order of the page."""

DIGITS_OF_DIAGNOSTICS = 5
"""Significant digits of values that are not compared with targets."""


def page_data(
    runs: Sequence[StoredRun],
    targets: Sequence[GoalLike | Goal] | None = None,
    unreadable: Sequence[str] = (),
    metric: str | None = None,
    extra_axes: CostAxes | None = None,
    axis: str = "",
    cache: CurveCache | None = None,
) -> dict[str, Any]:
    """Collect the data of the page.

    targets: values of metrics whose first round the summary shows; by default those of the sweeps
    of the runs, and suitable ones for other metrics. metric: the main metric; by default that of
    the targets. extra_axes: axes of networks. axis: what curves are drawn against at first.
    cache: curves of an earlier page.
    """
    extra_axes = extra_axes or CostAxes()
    runs, repeated = one_of_each(runs)
    groups = group_runs(runs, extra_axes.points, cache)
    metrics, main = select_metric(groups, metric)
    chosen_targets = _targets(runs, targets, metrics, main)
    if metric is None and chosen_targets:
        main = chosen_targets[0].metric
    depths = {len(run.tree["levels"]) - 1 for run in runs if run.tree.get("levels")}
    goals = {info.name: default_targets(groups, info) for info in metrics}
    goals |= {
        info.name: [goal.value for target_metric, goal in chosen_targets if target_metric == info]
        for info in metrics
        if any(target_metric == info for target_metric, _ in chosen_targets)
    }
    before, after = fixed_columns(groups, metrics)
    ordered = [run for group in groups for run in group.runs]
    names = [name for group in groups for name in run_names(group)]
    drawn_trees, tree_of_run = trees(ordered, names)
    max_values = MAX_NODE_VALUES // max(1, len(ordered))
    values = [
        None if index is None else node_values(run, drawn_trees[index], max_values)
        for run, index in zip(ordered, tree_of_run, strict=True)
    ]
    common, configs = split_config(ordered)
    rows = iter(zip(names, tree_of_run, values, configs, strict=True))
    axes = axes_of([curve for group in groups for curve in group.curves], extra_axes.axes)
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "axes": {name: shown._asdict() for name, shown in axes.items()},
        "axis": check_axis(axis, axes) if axis else next(iter(axes)),
        "metrics": [info.as_dict for info in metrics],
        "metric": None if main is None else main.name,
        "targets": goals,
        "quantities": {name: {"title": title, "unit": unit} for name, (title, unit) in QUANTITIES.items()},
        "levels": [_level_title(level, depths) for level in range(max(depths, default=0) + 1)],
        "settings": [_group_data(group, [next(rows) for _ in group.runs]) for group in groups],
        "summary": {"before": [column.as_dict for column in before], "after": [column.as_dict for column in after]},
        "shared": common,
        "environments": _environments(runs),
        "trees": drawn_trees,
        "timelines": timelines(_groups_on_networks(groups, extra_axes)),
        "unreadable": [*unreadable, *repeated, *extra_axes.notes],
    }


def _targets(
    runs: Sequence[StoredRun],
    targets: Sequence[GoalLike | Goal] | None,
    metrics: Sequence[MetricInfo],
    main: MetricInfo | None,
) -> list[Target]:
    """Requested targets, or those stored with the sweeps, as far as the runs have such metrics."""
    if targets is not None:
        chosen = [] if main is None else targets_of(targets, metrics, main, "--target")
        for target in chosen:
            if not target.has_default_direction:
                reason = "is the wrong way round for a report, which counts the rounds to"
                raise InvalidInput("--target", str(target.goal), f"{reason} {target.metric.goal(target.goal.value)}")
        return chosen
    names = {info.name for info in metrics}
    stored = [goal for folder in dict.fromkeys(run.path.parent for run in runs) if (goal := noted_target(folder))]
    chosen = targets_of([goal for goal in stored if goal.metric in names], metrics, main, "--target")
    return [target for target in dict.fromkeys(chosen) if target.has_default_direction]


def run_names(group: RunGroup) -> list[str]:
    """Names of the runs of a group, with their seeds."""
    return [group.label if seed is None else f"{group.label}, seed {seed}" for seed in group.seeds]


def _groups_on_networks(groups: Sequence[RunGroup], extra_axes: CostAxes) -> list[GroupOnNetwork]:
    """First run of each group on each network: seeds change only the random draws."""
    return [
        GroupOnNetwork(group.label, run, network)
        for group in groups
        for priced in [extra_axes.priced[run.path] for run in group.runs if run.path in extra_axes.priced][:1]
        for run, network in priced
    ]


_RunRow = tuple[str, int | None, dict[str, Any] | None, dict[str, str]]
"""Name of a run, place of its tree, values of its nodes, and its part of the config."""


def _group_data(group: RunGroup, rows: Sequence[_RunRow]) -> dict[str, Any]:
    runs = []
    for (title, tree, values, config), run, curve, seed in zip(
        rows, group.runs, group.curves, group.seeds, strict=True
    ):
        is_bad, remarks = run_remarks(run, curve)
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
                "notes": remarks,
                "tree": tree,
                "nodes": values,
                "folder": run.path.parent.name,
                "tags": _tags(run),
                "config": config,
                "curve": _curve(curve),
            }
        )
    # one run is its own mean
    return {
        "label": group.label,
        **group.style._asdict(),
        "mean": None if len(runs) == 1 else _curve(group.mean),
        "runs": runs,
    }


def _tags(run: StoredRun) -> list[str]:
    storage = run.config.get("storage")
    return format.strings_in(storage.get("tags")) if isinstance(storage, dict) else []


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "x": {name: _column(points) for name, points in curve.x.items()},
        "y": {name: points if is_metric(name) else _shortened(points) for name, points in curve.y.items()},
        "spread": {name: _shortened(points) for name, points in curve.spread.items()},
    }


def _column(points: Points) -> Any:
    """Points; evenly spaced ones as the first value, the step and the count."""
    if len(points) > 2 and points[0] is not None and points[1] is not None:
        first, step = points[0], points[1] - points[0]
        if all(point == first + step * index for index, point in enumerate(points)):
            return {"first": first, "step": step, "count": len(points)}
    return points


def _shortened(points: Points) -> Points:
    return [None if point is None else float(f"{point:.{DIGITS_OF_DIAGNOSTICS}g}") for point in points]


def _level_title(level: int, depths: set[int]) -> dict[str, str]:
    """Title of a level's drift: the paper's names if all trees have two edge levels."""
    if level == 0:
        return {"title": "Root", "note": "the global model"}
    if len(depths) > 1:
        return {"title": f"Level {level}", "note": "counted from the root, in trees of different depth"}
    (depth,) = depths
    parent = "the root" if level == 1 else "their groups" if depth == 2 else f"their parents of level {level - 1}"
    if level == depth:
        title = "Clients" if depth <= 2 else f"Level {level}: clients"
        return {"title": title, "note": f"client model drift: clients around {parent}"}
    if depth == 2:
        return {"title": "Groups", "note": "group model drift: groups around the root"}
    return {"title": f"Level {level}", "note": f"aggregators of level {level} around {parent}"}


def _environments(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Distinct environments in which the runs were computed."""
    environments = [environment for run in runs for environment in run.environments() or [run.environment]]
    texts = {json.dumps(environment, sort_keys=True, default=str): environment for environment in environments}
    return [{str(key): str(value) for key, value in environment.items()} for environment in texts.values()]
