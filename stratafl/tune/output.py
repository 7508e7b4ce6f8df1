"""Files of a tuning result: tables, configs, the figure of the frontier."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base.files import atomic_write, write_json
from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.base.statistics import OverSeeds
from stratafl.config.schema import Config
from stratafl.cost.pricing import BYTES, ENERGY, TIME, Unit
from stratafl.runs.format import slug
from stratafl.tune.result import TuningResult
from stratafl.tune.selection import Candidate, NetworkResult, frontier_segments
from stratafl.tune.task import COSTS
from stratafl.tune.trials import TuningTrial, cost_in, spent_R

PLAN, TRIALS = "plan.json", "trials.csv"


def write(made: TuningResult, folder: Path) -> list[Path]:
    """All files but the picture; those that were written."""
    paths = [folder / PLAN, folder / TRIALS]
    write_json(paths[0], as_dict(made))
    with atomic_write(paths[1], sync=False) as file:
        file.write(as_csv(made).encode())
    for answer in made.answers:
        if answer.choice is not None:
            path = folder / best_name(answer)
            with atomic_write(path, sync=False) as file:
                file.write(_best(made, answer).encode())
            paths.append(path)
    return paths


def best_name(answer: NetworkResult) -> str:
    """The name of the config file for a network's answer."""
    return f"best-{slug(answer.network)}.toml"


def as_dict(made: TuningResult) -> dict[str, Any]:
    """The whole plan as plain data."""
    question, search = made.question, made.search
    return {
        "target": {"metric": question.target.metric, "value": question.target.value, "sign": made.baseline.goal.sign},
        "minimise": question.minimise,
        "budgets": dict(question.budgets),
        "space": {**question.space.as_dict(), "size": question.space.size},
        "trials": question.trials,
        "tried": search.count,
        "outcomes": outcomes(made),
        "seeds": question.seed_list,
        "complete": made.is_complete,
        "networks": [_answer(made, answer) for answer in made.answers],
        "runs": rows(made),
    }


def outcomes(made: TuningResult) -> dict[str, int]:
    """How many settings of the search ended how, the config as given among them."""
    tried = list(made.search.tried.values())
    if made.search.space.usual is None:
        tried.append(made.baseline)
    return dict(Counter(each.outcome for each in tried))


def gain(made: TuningResult, answer: NetworkResult) -> float | None:
    """How many times cheaper the choice is than the config as given; None where either did not get
    there."""
    if answer.choice is None:
        return None
    best = answer.choice.over(answer.network, made.question.minimise)
    given = answer.baseline.over(answer.network, made.question.minimise)
    return None if best is None or given is None else given.mean / best.mean


def rows(made: TuningResult) -> list[dict[str, Any]]:
    """One flat table per run and network: costs up to the target, or what was spent without it."""
    found: list[dict[str, Any]] = []
    for number, (label, seed, tried) in enumerate(made.tried):
        for network in made.question.networks:
            total = tried.total(network.name)
            found.append({
                "trial": number, "setting": label, "seed": seed, "network": network.name, "outcome": tried.outcome,
                "rounds": None if total is None else total.round, "best": tried.best,
                **{kind: None if total is None else cost_in(total, kind) for kind in COSTS},
                "run": "" if tried.run is None else tried.run.path.name, "reason": tried.reason,
            })  # fmt: skip
    return found


def as_csv(made: TuningResult) -> str:
    """The same as a CSV file."""
    table = rows(made)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in table)
    return text.getvalue()


def _answer(made: TuningResult, answer: NetworkResult) -> dict[str, Any]:
    return {
        "network": answer.network,
        "choice": None if answer.choice is None else _candidate(made, answer, answer.choice),
        "config": None if answer.choice is None else best_name(answer),
        "gain": gain(made, answer),
        "baseline": _candidate(made, answer, answer.baseline),
        "candidates": [_candidate(made, answer, each) for each in answer.candidates],
        "frontier": [vars(point) for point in answer.frontier],
        "pareto": [vars(point) for point in frontier_segments(answer.frontier)],
    }


def _candidate(made: TuningResult, answer: NetworkResult, candidate: Candidate) -> dict[str, Any]:
    space = made.search.space
    return {
        "setting": candidate.label,
        "values": {} if candidate.setting is None else space.values_of(candidate.setting),
        "is_baseline": candidate.is_baseline,
        "runs": [None if run.run is None else run.run.path.name for run in candidate.runs],
        "reached": candidate.reached(answer.network, made.question),
        "rounds": _over(candidate.rounds()),
        **{kind: _over(candidate.over(answer.network, kind)) for kind in COSTS},
        "per_seed": [
            cost_in(total, made.question.minimise) if total is not None else None
            for total in (run.total(answer.network) for run in candidate.runs)
        ],
    }


def _over(value: OverSeeds | None) -> dict[str, float | None] | None:
    return None if value is None else value._asdict()


# -- a config as a file ----------------------------------------------------------------------------


def _best(made: TuningResult, answer: NetworkResult) -> str:
    choice, question = answer.choice, made.question
    assert choice is not None
    space, setting = made.search.space, choice.setting
    config = question.config if setting is None or setting == space.usual else space.config_of(setting)
    about = (
        f"# Chosen on {answer.network}: {choice.label}\n"
        f"# least {question.minimise} to {made.baseline.goal} of {len(made.search.tried)} settings tried,"
        f" {len(choice.runs)} seeds; it stops there\n"
    )
    return about + toml(config)


def toml(config: Config) -> str:
    """A config as a TOML file, without what has no value."""
    tables = config.as_dict()
    # 0 is how a file says that a batch is all of a client's data
    tables["leaf"]["batch"] = tables["leaf"]["batch"] or 0
    sections = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]
        sections.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(sections)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


GREY, BLUE, BLACK, RED = "#c3c8cf", "#0072b2", "#1b1f24", "#d55e00"

ACROSS = 3

UNITS = {"seconds": TIME, "bytes": BYTES, "joules": ENERGY}

TITLES = {"seconds": "time", "bytes": "bytes sent", "joules": "energy", "money": "money"}


def unit_of(made: TuningResult, network: str, values: list[float]) -> Unit:
    """What a network's costs are written in."""
    kind = made.question.minimise
    currency = next(each.currency for each in made.question.networks if each.name == network)
    return Unit.of(UNITS[kind], values) if kind in UNITS else Unit(currency or "money", 1.0)


def picture(made: TuningResult, *paths: Path) -> None:
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


def _panel(axes: Any, made: TuningResult, answer: NetworkResult) -> None:
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
    made: TuningResult
    network: str
    unit: Unit

    def line(self, tried: TuningTrial, colour: str, width: float, label: str | None) -> None:
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
