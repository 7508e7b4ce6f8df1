"""What a plan searches: some values for each of a few keys, and the config that a choice of them
makes.

Values lie on a grid, so that the same setting comes up again as the same run. Without a [plan]
table the grid is the neighbourhood of the config as given.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Tree
from stratafl.base.validation import check_number, name_and_params
from stratafl.config.schema import Config, check_plain
from stratafl.config.setup import import_plugins, rules_of, schedule_of
from stratafl.core.participation import check_participation
from stratafl.core.schedule import Schedule
from stratafl.rules.registry import rules_for

WIDE, NARROW = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0)
"""Neighbours on a grid, as multiples of the config's own value."""
METHODS = ("hfedavg", "mtgc")
"""Searched besides the config's own method."""
KEYS = ("periods", "participation", "lr", "batch", "method", "effort", "defaults")
PERIODS = "periods."
SHORT = {"participation": "schedule.participation", "lr": "leaf.lr", "batch": "leaf.batch"}
SECTIONS = ("tree", "data", "model", "method", "objective", "schedule", "leaf", "run")

GridPoint = tuple[int, ...]
"""The place of the value that is taken, on each axis of a space."""


@dataclass(frozen=True)
class SearchDimension:
    """A key, the values it may have, and where among them the config's own is, if it is there."""

    name: str
    values: tuple[Any, ...]
    usual: int | None

    @property
    def is_ordered(self) -> bool:
        """Whether neighbouring places have neighbouring values."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @property
    def labels(self) -> list[str]:
        return [_label(value) for value in self.values]


@dataclass(frozen=True, eq=False)
class Space:
    """The settings around a config."""

    config: Config
    axes: tuple[SearchDimension, ...]
    effort: float = 1.0
    """How many times the config's own local steps a trial may take."""

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def usual(self) -> GridPoint | None:
        """The config as given, where it is one of the settings."""
        places = [axis.usual for axis in self.axes]
        if self.effort != 1 or any(place is None for place in places):
            return None
        return tuple(place for place in places if place is not None)

    @cached_property
    def schedule(self) -> Schedule:
        """The config's own schedule."""
        return schedule_of(self.config, _depth(self.config))

    def config_of(self, setting: GridPoint) -> Config:
        """The run of a setting: as many local steps in all as the config as given has, so that
        longer periods have fewer rounds, times the effort."""
        tables = self.config.as_dict()
        periods = list(self.schedule.periods)
        for axis, place in zip(self.axes, setting, strict=True):
            value = axis.values[place]
            if axis.name.startswith(PERIODS):
                periods[int(axis.name.removeprefix(PERIODS)) - 1] = value
            elif place != axis.usual:
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
        """What tells a setting from others, such as "mtgc 5x10 lr 0.2"."""
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
        """The values of a setting by the names of their axes."""
        return {axis.name: axis.values[place] for axis, place in zip(self.axes, setting, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        return {"axes": {axis.name: list(axis.values) for axis in self.axes}, "effort": self.effort}


def space_of(config: Config, given: Mapping[str, Any] | None = None) -> Space:
    """The settings that a [plan] table names; for keys that it does not name, those around the
    config."""
    tables = dict(given or {})
    check_plain(tables, "plan")
    import_plugins(config.run.plugins)
    effort = check_number("plan.effort", tables.pop("effort", 1.0), above=0)
    defaults = tables.pop("defaults", True)
    if not isinstance(defaults, bool):
        raise InvalidInput("plan.defaults", defaults, "must be true or false")
    usual = _usual(config)
    axes = (
        {name: SearchDimension(name, values, values.index(own)) for name, (own, values) in usual.items()}
        if defaults
        else {}
    )
    for name, values, own in _named(config, tables, usual):
        axes[name] = SearchDimension(name, values, values.index(own) if own in values else None)
    # with one value there is nothing to choose, unless it is not the config's own
    chosen = [axis for axis in axes.values() if len(axis.values) > 1 or axis.usual is None]
    space = Space(config, tuple(sorted(chosen, key=lambda axis: axis.name != "method")), effort)
    if space.size < 2:
        raise InvalidInput("plan", given or {}, "leaves nothing to choose: give a key at least two values")
    _check(space)
    return space


def _usual(config: Config) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The config's own value of each key, and its neighbours."""
    depth = _depth(config)
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    found["method"] = _methods(config)
    for level, period in enumerate(schedule_of(config, depth).periods, 1):
        found[f"{PERIODS}{level}"] = period, neighbors(period, WIDE, lambda value: max(1, round(value)))
    taking_part = check_participation(config.schedule.participation, depth)[-1]
    if taking_part is None or isinstance(taking_part, str | float):
        own = taking_part if isinstance(taking_part, float) else 1.0
        found["participation"] = own, tuple(sorted({own, 0.5, 1.0}))
    lr = check_number("leaf.lr", config.leaf.lr, above=0)
    found["lr"] = lr, neighbors(lr, WIDE, lambda value: float(f"{value:.6g}"))
    if config.leaf.batch:
        found["batch"] = config.leaf.batch, neighbors(config.leaf.batch, NARROW, lambda value: max(1, round(value)))
    return found


def _methods(config: Config) -> tuple[Any, tuple[Any, ...]]:
    own = dict(config.method)
    return own, (own, *({"name": name} for name in METHODS if name != own.get("name")))


def neighbors(value: float, factors: Iterable[float], fitted: Callable[[float], Any]) -> tuple[Any, ...]:
    """A value and its products with the factors, in order."""
    return tuple(sorted({value, *(fitted(value * factor) for factor in factors if factor != 1)}))


def _named(
    config: Config, tables: Mapping[str, Any], usual: Mapping[str, tuple[Any, Any]]
) -> Iterable[tuple[str, tuple[Any, ...], Any]]:
    """The axes that a [plan] table gives: name, values, and the config's own value."""
    for key, values in tables.items():
        if key == "periods":
            levels = len([name for name in usual if name.startswith(PERIODS)])
            if not isinstance(values, list) or len(values) != levels:
                wanted = f"must have a list of values per edge level, root first, {levels} of them"
                raise InvalidInput("plan.periods", values, wanted)
            for level, each in enumerate(values, 1):
                name = f"{PERIODS}{level}"
                yield name, _values(f"plan.{key}", each), usual[name][0]
        elif key == "method":
            yield key, tuple(map(_as_method, _values("plan.method", values))), dict(config.method)
        elif key in SHORT:
            own = usual[key][0] if key in usual else _own(config, SHORT[key])
            yield key, _values(f"plan.{key}", values), own
        elif key in SECTIONS and isinstance(values, Mapping):
            for inner, each in values.items():
                yield f"{key}.{inner}", _values(f"plan.{key}.{inner}", each), _own(config, f"{key}.{inner}")
        elif key.partition(".")[0] in SECTIONS and "." in key:
            yield key, _values(f"plan.{key}", values), _own(config, key)
        else:
            raise unknown_name("plan key", key, KEYS)


def _values(field: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, list) or not given:
        raise InvalidInput(field, given, "must be a list of values")
    labels = [json.dumps(value, sort_keys=True) for value in given]
    if len(set(labels)) < len(labels):
        raise InvalidInput(field, given, "has a value twice")
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in given)
    return tuple(sorted(given) if numbers else given)


def _as_method(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping) and "rules" in given:
        return dict(given)
    name, params = name_and_params("plan.method", given)
    return {"name": name, **params}


def _own(config: Config, path: str) -> Any:
    value: Any = config.as_dict()
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_key(tables: dict[str, Any], name: str, value: Any, depth: int) -> None:
    """One value at its place in a config's tables."""
    if name == "participation":
        given = tables["schedule"]["participation"]
        above = list(given[:-1]) if isinstance(given, list | tuple) else [None] * (depth - 1)
        value = [*("all" if each is None else each for each in above), value]
    elif name == "method":
        tables["method"] = copy.deepcopy(value)
        return
    *sections, key = SHORT.get(name, name).split(".")
    for section in sections:
        tables = tables.setdefault(section, {})
    tables[key] = copy.deepcopy(value)


def _check(space: Space) -> None:
    """Refuse a value that cannot be used before anything is trained."""
    first = space.usual or (0,) * len(space.axes)
    for place, axis in enumerate(space.axes):
        for value in range(len(axis.values)):
            config = space.config_of((*first[:place], value, *first[place + 1 :]))
            depth = _depth(config)
            schedule_of(config, depth)
            rules_for(rules_of(config), depth)
            check_participation(config.schedule.participation, depth)
            config.leaf.chain(config.run.rounds)


def _depth(config: Config) -> int:
    return Tree.of(config.tree.shape).depth


def _label(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        rest = "".join(f" {key}={_label(each)}" for key, each in value.items() if key != "name")
        return f"{value['name']}{rest}"
    if isinstance(value, Mapping) and isinstance(value.get("rules"), Sequence):
        return "/".join(map(_label, value["rules"]))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
