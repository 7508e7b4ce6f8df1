"""`stratafl.report`: the page and the figures of stored runs, as a function and as the command
makes them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, as_arguments, join_names
from stratafl.base.files import atomic_write
from stratafl.costs.pricing import network_axes
from stratafl.costs.workload import named_networks, resolved
from stratafl.metrics.objective import Goal, GoalLike
from stratafl.network.specification import Network, NetworkLike
from stratafl.reports.figures import figures as draw_figures
from stratafl.reports.page import page
from stratafl.reports.page_data import page_data
from stratafl.reports.summary import SummaryCell, SummaryColumn, columns
from stratafl.runs import StoredRun
from stratafl.runs.curves import CurveAxis
from stratafl.runs.groups import RunGroup, RunsLike, given_runs, group_runs, one_of_each, select_metric

TITLE = "stratafl report"
COUNTS = ("runs", "rounds")
"""Columns of whole numbers."""


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared, and what the page shows of them."""

    data: dict[str, Any]
    groups: list[RunGroup]
    axes: Sequence[str] = ()
    """What the curves of figures are drawn against; empty for the usual axes."""
    extra_axes: Mapping[str, CurveAxis] = field(default_factory=dict)
    """Axes of networks."""

    @property
    def metric(self) -> str | None:
        """Metric by which the settings are compared."""
        name: str | None = self.data["metric"]
        return name

    @property
    def targets(self) -> list[float]:
        """Values of that metric whose first round is looked for."""
        values: list[float] = self.data["targets"].get(self.metric, [])
        return values

    @property
    def summary(self) -> list[SummaryColumn]:
        """Columns of the whole summary table."""
        metrics, main = select_metric(self.groups, self.metric)
        return columns(self.groups, metrics, main, self.targets)

    def as_rows(self) -> list[dict[str, Any]]:
        """The summary as a flat table per setting, with names in snake_case."""
        rows: list[dict[str, Any]] = [{} for _ in self.groups]
        for column in self.summary:
            for row, cell in zip(rows, column.cells, strict=True):
                row.update(_values(_snake_case(column.title), cell))
        return rows

    def write(self, out: Path, title: str = TITLE) -> None:
        """Write the page."""
        with atomic_write(out, sync=False) as file:
            file.write(page(self.data, title).encode())

    def draw(self, folder: Path) -> list[Path]:
        """Write figures and tables for a paper; returns their paths."""
        return draw_figures(folder, self.groups, self.targets, self.metric, self.axes, self.extra_axes)


def compare(
    runs: Sequence[StoredRun],
    left_out: Sequence[str] = (),
    metric: str | None = None,
    targets: Sequence[GoalLike | Goal] | None = None,
    networks: Sequence[Network | None] = (),
    axes: Sequence[str] = (),
) -> Comparison:
    """Compare runs by a metric, to targets and on networks; curves are drawn against `axes`, on the
    page against the first one at first."""
    extra_axes = network_axes(runs, resolved(networks, runs))
    data = page_data(runs, targets, left_out, metric, extra_axes, axes[0] if axes else "")
    if metric is not None and data["metric"] is None:
        names = join_names([shown["name"] for shown in data["metrics"]])
        raise InvalidInput("--metric", metric, f"these runs have {names}")
    return Comparison(data, group_runs(runs, extra_axes.points), axes, extra_axes.axes)


def check_page(out: Path) -> None:
    """Reject a page that cannot be written, before the work."""
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise InvalidInput("--out", str(out), "must be a file that ends in .html")
    parent = out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidInput("--out", str(out), f"cannot write in {parent}")


def report(
    runs: RunsLike = "runs",
    out: str | Path | None = "report.html",
    *,
    metric: str | None = None,
    target: GoalLike | Sequence[GoalLike] | None = None,
    network: NetworkLike | Sequence[NetworkLike] = (),
    axis: str | Sequence[str] = (),
    figures: str | Path | None = None,
    title: str = TITLE,
) -> list[dict[str, Any]]:
    """Compare stored runs: write a page that opens offline, and return its summary.

    The summary is a list of flat tables, one per setting, as pandas takes it. Runs that cannot be
    read are left out with a warning.

    runs: run folders, folders of runs, archives, or what `read_run` returned.
    out: the page; None for none.
    metric: the metric to compare by; accuracy, or another that there is, unless given.
    target: values of metrics whose first round is looked for, such as 0.75 or "loss<=0.3".
    network: networks on which seconds and costs are shown, too: presets, TOML files or tables.
    axis: what curves are drawn against, one or several: "rounds", "steps", "bytes", "seconds",
        "network" or "traffic.1", the bytes on the top link.
    figures: a folder for figures of a paper, and for the summary as CSV and LaTeX.
    """
    with as_arguments():
        if out is not None:
            check_page(Path(out))
        stored, unreadable = given_runs(runs)
        stored, repeated = one_of_each(stored)
        left_out = [*unreadable, *repeated]
        for line in left_out:
            warnings.warn(f"left out: {line}", stacklevel=3)
        if target is not None:
            target = [target] if isinstance(target, float | int | str | Mapping) else list(target)
        names = [network] if isinstance(network, str | Path | Mapping | Network) else list(network)
        networks = named_networks(names)
        axes = [axis] if isinstance(axis, str) else list(axis)
        comparison = compare(stored, left_out, metric, target, networks, axes)
        if out is not None:
            comparison.write(Path(out), title)
        if figures is not None:
            comparison.draw(Path(figures))
    return comparison.as_rows()


def _values(name: str, cell: SummaryCell) -> dict[str, Any]:
    if cell.mean is None:
        return {name: cell.text}
    if name in COUNTS:
        return {name: int(cell.mean)}
    return {name: cell.mean} if cell.deviation is None else {name: cell.mean, f"{name}_std": cell.deviation}


def _snake_case(title: str) -> str:
    """Name of a column in data: "best accuracy, %" is best_accuracy_percent."""
    return re.sub(r"\W+", "_", title.replace("%", "percent").lower()).strip("_")
