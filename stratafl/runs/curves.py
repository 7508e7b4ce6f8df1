"""Learning curves of stored runs, their mean and band, and their metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

from stratafl.base.errors import InvalidInput, join_names
from stratafl.base.statistics import MeanStd, mean_std
from stratafl.base.validation import check_choice
from stratafl.metrics.metrics import Better
from stratafl.metrics.objective import Goal, GoalLike, default_metric, parse_goal, rank
from stratafl.metrics.records import diverged, measured
from stratafl.runs import StoredRun

Points = list[float | None]


class CurveAxis(NamedTuple):
    """Quantity that curves are drawn against."""

    title: str
    unit: Literal["rounds", "steps", "bytes", "seconds", "money"]


AXES = {
    "rounds": CurveAxis("global rounds", "rounds"),
    "steps": CurveAxis("local steps per client", "steps"),
    "bytes": CurveAxis("bytes per client", "bytes"),
    "seconds": CurveAxis("wall-clock seconds", "seconds"),
}
"""Axes of all runs. Some runs have more: see `axes_of`."""

NETWORK = "network"
"""Axis of runs in the virtual time of a network."""

TRAFFIC = "traffic."
"""Beginning of the names of axes of bytes; the level follows, whose nodes exchange these with their
parents."""

TOP_LINK = f"{TRAFFIC}1"

DIGITS = 7
"""Significant digits of stored values: all that a figure or table shows, at half the size."""


@dataclass(frozen=True)
class Curve:
    """Curve with one point per global round: its axes, and values by name.

    Names are those of metrics ("accuracy"), "drift.LEVEL.QUANTITY" for diagnostics, and
    "nodes.LEVEL.SUMMARY.METRIC" for a level whose nodes were evaluated.
    """

    x: dict[str, Points]
    y: dict[str, Points]
    spread: dict[str, Points]
    """Standard deviations over the runs of a mean curve; empty for one run."""
    diverged: int | None = None
    """Round from which on no test loss is finite: the metrics' curves end before it."""

    def points_of(self, name: str) -> list[tuple[float, float]]:
        """Pairs of round and value, where there is a value."""
        rounds, values = self.x["rounds"], self.y.get(name, [])
        return [(r, v) for r, v in zip(rounds, values, strict=False) if r is not None and v is not None]

    def last(self, name: str) -> float | None:
        """Final value; None if the run diverged."""
        if self.diverged is not None:
            return None
        return next((value for value in reversed(self.y.get(name, [])) if value is not None), None)


def curve_of(run: StoredRun, extra_axes: Mapping[str, Points] | None = None) -> Curve:
    """Create the curve of a stored run. extra_axes: further axes, with a value per round."""
    records = run.rounds
    seconds = accumulate(plain_number(record.get("seconds")) or 0.0 for record in records)
    x: dict[str, Points] = {
        "rounds": [float(record["round"]) for record in records],
        "steps": [plain_number(record.get("steps")) for record in records],
        "bytes": [plain_number(record.get("bytes_per_client")) for record in records],
        "seconds": [plain_number(total) for total in seconds],
        NETWORK: [plain_number(record.get("clock_total")) for record in records],
        **_traffic(records),
        **(extra_axes or {}),
    }
    # a run in no network's time, or without counts of traffic, lacks these axes
    x = {name: points for name, points in x.items() if name in AXES or any(point is not None for point in points)}
    columns: dict[str, Points] = {}
    levels = levels_of(run.tree)
    for index, record in enumerate(records):
        for name, value in _values(record, levels):
            columns.setdefault(name, [None] * len(records))[index] = value
    return Curve(x, columns, {}, diverged(records))


class CurveCache:
    """Curves of runs; that of a run which was not read again is not computed again."""

    def __init__(self) -> None:
        self._curves: dict[int, tuple[StoredRun, Mapping[str, Points] | None, Curve]] = {}
        """By the identity of the run, which is kept so that no other object gets it."""

    def curve_of(self, run: StoredRun, extra_axes: Mapping[str, Points] | None = None) -> Curve:
        """Return what the function `curve_of` returns."""
        cached = self._curves.get(id(run))
        if cached is None or cached[1] != extra_axes:
            cached = self._curves[id(run)] = run, extra_axes, curve_of(run, extra_axes)
        return cached[2]

    def retain(self, runs: Sequence[StoredRun]) -> None:
        """Forget all other runs."""
        self._curves = {id(run): self._curves[id(run)] for run in runs if id(run) in self._curves}


