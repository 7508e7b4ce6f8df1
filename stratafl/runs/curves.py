"""Learning curves of stored runs, their mean and band, and the metrics they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from stratafl.base.errors import InvalidInput, join_names
from stratafl.base.statistics import OverSeeds, over_seeds
from stratafl.metrics.metrics import Better
from stratafl.metrics.objective import Goal, GoalLike, default_metric, parse_goal, rank
from stratafl.metrics.records import diverged, measured
from stratafl.runs import StoredRun

Points = list[float | None]

AXES = {"rounds": "global rounds", "steps": "local steps per client", "bytes": "bytes per client", "seconds": "seconds"}
"""What a curve can be drawn against, and how that reads on an axis."""

DIGITS = 7
"""Significant ones kept: what a picture or a table can show, at half the size."""


@dataclass(frozen=True)
class Curve:
    """One point per global round: what it is drawn against, and values by name.

    Names are those of metrics ("accuracy"), "drift.LEVEL.QUANTITY" for diagnostics, and
    "nodes.LEVEL.SUMMARY.METRIC" for a level whose nodes were evaluated.
    """

    x: dict[str, Points]
    y: dict[str, Points]
    spread: dict[str, Points]
    """Standard deviation over the runs of a mean; empty for one run."""
    diverged: int | None = None
    """The round from which on the test loss is not finite: the curves of the metrics end before
    it."""

    def known(self, name: str) -> list[tuple[float, float]]:
        """(round, value) wherever there is a value."""
        rounds, values = self.x["rounds"], self.y.get(name, [])
        return [(r, v) for r, v in zip(rounds, values, strict=False) if r is not None and v is not None]

    def last(self, name: str) -> float | None:
        """The final value; None where the run diverged, however far it had come before."""
        if self.diverged is not None:
            return None
        return next((value for value in reversed(self.y.get(name, [])) if value is not None), None)


def curve_of(run: StoredRun, further: Mapping[str, Points] | None = None) -> Curve:
    """further: axes that the run has besides its own, a value per round."""
    records = run.rounds
    seconds = accumulate(plain_number(record.get("seconds")) or 0.0 for record in records)
    x: dict[str, Points] = {
        "rounds": [float(record["round"]) for record in records],
        "steps": [plain_number(record.get("steps")) for record in records],
        "bytes": [plain_number(record.get("bytes_per_client")) for record in records],
        "seconds": [plain_number(total) for total in seconds],
        **(further or {}),
    }
    columns: dict[str, Points] = {}
    levels = levels_of(run.tree)
    for place, record in enumerate(records):
        for name, value in _values(record, levels):
            columns.setdefault(name, [None] * len(records))[place] = value
    return Curve(x, columns, {}, diverged(records))


def levels_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """The level of each node of a stored tree, by its name; empty where the tree is broken."""
    levels = tree.get("levels")
    named = [level.get("names") for level in levels if isinstance(level, dict)] if isinstance(levels, list) else []
    return {str(name): level for level, names in enumerate(named) if isinstance(names, list) for name in names}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several runs, over the rounds that all of them have reached, until the first of
    them diverged."""
    if len(curves) == 1:
        return curves[0]
    rounds = min(len(curve.x["rounds"]) for curve in curves)
    names = [name for name in curves[0].y if all(name in curve.y for curve in curves)]

    def over(lines: Sequence[Points]) -> tuple[Points, Points]:
        """Mean and deviation of each round, where all runs have a value."""
        means: Points = []
        deviations: Points = []
        for values in zip(*(line[:rounds] for line in lines), strict=True):
            known = [value for value in values if value is not None]
            mean, deviation = over_seeds(known) if len(known) == len(values) else (None, None)
            means.append(plain_number(mean))
            deviations.append(plain_number(deviation))
        return means, deviations

    x = {axis: over([curve.x[axis] for curve in curves])[0] for axis in curves[0].x}
    y = {name: over([curve.y[name] for curve in curves]) for name in names}
    return Curve(
        x,
        {name: means for name, (means, _) in y.items()},
        {name: deviations for name, (_, deviations) in y.items()},
        min((curve.diverged for curve in curves if curve.diverged is not None), default=None),
    )


def plain_number(value: object) -> float | None:
    """A finite number, shortened to what can be seen; None for anything else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        short = float(f"{value:.{DIGITS}g}")
    except OverflowError:
        return None
    return short if math.isfinite(short) else None


def is_metric(name: str) -> bool:
    """Whether a curve's name is that of a metric of the root."""
    return not name.startswith(("drift.", "nodes."))


