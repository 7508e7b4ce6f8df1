"""Data of the user that an experiment names: a file, a folder, a set of Hugging Face, or a
function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.rng import Stream, derive_seed, seeded_rng
from stratafl.base.topology import Topology
from stratafl.base.user_code import load_attribute
from stratafl.data import user_files
from stratafl.data.catalog.storage import StoredDataset
from stratafl.data.dataset import FederatedData
from stratafl.data.loading import TABLE_SUFFIXES, DataColumns, load_data
from stratafl.data.partition.partition import Partition, check_partition
from stratafl.experiment.sections import Data
from stratafl.experiment.toml import HUB

RETURNED = ("train", "test", "partition", "owner", "classes")
"""What a function may return in a table."""
FILES = (*TABLE_SUFFIXES, *user_files.ARRAY_SUFFIXES)


def is_own(name: str) -> bool:
    """Whether a data set's name is that of a user's own."""
    return ":" in name or os.sep in name or name.lower().endswith(FILES)


def is_function(name: str) -> bool:
    """Whether a data set's name is that of a function which returns it."""
    return ":" in name and not name.startswith(HUB)


def load_user_data(section: Data, tree: Topology, seed: int) -> FederatedData | StoredDataset:
    """Load the file, folder or function that a config names; images come as a `StoredDataset`."""
    name, columns = str(section.source), DataColumns.of("data.columns", section.columns)
    if is_function(name):
        refuse(section, "is not for a function", "test")
        return _call(section, tree, seed)
    if name.startswith(HUB):
        return user_files.read_hub(name.removeprefix(HUB), section.test, columns, section.arguments, section.lazy, seed)
    refuse(section, "is not for a file or folder", "arguments", "lazy")
    path = Path(name)
    # os.path, since to pathlib some texts are errors and not files that are absent
    if os.path.isdir(path):
        refuse(section, "is not for a folder", "columns")
        return user_files.read_images(path, section.test)
    kind = path.suffix.lower()
    if not os.path.isfile(path) or kind not in FILES:
        allowed = "must be a .csv, .parquet or .npz file, a folder of images, or a function (file.py:load)"
        found = "this is none" if os.path.exists(path) else "there is none"
        raise InvalidInput("data.source", path, f"{allowed}; {found}")
    if kind in TABLE_SUFFIXES:
        return user_files.read_tables(path, section.test, columns)
    refuse(section, "is not for an .npz file", "columns")
    return user_files.read_arrays(path, section.test)


def refuse(section: Data, told: str, *keys: str) -> None:
    """Refuse these keys where they say something."""
    for key in keys:
        if getattr(section, key) != getattr(Data(), key):
            raise InvalidInput(f"data.{key}", getattr(section, key), told)


def _call(section: Data, tree: Topology, seed: int) -> FederatedData:
    """Load what the user's function returns, called with all generators set from the run's seed."""
    name, arguments = str(section.source), section.arguments
    function = load_attribute("data.source", name)
    if not (inspect.isfunction(inspect.unwrap(function)) or inspect.ismethod(function)):
        raise InvalidInput("data.source", name, "must be a Python function")
    accepted = inspect.signature(function).parameters
    task = {key: value for key, value in {"clients": tree.leaves, "seed": seed}.items() if key in accepted}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in arguments:
            if key not in accepted:
                raise unknown_name("data.arguments key", key, accepted)
    with convert_errors("data.source", name), seeded_rng(derive_seed(seed, Stream.READ, 1)):
        returned = function(**{**task, **arguments})
    table = _returned_table(name, returned)
    data = load_objects(section, table["train"], table.get("test"), seed)
    data = replace(
        data, classes=tuple(map(str, table.get("classes", data.classes))), owners=table.get("owner", data.owners)
    )
    partition = table.get("partition", data.clients)
    if partition is None:
        return data
    numbers = partition.leaves if isinstance(partition, Partition) else partition
    notes = partition.methods if isinstance(partition, Partition) else ("as it was given",) * tree.depth
    return replace(data, clients=check_partition(numbers, tree, len(data.samples.targets_N)), partition_notes=notes)


def load_objects(section: Data, train: object, test: object, seed: int) -> FederatedData:
    """Load data to train and to test on that a program gives, or a function returns."""
    columns = DataColumns.of("data.columns", section.columns)
    if user_files.are_tables(train, columns):
        refuse(section, "is not for tables", "lazy")
        return user_files.read_tables(train, test, columns)
    return load_data(train, test, columns=columns, lazy=section.lazy, seed=seed)


def _returned_table(name: str, returned: object) -> dict[str, Any]:
    """The parts that a user's function returned, by their names."""
    if isinstance(returned, Mapping):
        # of a table of splits, as Hugging Face's, others than these are left alone
        keys = {key for key, value in returned.items() if not hasattr(value, "column_names")}
        for key in keys - set(RETURNED):
            raise unknown_name("data.source returned", key, RETURNED)
        if returned.get("train") is None:
            raise InvalidInput("data.source", name, "must return something to train on")
        table = {key: returned[key] for key in RETURNED if returned.get(key) is not None}
        classes = table.get("classes", ())
        if not isinstance(classes, Sequence | np.ndarray) or isinstance(classes, str):
            raise InvalidInput("data.source returned classes", classes, "must be a list of their names")
        return table
    if not isinstance(returned, tuple) or len(returned) != 2:
        allowed = f"must return (train, test), or a table with some of {', '.join(RETURNED)}"
        raise InvalidInput("data.source", name, f"{allowed}; not {type(returned).__name__}")
    return {"train": returned[0], "test": returned[1]}
