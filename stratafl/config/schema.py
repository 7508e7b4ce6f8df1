"""A run as data: what a TOML file may say, checked key by key.

[tree]      shape, weights
[data]      name, arguments, columns, test, lazy, partition, rotation, augment, synthetic,
            test_partition
[model]     name and its parameters, base, lora, keep_at_home
[method]    name and its parameters, or rules: one per edge level, root first
[schedule]  periods or steps_per_sync, participation, wait
[network]   name, of a preset or a file; or a network's own tables
[objective] loss, metrics
[leaf]      lr, batch, sampling, clip, weight_decay, momentum, optimiser, optimiser_state,
            epochs, schedule
[run]       rounds, seed, evaluate_every, evaluate_levels, stop_at, stop_when, checkpoint_every,
            keep_state, device, engine, precision, diagnose, update_limit, update_factor, initial,
            plugins
[plan]      no part of a run: what `stratafl plan` searches, see docs/how-to/plan.md
"""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from stratafl.base.errors import InvalidInput, describe_exception, first_line_of, unknown_name
from stratafl.base.validation import check_choice, name_and_params
from stratafl.config.paths import anchored
from stratafl.core.client_update import Leaf, OptimiserState, leaf
from stratafl.core.optimizer import LearningRate, constant, cosine, step_decay

PLAN = "plan"
DEEPEST = 120
"""Lists and tables in each other; a tree may have a hundred levels."""
MOST_BITS = 1023
"""What an integer may have: a larger one has no floating-point value, and could not be stored."""


@dataclass(frozen=True)
class TreeConfig:
    """The table `[tree]`: the tree and the weights of siblings."""

    shape: Any = "4x5"
    weights: Any = "uniform"


@dataclass(frozen=True)
class DataConfig:
    """The table `[data]`: the data set, and how clients share it."""

    name: str = "digits"
    """A data set of the catalogue; or of the user's own: a function ("my_data.py:load"), a file
    (.csv, .parquet, .npz), a folder of images, or a set of Hugging Face's ("hf:name")."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the function, or Hugging Face's, is called with."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of a table: inputs, targets and owner."""
    test: Any = None
    """What a file or folder is tested on: another of its kind, or a share of its own samples."""
    lazy: bool = False
    """Whether a data set's items are read anew for every batch."""
    partition: Any = field(default_factory=list)
    """One split per edge level, root first; i.i.d. on every level where it is empty."""
    rotation: Mapping[str, Any] | None = None
    """Turn training images by node: start, step (degrees) and level."""
    augment: str = "none"
    synthetic: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the data set of that name: samples per client; alpha and beta, one number or one
    per level."""
    test_partition: str | None = None
    """Test data of each client's own: "like_train", or none."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The table `[objective]`: the loss, and what is measured besides."""

    loss: Any = None
    """A name, an import path, or a table of one with its parameters; cross-entropy unless given."""
    metrics: Any = None
    """A list, or a table by name: names, import paths, or tables of one with parameters and which
    way is `better`."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The table `[schedule]`: when levels meet, and who takes part."""

    periods: Any = None
    steps_per_sync: Any = None
    participation: Any = None
    wait: Any = None
    """Whom parents wait for: "all", { deadline = seconds }, { first = a number or a fraction }, {
    buffer = a number }."""


@dataclass(frozen=True)
class LeafConfig:
    """The table `[leaf]`: a client's step."""

    lr: float = 0.1
    batch: int | None = 32
    """0 for full batches: a TOML file cannot say None."""
    sampling: str = "epochs"
    clip: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    optimiser: Any = None
    """A name, a table with parameters, or "file.py:make"; SGD with the momentum above unless
    given."""
    optimiser_state: str = "restart"
    """What becomes of it when a client gets a model from its parent: it restarts, or "keep"."""
    epochs: int | None = None
    """Passes over a client's own data between two meetings, instead of the lowest of the
    periods."""
    schedule: Any = "constant"

    def rates(self, rounds: int) -> tuple[str, dict[str, Any]]:
        """The name of the learning rate's schedule, and its parameters in a run of so many
        rounds."""
        name, params = name_and_params("leaf.schedule", self.schedule)
        allowed = {"constant": (), "step": ("every", "factor"), "cosine": ("rounds", "floor")}
        check_choice("leaf.schedule", name, allowed)
        for key in params:
            if key not in allowed[name]:
                raise unknown_name("leaf.schedule key", key, allowed[name])
        if name == "step" and "every" not in params:
            raise InvalidInput("leaf.schedule", self.schedule, "step needs every = a number of rounds")
        return name, {"rounds": rounds, **params} if name == "cosine" else params

    def chain(self, rounds: int) -> Leaf:
        schedules: dict[str, Callable[..., LearningRate]] = {"constant": constant, "step": step_decay, "cosine": cosine}
        name, params = self.rates(rounds)
        return leaf(
            schedules[name](self.lr, **params),
            clip_norm=self.clip,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            optimiser=self.optimiser,
            optimiser_state=check_choice("leaf.optimiser_state", self.optimiser_state, get_args(OptimiserState)),
            epochs=self.epochs,
        )


