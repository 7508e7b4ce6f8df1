"""Readers of users' data: arrays, tables, image folders, Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra, convert_errors
from stratafl.base.rng import Stream, generator
from stratafl.base.validation import check_choice, check_number
from stratafl.data.catalog.archive import FileTree, open_files
from stratafl.data.catalog.hub import load
from stratafl.data.catalog.images import picture
from stratafl.data.catalog.storage import DatasetArrays, StoredDataset, add_statistics
from stratafl.data.dataset import FederatedData
from stratafl.data.loading import TABLE_SUFFIXES, TARGETS, DataColumns, load_data


def encode_labels(field: str, values: Sequence[object] | np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Replace each value by its index among the sorted distinct values, and return their names."""
    array = np.asarray(values, dtype=object if len({isinstance(value, str) for value in values}) > 1 else None)
    if array.ndim != 1 or array.dtype.kind in "OV" or (array.dtype.kind == "f" and np.isnan(array).any()):
        raise InvalidInput(field, array, "must be all numbers or all texts, and none missing")
    names, numbers = np.unique(array, return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names))


def train_test_split(field: str, count: int, share: object) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the training and test samples; the same in every run, whatever its seed."""
    tested = round(check_number(field, share, above=0, below=1) * count)
    if not 0 < tested < count:
        raise InvalidInput(field, share, f"leaves nothing to train or to test on, of {count:,} samples")
    order = generator(0, Stream.SAMPLES, count).permutation(count)
    return np.sort(order[tested:]), np.sort(order[:tested])


ARRAY_SUFFIXES = (".npz",)


def read_arrays(path: Path, test: object) -> FederatedData:
    """Read an .npz file, whose arrays are taken as they are."""
    arrays = _arrays("data.source", path)
    part = "_train" if "x_train" in arrays else ""
    x, y = _pair("data.source", path, arrays, part)
    owner = arrays.get(f"owner{part}")
    if owner is not None and owner.shape != y.shape[:1]:
        raise InvalidInput("data.source", str(path), f"must have as many of owner{part} as of y{part}")
    train, tested = (x, y), None
    if "x_test" in arrays:
        if test is not None:
            raise InvalidInput("data.test", test, f"{path.name} has an x_test of its own")
        tested = _pair("data.source", path, arrays, "_test")
    elif isinstance(test, str):
        tested = _pair("data.test", Path(test), _arrays("data.test", Path(test)))
    elif test is not None:
        first, second = train_test_split("data.test", len(y), test)
        train, tested = (x[first], y[first]), (x[second], y[second])
        owner = None if owner is None else owner[first]
    return replace(load_data(train, tested), owners=owner)


def _arrays(field: str, path: Path) -> dict[str, np.ndarray]:
    with convert_errors(field, str(path), "cannot be read"), np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _pair(field: str, path: Path, arrays: dict[str, np.ndarray], part: str = "") -> tuple[np.ndarray, np.ndarray]:
    names = [f"x{part}", f"y{part}"]
    if not set(names) <= set(arrays):
        raise InvalidInput(field, str(path), f"must have {' and '.join(names)}; it has {', '.join(arrays)}")
    x, y = (arrays[name] for name in names)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise InvalidInput(field, str(path), f"must have as many of {names[1]} as of {names[0]}")
    return x, y


TEST_SPLITS = ("test", "validation")
"""Default names of the test split, in order of preference."""


def read_hub(
    name: str, test: object, columns: DataColumns, arguments: Mapping[str, Any], lazy: bool, seed: int
) -> FederatedData:
    """Read the split `train` of a Hugging Face data set, and one to test on."""
    splits = _splits(name, arguments)
    if "train" not in splits:
        raise InvalidInput("data.source", name, f"has no split train; it has {', '.join(splits)}")
    tested = (
        check_choice("data.test", test, splits)
        if test is not None
        else next((n for n in TEST_SPLITS if n in splits), None)
    )
    train = splits["train"]
    target = columns.find_targets("data.source", list(train.column_names))
    classes = getattr(train.features[target], "names", None) or ()
    data = load_data(train, None if tested is None else splits[tested], columns=columns, lazy=lazy, seed=seed)
    return replace(data, classes=tuple(classes))


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Make Hugging Face's `datasets` use its cache only; it has no argument for that."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _splits(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Splits of a data set by name."""
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtra("data sets of Hugging Face", "datasets", "hub") from None
    folder = Path(name)
    if folder.is_dir():
        if not ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            parts = [part for part in ("train", *TEST_SPLITS) if list(folder.rglob(f"{part}*.parquet"))]
            return {part: load(folder, part) for part in parts}
        with convert_errors("data.source", name, "cannot be read"):
            saved = datasets.load_from_disk(name)
    else:
        get = f"to get it: python -c \"import datasets; datasets.load_dataset('{name}')\""
        with (
            convert_errors("data.source", name, f"is not in the cache of Hugging Face's datasets; {get}"),
            _offline(datasets),
        ):
            saved = datasets.load_dataset(name, **arguments)
    return dict(saved) if isinstance(saved, dict) else {"train": saved}


