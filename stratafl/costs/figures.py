"""Figures of costs: one round node by node (also for the page), time by activity, a network."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.plotting import BLUE, GREEN, INK, PINK, VERMILION, VIOLET, save, style
from stratafl.base.topology import Topology
from stratafl.costs.costs import PriceableRun
from stratafl.costs.pricing import ALL_ROUNDS, TIME, GroupCosts, Unit, time_breakdown
from stratafl.network.specification import Device, Distribution, Network, Tier
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
"""Siblings of a large group that have a row, by their number: place in the order from the longest
wait (0) to the shortest (1), and name."""


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

    def __init__(self, tree: Topology, activities: Sequence[Activity]):
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


ACTIVITY_COLOURS = {
    DOWNLOAD: "#56b4e9",
    COMPUTE: BLUE,
    UPLOAD: "#e69f00",
    WAIT: "#d9dde1",
    AGGREGATE: PINK,
    OFFLINE: "#bfe3d0",
}

ACTIVITY_LABELS = {
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
    with style() as plt:
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


def _shown_nodes(tree: Topology) -> list[Place]:
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
            axes.barh(row, last - first, left=first, height=0.72, color=ACTIVITY_COLOURS[kind])
            drawn.add(kind)
    for kind, label in ACTIVITY_LABELS.items():
        if kind in drawn:
            axes.barh(0, 0, color=ACTIVITY_COLOURS[kind], label=label)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, handlelength=1.0)
    axes.set(xlabel=unit.name, xlim=(0, chart.seconds / unit.factor))


PART_COLOURS = {"computing": BLUE, "away": "#b8bec6"}

SHADES = {
    "sending": ("#e69f00", VERMILION, "#8c3b00", "#5c2600"),
    "waiting": ("#bfe3d0", "#66c2a5", GREEN, "#00593f"),
    "own rounds": ("#cfe3f1", "#8ec1e3", "#4a90c2", "#1f5f8b"),
    "merging": ("#e3b8d2", PINK, "#8e3b6e", "#5c2247"),
}
"""Colours of tiers, from the clients up: higher tiers are darker."""

WIDTH = 7.2


def plot_time_breakdown(path: Path, groups: Sequence[GroupCosts], until: str = ALL_ROUNDS) -> None:
    """Plot the time that groups of runs took until a milestone, by activity."""
    networks = list(dict.fromkeys(group.network for group in groups))
    names = list(dict.fromkeys(group.setting for group in groups))
    longest = max(map(len, names))
    with style() as plt:
        # a panel has room for its bars, and for its legend
        height = len(networks) * max(0.62 + 0.24 * len(names), 1.6) + 0.35
        figure, panels = plt.subplots(len(networks), 1, figsize=(WIDTH, height), layout="constrained", squeeze=False)
        for axes, network in zip(panels[:, 0], networks, strict=True):
            _panel(axes, [group for group in groups if group.network == network], names, until)
            axes.set_title(f"{network}, until {until}", loc="left", fontsize=8)
            axes.tick_params(axis="y", labelsize=8 if longest < 40 else 6)
        save(figure, path)


def _panel(axes: Any, groups: Sequence[GroupCosts], names: Sequence[str], until: str) -> None:
    complete = [group for group in groups if group.at(until).seconds is not None]
    seconds = {group.setting: time_breakdown(group.at(until), group.levels) for group in complete}
    unit = Unit.of(TIME, [sum(parts.values()) for parts in seconds.values()])
    totals = {name: sum(parts.values()) / unit.factor for name, parts in seconds.items()}
    titles = [
        title
        for title in dict.fromkeys(title for parts in seconds.values() for title in parts)
        if any(parts.get(title, 0.0) > 1e-3 * sum(parts.values()) for parts in seconds.values())
    ]
    colours = _colours(titles)
    for place, name in enumerate(names):
        left = 0.0
        for title in titles if name in seconds else ():
            width = seconds[name].get(title, 0.0) / unit.factor
            axes.barh(place, width, left=left, height=0.66, color=colours[title], linewidth=0)
            left += width
        text = f" {totals[name]:,.3g} {unit.name}" if name in seconds else " not reached"
        axes.text(left, place, text, va="center", fontsize=7, color=INK)
    axes.set(xlabel=unit.name, xlim=(0, 1.28 * max(totals.values(), default=1.0)), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    handles = [axes.barh(0, 0, color=colours[title], label=title) for title in titles]
    if handles:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, handlelength=1.0)


def _colours(titles: Sequence[str]) -> dict[str, str]:
    colours, used = dict(PART_COLOURS), dict.fromkeys(SHADES, 0)
    tiers = list(dict.fromkeys(title.partition(", ")[2] for title in titles if ", " in title))
    for title in titles:
        kind, _, tier = title.partition(", ")
        if kind in used:
            shades = SHADES[kind]
            colours[title] = shades[min(len(tiers) - 1 - tiers.index(tier), len(shades) - 1)]
    return colours


UNITS = {"mbit_s": "Mbit/s", "gflop_s": "GFLOP/s", "bytes": "bytes", "watts": "W", "_s": "s"}
"""Units by the end of a quantity's name."""

