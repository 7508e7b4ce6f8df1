"""A config's data where it is the user's own: which reader it is for, and what a function of the
user's may return."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.rng import Stream, derive_seed, seeded_rng
from stratafl.base.user_code import load_attribute
from stratafl.config.paths import HUB
from stratafl.config.schema import DataConfig
from stratafl.data import user_files
from stratafl.data.dataset import Columns
from stratafl.data.user_files import Found

RETURNED = ("train", "test", "partition", "owner", "classes")
"""What a function may return in a table."""
FILES = (*user_files.TABLE_SUFFIXES, *user_files.ARRAY_SUFFIXES)


def is_own(name: str) -> bool:
    """Whether a data set's name is that of a user's own."""
    return ":" in name or os.sep in name or name.lower().endswith(FILES)


def is_function(name: str) -> bool:
    """Whether a data set's name is that of a function which returns it."""
    return ":" in name and not name.startswith(HUB)


def find(config: DataConfig, clients: int, seed: int) -> Found:
    """What there is under a config's name, read as its kind is."""
    name, columns = config.name, Columns.of("data.columns", config.columns)
    if is_function(name):
        refuse(config, "is not for a function", "test")
        return _called(name, config.arguments, clients, seed)
    if name.startswith(HUB):
        return user_files.read_hub(name.removeprefix(HUB), config.test, columns, config.arguments)
    refuse(config, "is not for a file or folder", "arguments", "lazy")
    path = Path(name)
    # os.path, since to pathlib some texts are errors and not files that are absent
    if os.path.isdir(path):
        refuse(config, "is not for a folder", "columns")
        return user_files.read_images(path, config.test)
    kind = path.suffix.lower()
    if not os.path.isfile(path) or kind not in FILES:
        allowed = "must be a .csv, .parquet or .npz file, a folder of images, or a function (file.py:load)"
        found = "this is none" if os.path.exists(path) else "there is none"
        raise InvalidInput("data.name", path, f"{allowed}; {found}")
    if kind in user_files.TABLE_SUFFIXES:
        return user_files.read_table(path, config.test, columns)
    refuse(config, "is not for an .npz file", "columns")
    return user_files.read_arrays(path, config.test)


def refuse(config: DataConfig, told: str, *keys: str) -> None:
    """Refuse these keys where they say something."""
    for key in keys:
        if getattr(config, key) != getattr(DataConfig(), key):
            raise InvalidInput(f"data.{key}", getattr(config, key), told)


def _called(name: str, given: Mapping[str, Any], clients: int, seed: int) -> Found:
    """What the user's function returns, called with all generators set from the run's seed."""
    load = load_attribute("data.name", name)
    if not (inspect.isfunction(inspect.unwrap(load)) or inspect.ismethod(load)):
        raise InvalidInput("data.name", name, "must be a Python function")
    accepted = inspect.signature(load).parameters
    task = {key: value for key, value in {"clients": clients, "seed": seed}.items() if key in accepted}
    if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        for key in given:
            if key not in accepted:
                raise unknown_name("data.arguments key", key, accepted)
    with convert_errors("data.name", name), seeded_rng(derive_seed(seed, Stream.READ, 1)):
        found = load(**{**task, **given})
    if isinstance(found, Mapping):
        # of a table of splits, as Hugging Face's, others than these are left alone
        keys = {key for key, value in found.items() if not hasattr(value, "column_names")}
        for key in keys - set(RETURNED):
            raise unknown_name("data.name returned", key, RETURNED)
        if found.get("train") is None:
            raise InvalidInput("data.name", name, "must return something to train on")
        named = {key: found[key] for key in RETURNED if found.get(key) is not None}
        classes = named.get("classes", ())
        if not isinstance(classes, Sequence | np.ndarray) or isinstance(classes, str):
            raise InvalidInput("data.name returned classes", classes, "must be a list of their names")
        return Found(**{**named, "classes": tuple(map(str, classes))})
    if not isinstance(found, tuple) or len(found) != 2:
        allowed = f"must return (train, test), or a table with some of {', '.join(RETURNED)}"
        raise InvalidInput("data.name", name, f"{allowed}; not {type(found).__name__}")
    return Found(train=found[0], test=found[1])
