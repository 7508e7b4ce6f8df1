"""Tuning task: a search space around a config, the cost to minimise, a target, and networks.

Values of the space lie on a grid, so that a repeated setting is the same run. Without a [plan]
table the grid is the neighbourhood of the given config.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.files import cannot_read, read_json
from stratafl.base.topology import Tree
from stratafl.base.validation import check_choice, check_number, name_and_params, repeated
from stratafl.config.schema import Config, check_plain
from stratafl.config.setup import import_plugins, rules_of, schedule_of
from stratafl.core.participation import check_participation
from stratafl.core.schedule import Schedule
from stratafl.metrics.objective import Goal
from stratafl.network.specification import Network
from stratafl.rules.registry import rules_for
from stratafl.runs.format import slug
from stratafl.runs.provenance import config_digest, essence

WIDE, NARROW = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0)
"""Neighbours on the grid, as multiples of the config's value."""
METHODS = ("hfedavg", "mtgc")
"""Methods that are searched besides the config's own."""
KEYS = ("periods", "participation", "lr", "batch", "method", "effort", "defaults")
PERIODS = "periods."
SHORT_NAMES = {"participation": "schedule.participation", "lr": "leaf.lr", "batch": "leaf.batch"}
SECTIONS = ("tree", "data", "model", "method", "objective", "schedule", "leaf", "run")

GridPoint = tuple[int, ...]
"""Index of the chosen value of each dimension."""


@dataclass(frozen=True)
class SearchDimension:
    """Key with its possible values, and the index of the config's own value, if it is among
    them."""

    name: str
    values: tuple[Any, ...]
    baseline: int | None

    @property
    def is_ordered(self) -> bool:
        """Whether neighbouring indices have neighbouring values."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @property
    def labels(self) -> list[str]:
        return [_label(value) for value in self.values]


@dataclass(frozen=True, eq=False)
class Space:
    """Settings around a config."""

    config: Config
    axes: tuple[SearchDimension, ...]
    effort: float = 1.0
    """Local steps of a trial, as a multiple of the config's."""

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def baseline(self) -> GridPoint | None:
        """Grid point of the given config, if it is one of the settings."""
        places = [axis.baseline for axis in self.axes]
        if self.effort != 1 or any(place is None for place in places):
            return None
        return tuple(place for place in places if place is not None)

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule of the given config."""
        return schedule_of(self.config, _depth(self.config))

    def config_of(self, setting: GridPoint) -> Config:
        """Config of a setting.

        It has as many local steps in all as the given config, times the effort, so that longer
        periods have fewer rounds.
        """
        tables = self.config.as_dict()
        periods = list(self.schedule.periods)
        for axis, place in zip(self.axes, setting, strict=True):
            value = axis.values[place]
            if axis.name.startswith(PERIODS):
                periods[int(axis.name.removeprefix(PERIODS)) - 1] = value
            elif place != axis.baseline:
                set_key(tables, axis.name, value, len(periods))
        if periods != list(self.schedule.periods):
            passes = tables["leaf"].get("epochs") is not None
            tables["schedule"]["periods"] = periods[:-1] if passes else periods
            tables["schedule"]["steps_per_sync"] = None
            tables["leaf"]["epochs"] = periods[-1] if passes else None
        Schedule.of(periods, len(periods))
        ratio = self.effort * math.prod(self.schedule.periods) / math.prod(periods)
        if ratio != 1:
            tables["run"]["rounds"] = max(1, math.ceil(tables["run"]["rounds"] * ratio))
            rate = tables["leaf"]["schedule"]
            if isinstance(rate, dict) and "every" in rate:
                rate["every"] = max(1, round(rate["every"] * ratio))
        return Config.of(tables)

    def label(self, setting: GridPoint) -> str:
        """Label of a setting, such as "mtgc 5x10 lr 0.2"."""
        parts: list[str] = []
        periods = [str(period) for period in self.schedule.periods]
        for axis, place in zip(self.axes, setting, strict=True):
            text = axis.labels[place]
            if axis.name.startswith(PERIODS):
                periods[int(axis.name.removeprefix(PERIODS)) - 1] = text
            elif axis.name == "method":
                parts.insert(0, text)
            else:
                parts.append(f"{axis.name} {text}")
        if any(axis.name.startswith(PERIODS) for axis in self.axes):
            parts.insert(1 if any(axis.name == "method" for axis in self.axes) else 0, "x".join(periods))
        return " ".join(parts)

    def values_of(self, setting: GridPoint) -> dict[str, Any]:
        """Values of a setting by the names of their dimensions."""
        return {axis.name: axis.values[place] for axis, place in zip(self.axes, setting, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        return {"axes": {axis.name: list(axis.values) for axis in self.axes}, "effort": self.effort}


def space_of(config: Config, table: Mapping[str, Any] | None = None) -> Space:
    """Create the space that a [plan] table describes; keys that it does not name have the
    neighbourhood of the config's values."""
    tables = dict(table or {})
    check_plain(tables, "plan")
    import_plugins(config.run.plugins)
    effort = check_number("plan.effort", tables.pop("effort", 1.0), above=0)
    defaults = tables.pop("defaults", True)
    if not isinstance(defaults, bool):
        raise InvalidInput("plan.defaults", defaults, "must be true or false")
    neighborhood = _neighborhood(config)
    axes = (
        {name: SearchDimension(name, values, values.index(value)) for name, (value, values) in neighborhood.items()}
        if defaults
        else {}
    )
    for name, values, value in _table_axes(config, tables, neighborhood):
        axes[name] = SearchDimension(name, values, values.index(value) if value in values else None)
    # with one value there is nothing to choose, unless it is not the config's own
    chosen = [axis for axis in axes.values() if len(axis.values) > 1 or axis.baseline is None]
    space = Space(config, tuple(sorted(chosen, key=lambda axis: axis.name != "method")), effort)
    if space.size < 2:
        raise InvalidInput("plan", table or {}, "leaves nothing to choose: give a key at least two values")
    _check(space)
    return space


