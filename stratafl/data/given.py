"""A user's data in any of the forms it may be given in, as a supply of samples.

(inputs, targets)     tensors or arrays; inputs may be a table of them, which the model gets by name
a map-style data set  of such pairs, or of tables: a `torch.utils.data.Dataset`, or one of Hugging
                      Face's (whatever has `column_names`)
several of them       one for each client
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratafl.base.errors import InvalidInput, guarded, unknown
from stratafl.base.rng import Purpose, seed_of, seeded, states
from stratafl.data.inputs import Fields, Inputs, Pair, is_array, merged, named_inputs, targets, tensors_of
from stratafl.data.supply import Held, Lazy

TARGETS = ("labels", "label")
"""What the targets' column is called unless it is named."""
WANTED = "must be (inputs, targets) or a map-style data set of such pairs"


class Columns(NamedTuple):
    """Which parts of a table, or of an item that is one, are what."""

    inputs: str | tuple[str, ...] | None = None
    """One by itself, or several that the model gets by name: all others unless given."""
    targets: str | None = None
    owner: str | None = None
    """Whose sample it is, for a natural partition."""

    @staticmethod
    def of(field: str, given: object) -> Columns:
        """Read the columns from a table of them, or from None."""
        if given is None or isinstance(given, Columns):
            return given or Columns()
        if not isinstance(given, Mapping):
            raise InvalidInput(field, given, "must be a table: inputs, targets, owner")
        for key in given:
            if key not in Columns._fields:
                raise unknown(f"{field} key", key, Columns._fields)
        named = dict(given)
        inputs = named.get("inputs")
        if isinstance(inputs, list | tuple) and inputs and all(isinstance(each, str) for each in inputs):
            named["inputs"] = tuple(inputs)
        elif inputs is not None and not isinstance(inputs, str):
            raise InvalidInput(f"{field}.inputs", inputs, "must be a column's name, or a list of them")
        for key in ("targets", "owner"):
            if named.get(key) is not None and not isinstance(named[key], str):
                raise InvalidInput(f"{field}.{key}", named[key], "must be a column's name")
        return Columns(**named)

    def target(self, field: str, known: Sequence[str]) -> str:
        """The targets' column, of those there are."""
        found = next((name for name in TARGETS if name in known), None) if self.targets is None else self.targets
        if found is None:
            raise InvalidInput(
                f"{field} columns", list(known), 'say which are the targets: columns = {targets = "..."}'
            )
        return _known(field, found, known)

    def chosen(self, field: str, known: Sequence[str]) -> str | tuple[str, ...]:
        """The inputs' columns, of those there are."""
        if isinstance(self.inputs, str):
            return _known(field, self.inputs, known)
        if self.inputs is not None:
            return tuple(_known(field, name, known) for name in self.inputs)
        others = {self.target(field, known), self.owner}
        return tuple(name for name in known if name not in others)