@dataclass(frozen=True)
class RunConfig:
    """The table `[run]`: how long a run is, where it is computed, and what is kept of it."""

    rounds: int = 20
    seed: int = 0
    evaluate_every: int = 1
    evaluate_levels: Any = (0,)
    stop_at: float | None = None
    """A test accuracy that ends the run early."""
    stop_when: Any = None
    """Values of metrics that do: a table, or a text such as "loss <= 0.1"."""
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
    """Updates whose norm is so many times their siblings' median are refused; 0 for none.

    One number, or one per level.
    """
    initial: str | None = None
    """A state dict to start from, a .safetensors or .pt file."""
    plugins: Any = ()
    """Python files imported first, so that rules they register can be named."""


@dataclass(frozen=True)
class Config:
    """A run as data: what a TOML file says, table by table."""

    tree: TreeConfig = field(default_factory=TreeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "mlp"})
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "mtgc"})
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    leaf: LeafConfig = field(default_factory=LeafConfig)
    run: RunConfig = field(default_factory=RunConfig)
    network: Mapping[str, Any] | None = None
    """Links and devices in whose virtual time the run goes on."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Config:
        """Read a config from nested tables, such as a parsed TOML file; what `stratafl plan` reads
        in it is no part of a run."""
        check_plain(values)
        given = {key: each for key, each in values.items() if key != PLAN} if isinstance(values, Mapping) else values
        return _fill(Config, given, "")

    @staticmethod
    def load(path: Path, changes: Iterable[str] = ()) -> Config:
        """Read a config from a TOML file, with "section.key=value" changes on top; files that it
        names lie beside it."""
        return Config.of(read_tables(path, changes))

    def as_dict(self) -> dict[str, Any]:
        """The config as plain tables. What only a run in virtual time says is left out of
        another's, whose tables are then those of runs that were stored before there was any."""
        tables = dataclasses.asdict(self)
        if self.network is None:
            del tables["network"]
        if self.schedule.wait is None:
            del tables["schedule"]["wait"]
        return tables


def read_tables(path: Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """A config file's tables with "section.key=value" changes on top, its files found."""
    return anchored(with_changes(read_toml(path), changes), path.parent)


def with_changes(values: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """A config's tables with "section.key=value" changes on top."""
    changed = copy.deepcopy(dict(values))
    for change in changes:
        _change(changed, change)
    check_plain(changed)
    return changed


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or the complaint."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise InvalidInput("config", path, "is not UTF-8 text") from None
    except (OSError, ValueError) as problem:
        raise InvalidInput("config", path, getattr(problem, "strerror", None) or describe_exception(problem)) from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InvalidInput("config", path, f"not valid TOML: {_unread(problem)}") from None


def _unread(problem: Exception) -> str:
    """Why TOML cannot be read; not everything Python cannot take is an error of the format's."""
    if isinstance(problem, RecursionError):
        return "lists or tables are nested too deeply"
    return first_line_of(problem) if isinstance(problem, tomllib.TOMLDecodeError) else "a number is too long"


def _fill(kind: Any, values: Any, path: str) -> Any:
    """A dataclass from a table; a key it does not have is refused with the nearest it has."""
    if not isinstance(values, Mapping):
        raise InvalidInput(path or "config", values, "must be a table")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    filled = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise unknown_name(f"{path or 'config'} key", key, fields)
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