def _neighborhood(config: Config) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Value of each key in the config, and its neighbours."""
    depth = _depth(config)
    neighborhood: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    method = dict(config.method)
    neighborhood["method"] = method, (method, *({"name": name} for name in METHODS if name != method.get("name")))
    for level, period in enumerate(schedule_of(config, depth).periods, 1):
        neighborhood[f"{PERIODS}{level}"] = period, neighbors(period, WIDE, lambda value: max(1, round(value)))
    participation = check_participation(config.schedule.participation, depth)[-1]
    if participation is None or isinstance(participation, str | float):
        share = participation if isinstance(participation, float) else 1.0
        neighborhood["participation"] = share, tuple(sorted({share, 0.5, 1.0}))
    lr = check_number("leaf.lr", config.leaf.lr, above=0)
    neighborhood["lr"] = lr, neighbors(lr, WIDE, lambda value: float(f"{value:.6g}"))
    if config.leaf.batch:
        neighborhood["batch"] = (
            config.leaf.batch,
            neighbors(config.leaf.batch, NARROW, lambda value: max(1, round(value))),
        )
    return neighborhood


def neighbors(value: float, factors: Iterable[float], rounded: Callable[[float], Any]) -> tuple[Any, ...]:
    """A value and its products with the factors, in order."""
    return tuple(sorted({value, *(rounded(value * factor) for factor in factors if factor != 1)}))


def _table_axes(
    config: Config, tables: Mapping[str, Any], neighborhood: Mapping[str, tuple[Any, Any]]
) -> Iterable[tuple[str, tuple[Any, ...], Any]]:
    """Dimensions that a [plan] table describes: name, values, and the config's own value."""
    for key, values in tables.items():
        if key == "periods":
            levels = len([name for name in neighborhood if name.startswith(PERIODS)])
            if not isinstance(values, list) or len(values) != levels:
                allowed = f"must have a list of values per edge level, root first, {levels} of them"
                raise InvalidInput("plan.periods", values, allowed)
            for level, level_values in enumerate(values, 1):
                name = f"{PERIODS}{level}"
                yield name, _values(f"plan.{key}", level_values), neighborhood[name][0]
        elif key == "method":
            yield key, tuple(map(_as_method, _values("plan.method", values))), dict(config.method)
        elif key in SHORT_NAMES:
            value = neighborhood[key][0] if key in neighborhood else _config_value(config, SHORT_NAMES[key])
            yield key, _values(f"plan.{key}", values), value
        elif key in SECTIONS and isinstance(values, Mapping):
            for inner, level_values in values.items():
                yield (
                    f"{key}.{inner}",
                    _values(f"plan.{key}.{inner}", level_values),
                    _config_value(config, f"{key}.{inner}"),
                )
        elif key.partition(".")[0] in SECTIONS and "." in key:
            yield key, _values(f"plan.{key}", values), _config_value(config, key)
        else:
            raise unknown_name("plan key", key, KEYS)


