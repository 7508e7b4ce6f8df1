"""Everything the page shows, as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.metrics.objective import Goal, GoalLike
from stratafl.report import compare
from stratafl.report.compare import Setting
from stratafl.report.costs.axes import NetworkAxes
from stratafl.report.costs.rounds import Clocked, timelines
from stratafl.report.curves import AXES, Curve, Points, is_metric
from stratafl.report.measures import Measure, Target, chief, measures, targets_of
from stratafl.report.notes import notes
from stratafl.report.summary import fixed_columns, usual_targets
from stratafl.report.trees import MOST, node_values, trees
from stratafl.runs import StoredRun
from stratafl.runs.sweep.plan import noted_target

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


def payload(
    runs: Sequence[StoredRun],
    targets: Sequence[GoalLike | Goal] | None = None,
    unreadable: Sequence[str] = (),
    metric: str | None = None,
    further: NetworkAxes | None = None,
) -> dict[str, Any]:
    """targets: values of metrics whose first round the summary names; those of the sweeps that the
    runs are part of unless given, and fitting ones of metrics that these do not name. metric: the
    targets', or else the default one, unless given. further: axes of networks."""
    further = further or NetworkAxes()
    runs, repeated = compare.one_of_each(runs)
    found = compare.settings(runs, further.points)
    metrics, judged = judged_by(found, metric)
    chosen = _targets(runs, targets, metrics, judged)
    if metric is None and chosen:
        judged = chosen[0].measure
    depths = {len(run.tree["levels"]) - 1 for run in runs if run.tree.get("levels")}
    goals = {each.name: usual_targets(found, each) for each in metrics}
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
        "differences": compare.differences(found),
        "shared": compare.shared(found),
        "environments": _environments(runs),
        "trees": drawn,
        "timelines": timelines(_clocked(found, further)),
        "unreadable": [*unreadable, *repeated, *further.notes],
    }


def _targets(
    runs: Sequence[StoredRun],
    given: Sequence[GoalLike | Goal] | None,
    metrics: Sequence[Measure],
    judged: Measure | None,
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


def judged_by(found: Sequence[Setting], name: str | None = None) -> tuple[list[Measure], Measure | None]:
    """All metrics of these settings, and the one they are compared by."""
    curves = [curve for setting in found for curve in setting.curves]
    metrics = measures([run for setting in found for run in setting.runs], curves)
    return metrics, next((each for each in metrics if each.name == name), None) if name else chief(metrics)


def run_names(setting: Setting) -> list[str]:
    """A setting's runs, told apart by their seeds."""
    return [setting.label if seed is None else f"{setting.label}, seed {seed}" for seed in setting.seeds]


def _clocked(found: Sequence[Setting], further: NetworkAxes) -> list[Clocked]:
    """One run of each setting on each network: seeds differ in what is drawn only."""
    return [
        Clocked(setting.label, run, network)
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


def _setting(setting: Setting, shown: Sequence[tuple[str, int | None, dict[str, Any] | None]]) -> dict[str, Any]:
    runs = []
    for (title, tree, values), run, curve, seed in zip(shown, setting.runs, setting.curves, setting.seeds, strict=True):
        is_bad, told = notes(run, curve)
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
