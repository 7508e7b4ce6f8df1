"""Configs of format 1: stored runs are translated, and a user's file gets one line per old key."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tables = dict[str, Any]

RENAMED = {
    "data.name": "data.source",
    "data.synthetic": "data.arguments",
    "model.keep_at_home": "model.local_parameters",
    "objective.loss": "loss",
    "objective.metrics": "evaluation.metrics",
    "leaf.lr": "client.lr",
    "leaf.batch": "client.batch_size",
    "leaf.sampling": "client.sampling",
    "leaf.clip": "client.clip_norm",
    "leaf.weight_decay": "client.weight_decay",
    "leaf.optimiser": "client.optimizer",
    "leaf.optimiser_state": "client.optimizer_state",
    "leaf.schedule": "client.lr_schedule",
    "run.rounds": "rounds",
    "run.seed": "seed",
    "run.plugins": "plugins",
    "run.initial": "model.initial",
    "run.evaluate_every": "evaluation.every",
    "run.evaluate_levels": "evaluation.levels",
    "run.stop_when": "evaluation.stop_when",
    "run.diagnose": "evaluation.drift",
    "run.device": "execution.device",
    "run.engine": "execution.engine",
    "run.precision": "execution.precision",
    "run.checkpoint_every": "storage.checkpoint_every",
    "run.keep_state": "storage.keep_state",
    "run.update_limit": "aggregation.update_limit",
    "run.update_factor": "aggregation.update_factor",
}
"""Keys of format 1 and those of format 2, where the key alone has changed, or its notation of a
value."""

REPLACED = {
    "leaf.momentum": 'is a parameter of the optimizer now: client.optimizer = { name = "sgd", momentum = 0.9 }',
    "leaf.epochs": 'is the last of schedule.periods now, with schedule.unit = "epochs"',
    "run.stop_at": 'is evaluation.stop_when now: "accuracy >= 0.9"',
    "schedule.steps_per_sync": "is schedule.periods now: each entry divided by the next one",
    "plan": "is the table [tune] now",
}
"""Keys of format 1 that are said in another way now."""

TABLES = {
    "run": "a table per topic now",
    "leaf": "the table [client] now",
    "objective": "loss and evaluation.metrics now",
}
"""Tables of format 1, and where their keys are now."""

_VALUES: dict[str, Callable[[Any], Any]] = {
    "data.partition": lambda partition: partition or None,
    "leaf.batch": lambda batch: "full" if batch in (0, None) else batch,
    "leaf.sampling": lambda sampling: {"epochs": "shuffle"}.get(sampling, sampling),
    "leaf.optimiser": lambda optimizer: optimizer or "sgd",
    "leaf.optimiser_state": lambda state: {"restart": "reset"}.get(state, state),
    "run.evaluate_levels": lambda levels: [level for level in levels or () if level != 0],
}
"""Values of format 1 in the notation of format 2."""


KEYWORDS = {
    "periods": "schedule.periods",
    "participation": "schedule.participation",
    "wait": "schedule.wait",
    "rules": "method",
    "batch": "client.batch_size",
    "sampling": "client.sampling",
    "partition": "data.partition",
    "test": "data.test",
    "test_partition": "data.test_partition",
    "columns": "data.columns",
    "lazy": "data.lazy",
    "augment": "data.augment",
    "weights": "tree.weights",
    "initial": "model.initial",
    "keep_at_home": "model.local_parameters",
    "metrics": "evaluation.metrics",
    "evaluate_every": "evaluation.every",
    "evaluate_levels": "evaluation.levels",
    "stop_at": "evaluation.stop_when",
    "stop_when": "evaluation.stop_when",
    "diagnose": "evaluation.drift",
    "device": "execution.device",
    "engine": "execution.engine",
    "precision": "execution.precision",
    "update_limit": "aggregation.update_limit",
    "update_factor": "aggregation.update_factor",
}
"""Keywords that `simulate` had, and the options that they are now."""


def new_place(key: str) -> str | None:
    """Where the meaning of an old key is now, for an error; None for a key that is simply
    unknown."""
    renamed = RENAMED | KEYWORDS
    if key in renamed:
        return f"is {renamed[key]} now"
    return REPLACED.get(key, f"is {TABLES[key]}" if key in TABLES else None)


def is_old(tables: Mapping[str, Any]) -> bool:
    """Whether these are the tables of a stored run of format 1."""
    return any(table in tables for table in ("run", "leaf", "objective"))


def current(tables: Mapping[str, Any]) -> Tables:
    """The tables of a stored run in the names of this version."""
    return translated(tables) if is_old(tables) else dict(tables)


def translated(tables: Mapping[str, Any]) -> Tables:
    """The tables of a stored run of format 1 in the names and notations of format 2."""
    old, new = copy.deepcopy(dict(tables)), Tables()
    _replace(old)
    for table, entries in old.items():
        if not isinstance(entries, Mapping):
            new[table] = entries
            continue
        for key, value in entries.items():
            dotted = f"{table}.{key}"
            if dotted in _VALUES:
                value = _VALUES[dotted](value)
            if value is None and dotted not in ("model.params",):
                continue
            *section, name = RENAMED.get(dotted, dotted).split(".")
            target = new.setdefault(section[0], {}) if section else new
            if dotted == "data.synthetic" and not value:
                continue
            target[name] = value
    return new


def _replace(tables: Tables) -> None:
    """Rewrite what two or more keys of format 1 say together."""
    leaf, run, schedule = (_table(tables, name) for name in ("leaf", "run", "schedule"))
    momentum = leaf.pop("momentum", None)
    if momentum and not leaf.get("optimiser"):
        leaf["optimiser"] = {"name": "sgd", "momentum": momentum}
    is_from_file = "steps_per_sync" in schedule or not schedule.get("periods")
    steps = schedule.pop("steps_per_sync", None)
    if isinstance(steps, Sequence) and not schedule.get("periods"):
        schedule["periods"] = [math.ceil(above / below) for above, below in zip(steps, [*steps[1:], 1], strict=True)]
    epochs = leaf.pop("epochs", None)
    if epochs is not None:
        schedule["unit"] = "epochs"
        # the tables of a run from Python had all periods, and no key for the other notation
        if is_from_file:
            schedule["periods"] = [*(schedule.get("periods") or []), epochs]
        tables["schedule"] = schedule
    accuracy = run.pop("stop_at", None)
    if accuracy is not None and run.get("stop_when") is None:
        run["stop_when"] = f"accuracy >= {accuracy!r}"


def _table(tables: Tables, name: str) -> Tables:
    """A table by its name; an empty one if it is not there."""
    table = tables.get(name)
    return table if isinstance(table, dict) else {}
