"""Load a user's data: arrays, map-style data sets, or a list of these, one per client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.rng import Stream, derive_seed, rng_states, seeded_rng
from stratafl.base.validation import check_keys
from stratafl.data.dataset import ClientIndex, FederatedData, InMemorySamples, LazySamples
from stratafl.data.inputs import Inputs, NamedInputs, Pair, combine, is_array, parse_inputs, targets, tensors_of

TARGETS = ("labels", "label")
"""Default names of the target column."""

TABLE_SUFFIXES = (".csv", ".parquet")
ACCEPTED = "must be (inputs, targets) or a map-style data set of such pairs"


class DataColumns(NamedTuple):
    """Roles of the columns of a table, or of the keys of items that are tables."""

    inputs: str | tuple[str, ...] | None = None
    """One column, or several that the model gets by name; by default all other columns."""
    targets: str | None = None
    owner: str | None = None
    """Column with the owner of each sample, for a natural partition."""

    @staticmethod
    def of(field: str, table: object) -> DataColumns:
        """Read the columns from a table or None."""
        if table is None or isinstance(table, DataColumns):
            return table or DataColumns()
        if not isinstance(table, Mapping):
            raise InvalidInput(field, table, "must be a table: inputs, targets, owner")
        check_keys(field, table, DataColumns._fields)
        named = dict(table)
        inputs = named.get("inputs")
        if isinstance(inputs, list | tuple) and inputs and all(isinstance(name, str) for name in inputs):
            named["inputs"] = tuple(inputs)
        elif inputs is not None and not isinstance(inputs, str):
            raise InvalidInput(f"{field}.inputs", inputs, "must be a column's name, or a list of them")
        for key in ("targets", "owner"):
            if named.get(key) is not None and not isinstance(named[key], str):
                raise InvalidInput(f"{field}.{key}", named[key], "must be a column's name")
        return DataColumns(**named)

    def find_targets(self, field: str, names: Sequence[str]) -> str:
        """Column of the targets among those with these names."""
        column = next((name for name in TARGETS if name in names), None) if self.targets is None else self.targets
        if column is None:
            raise InvalidInput(
                f"{field} columns", list(names), 'say which are the targets: data.columns = {targets = "..."}'
            )
        return _check_column(field, column, names)

    def find_inputs(self, field: str, names: Sequence[str]) -> str | tuple[str, ...]:
        """Columns of the inputs among those with these names."""
        if isinstance(self.inputs, str):
            return _check_column(field, self.inputs, names)
        if self.inputs is not None:
            return tuple(_check_column(field, name, names) for name in self.inputs)
        others = {self.find_targets(field, names), self.owner}
        return tuple(name for name in names if name not in others)


def _check_column(field: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise unknown_name(f"{field} column", name, names)
    return name


class Sample(NamedTuple):
    """Item of a user's data set."""

    inputs: Inputs
    target: Tensor
    owner: Any = None


def is_map_style(data: object) -> bool:
    """Whether a data set is read item by item."""
    return _is_set(data) and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _is_set(data: object) -> bool:
    return isinstance(data, Dataset) or hasattr(data, "column_names")


def is_per_client(data: object) -> bool:
    """Whether a list has one data set per client."""
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(is_map_style(part) or _is_pair(part) for part in data)


def _is_pair(data: object) -> bool:
    if not isinstance(data, list | tuple) or len(data) != 2:
        return False
    return isinstance(data[0], Mapping) or is_array(data[0])


def _is_list_of_pairs(data: object) -> bool:
    return isinstance(data, list) and all(isinstance(part, tuple) and _is_pair(part) for part in data)


def load_data(
    data: object, test: object = None, *, columns: object = None, lazy: bool = False, seed: int = 0
) -> FederatedData:
    """Load data to train and to test on, each one data set or a list of one per client."""

    def load(field: str, part: object, lazy: bool) -> FederatedData:
        reader = load_per_client if is_per_client(part) else load_dataset
        return reader(field, part, columns=columns, lazy=lazy, seed=seed)

    train = load("data.source", data, lazy)
    return train if test is None else replace(train, test=load("data.test", test, False))


def load_dataset(
    field: str, data: object, *, columns: object = None, lazy: bool = False, seed: int = 0
) -> FederatedData:
    """Load one data set of all clients; with `lazy` its items are read anew for every batch."""
    if is_map_style(data):
        items = _ItemReader(field, data, DataColumns.of("data.columns", columns))
        return _read_items(field, [items], lazy, seed)
    if lazy:
        raise InvalidInput(
            "data.lazy", lazy, f"is for a data set that is read item by item, not for {type(data).__name__}"
        )
    return FederatedData(samples=InMemorySamples(*_pair(field, data)))


