"""Runs of a sweep: a base config, variants of it, and a grid over methods, seeds and any keys."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base.errors import InvalidInput
from stratafl.base.files import read_json, remove_tree, write_json
from stratafl.base.validation import check_integer, check_keys, plain, repeated
from stratafl.experiment.experiment import Experiment, plain_value
from stratafl.experiment.fields import Section
from stratafl.experiment.sections import SECTIONS, Cosine, Method, StepDecay
from stratafl.experiment.toml import check_plain, parse_change, put, read_toml, with_changes, with_full_paths
from stratafl.metrics.objective import Goal, GoalLike, parse_goal
from stratafl.runs import format

KEYS = ("config", "base", "variants", "grid", "target")
OLD_KEYS = {("seeds",): "seed", ("methods",): "method", ("run", "seed"): "seed"}
"""Keys of a grid that have other names now."""
MOST = 10_000
"""Maximum number of runs of one sweep; more are a mistake in the file."""
SEED = ("seed",)
NOTED = "sweep.json"
"""File in the folder of a sweep, beside its runs, with its target."""


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep; runs that differ only in their seed share a group."""

    name: str
    group: str
    experiment: Experiment


@dataclass(frozen=True)
class GridAxis:
    """Line of a grid: the parts of a dotted key in a config, and its values with their labels."""

    keys: tuple[str, ...]
    values: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """Runs of a sweep, and the target by which they are compared."""

    name: str
    entries: list[SweepEntry]
    target: Goal | None

    @staticmethod
    def load(path: Path, changes: Sequence[str] = ()) -> Sweep:
        """Read a sweep file, with "section.key=value" changes of its base config."""
        values = read_toml(path, "sweep")
        if values.keys() & SECTIONS.keys() and not values.keys() & set(KEYS):
            allowed = f'is the config of a run; a sweep has config = "{path.name}" and a table [grid]'
            raise InvalidInput("sweep", path, allowed)
        return Sweep.of(values, format.slug(path.stem), path.parent, changes)

    @staticmethod
    def of(values: Mapping[str, Any], name: str, folder: Path = Path(), changes: Sequence[str] = ()) -> Sweep:
        """Create the sweep of a parsed file.

        folder: where relative paths in the sweep file start.
        """
        check_plain(values)
        check_keys("sweep", values, KEYS)
        base: dict[str, Any] = {}
        if "config" in values:
            if not isinstance(values["config"], str):
                raise InvalidInput("config", values["config"], "must be the path of a TOML file")
            path = folder / values["config"]
            base = read_toml(path)
            check_plain(base)
            base = with_full_paths(base, path.parent)
        _merge(base, _table("base", values.get("base", {})))
        target = parse_goal("target", values["target"]) if values.get("target") is not None else None
        variants = _table("variants", values.get("variants", {})) or {"": {}}
        axes = _axes(_table("grid", values.get("grid", {})))
        for change in changes:
            _check_change(change, axes, variants)
        base = with_changes(base, changes)

        def build(variant: str, chosen: Sequence[Choice]) -> Experiment:
            tables = copy.deepcopy(base)
            for keys, value in _leaves(_table(f"variants.{variant}", variants[variant]), "variants"):
                put(tables, keys, value)
            for choice in chosen:
                put(tables, choice.keys, choice.value)
            return Experiment.from_table(with_full_paths(tables, folder))

        return Sweep(name, _entries(name, list(variants), axes, build), target)

    @staticmethod
    def of_grid(experiment: Experiment, grid: Mapping[str, Any], name: str, target: GoalLike | None = None) -> Sweep:
        """Create the sweep of an experiment of Python and a grid of values by dotted key."""
        axes = _axes({key: _listed(value) for key, value in _table("grid", grid).items()})

        def build(variant: str, chosen: Sequence[Choice]) -> Experiment:
            return experiment.replace({".".join(choice.keys): choice.value for choice in chosen})

        goal = None if target is None else parse_goal("target", target)
        return Sweep(name, _entries(name, [""], axes, build), goal)


class Choice(NamedTuple):
    """Value of one line of a grid, and its label in names of runs."""

    keys: tuple[str, ...]
    label: str
    value: Any


def _entries(
    sweep: str,
    variants: Sequence[str],
    axes: Sequence[GridAxis],
    build: Callable[[str, Sequence[Choice]], Experiment],
) -> list[SweepEntry]:
    """Every combination as a named experiment; raises if one has a mistake."""
    if len(variants) * math.prod(len(axis.values) for axis in axes) > MOST:
        count = len(variants) * math.prod(len(axis.values) for axis in axes)
        raise InvalidInput("grid", count, f"at most {MOST:,} runs")
    entries = []
    for variant in variants:
        for chosen in itertools.product(*([Choice(axis.keys, *entry) for entry in axis.values] for axis in axes)):
            several = [c.label for c, axis in zip(chosen, axes, strict=True) if len(axis.values) > 1 and c.keys != SEED]
            group = " ".join([*([variant] if variant else []), *several]) or sweep
            seed = "".join(choice.label for choice in chosen if choice.keys == SEED)
            entries.append(SweepEntry(run_name(f"{group} {seed}".strip()), group, build(variant, chosen)))
    twice = repeated(entry.name for entry in entries)
    if twice is not None:
        raise InvalidInput("grid", twice, "two runs would be the same; give every value once")
    for first in {entry.group: entry for entry in reversed(entries)}.values():
        first.experiment.check()  # a wrong value of a late run would be found after hours
    return entries


