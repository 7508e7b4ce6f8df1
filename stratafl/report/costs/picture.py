"""Where the time goes, as stacked bars: a panel per network, a bar per setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.report.costs.pricing import ALL, PricedSetting
from stratafl.report.costs.texts import TIME, Unit, grouped

FIXED = {"computing": "#0072b2", "away": "#b8bec6"}
SHADES = {
    "sending": ("#e69f00", "#d55e00", "#8c3b00", "#5c2600"),
    "waiting": ("#bfe3d0", "#66c2a5", "#009e73", "#00593f"),
    "own rounds": ("#cfe3f1", "#8ec1e3", "#4a90c2", "#1f5f8b"),
    "merging": ("#e3b8d2", "#c2629b", "#8e3b6e", "#5c2247"),
}
"""Colours of tiers, from the leaves up: what happens further up is darker."""
WIDTH = 7.2


def bars(path: Path, found: Sequence[PricedSetting], until: str = ALL) -> None:
    """Write a picture of what settings took until a milestone."""
    plt = pyplot()
    networks = list(dict.fromkeys(each.network for each in found))
    names = list(dict.fromkeys(each.setting for each in found))
    longest = max(map(len, names))
    with plt.rc_context(STYLE):
        # a panel has room for its bars, and for its legend
        height = len(networks) * max(0.62 + 0.24 * len(names), 1.6) + 0.35
        figure, panels = plt.subplots(len(networks), 1, figsize=(WIDTH, height), layout="constrained", squeeze=False)
        for axes, network in zip(panels[:, 0], networks, strict=True):
            _panel(axes, [each for each in found if each.network == network], names, until)
            axes.set_title(f"{network}, until {until}", loc="left", fontsize=8)
            axes.tick_params(axis="y", labelsize=8 if longest < 40 else 6)
        save(figure, path)


def _panel(axes: Any, found: Sequence[PricedSetting], names: Sequence[str], until: str) -> None:
    known = [each for each in found if each.at(until).seconds is not None]
    spent = {each.setting: grouped(each.at(until), each.levels) for each in known}
    unit = Unit.of(TIME, [sum(parts.values()) for parts in spent.values()])
    totals = {name: sum(parts.values()) / unit.factor for name, parts in spent.items()}
    titles = [
        title
        for title in dict.fromkeys(title for parts in spent.values() for title in parts)
        if any(parts.get(title, 0.0) > 1e-3 * sum(parts.values()) for parts in spent.values())
    ]
    colours = _colours(titles)
    for place, name in enumerate(names):
        left = 0.0
        for title in titles if name in spent else ():
            width = spent[name].get(title, 0.0) / unit.factor
            axes.barh(place, width, left=left, height=0.66, color=colours[title], linewidth=0)
            left += width
        text = f" {totals[name]:,.3g} {unit.name}" if name in spent else " not reached"
        axes.text(left, place, text, va="center", fontsize=7, color="#30363d")
    axes.set(xlabel=unit.name, xlim=(0, 1.28 * max(totals.values(), default=1.0)), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh(0, 0, color=colours[title], label=title) for title in titles]
    if handles:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7, handlelength=1.0)


def _colours(titles: Sequence[str]) -> dict[str, str]:
    found, used = dict(FIXED), dict.fromkeys(SHADES, 0)
    tiers = list(dict.fromkeys(title.partition(", ")[2] for title in titles if ", " in title))
    for title in titles:
        kind, _, tier = title.partition(", ")
        if kind in used:
            shades = SHADES[kind]
            found[title] = shades[min(tiers.index(tier), len(shades) - 1)]
    return found