def load_per_client(
    field: str, datasets: object, *, columns: object = None, lazy: bool = False, seed: int = 0
) -> FederatedData:
    """Join the clients' data sets into one, with the samples of each client."""
    if not isinstance(datasets, Sequence) or isinstance(datasets, str | bytes) or not datasets:
        raise InvalidInput(field, type(datasets).__name__, "must be a list, one data set per client")
    fields = [f"{field}[{client}]" for client in range(len(datasets))]
    if all(map(is_map_style, datasets)):
        data_columns = DataColumns.of("data.columns", columns)
        readers = [_ItemReader(name, data, data_columns) for name, data in zip(fields, datasets, strict=True)]
        joined, sizes = _read_items(field, readers, lazy, seed), list(map(len, readers))
    else:
        parts = [
            load_dataset(name, data, columns=columns, lazy=lazy, seed=seed)
            for name, data in zip(fields, datasets, strict=True)
        ]
        held = [part.samples for part in parts if isinstance(part.samples, InMemorySamples)]
        sizes = [len(samples.targets_N) for samples in held]
        joined = FederatedData(
            samples=_combine_samples(field, "clients", [(part.inputs_N, part.targets_N) for part in held], torch.cat),
            warnings=tuple(warning for part in parts for warning in part.warnings),
            declared_classes=check_class_names(
                (name, part.declared_classes) for name, part in zip(fields, parts, strict=True)
            ),
        )
    return replace(joined, clients=ClientIndex(torch.arange(sum(sizes)), np.cumsum([0, *sizes])))


def _pair(field: str, data: Any) -> Pair:
    is_pair = isinstance(data, Sequence) and not isinstance(data, str | bytes) and len(data) == 2
    if not is_pair or any(_hint(part) or is_map_style(part) for part in data) or _is_list_of_pairs(data):
        raise _unusable_data_error(field, data)
    inputs, targets_N = parse_inputs(field, data[0]), targets(field, data[1])
    parts = [*tensors_of(inputs).values(), targets_N]
    if any(part.ndim == 0 or len(part) != len(targets_N) or len(part) == 0 for part in parts[::-1]):
        shapes = tuple(tuple(part.shape) for part in parts)
        raise InvalidInput(f"{field} shapes", shapes, "needs as many targets as inputs, at least one")
    return inputs, targets_N


def _unusable_data_error(field: str, data: object) -> InvalidInput:
    """Build the error about an object that is no data set; for a list, about a wrong entry."""
    is_list = isinstance(data, list)
    for place, part in enumerate(data if isinstance(data, list | tuple) else ()):
        if is_list and isinstance(part, str | Path) and str(part).lower().endswith(TABLE_SUFFIXES):
            continue
        if _hint(part) or (is_list and not (is_map_style(part) or _is_pair(part))):
            return InvalidInput(f"{field}[{place}]", type(part).__name__, _hint(part) or ACCEPTED)
    if is_list and data:
        return InvalidInput(field, type(data).__name__, "a list has a data set per client: leave data.partition out")
    return InvalidInput(field, type(data).__name__, _hint(data) or ACCEPTED)


def _hint(data: object) -> str:
    """Hint on how to get a data set out of an object; empty if there is none."""
    if isinstance(data, DataLoader):
        return "give loader.dataset: a run samples batches of client.batch_size itself"
    if isinstance(data, str | Path):
        return "is no data: load it first; a list may have the paths of tables (.csv, .parquet)"
    if _is_set(data) and not is_map_style(data):
        return "its samples have no numbers: give a map-style data set, or default_collate(list(dataset))"
    return ""


class _ItemReader:
    """Reader of a map-style data set."""

    def __init__(self, field: str, data: Any, columns: DataColumns):
        self.field, self.data, self.columns = field, data, columns
        self.kind = type(data).__name__
        if len(self) == 0:
            raise InvalidInput(field, self.kind, ACCEPTED)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def class_names(self) -> dict[int, str]:
        """Class names by number, as Hugging Face data sets and image folders declare them.

        Empty if a transform may change the numbers.
        """
        data = self.data
        if hasattr(data, "column_names"):
            features, format = getattr(data, "features", None) or {}, getattr(data, "format", None) or {}
            if not features or format.get("type") == "custom":
                return {}
            names = getattr(features[self.columns.find_targets(self.field, list(features))], "names", None)
            return dict(enumerate(map(str, names or ())))
        numbers = getattr(data, "class_to_idx", None)
        if not isinstance(numbers, Mapping) or getattr(data, "target_transform", None) is not None:
            return {}
        return {number: str(name) for name, number in numbers.items()}

    def sample(self, number: int) -> Sample:
        with convert_errors(self.field, self.kind, "cannot be read"):
            item = self.data[number]
        field, columns = self.field, self.columns
        if isinstance(item, Mapping):
            names = list(item)
            input_names = columns.find_inputs(field, names)
            inputs = item[input_names] if isinstance(input_names, str) else {name: item[name] for name in input_names}
            owner = None if columns.owner is None else item[_check_column(field, columns.owner, names)]
            return Sample(parse_inputs(field, inputs), targets(field, item[columns.find_targets(field, names)]), owner)
        if not isinstance(item, Sequence) or len(item) != 2:
            raise InvalidInput(field, self.kind, ACCEPTED)
        return Sample(parse_inputs(field, item[0]), targets(field, item[1]))