TIER_COLOURS = (BLUE, VERMILION, GREEN, VIOLET)
PROBABILITIES = np.linspace(0.005, 0.995, 200)


def quantity_rows(network: Network) -> list[tuple[str, str, str, str]]:
    """Rows of the quantities that differ from the default: part, quantity, median, range."""
    rows = []
    for name, part in _parts(network):
        for key, value in _set_quantities(part).items():
            spread = "" if value.is_constant else f"{value.quantile_at(0.1):.4g} to {value.quantile_at(0.9):.4g}"
            rows.append((name, key, f"{value.quantile_at(0.5):.4g}", spread))
            name = " "
    for pattern, quantities in network.nodes:
        rows += [(f"nodes {pattern}", key, f"{value.quantile_at(0.5):.4g}", "") for key, value in quantities]
    return rows


def _parts(network: Network) -> list[tuple[str, Tier | Device]]:
    tiers = [(f"tier {place}: {tier.name}".rstrip(": "), tier) for place, tier in enumerate(network.tiers, 1)]
    direct = [] if network.direct is None else [("direct", network.direct)]
    return [("leaf", network.leaf), *tiers, *direct]


def _set_quantities(part: Tier | Device) -> dict[str, Distribution]:
    """Quantities of a tier or device that differ from the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    values = {key: value for key, value in vars(part).items() if key != "name"}
    if isinstance(part, Tier) and part.down_mbit_s == part.up_mbit_s:
        del values["down_mbit_s"]
    return {key: value for key, value in values.items() if value is not None and value != defaults[key]}


def plot_network(path: Path, network: Network, tree: Topology) -> None:
    """Plot a tree with its links at the left, and distributions at the right."""
    colours: dict[str, str] = {"leaf": INK}
    colours |= {tier.name: TIER_COLOURS[place % len(TIER_COLOURS)] for place, tier in enumerate(network.tiers)}
    levels = [network.tier(level, tree.depth) for level in range(tree.depth, 0, -1)]
    parts: dict[str, Tier | Device] = {"leaf": network.leaf, **{tier.name: tier for tier in levels}}
    varied = [
        (f"{name}: {key}", value, colours.get(name, TIER_COLOURS[0]))
        for name, part in parts.items()
        for key, value in _set_quantities(part).items()
        if not value.is_constant
    ]
    with style() as plt:
        # one small panel beside the tree for each distribution
        count = max(1, len(varied))
        figure = plt.figure(figsize=(7.2 if varied else 4.8, max(3.2, 1.45 * count)), layout="constrained")
        grid = figure.add_gridspec(count, 2 if varied else 1, width_ratios=(2.1, 1) if varied else (1,))
        _plot_tree(figure.add_subplot(grid[:, 0]), network, tree)
        for place, (title, value, colour) in enumerate(varied):
            _plot_distribution(figure.add_subplot(grid[place, 1]), title, value, colour)
        save(figure, path)


def _plot_tree(axes: Any, network: Network, tree: Topology) -> None:
    depth = tree.depth
    position = [np.empty(size) for size in tree.sizes]
    position[depth] = np.arange(tree.leaves, dtype=float)
    for level in range(depth - 1, -1, -1):
        counts = tree.children(level)
        position[level] = np.bincount(tree.parents[level + 1], position[level + 1]) / counts
    width = max(1.0, tree.leaves - 1.0)
    for level in range(1, depth + 1):
        colour = TIER_COLOURS[min(depth - level, len(network.tiers) - 1) % len(TIER_COLOURS)]
        for child, parent in enumerate(tree.parents[level]):
            ends = [position[level - 1][parent], position[level][child]]
            axes.plot(ends, [depth - level + 1, depth - level], color=colour, linewidth=1.2, zorder=1)
        tier = network.tier(level, depth)
        axes.text(1.06 * width, depth - level + 0.5, _tier_text(tier), fontsize=7, color=colour, va="center")
    for level, xs in enumerate(position):
        size = 60 if level < depth else 28
        shape = "s" if level < depth else "o"
        axes.scatter(xs, np.full(len(xs), depth - level), s=size, color=INK, marker=shape, zorder=2)
    axes.text(1.06 * width, -0.06, _device_text(network.leaf), fontsize=7, color=INK, va="center")
    axes.set(xlim=(-0.05 * width, 1.85 * width), ylim=(-0.45, depth + 0.35))
    axes.set_title(network.name, loc="left", fontsize=9)
    axes.axis("off")


def _tier_text(tier: Tier) -> str:
    """Description of a tier's links in a few lines."""
    assert tier.up_mbit_s is not None and tier.down_mbit_s is not None
    up, down = (_median_text(rate) for rate in (tier.up_mbit_s, tier.down_mbit_s))
    lines = [tier.name] if tier.name else []
    lines.append(f"{up} Mbit/s" if up == down else f"{up} up, {down} down Mbit/s")
    if tier.latency_s.quantile_at(0.5) or tier.jitter_s.quantile_at(0.5):
        jitter = f" + {_duration_text(tier.jitter_s)} jitter" if tier.jitter_s.quantile_at(0.5) else ""
        lines.append(f"{_duration_text(tier.latency_s)} one way{jitter}")
    pipes = {_median_text(rate) for rate in (tier.pipe_up_mbit_s, tier.pipe_down_mbit_s) if rate is not None}
    if pipes:
        lines.append(f"shared pipe: {', '.join(sorted(pipes))} Mbit/s")
    return "\n".join(lines)


