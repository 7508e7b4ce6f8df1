"""Experiments of a Python program as plain tables, with descriptions of its objects.

A user's objects are named by where they are imported from ("my_nets:Net"), so that a change of that
file is noticed, as it is for a config's. What a program defines itself, where a change of any other
line says nothing, has a digest of its own source instead; numbers and texts that a function was
made with are named, too ({"name": "fedprox", "mu": 0.1}).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.base.tracebacks import is_installed
from stratafl.core.flat_module import frozen_digest
from stratafl.core.rule import Rule, average
from stratafl.core.schedule import SyncSchedule
from stratafl.data.inputs import as_tensor, is_array
from stratafl.experiment.experiment import Experiment, all_options, plain_value
from stratafl.experiment.fields import options
from stratafl.experiment.toml import with_full_paths
from stratafl.simulation.simulation import Simulation

Table = dict[str, Any]
IN_MEMORY = "in memory"
MOST_BYTES = 1 << 26
"""The most bytes of an array that are looked at for its digest: of a larger one, rows at equal
distances."""
MOST_ENTRIES = 64
"""The most entries of a list that is repeated as it is; a longer one has a digest."""
DEEPEST = 5


def plain_config(simulation: Simulation) -> Table:
    """Plain tables of a simulation's experiment, with descriptions of the objects of its
    program."""
    experiment = simulation.experiment
    table: Table = {}
    for name, option in options(Experiment).items():
        value = getattr(experiment, name)
        if option.section is None:
            table[name] = _option(name, value)
        else:
            table[name] = {key: _option(f"{name}.{key}", getattr(value, key)) for key in options(option.section)}
    if not _is_plain(experiment.model.name):
        table["model"] |= _frozen(simulation)
    if not _is_plain(experiment.tree.shape):
        table["tree"]["shape"] = str(simulation.federation.tree.whole)
    if not _is_plain(experiment.data.partition):
        # who holds which samples is in the fingerprint of the data
        table["data"]["partition"] = IN_MEMORY
    if simulation.clock is not None and not _is_plain(experiment.network):
        table["network"] = simulation.clock.facts["network"]
    if not _is_plain(experiment.schedule.wait) and simulation.clock is not None:
        table["schedule"]["wait"] = [policy.to_plain() for policy in simulation.clock.workload.wait]
    return with_full_paths(table, Path.cwd())


def _option(key: str, value: Any) -> Any:
    """An option as plain data."""
    try:
        return plain_value(key, value)
    except InvalidInput:
        return described(value)


def objects_of(experiment: Experiment) -> dict[str, str]:
    """Options that are objects of a program, not plain values: where each is imported from, or that
    it is in memory."""
    objects = {}
    for key in all_options():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(experiment, section) if section else experiment, name)
        try:
            plain_value(key, value)
        except InvalidInput:
            objects[key] = _where(value)
    return objects


def _frozen(simulation: Simulation) -> Table:
    """Digest of a model's frozen weights, if it has any: they are in no checkpoint, and a run must
    go on with the same."""
    digest = frozen_digest(simulation.flat)
    return {"frozen": digest[:16]} if digest else {}


# -- one value -------------------------------------------------------------------------------------


def described(value: Any, depth: int = 0) -> Any:
    """A value as plain data that is the same whenever the value is; what cannot be looked into is
    named."""
    if _is_plain(value):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path | torch.device | torch.dtype):
        return str(value)
    if isinstance(value, SyncSchedule):
        return list(value.periods)
    if is_array(value):
        has_texts = hasattr(value, "to_csv") and np.asarray(value).dtype.kind == "O"
        sha256 = _of_text(value.to_csv(index=False)) if has_texts else digest(value)
        return {"name": IN_MEMORY, "shape": list(value.shape), "sha256": sha256}
    if depth > DEEPEST:
        return IN_MEMORY
    if isinstance(value, Mapping):
        return {str(key): described(each, depth + 1) for key, each in value.items()}
    if isinstance(value, Rule):
        return _rule(value, depth)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {**named(value), **described(value._asdict(), depth + 1)}
    if isinstance(value, list | tuple):
        entries = [described(each, depth + 1) for each in value]
        if len(entries) <= MOST_ENTRIES:
            return entries
        return {"name": IN_MEMORY, "entries": len(entries), "sha256": _of_text(json.dumps(entries))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {**named(value), **{name: described(each, depth + 1) for name, each in kept.items()}}
    return named(value, depth)


def named(value: Any, depth: int = 0) -> Table:
    """An object by its name, with what a function was made with."""
    kind, where = _kind(value), _where(value)
    table: Table = {"name": where}
    if _is_the_users(kind) and (where.startswith("__main__:") or "<" in kind.__qualname__):
        table |= _source_digest(kind)
    if isinstance(value, nn.Module):
        table["parameters"] = sum(each.numel() for each in value.parameters())
    made_with = inspect.isfunction(value) and zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    for name, cell in made_with or ():
        with contextlib.suppress(ValueError):  # one that is not filled yet
            kept = cell.cell_contents
            table |= {name: described(kept, depth + 1)} if _is_plain(kept) or callable(kept) else {}
    return table


def _rule(rule: Rule, depth: int) -> Table:
    """A rule described by the functions that are not those of averaging, and what these were made
    with."""
    usual = average()._asdict()
    own = {name: each for name, each in rule._asdict().items() if _origin(each) != _origin(usual[name])}
    table: Table = {"name": "+".join(dict.fromkeys(map(_origin, own.values()))) or "average", "own": list(own)}
    for name, each in own.items():
        details = described(each, depth + 1)
        table |= {f"{name}.source" if key == "source" else key: each for key, each in details.items() if key != "name"}
    return table


def _origin(function: Any) -> str:
    """The outermost function that made this one; nothing of None."""
    if function is None:
        return ""
    kind = _kind(function)
    outer = kind.__qualname__.partition(".")[0]
    return outer if _is_ours(kind) else f"{kind.__module__}:{outer}"


def _kind(value: Any) -> Any:
    """A function or a class itself; the class of anything else."""
    return value if isinstance(value, type) or inspect.isroutine(value) else type(value)


def _where(value: Any) -> str:
    """Where an object, or its class, is imported from; or that it is in memory."""
    kind = _kind(value)
    name, module = getattr(kind, "__qualname__", ""), getattr(kind, "__module__", None)
    if isinstance(value, Tensor | np.ndarray | list | tuple | dict) or not name or not module:
        return IN_MEMORY
    if _is_ours(kind):
        return str(name).partition(".")[0]
    if "<" in name:
        return IN_MEMORY
    return f"{module}:{name}" if _is_the_users(kind) else f"{module}.{name}"


def _is_ours(kind: Any) -> bool:
    return str(kind.__module__).startswith("stratafl.")


def _is_the_users(kind: Any) -> bool:
    """Whether it is neither the library's, nor Python's, nor of an installed package."""
    module = str(kind.__module__)
    if module == "__main__":
        return True
    source = getattr(sys.modules.get(module), "__file__", None)
    is_a_library_s = source is None or is_installed(Path(source))
    return not (_is_ours(kind) or is_a_library_s or module.partition(".")[0] in sys.stdlib_module_names)


def _source_digest(kind: Callable[..., Any] | type) -> Table:
    try:
        return {"source": _of_text(inspect.getsource(kind))}
    except (OSError, TypeError):
        return {}


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return len(value) <= MOST_ENTRIES and all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


def digest(values: Tensor | np.ndarray | Sequence[Any]) -> str:
    """A digest of an array's numbers, or of rows at equal distances where there are very many."""
    rows = as_tensor("array", values)
    if rows.dim() > 0 and rows.nbytes > MOST_BYTES:
        rows = rows[:: -(-rows.nbytes // MOST_BYTES)]
    # one repeated entry has stride 0, which counts as contiguous, and cannot be viewed as bytes
    copy = rows.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return hashlib.sha256(copy.numpy().tobytes()).hexdigest()[:16]