IMAGE_KINDS = (".png", ".jpg", ".jpeg", ".webp")


def read_images(path: Path, test: object) -> StoredDataset:
    """Read a folder with a folder of images for each class; all images must have one size."""
    inside = {entry.name for entry in path.iterdir() if entry.is_dir()}
    if {"train", "test"} <= inside and test is None:
        train, tested = _images("data.source", path / "train"), _images("data.source", path / "test")
    elif "train" in inside:
        allowed = "has a folder train: leave test out where there is a folder test beside it, or name both folders"
        raise InvalidInput("data.source", str(path), f'{allowed}: data.source = ".../train", data.test = ".../..."')
    elif test is None:
        allowed = "say what to test on: test = a path, or a share of the samples such as 0.2"
        raise InvalidInput("data.source", str(path), allowed)
    else:
        train = _images("data.source", path)
        tested = _images("data.test", Path(test)) if isinstance(test, str) else {}
    classes = tuple(sorted({*train, *tested}))
    x, y = _concatenate(train, classes)
    if tested:
        (x_train, y_train), (x_test, y_test) = (x, y), _concatenate(tested, classes)
    else:
        first, second = train_test_split("data.test", len(y), test)
        (x_train, y_train), (x_test, y_test) = (x[first], y[first]), (x[second], y[second])
    if x_test.shape[1:] != x_train.shape[1:]:
        raise InvalidInput("data.test", x_test.shape[1:], f"must be images of {x_train.shape[1:]}")
    samples = DatasetArrays(
        kind="image", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes
    )
    return add_statistics(path.name, "image folder", samples)


def _images(field: str, path: Path) -> dict[str, np.ndarray]:
    """Images of a folder, by class."""
    classes: dict[str, np.ndarray] = {}
    size: tuple[int, int] | None = None
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        files: FileTree = open_files(folder)
        names = sorted(name for name in files.names if name.lower().endswith(IMAGE_KINDS) and not _is_hidden(name))
        pictures = {}
        for name, data in files.read_many(names):
            pictures[name] = picture(files, name, data, size)
            size = size or (pictures[name].shape[1], pictures[name].shape[0])
        if pictures:
            classes[folder.name] = np.stack([pictures[name] for name in names])
    if not classes:
        raise InvalidInput(field, str(path), "must have a folder of PNG, JPEG or WebP images for each class")
    return classes


def _is_hidden(name: str) -> bool:
    """Whether a file or its folder is hidden, such as those of editors and file systems."""
    return any(part.startswith(".") for part in name.split("/"))