def _known(field: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise unknown(f"{field} column", name, known)
    return name


class Sample(NamedTuple):
    """One item of a user's data set, taken apart."""

    inputs: Inputs
    target: Tensor
    owner: Any = None


class Given(NamedTuple):
    """Data as a run takes it."""

    supply: Held | Lazy
    parts: list[np.ndarray] | None = None
    """Each client's sample numbers, where data was given client by client."""
    owner: list[Any] | None = None
    """Whose each sample is, where a column says so."""
    notes: tuple[str, ...] = ()
    class_names: Mapping[int, str] = MappingProxyType({})
    """What the class numbers stand for, where the data sets say so."""


def is_items(data: object) -> bool:
    """Whether data is read item by item."""
    return _is_set(data) and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _is_set(data: object) -> bool:
    return isinstance(data, Dataset) or hasattr(data, "column_names")


def is_several(data: object) -> bool:
    """Whether these are the data sets of several clients."""
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(is_items(each) or _is_pair(each) for each in data)


def _is_pair(data: object) -> bool:
    if not isinstance(data, list | tuple) or len(data) != 2:
        return False
    return isinstance(data[0], Mapping) or is_array(data[0])


def _is_list_of_pairs(data: object) -> bool:
    return isinstance(data, list) and all(isinstance(each, tuple) and _is_pair(each) for each in data)


def given(field: str, data: object, *, columns: object = None, lazy: bool = False, seed: int = 0) -> Given:
    """One data set, unless it is made already. lazy: read its items anew for every batch."""
    if isinstance(data, Given):
        return data
    if is_items(data):
        items = _Items(field, data, Columns.of(f"{field} columns" if field == "test" else "columns", columns))
        return _read(field, [items], lazy, seed)
    if lazy:
        raise InvalidInput("lazy", lazy, f"is for a data set that is read item by item, not for {type(data).__name__}")
    return Given(Held(*_pair(field, data)))


def one_each(field: str, several: object, *, columns: object = None, lazy: bool = False, seed: int = 0) -> Given:
    """One data set for each client, as one of all and the samples of each."""
    if not isinstance(several, Sequence) or isinstance(several, str | bytes) or not several:
        raise InvalidInput(field, type(several).__name__, "must be a list, one data set per client")
    named = [f"{field}[{number}]" for number in range(len(several))]
    if all(is_items(each) for each in several):
        chosen = Columns.of("columns", columns)
        items = [_Items(name, each, chosen) for name, each in zip(named, several, strict=True)]
        made = _read(field, items, lazy, seed)
        sizes = [len(each) for each in items]
    else:
        found = [
            given(name, each, columns=columns, lazy=lazy, seed=seed) for name, each in zip(named, several, strict=True)
        ]
        held = [each.supply for each in found if isinstance(each.supply, Held)]
        joined = _joined(field, "clients", [(each.inputs_N, each.targets_N) for each in held], torch.cat)
        names = one_numbering((name, each.class_names) for name, each in zip(named, found, strict=True))
        made = Given(joined, notes=tuple(note for each in found for note in each.notes), class_names=names)
        sizes = [len(each.targets_N) for each in held]
    ends = [0, *accumulate(sizes)]
    return made._replace(parts=[np.arange(first, last) for first, last in pairwise(ends)])


def _pair(field: str, data: Any) -> Pair:
    is_pair = isinstance(data, Sequence) and not isinstance(data, str | bytes) and len(data) == 2
    if not is_pair or any(_way(each) or is_items(each) for each in data) or _is_list_of_pairs(data):
        raise _unusable(field, data)
    inputs, targets_N = named_inputs(field, data[0]), targets(field, data[1])
    parts = [*tensors_of(inputs).values(), targets_N]
    if any(each.ndim == 0 or len(each) != len(targets_N) or len(each) == 0 for each in parts[::-1]):
        shapes = tuple(tuple(each.shape) for each in parts)
        raise InvalidInput(f"{field} shapes", shapes, "needs as many targets as inputs, at least one")
    return inputs, targets_N


def _unusable(field: str, data: object) -> InvalidInput:
    """The complaint about what is no data set: of a list, about the first entry that is none."""
    is_list = isinstance(data, list)
    for place, each in enumerate(data if isinstance(data, list | tuple) else ()):
        if _way(each) or (is_list and not (is_items(each) or _is_pair(each))):
            return InvalidInput(f"{field}[{place}]", type(each).__name__, _way(each) or WANTED)
    if is_list and data:
        return InvalidInput(field, type(data).__name__, "a list has a data set per client, and needs partition=None")
    return InvalidInput(field, type(data).__name__, _way(data) or WANTED)


def _way(data: object) -> str:
    """A way to the data set that is in something; empty where none is known."""
    if isinstance(data, DataLoader):
        return "give loader.dataset: a run draws its own batches"
    if isinstance(data, str | Path):
        return "is no data: load it first, or name it in a config, [data] name"
    if _is_set(data) and not is_items(data):
        return "is read in its own order alone: give a map-style data set, whose samples have numbers"
    return ""


class _Items:
    """A map-style data set, read item by item."""

    def __init__(self, field: str, data: Any, columns: Columns):
        self.field, self.data, self.columns = field, data, columns
        self.kind = type(data).__name__
        if len(self) == 0:
            raise InvalidInput(field, self.kind, WANTED)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def class_names(self) -> dict[int, str]:
        """What class numbers stand for, as Hugging Face's data sets and folders of images tell;
        nothing where a transform may give others."""
        data = self.data
        if hasattr(data, "column_names"):
            features, format = getattr(data, "features", None) or {}, getattr(data, "format", None) or {}
            if not features or format.get("type") == "custom":
                return {}
            names = getattr(features[self.columns.target(self.field, list(features))], "names", None)
            return dict(enumerate(map(str, names or ())))
        numbers = getattr(data, "class_to_idx", None)
        if not isinstance(numbers, Mapping) or getattr(data, "target_transform", None) is not None:
            return {}
        return {number: str(name) for name, number in numbers.items()}

    def sample(self, number: int) -> Sample:
        with guarded(self.field, self.kind, "cannot be read"):
            item = self.data[number]
        field, columns = self.field, self.columns
        if isinstance(item, Mapping):
            known = list(item)
            chosen = columns.chosen(field, known)
            inputs = item[chosen] if isinstance(chosen, str) else {name: item[name] for name in chosen}
            owner = None if columns.owner is None else item[_known(field, columns.owner, known)]
            return Sample(named_inputs(field, inputs), targets(field, item[columns.target(field, known)]), owner)
        if not isinstance(item, Sequence) or len(item) != 2:
            raise InvalidInput(field, self.kind, WANTED)
        return Sample(named_inputs(field, item[0]), targets(field, item[1]))


def _read(field: str, sets: Sequence[_Items], lazy: bool, seed: int) -> Given:
    """Everything once; of what is lazy, only the targets are kept."""
    where = [(items, number) for items in sets for number in range(len(items))]
    kind = sets[0].kind

    def sample(number: int) -> Sample:
        items, own = where[number]
        return items.sample(own)

    def read(numbers: Sequence[int]) -> Pair:
        samples = [sample(number) for number in numbers]
        held = _joined(field, kind, [(each.inputs, each.target) for each in samples], torch.stack)
        return held.inputs_N, held.targets_N

    samples: list[Sample] = []
    nothing = Fields({})
    key = seed_of(seed, Purpose.READ)
    with seeded(key):
        before = states()
        first, again = sample(0), sample(0)
        draws = states() != before or not _same(first, again)
        for number in range(len(where)):
            found = sample(number)
            samples.append(found._replace(inputs=nothing) if lazy else found)
        draws = draws or states() != before
    owner = [each.owner for each in samples] if sets[0].columns.owner is not None else None
    supply = _joined(field, kind, [(each.inputs, each.target) for each in samples], torch.stack)
    names = one_numbering([(each.field, each.class_names) for each in sets])
    if not lazy:
        return Given(supply, owner=owner, notes=(_frozen(field, kind),) if draws else (), class_names=names)
    notes = _unrepeatable(field, kind, sample, key)
    return Given(Lazy(read, supply.targets_N), owner=owner, notes=notes, class_names=names)


def one_numbering(told: Iterable[tuple[str, Mapping[int, str]]]) -> Mapping[int, str]:
    """What class numbers stand for in several data sets, each with its field: where the same number
    has two names, one was numbered by itself, and is refused."""
    known: dict[int, str] = {}
    for field, names in told:
        for number, name in names.items():
            if known.setdefault(number, name) != name:
                allowed = f"is {known[number]!r} in the data sets before it: number the classes of all alike"
                raise InvalidInput(f"{field} class {number}", name, allowed)
    return known


def _joined(field: str, kind: str, pairs: Sequence[Pair], join: Callable[[list[Tensor]], Tensor]) -> Held:
    kinds = {tuple(tensors_of(inputs)) for inputs, _ in pairs}
    if len(kinds) > 1:
        raise InvalidInput(field, sorted(kinds), "its samples must have the same inputs")
    # joined, whole numbers would become real ones, and a class number or a code no longer be one
    for name in (*kinds.pop(), None):
        parts = {(target if name is None else tensors_of(inputs)[name]).dtype for inputs, target in pairs}
        if len({each.is_floating_point for each in parts}) > 1:
            what = "targets" if name is None else f"input {name}" if name else "inputs"
            told = "must be all whole or all real numbers"
            raise InvalidInput(f"{field} {what}", ", ".join(sorted(map(str, parts))), told)
    with guarded(field, kind, "its samples must be of one shape (pad those that are shorter)"):
        return Held(merged(join, [inputs for inputs, _ in pairs]), join([target for _, target in pairs]))


def _same(one: Sample, other: Sample) -> bool:
    parts = [(*tensors_of(each.inputs).values(), each.target) for each in (one, other)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*parts, strict=False))


def _frozen(field: str, kind: str) -> str:
    told = f"{field}: reading an item of {kind} draws random numbers, and each is read once"
    if field == "test":
        return f"{told}: every evaluation sees the same"
    return f"{told}: every epoch sees the same; lazy (lazy=True, or a config's data.lazy) reads anew for every batch"


def _unrepeatable(field: str, kind: str, sample: Callable[[int], Sample], key: int) -> tuple[str, ...]:
    """What keeps a run that reads lazily from being repeated, if anything does."""
    found = []
    for _ in range(2):
        with seeded(key):
            found.append(sample(0))
    if _same(*found):
        return ()
    return (f"{field}: {kind} draws from a generator of its own, which no seed here sets: this run cannot be repeated",)
