"""One round on a network, node by node, for the page and as a figure."""

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
from stratafl.network.timeline import AWAY, COMPUTE, DOWN, MERGE, UP, WAIT, Activity

MOST_ROUNDS, LEAST = 60, 12
"""Rows of a round, and how many it may have on a page with many of them."""

ROOM = 60_000
"""Bars that a page holds, about; where there are more, rounds have fewer rows, and in the end there
are fewer rounds."""

BARS = 5
"""Bars of a leaf in one of its rounds, about."""

SHOWN: dict[int, tuple[tuple[float, str], ...]] = {
    3: ((0.0, "fastest"), (0.5, "median"), (1.0, "slowest")),
    1: ((1.0, "slowest"),),
}
"""How many of a large group have a row, and who they are: where they stand among all, and the
word for it."""


class GroupOnNetwork(NamedTuple):
    """A run on a network."""

    title: str
    run: PriceableRun
    network: Network


def timelines(clocked: Sequence[GroupOnNetwork]) -> list[dict[str, Any]]:
    """The first, the middle and the last round of each; the middle alone where they are many."""
    found = []
    for title, run, network in clocked:
        story, last = run.recovered.story, len(run.run.rounds)
        room = ROOM // (3 * len(clocked) * BARS * int(story.schedule.meetings[-1]))
        middle = (last + 1) // 2
        for round in sorted({1, middle, last} if room >= LEAST else {middle}):
            seen = RoundChart(story.tree, run.intervals(network, round))
            rows = seen.rows(min(MOST_ROUNDS, max(LEAST, room)))
            shown = {"run": title, "network": network.name, "round": round, "rounds": last}
            found.append({**shown, "seconds": seen.seconds, "nodes": seen.taking_part, "rows": rows})
    return found


class _Row(NamedTuple):
    level: int
    node: int
    role: str
    """Which of its group it is, where not all are shown."""
    siblings: int
    """How many of its group take part, with itself."""


class RoundChart:
    """One round, by node."""

    def __init__(self, tree: Tree, intervals: Sequence[Activity]):
        self.tree = tree
        self._of: list[list[Activity]] = [[] for _ in tree.sizes]
        self._is_there = [np.zeros(size, dtype=bool) for size in tree.sizes]
        self._waits, self._comes = ([np.zeros(size) for size in tree.sizes] for _ in range(2))
        for each in intervals:
            # parents merge, one level above their edges
            level = each.level - 1 if each.what == MERGE else each.level
            self._of[level].append(each)
            self._is_there[level] |= each.who_RN[0]
            if each.what == UP:
                self._comes[level] += each.who_RN[0]
            if each.what == WAIT:
                self._waits[level] += np.where(each.who_RN[0], (each.end_RN - each.begin_RN)[0], 0.0)
        self.seconds = float(max(each.end_RN[0, 0] for each in self._of[0]))
        self.taking_part = int(sum(map(np.count_nonzero, self._is_there)))

    def rows(self, room: int) -> list[dict[str, Any]]:
        """The rows of the picture, at most so many."""
        most = [self.tree.leaves] * (self.tree.depth + 1)
        found = self._some(most, room)
        for few, level in itertools.product(SHOWN, range(self.tree.depth, 0, -1)):
            if len(found) > room:
                most[level] = few
                found = self._some(most, room)
        return [self._plain(row) for row in found[:room]]

    def _some(self, most: Sequence[int], room: int) -> list[_Row]:
        """The rows if groups of a level show at most so many; where these are too many, one more
        than there is room for."""
        return list(itertools.islice(self._below(_Row(0, 0, "", 1), most), room + 1))

    def _below(self, row: _Row, most: Sequence[int]) -> Iterator[_Row]:
        """A node and what is below it."""
        yield row
        level = row.level + 1
        if level > self.tree.depth:
            return
        first, last = np.searchsorted(self.tree.parents[level], [row.node, row.node + 1])
        children = first + np.flatnonzero(self._is_there[level][first:last])
        # who is fast waits long when it comes
        waits = self._waits[level][children] / np.maximum(self._comes[level][children], 1)
        ordered = children[np.argsort(-waits, kind="stable")]
        shown = [(child, "") for child in children]
        if len(children) > most[level]:
            shown = [(ordered[int(share * (len(ordered) - 1))], role) for share, role in SHOWN[most[level]]]
        for child, role in shown:
            yield from self._below(_Row(level, int(child), role, len(children)), most)

    def _plain(self, row: _Row) -> dict[str, Any]:
        """A row as the page has it; of bars, when they begin and how long they are, by turns."""
        bars: dict[str, list[float]] = {}
        for begin, end, what in self.bars(row.level, row.node):
            bars.setdefault(what, []).extend((float(f"{begin:.6g}"), float(f"{end - begin:.4g}")))
        name = self.tree.names[row.level][row.node]
        return {"name": name, "level": row.level, "role": row.role, "siblings": row.siblings, "bars": bars}

    def bars(self, level: int, node: int) -> list[tuple[float, float, str]]:
        """What a node does, when each begins and ends, in order."""
        found: list[tuple[float, float, str]] = []
        for each in self._of[level]:
            if each.who_RN[0, node]:
                begin, end = (float(times[0, node]) for times in (each.begin_RN, each.end_RN))
                # who is late is told to stop, and what it would have done then never was
                while found and found[-1][0] >= begin:
                    found.pop()
                if found:
                    first, last, what = found[-1]
                    found[-1] = first, min(last, begin), what
                found.append((begin, min(end, self.seconds), each.what))
        return [bar for bar in found if bar[1] > bar[0]]


COLOURS = {DOWN: "#56b4e9", COMPUTE: "#0072b2", UP: "#e69f00", WAIT: "#d9dde1", MERGE: "#c2629b",
           AWAY: "#bfe3d0"}  # fmt: skip

WORDS = {DOWN: "gets", COMPUTE: "computes", UP: "sends", WAIT: "waits", MERGE: "merges", AWAY: "is away"}

MOST = 40
"""Lines that a picture has room for; leaves of later groups are left out."""

Place = tuple[int, int]


def plot_round(path: Path, ready: PriceableRun, network: Network, round: int) -> None:
    """Write the time line of one global round of a run, counted from 1."""
    run, tree = ready.run, ready.recovered.story.tree
    if round > len(run.rounds):
        raise InvalidInput("--round", round, f"{run.name} has {len(run.rounds)} rounds")
    lines = _lines(tree)
    plt = pyplot()
    with plt.rc_context(STYLE):
        size = (7.2, 0.95 + 0.17 * len(lines))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        _bars(axes, RoundChart(tree, ready.intervals(network, round)), lines)
        names = [f"{'   ' * (tree.depth - level)}{tree.names[level][node]}" for level, node in lines]
        axes.set_yticks(range(len(lines)), list(map(escape_control, names)), fontsize=7)
        axes.set(ylim=(len(lines) - 0.4, -0.6))
        left_out = sum(tree.sizes) - len(lines)
        more = f"; {left_out:,} nodes are not shown" if left_out else ""
        axes.set_title(f"round {round} of {escape_control(run.method)} on {network.name}{more}", loc="left", fontsize=8)
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


def _bars(axes: Any, seen: RoundChart, lines: Sequence[Place]) -> None:
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
