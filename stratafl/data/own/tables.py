"""A table, a row for each sample: CSV or parquet, through pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra, guarded
from stratafl.data.given import Columns
from stratafl.data.own.found import Found, codes, held_out

SUFFIXES = (".csv", ".parquet")
NO_NAME = "Unnamed: "
"""How pandas begins the name of a column that has none."""


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
    parts = [frame]
    if isinstance(test, str):
        parts.append(_frame("data.test", Path(test)))
    elif test is not None:
        parts = [frame.iloc[rows] for rows in held_out("data.test", len(frame), test)]
    lengths = [len(part) for part in parts]
    y, classes = _targets(np.concatenate([_column(part, target) for part in parts]))
    x = [np.stack([_numbers(part, name) for name in inputs], axis=1) for part in parts]
    y_train, *y_test = np.split(y, np.cumsum(lengths)[:-1])
    owner = None if columns.owner is None else _column(parts[0], columns.owner)
    return Found(train=(x[0], y_train), test=(x[1], y_test[0]) if y_test else None, classes=classes, owner=owner)


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


def _column(frame: Any, name: str) -> np.ndarray:
    if name not in frame.columns:
        raise InvalidInput("data.test", list(frame.columns), f"has no column {name!r}")
    if frame[name].isna().any():
        raise InvalidInput("data column", name, "has missing values")
    return frame[name].to_numpy()


def _numbers(frame: Any, name: str) -> np.ndarray:
    values = _column(frame, name)
    if values.dtype.kind not in "fiub":
        allowed = "must hold numbers: columns = {inputs = [...]} says which are the inputs"
        raise InvalidInput("data column", name, allowed)
    return values.astype(np.float32)


def _targets(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    if values.dtype.kind == "f":
        return values.astype(np.float32)[:, None], ()
    return codes(values.astype(str) if values.dtype.kind == "O" else values)
