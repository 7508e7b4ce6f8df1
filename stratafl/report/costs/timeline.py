"""One global round as a picture: a line per node, and on it what the node does and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, printable
from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.base.topology import Tree
from stratafl.clock.model.network import Network
from stratafl.clock.model.timeline import AWAY, COMPUTE, DOWN, MERGE, UP, WAIT
from stratafl.clock.price.costs import PricedRun
from stratafl.report.costs.rounds import Seen
from stratafl.report.costs.texts import TIME, Unit

COLOURS = {DOWN: "#56b4e9", COMPUTE: "#0072b2", UP: "#e69f00", WAIT: "#d9dde1", MERGE: "#c2629b",
           AWAY: "#bfe3d0"}  # fmt: skip
WORDS = {DOWN: "gets", COMPUTE: "computes", UP: "sends", WAIT: "waits", MERGE: "merges", AWAY: "is away"}
MOST = 40
"""Lines that a picture has room for; leaves of later groups are left out."""
Place = tuple[int, int]


def draw_round(path: Path, ready: PricedRun, network: Network, round: int) -> None:
    """Write the time line of one global round of a run, counted from 1."""
    run, tree = ready.run, ready.recovered.story.tree
    if round > len(run.rounds):
        raise InvalidInput("--round", round, f"{run.name} has {len(run.rounds)} rounds")
    lines = _lines(tree)
    plt = pyplot()
    with plt.rc_context(STYLE):
        size = (7.2, 0.95 + 0.17 * len(lines))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        _bars(axes, Seen(tree, ready.intervals(network, round)), lines)
        names = [f"{'   ' * (tree.depth - level)}{tree.names[level][node]}" for level, node in lines]
        axes.set_yticks(range(len(lines)), list(map(printable, names)), fontsize=7)
        axes.set(ylim=(len(lines) - 0.4, -0.6))
        left_out = sum(tree.sizes) - len(lines)
        more = f"; {left_out:,} nodes are not shown" if left_out else ""
        axes.set_title(f"round {round} of {printable(run.method)} on {network.name}{more}", loc="left", fontsize=8)
        save(figure, path)


def _lines(tree: Tree) -> list[Place]:
    """Levels and numbers of the nodes that are drawn: each parent, and below it its children."""
    found: list[Place] = []
    room = MOST - sum(tree.sizes[:-1])

    def add(level: int, node: int) -> None:
        nonlocal room
        if level == tree.depth:
            room -= 1
            if room < 0:
                return
        if len(found) < MOST:
            found.append((level, node))
        for child in np.flatnonzero(tree.parents[level + 1] == node) if level < tree.depth else ():
            add(level + 1, int(child))

    add(0, 0)
    return found


def _bars(axes: Any, seen: Seen, lines: Sequence[Place]) -> None:
    unit, drawn = Unit.of(TIME, [seen.seconds]), set[str]()
    for row, place in enumerate(lines):
        for begin, end, what in seen.bars(*place):
            first, last = begin / unit.factor, end / unit.factor
            axes.barh(row, last - first, left=first, height=0.72, color=COLOURS[what])
            drawn.add(what)
    for what, word in WORDS.items():
        if what in drawn:
            axes.barh(0, 0, color=COLOURS[what], label=word)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7, handlelength=1.0)
    axes.set(xlabel=unit.name, xlim=(0, seen.seconds / unit.factor))
    axes.spines[["top", "right"]].set_visible(False)