def _check_change(change: str, axes: Sequence[GridAxis], variants: Mapping[str, Any]) -> None:
    """Raise for a change of what the grid or a variant decides, which would have no effect."""
    decided = {axis.keys: "grid" for axis in axes}
    for variant, table in variants.items():
        where = f"variants.{variant}"
        decided |= {tuple(keys): where for keys, _ in _leaves(_table(where, table), "variants")}
    keys = tuple(parse_change(change)[0])
    for other, where in decided.items():
        if keys == other[: len(keys)] or other == keys[: len(other)]:
            raise InvalidInput("--set", change, f"has no effect, since {where} has {'.'.join(other)}")


def _listed(value: Any) -> Any:
    """A range, tuple or array of a grid as a list; other values as they are."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else value


def run_name(label: str) -> str:
    """Convert a label to a part of a folder's name; digits of its hash are added if characters are
    lost."""
    plain = format.slug(label)
    if plain == label.replace(" ", "-"):
        return plain
    digest = hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()
    return f"{plain[: format.MAX_NAME_LENGTH - 7]}-{digest[:6]}"


def _axes(grid: Mapping[str, Any]) -> list[GridAxis]:
    axes = []
    for keys, values in _leaves(grid, "grid"):
        where = ".".join(keys)
        if keys in OLD_KEYS:
            raise InvalidInput(f"grid.{where}", values, f"is grid.{OLD_KEYS[keys]} now")
        if keys == SEED and isinstance(values, int) and not isinstance(values, bool):
            values = list(range(check_integer("grid.seed", values, at_least=1, at_most=MOST)))
        if not isinstance(values, list) or not values:
            raise InvalidInput(f"grid.{where}", values, "must be a list of values")
        named = [(_label(keys, _readable(keys, value, position)), value) for position, value in enumerate(values)]
        axes.append(GridAxis(keys, named))
    return sorted(axes, key=lambda axis: axis.keys == SEED)  # seeds vary fastest


def _readable(keys: Sequence[str], value: Any, position: int) -> Any:
    """A value as a file would have it; an object of a program by its name, or else its position."""
    if isinstance(value, Method):
        value = value.rules if value.name is None else {"name": value.name, **value.params}
    elif isinstance(value, Section) and not isinstance(value, Cosine | StepDecay):
        value = value.changed()
    try:
        return plain_value(".".join(keys), plain(value))
    except InvalidInput:
        return getattr(value, "__name__", position)


def _label(keys: tuple[str, ...], value: Any) -> str:
    if keys == ("method",) and isinstance(value, Mapping):
        rest = "".join(f" {key}={_text(parameter)}" for key, parameter in value.items() if key != "name")
        return f"{value.get('name', 'rules')}{rest}"
    if keys in (("method",), ("method", "name")):
        return f"method={value}" if isinstance(value, int) else str(value)
    return f"{keys[-1]}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))


def _leaves(
    tables: Mapping[str, Any], where: str, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Pairs of a "section.key" and its value, which a file may write dotted, quoted or as
    tables."""
    for key, value in tables.items():
        keys = (*above, *str(key).split("."))
        if not all(keys):
            raise InvalidInput(f"{where} key", key, "must look like section.key")
        # a variant's method or model is one value: the base's parameters must not stay with it
        as_one = where == "variants" and keys[0] in ("method", "model")
        if isinstance(value, Mapping) and len(keys) < 2 and not as_one:
            yield from _leaves(value, where, keys)
        else:
            yield keys, value


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for section, table in changes.items():
        if isinstance(table, Mapping) and isinstance(into.get(section), dict):
            into[section].update(table)
        else:
            into[section] = table


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(where, value, "must be a table")
    return value


def note_target(folder: Path, target: Goal | None) -> None:
    """Store the target in a sweep's folder."""
    if target is None:
        remove_tree(folder / NOTED)
    else:
        write_json(folder / NOTED, {"target": asdict(target)})


def noted_target(folder: Path) -> Goal | None:
    """Target that is stored in a sweep's folder; None if there is none that can be read."""
    path = folder / NOTED
    if not path.is_file():
        return None
    try:
        noted = read_json(path)["target"]
        return None if noted is None else Goal(str(noted["metric"]), float(noted["value"]), str(noted["sign"]))
    except (InvalidInput, KeyError, TypeError, ValueError):
        return None