def _traffic(records: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Bytes since the start of the run, both ways, between the nodes of each level and their
    parents, by axis."""
    tables = [_table(record.get("traffic")) for record in records]
    levels = sorted({level for table in tables for level in table if level.isdecimal()}, key=int)
    return {f"{TRAFFIC}{level}": [_bytes(_table(table.get(level))) for table in tables] for level in levels}


def _bytes(total: Mapping[str, Any]) -> float | None:
    """Bytes of both directions."""
    up, down = (plain_number(total.get(f"bytes_{direction}")) for direction in ("up", "down"))
    return None if up is None or down is None else plain_number(up + down)


def axes_of(curves: Sequence[Curve], extra_axes: Mapping[str, CurveAxis] | None = None) -> dict[str, CurveAxis]:
    """Axes against which at least one of these curves can be drawn: those of all runs, seconds on
    their own network, bytes of each level from the root down, and extra ones."""
    levels_of_curves = [
        [int(name.removeprefix(TRAFFIC)) for name in curve.x if name.startswith(TRAFFIC)] for curve in curves
    ]
    depths = {max(levels) for levels in levels_of_curves if levels}
    axes = dict(AXES)
    if any(NETWORK in curve.x for curve in curves):
        axes[NETWORK] = CurveAxis("seconds on the network", "seconds")
    for level in sorted({level for levels in levels_of_curves for level in levels}):
        link = (
            "the top link" if level == 1 else "the clients' links" if depths == {level} else f"links of level {level}"
        )
        axes[f"{TRAFFIC}{level}"] = CurveAxis(f"bytes on {link}", "bytes")
    return axes | dict(extra_axes or {})


def check_axis(name: str, axes: Mapping[str, CurveAxis]) -> str:
    """Check the name of an axis against those that runs have."""
    if name.startswith(TRAFFIC) and TOP_LINK not in axes:
        reason = "these runs lack it, as deployed trees and earlier versions do not count the bytes of each level"
        raise InvalidInput("--axis", name, f"{reason}; they have {join_names(list(axes))}")
    return check_choice("--axis", name, list(axes))


def levels_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """Level of each node of a stored tree, by its name; empty if the tree is damaged."""
    levels = tree.get("levels")
    named = [level.get("names") for level in levels if isinstance(level, dict)] if isinstance(levels, list) else []
    return {str(name): level for level, names in enumerate(named) if isinstance(names, list) for name in names}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Mean curve of several runs, over the rounds that all have, until the first of them
    diverged."""
    if len(curves) == 1:
        return curves[0]
    rounds = min(len(curve.x["rounds"]) for curve in curves)
    names = [name for name in curves[0].y if all(name in curve.y for curve in curves)]

    def mean_and_std(lines: Sequence[Points]) -> tuple[Points, Points]:
        """Mean and standard deviation of each round in which all runs have a value."""
        means: Points = []
        deviations: Points = []
        for values in zip(*(line[:rounds] for line in lines), strict=True):
            present = [value for value in values if value is not None]
            mean, deviation = mean_std(present) if len(present) == len(values) else (None, None)
            means.append(plain_number(mean))
            deviations.append(plain_number(deviation))
        return means, deviations

    axes = [axis for axis in curves[0].x if all(axis in curve.x for curve in curves)]
    x = {axis: mean_and_std([curve.x[axis] for curve in curves])[0] for axis in axes}
    y = {name: mean_and_std([curve.y[name] for curve in curves]) for name in names}
    return Curve(
        x,
        {name: means for name, (means, _) in y.items()},
        {name: deviations for name, (_, deviations) in y.items()},
        min((curve.diverged for curve in curves if curve.diverged is not None), default=None),
    )


def plain_number(value: object) -> float | None:
    """Round a finite number to the digits that are shown; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        short = float(f"{value:.{DIGITS}g}")
    except OverflowError:
        return None
    return short if math.isfinite(short) else None


def is_metric(name: str) -> bool:
    """Whether a name is that of a metric of the root."""
    return not name.startswith(("drift.", "nodes."))


def _values(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    for name, value in measured(record).items():
        yield name, plain_number(value)
    for level, quantities in _table(record.get("drift")).items():
        for name, value in _table(quantities).items():
            yield f"drift.{level}.{name}", plain_number(value)
    yield from _node_summaries(record, levels)


def _node_summaries(record: dict[str, Any], levels: Mapping[str, int]) -> Iterator[tuple[str, float | None]]:
    """Mean, lowest, highest and standard deviation over the nodes of each level with several;
    skipped if a value is not a number."""
    values: dict[tuple[int, str], Points] = {}
    for node, metrics in _table(record.get("nodes")).items():
        for name, value in _table(metrics).items():
            if node in levels:
                values.setdefault((levels[node], name), []).append(plain_number(value))
    for (level, name), column in values.items():
        numbers = [value for value in column if value is not None]
        if len(column) > 1 and len(numbers) == len(column):
            # the nodes are the whole population, not a sample
            summaries = {"mean": statistics.fmean(numbers), "lowest": min(numbers), "highest": max(numbers)}
            for summary, value in (summaries | {"spread": statistics.pstdev(numbers)}).items():
                yield f"nodes.{level}.{summary}.{name}", plain_number(value)


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


LOWER = ("loss", "error", "perplexity", "mse", "mae", "rmse", "distance")
"""Words in the names of metrics for which lower is better."""

ABSENT = "—"
MINUS = "−"


@dataclass(frozen=True)
class MetricInfo:
    """Metric, and its presentation."""

    name: str
    title: str
    """Title of a chart and in a table."""
    better: Better
    percent: bool
    digits: int | None
    """Decimals in a table; None for scientific notation."""

    @property
    def unit(self) -> str:
        return "%" if self.percent else ""

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def scaled(self, value: MeanStd) -> MeanStd:
        """Convert a value to the unit of the tables: shares to per cent."""
        factor = 100.0 if self.percent else 1.0
        return MeanStd(factor * value.mean, None if value.deviation is None else factor * value.deviation)

    def goal(self, value: float) -> Goal:
        """Goal of reaching a value, in the direction in which the metric is better."""
        return Goal(self.name, value, "<=" if self.better == "lower" else ">=")

    def goal_text(self, target: float) -> str:
        return f"{100 * target:.6g} %" if self.percent else f"{target:.6g}"


def metric_infos(runs: Sequence[StoredRun], curves: Sequence[Curve]) -> list[MetricInfo]:
    """Metrics of these runs: accuracy first, the loss last."""
    values: dict[str, list[float]] = {}
    for curve in curves:
        for name, points in curve.y.items():
            if is_metric(name):
                values.setdefault(name, []).extend(value for value in points if value is not None)
    order = sorted(values, key=rank)
    return [
        MetricInfo(
            name,
            title={"accuracy": "Test accuracy", "loss": "Test loss"}.get(name, name),
            better=_direction(name, runs),
            percent=name == "accuracy",
            digits=1 if name == "accuracy" else _digits(values[name]),
        )
        for name in order
    ]


class Target(NamedTuple):
    """Value of a metric that runs are compared with."""

    metric: MetricInfo
    goal: Goal
    """Goal with its sign."""

    @property
    def has_default_direction(self) -> bool:
        """Whether the goal lies in the direction in which the metric is better."""
        return self.goal == self.metric.goal(self.goal.value)


def targets_of(
    values: Iterable[GoalLike | Goal], metrics: Sequence[MetricInfo], main: MetricInfo | None, field: str
) -> list[Target]:
    """Parse targets as users write them; a number without a metric is a value of the main
    metric."""
    infos = {info.name: info for info in metrics}
    default = default_metric(infos) if main is None else main.name
    targets = []
    for value in values:
        goal = value if isinstance(value, Goal) else parse_goal(field, value, default)
        if goal.metric not in infos:
            raise InvalidInput(field, value, f"these runs have {join_names(list(infos))}")
        info = infos[goal.metric]
        targets.append(Target(info, goal.with_direction({info.name: info.better})))
    return targets


def number_text(value: MeanStd | None, digits: int | None) -> str:
    """Format a value as "0.912 ± 0.003", or the mean of a single run."""
    if value is None:
        return ABSENT
    mean = _format_number(value.mean, digits)
    return mean if value.deviation is None else f"{mean} ± {_format_number(value.deviation, digits)}"


def _format_number(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}".replace("-", MINUS)
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}".replace("-", MINUS)


def _digits(values: Sequence[float]) -> int | None:
    """Decimals that show three or four digits of the median."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 3
    exponent = math.floor(math.log10(sizes[len(sizes) // 2]))
    return None if exponent > 5 or exponent < -3 else max(0, 3 - exponent if exponent > 0 else 3 - min(exponent + 1, 0))


def _direction(name: str, runs: Sequence[StoredRun]) -> Better:
    for run in runs:
        for direction in get_args(Better):
            if run.better.get(name) == direction:
                return direction
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return "lower" if any(word in LOWER for word in words) else "higher"


def first_round(curve: Curve, goal: Goal) -> int | None:
    """First round that reaches the target; None if none does."""
    points = curve.points_of(goal.metric)
    return goal.first_round([int(r) for r, _ in points], [value for _, value in points])


def mean_std_if_complete(values: Sequence[float | None]) -> MeanStd | None:
    """Mean and standard deviation, if every run has a value."""
    present = [value for value in values if value is not None]
    return mean_std(present) if present and len(present) == len(values) else None