def _values(field: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise InvalidInput(field, values, "must be a list of values")
    labels = [json.dumps(value, sort_keys=True) for value in values]
    if len(set(labels)) < len(labels):
        raise InvalidInput(field, values, "has a value twice")
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return tuple(sorted(values) if numbers else values)


def _as_method(method: Any) -> dict[str, Any]:
    if isinstance(method, Mapping) and "rules" in method:
        return dict(method)
    name, params = name_and_params("plan.method", method)
    return {"name": name, **params}


def _config_value(config: Config, path: str) -> Any:
    value: Any = config.as_dict()
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_key(tables: dict[str, Any], name: str, value: Any, depth: int) -> None:
    """Set one value in a config's tables."""
    if name == "participation":
        participation = tables["schedule"]["participation"]
        above = list(participation[:-1]) if isinstance(participation, list | tuple) else [None] * (depth - 1)
        value = [*("all" if share is None else share for share in above), value]
    elif name == "method":
        tables["method"] = copy.deepcopy(value)
        return
    *sections, key = SHORT_NAMES.get(name, name).split(".")
    for section in sections:
        tables = tables.setdefault(section, {})
    tables[key] = copy.deepcopy(value)


def _check(space: Space) -> None:
    """Reject values that cannot be used, before anything is trained."""
    first = space.baseline or (0,) * len(space.axes)
    for index, axis in enumerate(space.axes):
        for value in range(len(axis.values)):
            config = space.config_of((*first[:index], value, *first[index + 1 :]))
            depth = _depth(config)
            schedule_of(config, depth)
            rules_for(rules_of(config), depth)
            check_participation(config.schedule.participation, depth)
            config.leaf.chain(config.run.rounds)


def _depth(config: Config) -> int:
    return Tree.of(config.tree.shape).depth


def _label(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        parameters = "".join(f" {key}={_label(entry)}" for key, entry in value.items() if key != "name")
        return f"{value['name']}{parameters}"
    if isinstance(value, Mapping) and isinstance(value.get("rules"), Sequence):
        return "/".join(map(_label, value["rules"]))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


Cost = Literal["seconds", "bytes", "joules", "money"]
COSTS: tuple[Cost, ...] = get_args(Cost)
FILE = "question.json"


@dataclass(frozen=True, eq=False)
class TuningTask:
    """Space, networks, target and cost of one search."""

    config: Config
    """Given config, which stops at the target."""
    space: Space
    networks: tuple[Network, ...]
    target: Goal
    minimise: Cost
    budgets: Mapping[Cost, float] = field(default_factory=dict)
    """Maximum costs up to the target."""
    seeds: int = 3
    """Number of seeds with which the best settings are run."""
    trials: int = 20

    @staticmethod
    def of(config: Config, space: Space, networks: Sequence[Network], target: Goal, **options: Any) -> TuningTask:
        """Create a task whose runs all end at the target."""
        name = repeated(slug(network.name) for network in networks)
        if name is not None:
            raise InvalidInput("--network", name, "two networks of this name: give each once, and names of their own")
        stop = {target.metric: target.value} if not target.sign else f"{target.metric} {target.sign} {target.value!r}"
        stopping = replace(config, run=replace(config.run, stop_at=None, stop_when=stop))
        return TuningTask(stopping, replace(space, config=stopping), tuple(networks), target, **options)

    @property
    def seed_list(self) -> list[int]:
        """Seed of the search, then the seeds of the repetitions."""
        return [self.config.run.seed + offset for offset in range(self.seeds)]

    def as_dict(self) -> dict[str, Any]:
        """Description that must be equal to continue a search; a network may be added."""
        return {
            "config": self.config.as_dict(),
            "space": self.space.as_dict(),
            "target": str(self.target),
            "minimise": self.minimise,
            "budgets": dict(self.budgets),
            # digests of their tables, which leave out quantities that have their defaults
            "networks": {network.name: config_digest(network.as_tables()) for network in self.networks},
        }

    def check(self, folder: Path) -> dict[str, Any]:
        """Compare with the task stored in a folder, which another task must not use; returns the
        description to store."""
        description: dict[str, Any] = json.loads(json.dumps(self.as_dict()))
        path = folder / FILE
        if not path.exists():
            return description
        before = read_json(path)
        if not isinstance(before, dict) or not isinstance(before.get("networks"), dict):
            raise cannot_read(path, "not a plan's question")
        # networks may be added, as the runs are there already
        added = {name: digest for name, digest in description["networks"].items() if name not in before["networks"]}
        networks = {**before["networks"], **description["networks"]}
        before["networks"] = {**before["networks"], **added}
        description["networks"] = networks
        changed = [key for key in description if _decisive(before.get(key)) != _decisive(description[key])]
        if changed:
            reason = (
                f"holds a plan with another {' and '.join(changed)}: give what it was begun with, or another folder"
            )
            raise InvalidInput("--out", folder, reason)
        return description


def _decisive(value: object) -> object:
    """Copy tables without entries that decide nothing, such as file paths; return other values as
    they are."""
    return json.loads(json.dumps(essence(value))) if isinstance(value, dict) else value


def budgets_of(texts: Sequence[str]) -> dict[Cost, float]:
    """Read budgets such as "seconds=3600", each cost at most once."""
    budgets: dict[Cost, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        cost = check_choice("--budget", name.strip(), COSTS)
        try:
            limit = float(value)
        except ValueError:
            raise InvalidInput("--budget", text, "must look like seconds=3600") from None
        if cost in budgets:
            raise InvalidInput("--budget", text, f"{cost} has a budget already")
        budgets[cost] = check_number("--budget", limit, above=0)
    return budgets
