"""A run as data: what a TOML file may say, checked key by key.

[tree]      shape, weights
[data]      name, partition, rotation, augment, synthetic
[model]     name and its parameters
[method]    name and its parameters, or rules: one per edge level, root first
[schedule]  periods or steps_per_sync, participation
[leaf]      lr, batch, sampling, clip, weight_decay, momentum, schedule
[run]       rounds, seed, evaluate_every, evaluate_levels, stop_at, checkpoint_every, keep_state, device, engine,
            precision, diagnose, update_limit, update_factor, plugins
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratafl.errors import InvalidInput, choice, first_line, reason, unknown
from stratafl.local import Leaf, LearningRate, constant, cosine, leaf, step_decay

DEEPEST = 120
"""Lists and tables in each other; a tree may have a hundred levels."""
MOST_BITS = 1023
"""Of a whole number: what is larger has no floating-point value, and could not be stored with a run."""


@dataclass(frozen=True)
class TreeConfig:
    shape: Any = "4x5"
    weights: Any = "uniform"


@dataclass(frozen=True)
class DataConfig:
    name: str = "digits"
    partition: Any = field(default_factory=list)
    """One split per edge level, root first; i.i.d. on every level where it is empty."""
    rotation: Mapping[str, Any] | None = None
    """Turn training images by node: start, step (degrees) and level."""
    augment: str = "none"
    synthetic: Mapping[str, Any] = field(default_factory=dict)
    """For the data set of that name: samples per client, and alpha and beta, each one number or one per level."""


@dataclass(frozen=True)
class ScheduleConfig:
    periods: Any = None
    steps_per_sync: Any = None
    participation: Any = None


@dataclass(frozen=True)
class LeafConfig:
    lr: float = 0.1
    batch: int | None = 32
    """0 for full batches: a TOML file cannot say None."""
    sampling: str = "epochs"
    clip: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: Any = "constant"

    def chain(self, rounds: int) -> Leaf:
        schedules: dict[str, Callable[..., LearningRate]] = {"constant": constant, "step": step_decay, "cosine": cosine}
        name, params = named("leaf.schedule", self.schedule)
        choice("leaf.schedule", name, schedules)
        if name == "cosine":
            params = {"rounds": rounds, **params}
        allowed = {"constant": (), "step": ("every", "factor"), "cosine": ("rounds", "floor")}[name]
        for key in params:
            if key not in allowed:
                raise unknown("leaf.schedule key", key, allowed)
        if name == "step" and "every" not in params:
            raise InvalidInput("leaf.schedule", self.schedule, "step needs every = a number of rounds")
        return leaf(
            schedules[name](self.lr, **params),
            clip_norm=self.clip,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
        )


@dataclass(frozen=True)
class RunConfig:
    rounds: int = 20
    seed: int = 0
    evaluate_every: int = 1
    evaluate_levels: Any = (0,)
    stop_at: float | None = None
    """A test accuracy that ends the run early."""
    checkpoint_every: int = 10
    """Rounds; 0 for only when the run is stopped."""
    keep_state: bool = False
    """Whether a finished run keeps every node's model and correction, in a last checkpoint."""
    device: str = "cpu"
    engine: str | None = None
    precision: str = "fp32"
    diagnose: str = "drift"
    """What is measured beside the metrics: "drift", also the "ideal" corrections, or "none"."""
    update_limit: float | None = None
    """Updates so many times larger than their siblings' median are refused; 0 for none."""
    update_factor: Any = None
    """Updates whose norm is so many times their siblings' median are refused, one number or one per level; 0 for none.
    """
    plugins: Any = ()
    """Python files imported first, so that rules they register can be named."""


@dataclass(frozen=True)
class Config:
    tree: TreeConfig = field(default_factory=TreeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "mlp"})
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "mtgc"})
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    leaf: LeafConfig = field(default_factory=LeafConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Config:
        """From nested tables, such as a parsed TOML file."""
        check_plain(values)
        return _fill(Config, values, "")

    @staticmethod
    def load(path: Path, changes: Iterable[str] = ()) -> Config:
        """From a TOML file, with "section.key=value" changes on top."""
        values = read_toml(path)
        for change in changes:
            _change(values, change)
        return Config.of(values)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInput("config", path, "is not UTF-8 text") from None
    except (OSError, ValueError) as problem:
        raise InvalidInput("config", path, getattr(problem, "strerror", None) or reason(problem)) from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InvalidInput("config", path, f"not valid TOML: {_unread(problem)}") from None


def _unread(problem: Exception) -> str:
    """Why TOML cannot be read; not everything Python cannot take is an error of the format's."""
    if isinstance(problem, RecursionError):
        return "lists or tables are nested too deeply"
    return first_line(problem) if isinstance(problem, tomllib.TOMLDecodeError) else "a number is too long"


def named(field: str, value: Any) -> tuple[str, dict[str, Any]]:
    """A name with parameters: either the bare name or a table that has one."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {key: each for key, each in value.items() if key != "name"}
    raise InvalidInput(field, value, "must be a name, or a table with a name")


def _fill(kind: Any, values: Any, path: str) -> Any:
    """A dataclass from a table; a key it does not have is refused with the nearest it has."""
    if not isinstance(values, Mapping):
        raise InvalidInput(path or "config", values, "must be a table")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    filled = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise unknown(f"{path or 'config'} key", key, fields)
        default = _default(fields[key])
        if dataclasses.is_dataclass(default):
            filled[key] = _fill(type(default), value, where)
        else:
            filled[key] = _typed(where, value, default, str(fields[key].type))
    return kind(**filled)


def check_plain(value: Any, path: str = "", depth: int = 0) -> None:
    """Refuse what could not be stored with a run: TOML knows dates, JSON does not."""
    where = path or "config"
    if depth > DEEPEST:
        raise InvalidInput(where, value, f"at most {DEEPEST} lists or tables in each other")
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{where} key", key, "must be a text")
            check_plain(each, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            check_plain(each, path, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise InvalidInput(where, value, "must be a text, a number, true or false, a list or a table")
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise InvalidInput(where, value, "is too large a number")


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _typed(where: str, value: Any, default: Any, kind: str) -> Any:
    if kind.startswith("str") and not isinstance(value, str) and (value is not None or "None" not in kind):
        raise InvalidInput(where, value, "must be a text")
    if kind.startswith("Mapping") and not isinstance(value, Mapping) and (value is not None or "None" not in kind):
        raise InvalidInput(where, value, "must be a table")
    if isinstance(default, list | tuple) and not isinstance(value, list | tuple):
        raise InvalidInput(where, value, "must be a list")
    if kind.startswith("bool") and not isinstance(value, bool):
        raise InvalidInput(where, value, "must be true or false")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind.startswith(("int", "float")) and not (is_number or (value is None and "None" in kind)):
        raise InvalidInput(where, value, "must be a number")
    return value


def _change(values: dict[str, Any], change: str) -> None:
    """Apply one "section.key=value"; the value is TOML, or a plain text where it is not."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise InvalidInput("--set", change, "must look like section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except (ValueError, RecursionError) as problem:
        raise InvalidInput("--set", change, _unread(problem)) from None
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InvalidInput("--set", change, f"{key} is not a table")
    table[keys[-1]] = value
