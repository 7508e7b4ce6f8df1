"""Sweep files: a base config, variants of it, and a grid over methods, seeds and any keys."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.files import read_json, remove_tree, write_json
from stratafl.base.validation import check_integer, check_keys, repeated
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.toml import check_plain, put, read_toml, with_full_paths
from stratafl.metrics.objective import Goal, parse_goal
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
class PlannedRun:
    """Run of a sweep; runs that differ only in their seed share a group."""

    name: str
    group: str
    experiment: Experiment


@dataclass(frozen=True)
class Axis:
    """Line of a grid: the parts of a dotted key in a config, and its values with their labels."""

    keys: tuple[str, ...]
    values: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Plan:
    """Runs of a sweep, and the target by which they are compared."""

    name: str
    entries: list[PlannedRun]
    target: Goal | None

    @staticmethod
    def load(path: Path) -> Plan:
        return Plan.of(read_toml(path), format.slug(path.stem), path.parent)

    @staticmethod
    def of(values: Mapping[str, Any], name: str, folder: Path = Path()) -> Plan:
        """Create the plan of a parsed file.

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
        runs = len(variants)
        for axis in axes:
            runs *= len(axis.values)
        if runs > MOST:
            raise InvalidInput("grid", runs, f"at most {MOST:,} runs")
        entries = [
            _entry(name, folder, base, str(variant), _table(f"variants.{variant}", changes), chosen)
            for variant, changes in variants.items()
            for chosen in itertools.product(*([(axis, *entry) for entry in axis.values] for axis in axes))
        ]
        twice = repeated(entry.name for entry in entries)
        if twice is not None:
            raise InvalidInput("grid", twice, "two runs would be the same; give every value once")
        for first in {entry.group: entry for entry in reversed(entries)}.values():
            first.experiment.check()  # a wrong value of a late run would be found after hours
        return Plan(name, entries, target)


def _entry(
    sweep: str,
    folder: Path,
    base: dict[str, Any],
    variant: str,
    changes: Mapping[str, Any],
    chosen: Sequence[tuple[Axis, str, Any]],
) -> PlannedRun:
    values = copy.deepcopy(base)
    for keys, value in _leaves(changes, "variants"):
        put(values, keys, value)
    labels, seed = [variant] if variant else [], ""
    for axis, label, value in chosen:
        put(values, axis.keys, value)
        if axis.keys == SEED:
            seed = label
        elif len(axis.values) > 1:
            labels.append(label)
    group = " ".join(labels) or sweep
    return PlannedRun(
        run_name(f"{group} {seed}".strip()), group, Experiment.from_table(with_full_paths(values, folder))
    )


def run_name(label: str) -> str:
    """Convert a label to a part of a folder's name; digits of its hash are added if characters are
    lost."""
    plain = format.slug(label)
    if plain == label.replace(" ", "-"):
        return plain
    digest = hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()
    return f"{plain[: format.MAX_NAME_LENGTH - 7]}-{digest[:6]}"


def _axes(grid: Mapping[str, Any]) -> list[Axis]:
    axes = []
    for keys, values in _leaves(grid, "grid"):
        where = ".".join(keys)
        if keys in OLD_KEYS:
            raise InvalidInput(f"grid.{where}", values, f"is grid.{OLD_KEYS[keys]} now")
        if keys == SEED and isinstance(values, int) and not isinstance(values, bool):
            values = list(range(check_integer("grid.seed", values, at_least=1, at_most=MOST)))
        if not isinstance(values, list) or not values:
            raise InvalidInput(f"grid.{where}", values, "must be a list of values")
        axes.append(Axis(keys, [(_label(keys, value), value) for value in values]))
    return sorted(axes, key=lambda axis: axis.keys == SEED)  # seeds vary fastest


def _label(keys: tuple[str, ...], value: Any) -> str:
    if keys == ("method",) and isinstance(value, Mapping):
        rest = "".join(f" {key}={_text(parameter)}" for key, parameter in value.items() if key != "name")
        return f"{value.get('name', 'rules')}{rest}"
    if keys in (("method",), ("method", "name")):
        return str(value)
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
