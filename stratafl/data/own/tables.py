"""A table, a row for each sample: CSV or parquet, through pandas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra, guarded
from stratafl.data.given import Columns
from stratafl.data.own.found import Found, codes, held_out

SUFFIXES = (".csv", ".parquet")
NO_NAME = "Unnamed: "
"""How pandas begins the name of a column that has none."""

WHOLE, REAL = "whole numbers", "decimal numbers"
KINDS = {"i": WHOLE, "u": WHOLE, "f": REAL, "b": "truth values", "U": "texts", "M": "dates"}
"""NumPy's kinds of values that a column may have."""
NUMBERS = ("f", "i", "u", "b")


def read(path: Path, test: object, columns: Columns) -> Found:
    """Numbers in some columns, the targets in another; and whose a row is, perhaps, in one more.

    Targets that are whole numbers or texts are classes; real numbers are what they are.
    """
    frame = _frame("data.name", path)
    known = [str(name) for name in frame.columns]
    target = columns.target("data", known)
    chosen = columns.chosen("data", known)
    inputs = (chosen,) if isinstance(chosen, str) else chosen
    for name in inputs if columns.inputs is None else ():
        if name.startswith(NO_NAME):
            allowed = "has no name in the file, as the numbers of its rows have none: name the inputs, or leave it out"
            raise InvalidInput("data column", name, f"{allowed} (pandas: to_csv(index=False))")
    if columns.owner is not None and columns.owner not in known:
        raise InvalidInput("data.columns.owner", columns.owner, f"is none of {', '.join(known)}")
    frames = [frame, _frame("data.test", Path(test))] if isinstance(test, str) else [frame]
    x = np.concatenate([np.stack([_numbers(each, name) for name in inputs], axis=1) for each in frames])
    y, classes = _targets([_values(each, target) for each in frames])
    if isinstance(test, str):
        first, second = np.arange(len(frame)), np.arange(len(frame), len(y))
    elif test is None:
        first, second = np.arange(len(frame)), np.arange(0)
    else:
        first, second = held_out("data.test", len(frame), test)
    owner = None if columns.owner is None else _values(frame, columns.owner)[first]
    tested = None if test is None else (x[second], y[second])
    return Found(train=(x[first], y[first]), test=tested, classes=classes, owner=owner)


def _frame(field: str, path: Path) -> Any:
    try:
        import pandas as pd
    except ImportError:
        raise MissingExtra("reading tables", "pandas", "tables") from None
    with guarded(field, str(path), "cannot be read"):
        try:
            frame = pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
        except ImportError:
            raise MissingExtra("reading parquet files", "pyarrow", "tables") from None
    if not len(frame):
        raise InvalidInput(field, str(path), "has no rows")
    return frame.rename(columns=str)


def _column(frame: Any, name: str) -> Any:
    if name not in frame.columns:
        raise InvalidInput("data.test", list(frame.columns), f"has no column {name!r}")
    if frame[name].isna().any():
        raise InvalidInput("data column", name, "has missing values")
    return frame[name]


def _values(frame: Any, name: str) -> np.ndarray:
    """A column as an array of one of the kinds."""
    column = _column(frame, name)
    plain = getattr(column.dtype, "numpy_dtype", None)  # of pandas' own numbers, which may be missing
    values = column.to_numpy(plain if getattr(plain, "kind", "") in NUMBERS else None)
    if values.dtype.kind in "OS":
        with guarded("data column", name, "cannot be read"):
            # numbers and texts, as pandas may read a column of a large file, are texts
            values = np.asarray(column.tolist())
            values = values.astype(str) if values.dtype.kind == "S" else values
    if values.ndim != 1 or values.dtype.kind not in KINDS:
        found = type(column.iloc[0]).__name__
        raise InvalidInput("data column", name, f"must hold numbers or texts, and has values of type {found}")
    return values


def _numbers(frame: Any, name: str) -> np.ndarray:
    values = _values(frame, name)
    if values.dtype.kind not in NUMBERS:
        allowed = "must hold numbers: columns = {inputs = [...]} says which are the inputs"
        raise InvalidInput("data column", name, allowed)
    return values.astype(np.float32)


def _targets(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets and the names of their classes, of the kind that the file to train on has: the
    first."""
    kind, *others = [KINDS[part.dtype.kind] for part in parts]
    for other in others:
        # 3 is a real number, too, but 3.0 is no name of a class
        if other != kind and (kind, other) != (REAL, WHOLE):
            told = f"must be {kind}, as the targets to train on are: write both files alike"
            raise InvalidInput("data.test targets", other, told)
    values = np.concatenate(parts)
    return (values.astype(np.float32)[:, None], ()) if kind == REAL else codes("targets", values)