def _concatenate(images: dict[str, np.ndarray], classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    numbers = {label: number for number, label in enumerate(classes)}
    y = [np.full(len(pixels), numbers[label], np.int64) for label, pixels in images.items()]
    return np.concatenate(list(images.values())), np.concatenate(y)


NO_NAME = "Unnamed: "
"""Prefix that pandas gives to the name of an unnamed column."""


WHOLE, REAL = "whole numbers", "decimal numbers"
TABLE_KINDS = {"i": WHOLE, "u": WHOLE, "f": REAL, "b": "truth values", "U": "texts", "M": "dates"}
"""NumPy's kinds of dtype that a column may have, in words."""

NUMBERS = ("f", "i", "u", "b")


class Table(NamedTuple):
    """A data frame, and the field that it was given as."""

    field: str
    frame: Any


def is_table(data: object) -> bool:
    """Whether an object is a data frame of pandas, or the path of a file with a table."""
    if isinstance(data, str | Path):
        return str(data).lower().endswith(TABLE_SUFFIXES)
    return hasattr(data, "iloc") and hasattr(data, "columns")


def are_tables(data: object, columns: DataColumns) -> bool:
    """Whether data are a table, or a list of one per client.

    A list of two data frames may also be inputs and targets: then they do not both have targets.
    """
    if not isinstance(data, list):
        return is_table(data)
    if not data or not all(map(is_table, data)):
        return False
    names = [None if isinstance(part, str | Path) else list(map(str, part.columns)) for part in data]
    targets = TARGETS if columns.targets is None else (columns.targets,)
    return len(data) != 2 or all(has is None or any(name in has for name in targets) for has in names)


def read_tables(data: object, test: object, columns: DataColumns) -> FederatedData:
    """Read tables: inputs from columns of numbers, targets from one column, owners from another.

    Targets that are integers or texts are classes; decimal numbers are regression targets.

    data: a data frame, the path of a file, or a list of one of these per client.
    test: the same, a share of the samples of a single table, or None.
    """
    trained, share = _tables("data.source", data), None
    if test is None or isinstance(test, Real):
        tested, share = [], test
    elif are_tables(test, columns):
        tested = _tables("data.test", test)
    else:
        raise InvalidInput("data.test", type(test).__name__, "must be tables, as the data to train on are")
    if share is not None and isinstance(data, list):
        raise InvalidInput("data.test", share, "a share is taken of a single table: give tables to test on")
    inputs, target = _chosen_columns(trained[0], columns)
    tables = trained + tested
    xs = [np.stack([_numbers(table, name) for name in inputs], axis=1) for table in tables]
    ys, classes = _targets([(table, _values(table, target)) for table in tables])
    owners = None if columns.owner is None else np.concatenate([_values(part, columns.owner) for part in trained])
    pairs = list(zip(xs, ys, strict=True))
    train: Any = pairs[: len(trained)] if isinstance(data, list) else pairs[0]
    held_out: Any = pairs[len(trained) :] if isinstance(test, list) else pairs[-1] if tested else None
    if share is not None:
        x, y = train
        first, second = train_test_split("data.test", len(y), share)
        train, held_out = (x[first], y[first]), (x[second], y[second])
        owners = None if owners is None else owners[first]
    return replace(load_data(train, held_out), classes=classes, owners=owners)


def _chosen_columns(table: Table, columns: DataColumns) -> tuple[tuple[str, ...], str]:
    """Columns of the inputs and of the targets."""
    names = list(table.frame.columns)
    target = columns.find_targets(table.field, names)
    chosen = columns.find_inputs(table.field, names)
    inputs = (chosen,) if isinstance(chosen, str) else chosen
    for name in inputs if columns.inputs is None else ():
        if name.startswith(NO_NAME):
            allowed = "has no name in the file, as the numbers of its rows have none: name the inputs, or leave it out"
            raise InvalidInput(f"{table.field} column", name, f"{allowed} (pandas: to_csv(index=False))")
    if columns.owner is not None and columns.owner not in names:
        raise InvalidInput("data.columns.owner", columns.owner, f"is none of {', '.join(names)}")
    return inputs, target


def _tables(field: str, data: object) -> list[Table]:
    if not isinstance(data, list):
        return [_table(field, data)]
    return [_table(f"{field}[{client}]", part) for client, part in enumerate(data)]


def _table(field: str, data: Any) -> Table:
    shown = str(data) if isinstance(data, str | Path) else type(data).__name__
    frame = _frame(field, Path(data)) if isinstance(data, str | Path) else data
    if not len(frame):
        raise InvalidInput(field, shown, "has no rows")
    return Table(field, frame.rename(columns=str))


def _frame(field: str, path: Path) -> Any:
    try:
        import pandas as pd
    except ImportError:
        raise MissingExtra("reading tables", "pandas", "tables") from None
    with convert_errors(field, str(path), "cannot be read"):
        try:
            return pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
        except ImportError:
            raise MissingExtra("reading parquet files", "pyarrow", "tables") from None


def _column(table: Table, name: str) -> Any:
    if name not in table.frame.columns:
        raise InvalidInput(table.field, list(table.frame.columns), f"has no column {name!r}")
    if table.frame[name].isna().any():
        raise InvalidInput(f"{table.field} column", name, "has missing values")
    return table.frame[name]


def _values(table: Table, name: str) -> np.ndarray:
    """Values of a column as an array of one of the accepted kinds."""
    column = _column(table, name)
    plain = getattr(column.dtype, "numpy_dtype", None)  # of pandas' own numbers, which may be missing
    values = column.to_numpy(plain if getattr(plain, "kind", "") in NUMBERS else None)
    if values.dtype.kind in "OS":
        with convert_errors(f"{table.field} column", name, "cannot be read"):
            # numbers and texts, as pandas may read a column of a large file, are texts
            values = np.asarray(column.tolist())
            values = values.astype(str) if values.dtype.kind == "S" else values
    if values.ndim != 1 or values.dtype.kind not in TABLE_KINDS:
        kind = type(column.iloc[0]).__name__
        raise InvalidInput(f"{table.field} column", name, f"must hold numbers or texts, and has values of type {kind}")
    return values


def _numbers(table: Table, name: str) -> np.ndarray:
    values = _values(table, name)
    if values.dtype.kind not in NUMBERS:
        allowed = "must hold numbers: data.columns = {inputs = [...]} says which are the inputs"
        raise InvalidInput(f"{table.field} column", name, allowed)
    return values.astype(np.float32)


def _targets(columns: Sequence[tuple[Table, np.ndarray]]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Convert the targets of all tables, and name their classes.

    The first table, one to train on, decides whether they are classes.
    """
    kind, *others = [TABLE_KINDS[values.dtype.kind] for _, values in columns]
    for (table, _), other in zip(columns[1:], others, strict=True):
        # 3 is a real number, too, but 3.0 is no name of a class
        if other != kind and (kind, other) != (REAL, WHOLE):
            allowed = f"must be {kind}, as the targets to train on are: write all tables alike"
            raise InvalidInput(f"{table.field} targets", other, allowed)
    joined, ends = np.concatenate([values for _, values in columns]), np.cumsum([len(values) for _, values in columns])
    numbers, classes = (joined.astype(np.float32)[:, None], ()) if kind == REAL else encode_labels("targets", joined)
    return np.split(numbers, ends[:-1]), classes
