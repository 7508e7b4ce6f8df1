"""Chart of one round on a network, node by node, for the page and as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.base.topology import Tree
from stratafl.cost.costs import PriceableRun
from stratafl.cost.pricing import TIME, Unit
from stratafl.network.specification import Network
from stratafl.network.timeline import AGGREGATE, COMPUTE, DOWNLOAD, OFFLINE, UPLOAD, WAIT, Activity

MAX_ROWS, MIN_ROWS = 60, 12
"""Maximum number of rows of a round, and the minimum that a page with many rounds leaves it."""

MAX_BARS = 60_000
"""Approximate number of bars on a page; with more, rounds get fewer rows, and in the end there are
fewer rounds."""

BARS_PER_ROUND = 5
"""Approximate number of bars of a leaf in one of its rounds."""

SHOWN_SIBLINGS: dict[int, tuple[tuple[float, str], ...]] = {
    3: ((0.0, "fastest"), (0.5, "median"), (1.0, "slowest")),
    1: ((1.0, "slowest"),),
}
"""Siblings of a large group that have a row, by their number: quantile of the waiting time, and
name."""


class GroupOnNetwork(NamedTuple):
    """Run of a group on a network."""

    title: str
    run: PriceableRun
    network: Network


def timelines(groups: Sequence[GroupOnNetwork]) -> list[dict[str, Any]]:
    """Charts of the first, the middle and the last round of each run; of the middle one if there
    are many runs."""
    charts = []
    for title, run, network in groups:
        workload, last = run.recovered.workload, len(run.run.rounds)
        room = MAX_BARS // (3 * len(groups) * BARS_PER_ROUND * int(workload.schedule.meetings[-1]))
        middle = (last + 1) // 2
        for round in sorted({1, middle, last} if room >= MIN_ROWS else {middle}):
            chart = RoundChart(workload.tree, run.intervals(network, round))
            rows = chart.rows(min(MAX_ROWS, max(MIN_ROWS, room)))
            shown = {"run": title, "network": network.name, "round": round, "rounds": last}
            charts.append({**shown, "seconds": chart.seconds, "nodes": chart.taking_part, "rows": rows})
    return charts


class _ChartRow(NamedTuple):
    level: int
    node: int
    role: str
    """Name of the quantile, if not all siblings are shown."""
    siblings: int
    """Number of siblings that take part, with itself."""


class RoundChart:
    """Activities of one round, by node."""

    def __init__(self, tree: Tree, activities: Sequence[Activity]):
        self.tree = tree
        self._activities: list[list[Activity]] = [[] for _ in tree.sizes]
        self._takes_part = [np.zeros(size, dtype=bool) for size in tree.sizes]
        self._waiting_seconds, self._upload_counts = ([np.zeros(size) for size in tree.sizes] for _ in range(2))
        for activity in activities:
            # parents aggregate, one level above their edges
            level = activity.level - 1 if activity.kind == AGGREGATE else activity.level
            active_N, seconds_N = activity.active_RN[0], (activity.end_RN - activity.begin_RN)[0]
            self._activities[level].append(activity)
            self._takes_part[level] |= active_N
            if activity.kind == UPLOAD:
                self._upload_counts[level] += active_N
            if activity.kind == WAIT:
                self._waiting_seconds[level] += np.where(active_N, seconds_N, 0.0)
        self.seconds = float(max(activity.end_RN[0, 0] for activity in self._activities[0]))
        self.taking_part = int(sum(map(np.count_nonzero, self._takes_part)))

    def rows(self, room: int) -> list[dict[str, Any]]:
        """Rows of the chart, at most a given number."""
        limits = [self.tree.leaves] * (self.tree.depth + 1)
        rows = self._limited_rows(limits, room)
        for limit, level in itertools.product(SHOWN_SIBLINGS, range(self.tree.depth, 0, -1)):
            if len(rows) > room:
                limits[level] = limit
                rows = self._limited_rows(limits, room)
        return [self._page_row(row) for row in rows[:room]]

    def _limited_rows(self, limits: Sequence[int], room: int) -> list[_ChartRow]:
        """Rows with at most so many siblings per level; one more than allowed if there are too
        many."""
        return list(itertools.islice(self._subtree_rows(_ChartRow(0, 0, "", 1), limits), room + 1))

    def _subtree_rows(self, row: _ChartRow, limits: Sequence[int]) -> Iterator[_ChartRow]:
        """Row of a node, and those of its subtree."""
        yield row
        level = row.level + 1
        if level > self.tree.depth:
            return
        first, last = np.searchsorted(self.tree.parents[level], [row.node, row.node + 1])
        children = first + np.flatnonzero(self._takes_part[level][first:last])
        # fast children wait longest for each of their updates
        waits = self._waiting_seconds[level][children] / np.maximum(self._upload_counts[level][children], 1)
        ordered = children[np.argsort(-waits, kind="stable")]
        shown = [(child, "") for child in children]
        if len(children) > limits[level]:
            shown = [(ordered[int(share * (len(ordered) - 1))], role) for share, role in SHOWN_SIBLINGS[limits[level]]]
        for child, role in shown:
            yield from self._subtree_rows(_ChartRow(level, int(child), role, len(children)), limits)

    def _page_row(self, row: _ChartRow) -> dict[str, Any]:
        """Row as the page has it; bars alternate start and duration."""
        bars: dict[str, list[float]] = {}
        for begin, end, kind in self.bars(row.level, row.node):
            bars.setdefault(kind, []).extend((float(f"{begin:.6g}"), float(f"{end - begin:.4g}")))
        name = self.tree.names[row.level][row.node]
        return {"name": name, "level": row.level, "role": row.role, "siblings": row.siblings, "bars": bars}

    def bars(self, level: int, node: int) -> list[tuple[float, float, str]]:
        """Start, end and kind of the activities of a node, in order."""
        bars: list[tuple[float, float, str]] = []
        for activity in self._activities[level]:
            if activity.active_RN[0, node]:
                begin, end = (float(times[0, node]) for times in (activity.begin_RN, activity.end_RN))
                # a late node is stopped: activities that it would have begun later are dropped
                while bars and bars[-1][0] >= begin:
                    bars.pop()
                if bars:
                    first, last, kind = bars[-1]
                    bars[-1] = first, min(last, begin), kind
                bars.append((begin, min(end, self.seconds), activity.kind))
        return [bar for bar in bars if bar[1] > bar[0]]


COLOURS = {DOWNLOAD: "#56b4e9", COMPUTE: "#0072b2", UPLOAD: "#e69f00", WAIT: "#d9dde1", AGGREGATE: "#c2629b",
           OFFLINE: "#bfe3d0"}  # fmt: skip

LABELS = {
    DOWNLOAD: "gets",
    COMPUTE: "computes",
    UPLOAD: "sends",
    WAIT: "waits",
    AGGREGATE: "merges",
    OFFLINE: "is away",
}

MAX_LINES = 40
"""Maximum number of lines in a figure; leaves of later groups are left out."""

Place = tuple[int, int]
"""Level and number of a node."""


def plot_round(path: Path, run: PriceableRun, network: Network, round: int) -> None:
    """Write the time line of one global round of a run, counted from 1."""
    stored, tree = run.run, run.recovered.workload.tree
    if round > len(stored.rounds):
        raise InvalidInput("--round", round, f"{stored.name} has {len(stored.rounds)} rounds")
    lines = _shown_nodes(tree)
    plt = pyplot()
    with plt.rc_context(STYLE):
        size = (7.2, 0.95 + 0.17 * len(lines))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        _plot_bars(axes, RoundChart(tree, run.intervals(network, round)), lines)
        names = [f"{'   ' * (tree.depth - level)}{tree.names[level][node]}" for level, node in lines]
        axes.set_yticks(range(len(lines)), list(map(escape_control, names)), fontsize=7)
        axes.set(ylim=(len(lines) - 0.4, -0.6))
        left_out = sum(tree.sizes) - len(lines)
        more = f"; {left_out:,} nodes are not shown" if left_out else ""
        axes.set_title(
            f"round {round} of {escape_control(stored.method)} on {network.name}{more}", loc="left", fontsize=8
        )
        save(figure, path)


def _shown_nodes(tree: Tree) -> list[Place]:
    """Nodes in the figure: each parent, followed by its children."""
    nodes: list[Place] = []
    free = MAX_LINES - sum(tree.sizes[:-1])

    def add(level: int, node: int) -> None:
        nonlocal free
        if level == tree.depth:
            free -= 1
            if free < 0:
                return
        if len(nodes) < MAX_LINES:
            nodes.append((level, node))
        for child in np.flatnonzero(tree.parents[level + 1] == node) if level < tree.depth else ():
            add(level + 1, int(child))

    add(0, 0)
    return nodes


def _plot_bars(axes: Any, chart: RoundChart, lines: Sequence[Place]) -> None:
    unit, drawn = Unit.of(TIME, [chart.seconds]), set[str]()
    for row, place in enumerate(lines):
        for begin, end, kind in chart.bars(*place):
            first, last = begin / unit.factor, end / unit.factor
            axes.barh(row, last - first, left=first, height=0.72, color=COLOURS[kind])
            drawn.add(kind)
    for kind, label in LABELS.items():
        if kind in drawn:
            axes.barh(0, 0, color=COLOURS[kind], label=label)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7, handlelength=1.0)
    axes.set(xlabel=unit.name, xlim=(0, chart.seconds / unit.factor))
    axes.spines[["top", "right"]].set_visible(False)