def _read_items(field: str, sets: Sequence[_ItemReader], lazy: bool, seed: int) -> FederatedData:
    """Read all items, the first one repeatedly, to see whether reading draws random numbers.

    Of lazy data only the targets are kept.
    """
    where = [(items, number) for items in sets for number in range(len(items))]
    kind = sets[0].kind

    def sample(number: int) -> Sample:
        items, own = where[number]
        return items.sample(own)

    def read(numbers: Sequence[int]) -> Pair:
        samples = [sample(number) for number in numbers]
        held = _combine_samples(field, kind, [(item.inputs, item.target) for item in samples], torch.stack)
        return held.inputs_N, held.targets_N

    samples: list[Sample] = []
    nothing = NamedInputs({})
    key = derive_seed(seed, Stream.READ)
    with seeded_rng(key):
        before = rng_states()
        first, again = sample(0), sample(0)
        draws = rng_states() != before or not _is_equal(first, again)
        for number in range(len(where)):
            item = sample(number)
            samples.append(item._replace(inputs=nothing) if lazy else item)
        draws = draws or rng_states() != before
    source: InMemorySamples | LazySamples
    source = _combine_samples(field, kind, [(item.inputs, item.target) for item in samples], torch.stack)
    if lazy:
        source, warnings = LazySamples(read, source.targets_N), _warn_unseeded(field, kind, sample, key)
    else:
        warnings = (_warn_frozen_transforms(field, kind),) if draws else ()
    return FederatedData(
        samples=source,
        owners=[item.owner for item in samples] if sets[0].columns.owner is not None else None,
        warnings=warnings,
        declared_classes=check_class_names([(item.field, item.class_names) for item in sets]),
    )


def check_class_names(declared: Iterable[tuple[str, Mapping[int, str]]]) -> Mapping[int, str]:
    """Join the class names of several data sets, each with the field it was given as.

    A class number with two names is refused: the data sets were then numbered independently.
    """
    names: dict[int, str] = {}
    for data_field, declared_names in declared:
        for number, name in declared_names.items():
            if names.setdefault(number, name) != name:
                allowed = f"is {names[number]!r} in the data sets before it: number the classes of all alike"
                raise InvalidInput(f"{data_field} class {number}", name, allowed)
    return names


def _combine_samples(
    field: str, kind: str, pairs: Sequence[Pair], join: Callable[[list[Tensor]], Tensor]
) -> InMemorySamples:
    kinds = {tuple(tensors_of(inputs)) for inputs, _ in pairs}
    if len(kinds) > 1:
        raise InvalidInput(field, sorted(kinds), "its samples must have the same inputs")
    # joined with real numbers, whole ones would become real, so no class numbers or codes any more
    for name in (*kinds.pop(), None):
        parts = {(target if name is None else tensors_of(inputs)[name]).dtype for inputs, target in pairs}
        if len({dtype.is_floating_point for dtype in parts}) > 1:
            what = "targets" if name is None else f"input {name}" if name else "inputs"
            allowed = "must be all whole or all real numbers"
            raise InvalidInput(f"{field} {what}", ", ".join(sorted(map(str, parts))), allowed)
    with convert_errors(field, kind, "its samples must be of one shape (pad those that are shorter)"):
        return InMemorySamples(combine(join, [inputs for inputs, _ in pairs]), join([target for _, target in pairs]))


def _is_equal(one: Sample, other: Sample) -> bool:
    parts = [(*tensors_of(item.inputs).values(), item.target) for item in (one, other)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*parts, strict=False))


def _warn_frozen_transforms(field: str, kind: str) -> str:
    warning = f"{field}: reading an item of {kind} draws random numbers, and each is read once"
    if field == "test":
        return f"{warning}: every evaluation sees the same"
    return f"{warning}: every epoch sees the same; lazy (lazy=True, or a config's data.lazy) reads anew for every batch"


def _warn_unseeded(field: str, kind: str, sample: Callable[[int], Sample], key: int) -> tuple[str, ...]:
    """Warn if a lazily read run cannot be repeated, because items draw from other generators."""
    samples = []
    for _ in range(2):
        with seeded_rng(key):
            samples.append(sample(0))
    if _is_equal(*samples):
        return ()
    return (f"{field}: {kind} draws from a generator of its own, which no seed here sets: this run cannot be repeated",)
