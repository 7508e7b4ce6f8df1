"""The frontier: how good the model is against what it costs on a network, a panel for each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.cost.pricing import BYTES, ENERGY, TIME, Unit
from stratafl.plan.choose import Answer, Candidate
from stratafl.plan.make import Made
from stratafl.plan.priced import Tried, spent_R

GREY, BLUE, BLACK, RED = "#c3c8cf", "#0072b2", "#1b1f24", "#d55e00"
ACROSS = 3
UNITS = {"seconds": TIME, "bytes": BYTES, "joules": ENERGY}
TITLES = {"seconds": "time", "bytes": "bytes sent", "joules": "energy", "money": "money"}


def unit_of(made: Made, network: str, values: list[float]) -> Unit:
    """What a network's costs are written in."""
    kind = made.question.minimise
    currency = next(each.currency for each in made.question.networks if each.name == network)
    return Unit.of(UNITS[kind], values) if kind in UNITS else Unit(currency or "money", 1.0)


def picture(made: Made, *paths: Path) -> None:
    """Write the same picture as files of any kind."""
    plt, count = pyplot(), len(made.answers)
    across = min(count, ACROSS)
    down = math.ceil(count / across)
    with plt.rc_context(STYLE):
        for path in paths:
            size = (max(4.6, 3.4 * across), 3.1 * down + 0.55)
            figure, panels = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
            for axes, answer in zip(panels.flat, made.answers, strict=False):
                _panel(axes, made, answer)
            for axes in list(panels.flat)[count:]:
                axes.set_visible(False)
            handles, labels = panels[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
            save(figure, path)


def _panel(axes: Any, made: Made, answer: Answer) -> None:
    goal, network = made.baseline.goal, answer.network
    search = [tried for setting, tried in made.search.tried.items() if setting != made.search.space.usual]
    ends = [tried.cost(network, made.question.minimise) for tried in (*search, made.baseline) if tried.costs]
    unit = unit_of(made, network, ends)
    panel = _Panel(axes, made, network, unit)
    for number, tried in enumerate(each for each in search if each.curve):
        panel.line(tried, GREY, 0.8, "other settings" if number == 0 else None)
    panel.line(made.baseline, BLUE, 1.4, "as given")
    front = answer.frontier
    axes.step(
        [point.cost / unit.factor for point in front],
        [point.value for point in front],
        where="post", color=BLACK, linewidth=1.4, label="frontier",
    )  # fmt: skip
    for candidate, colour, name in ((answer.baseline, BLUE, None), (answer.choice, RED, "choice, ± over seeds")):
        if candidate is not None:
            panel.mark(candidate, colour, name)
    axes.axhline(goal.value, color="#5b6470", linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    _ticks(axes.xaxis)
    axes.set(xlabel=f"{TITLES[made.question.minimise]}, {unit.name}", ylabel=goal.metric)
    gained = "" if answer.choice is None else f"\n{answer.choice.label}"
    axes.set_title(f"{network}{gained}", loc="left", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(axis: Any) -> None:
    """Plain numbers, also where less than a power of ten is seen."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


class _Panel(NamedTuple):
    """The axes of one network, where costs are in this unit."""

    axes: Any
    made: Made
    network: str
    unit: Unit

    def line(self, tried: Tried, colour: str, width: float, label: str | None) -> None:
        """Draw a run: what it had reached for what it had cost."""
        spent = spent_R(tried.costs[self.network], self.made.question.minimise) / self.unit.factor
        rounds, values = [round - 1 for round, _ in tried.curve], [value for _, value in tried.curve]
        marker = "." if len(rounds) == 1 else None
        self.axes.plot(spent[rounds], values, color=colour, linewidth=width, marker=marker, markersize=3, label=label)

    def mark(self, candidate: Candidate, colour: str, label: str | None) -> None:
        """Mark where the target is reached, on the mean over seeds."""
        cost, factor = candidate.over(self.network, self.made.question.minimise), self.unit.factor
        if cost is not None:
            around = None if not cost.deviation else [[min(cost.deviation, 0.95 * cost.mean) / factor],
                                                      [cost.deviation / factor]]  # fmt: skip
            self.axes.errorbar(
                [cost.mean / factor], [self.made.baseline.goal.value],
                xerr=around, fmt="D", color=colour, markersize=4, capsize=2, linewidth=1, label=label, zorder=5,
            )  # fmt: skip