def _values(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    for name, value in measured(record).items():
        yield name, plain_number(value)
    for level, quantities in _table(record.get("drift")).items():
        for name, value in _table(quantities).items():
            yield f"drift.{level}.{name}", plain_number(value)
    yield from _over_nodes(record, levels)


def _over_nodes(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    """Mean, lowest, highest and deviation over the nodes of each level that has several; nothing
    where one of them is no number."""
    values: dict[tuple[int, str], Points] = {}
    for node, metrics in _table(record.get("nodes")).items():
        for name, value in _table(metrics).items():
            if node in levels:
                values.setdefault((levels[node], name), []).append(plain_number(value))
    for (level, name), column in values.items():
        known = [value for value in column if value is not None]
        if len(column) > 1 and len(known) == len(column):
            # all nodes there are, and not a few of many: the deviation of a population
            summaries = {"mean": statistics.fmean(known), "lowest": min(known), "highest": max(known)}
            for word, value in (summaries | {"spread": statistics.pstdev(known)}).items():
                yield f"nodes.{level}.{word}.{name}", plain_number(value)


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


LOWER = ("loss", "error", "perplexity", "mse", "mae", "rmse", "distance")
"""Words in the names of metrics that are the better the lower they are."""

ABSENT = "—"

MINUS = "−"


@dataclass(frozen=True)
class MetricInfo:
    """A metric and how it is shown."""

    name: str
    title: str
    """The title above a chart and in a table."""
    better: Better
    percent: bool
    digits: int | None
    """Decimals in a table; None for powers of ten."""

    @property
    def unit(self) -> str:
        return "%" if self.percent else ""

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def scaled(self, value: OverSeeds) -> OverSeeds:
        """A value in the unit of the tables: a share in per cent."""
        factor = 100.0 if self.percent else 1.0
        return OverSeeds(factor * value.mean, None if value.deviation is None else factor * value.deviation)

    def goal(self, value: float) -> Goal:
        """A value of it to get to, in the direction in which it is better."""
        return Goal(self.name, value, "<=" if self.better == "lower" else ">=")

    def goal_text(self, target: float) -> str:
        return f"{100 * target:.6g} %" if self.percent else f"{target:.6g}"


def measures(runs: Sequence[StoredRun], curves: Sequence[Curve]) -> list[MetricInfo]:
    """Every metric of these runs: accuracy first, the loss last."""
    values: dict[str, list[float]] = {}
    for curve in curves:
        for name, points in curve.y.items():
            if is_metric(name):
                values.setdefault(name, []).extend(value for value in points if value is not None)
    order = sorted(values, key=rank)
    return [_measure(name, values[name], _direction(name, runs)) for name in order]


class Target(NamedTuple):
    """A value of a metric that runs are held against."""

    measure: MetricInfo
    goal: Goal
    """With its sign."""

    @property
    def is_usual(self) -> bool:
        """Whether it lies in the direction in which the metric is better."""
        return self.goal == self.measure.goal(self.goal.value)


def targets_of(
    given: Iterable[GoalLike | Goal], metrics: Sequence[MetricInfo], judged: MetricInfo | None, field: str
) -> list[Target]:
    """Targets in any of the forms a user may give; a number alone is a value of the metric that
    settings are judged by."""
    known = {each.name: each for each in metrics}
    default = default_metric(known) if judged is None else judged.name
    found = []
    for each in given:
        goal = each if isinstance(each, Goal) else parse_goal(field, each, default)
        if goal.metric not in known:
            raise InvalidInput(field, each, f"these runs have {join_names(list(known))}")
        measure = known[goal.metric]
        found.append(Target(measure, goal.with_direction({measure.name: measure.better})))
    return found


def main_metric(found: Sequence[MetricInfo]) -> MetricInfo | None:
    """What settings are judged by unless somebody asks for another."""
    return found[0] if found else None


def number_text(value: OverSeeds | None, digits: int | None) -> str:
    """ "0.912 ± 0.003", or the mean alone where there is one run."""
    if value is None:
        return ABSENT
    mean = _written(value.mean, digits)
    return mean if value.deviation is None else f"{mean} ± {_written(value.deviation, digits)}"


def _written(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}".replace("-", MINUS)
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}".replace("-", MINUS)


def _measure(name: str, values: Sequence[float], better: Better) -> MetricInfo:
    percent = name == "accuracy"
    title = {"accuracy": "Test accuracy", "loss": "Test loss"}.get(name, name)
    return MetricInfo(name, title, better, percent, 1 if percent else _digits(values))


def _digits(values: Sequence[float]) -> int | None:
    """Decimals that show three or four digits of the usual value."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 3
    usual = math.floor(math.log10(sizes[len(sizes) // 2]))
    return None if usual > 5 or usual < -3 else max(0, 3 - usual if usual > 0 else 3 - min(usual + 1, 0))


def _direction(name: str, runs: Sequence[StoredRun]) -> Better:
    for run in runs:
        for way in get_args(Better):
            if run.better.get(name) == way:
                return way
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return "lower" if any(word in LOWER for word in words) else "higher"


def first_round(curve: Curve, goal: Goal) -> int | None:
    """The first round that is as good as the target; None where none is."""
    known = curve.known(goal.metric)
    return goal.first_round([int(r) for r, _ in known], [value for _, value in known])


def mean_std_if_complete(values: Sequence[float | None]) -> OverSeeds | None:
    """Mean and deviation where every run has a value."""
    known = [value for value in values if value is not None]
    return over_seeds(known) if known and len(known) == len(values) else None
