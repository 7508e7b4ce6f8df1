"""Figures of networks and of the time by activity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.base.topology import Tree
from stratafl.cost.pricing import ALL_ROUNDS, TIME, GroupCosts, Unit, time_breakdown
from stratafl.network.distributions import Distribution
from stratafl.network.specification import Device, Network, Tier

FIXED_COLOURS = {"computing": "#0072b2", "away": "#b8bec6"}

SHADES = {
    "sending": ("#e69f00", "#d55e00", "#8c3b00", "#5c2600"),
    "waiting": ("#bfe3d0", "#66c2a5", "#009e73", "#00593f"),
    "own rounds": ("#cfe3f1", "#8ec1e3", "#4a90c2", "#1f5f8b"),
    "merging": ("#e3b8d2", "#c2629b", "#8e3b6e", "#5c2247"),
}
"""Colours of tiers, from the leaves up: higher tiers are darker."""

WIDTH = 7.2


def plot_time_breakdown(path: Path, groups: Sequence[GroupCosts], until: str = ALL_ROUNDS) -> None:
    """Plot the time that groups of runs took until a milestone, by activity."""
    plt = pyplot()
    networks = list(dict.fromkeys(group.network for group in groups))
    names = list(dict.fromkeys(group.setting for group in groups))
    longest = max(map(len, names))
    with plt.rc_context(STYLE):
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
        axes.text(left, place, text, va="center", fontsize=7, color="#30363d")
    axes.set(xlabel=unit.name, xlim=(0, 1.28 * max(totals.values(), default=1.0)), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh(0, 0, color=colours[title], label=title) for title in titles]
    if handles:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7, handlelength=1.0)


def _colours(titles: Sequence[str]) -> dict[str, str]:
    colours, used = dict(FIXED_COLOURS), dict.fromkeys(SHADES, 0)
    tiers = list(dict.fromkeys(title.partition(", ")[2] for title in titles if ", " in title))
    for title in titles:
        kind, _, tier = title.partition(", ")
        if kind in used:
            shades = SHADES[kind]
            colours[title] = shades[min(tiers.index(tier), len(shades) - 1)]
    return colours


UNITS = {"mbit_s": "Mbit/s", "gflop_s": "GFLOP/s", "bytes": "bytes", "watts": "W", "_s": "s"}
"""Units by the end of a quantity's name."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#6b4fbb")

INK = "#30363d"

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


def plot_network(path: Path, network: Network, tree: Tree) -> None:
    """Plot a tree with its links at the left, and distributions at the right."""
    plt = pyplot()
    colours: dict[str, str] = {"leaf": INK}
    colours |= {tier.name: COLOURS[place % len(COLOURS)] for place, tier in enumerate(network.tiers)}
    levels = [network.tier(level, tree.depth) for level in range(tree.depth, 0, -1)]
    parts: dict[str, Tier | Device] = {"leaf": network.leaf, **{tier.name: tier for tier in levels}}
    varied = [
        (f"{name}: {key}", value, colours.get(name, COLOURS[0]))
        for name, part in parts.items()
        for key, value in _set_quantities(part).items()
        if not value.is_constant
    ]
    with plt.rc_context(STYLE):
        # one small panel beside the tree for each distribution
        count = max(1, len(varied))
        figure = plt.figure(figsize=(7.2 if varied else 4.8, max(3.2, 1.45 * count)), layout="constrained")
        grid = figure.add_gridspec(count, 2 if varied else 1, width_ratios=(2.1, 1) if varied else (1,))
        _plot_tree(figure.add_subplot(grid[:, 0]), network, tree)
        for place, (title, value, colour) in enumerate(varied):
            _plot_distribution(figure.add_subplot(grid[place, 1]), title, value, colour)
        save(figure, path)


def _plot_tree(axes: Any, network: Network, tree: Tree) -> None:
    depth = tree.depth
    position = [np.empty(size) for size in tree.sizes]
    position[depth] = np.arange(tree.leaves, dtype=float)
    for level in range(depth - 1, -1, -1):
        counts = tree.children(level)
        position[level] = np.bincount(tree.parents[level + 1], position[level + 1]) / counts
    width = max(1.0, tree.leaves - 1.0)
    for level in range(1, depth + 1):
        colour = COLOURS[min(depth - level, len(network.tiers) - 1) % len(COLOURS)]
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
    axes.spines[["top", "right"]].set_visible(False)