def _device_text(leaf: Device) -> str:
    lines = [
        f"{_duration_text(leaf.step_s)} per step"
        if leaf.step_s is not None
        else f"{_median_text(leaf.gflop_s)} GFLOP/s"
    ]
    if leaf.pause_s.quantile_at(0.5):
        lines.append(f"pauses: {_duration_text(leaf.pause_s)}")
    if leaf.watts.quantile_at(0.5):
        lines.append(f"{leaf.watts.quantile_at(0.5):g} W")
    return "\n".join(lines)


def _median_text(value: Distribution | None) -> str:
    """Text of a quantity: its value, or its median if it varies."""
    assert value is not None
    return _digits(value.quantile_at(0.5)) if value.is_constant else f"~{_digits(value.quantile_at(0.5))}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _duration_text(value: Distribution) -> str:
    middle, sign = value.quantile_at(0.5), "" if value.is_constant else "~"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if middle >= factor or factor == 1e-6:
            return f"{sign}{_digits(middle / factor)} {unit}"
    return ""


def _plot_distribution(axes: Any, title: str, value: Distribution, colour: str) -> None:
    """Plot a distribution's CDF."""
    values = value.quantile(PROBABILITIES)
    axes.plot(values, 100 * PROBABILITIES, color=colour, linewidth=1.4)
    if value.name != "uniform" and values[0] > 0 and values[-1] > 30 * values[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda number, place: f"{number:g}")
        axes.xaxis.set_minor_formatter(lambda number, place: "")
    axes.set_xlabel(next((unit for ending, unit in UNITS.items() if title.endswith(ending)), ""), labelpad=1)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("% below")
    axes.set_title(f"{title}, {value.name}", fontsize=6.5, loc="left")
    axes.grid(alpha=0.25, linewidth=0.5)
