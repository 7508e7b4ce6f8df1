"""An .npz of arrays: x and y, or x_train, y_train, x_test and y_test; and owner, perhaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stratafl.base.errors import InvalidInput, guarded
from stratafl.data.own.found import Found, held_out

SUFFIXES = (".npz",)


def read(path: Path, test: object) -> Found:
    """The arrays as they are."""
    arrays = _arrays("data.name", path)
    part = "_train" if "x_train" in arrays else ""
    x, y = _pair("data.name", path, arrays, part)
    owner = arrays.get(f"owner{part}")
    if owner is not None and owner.shape != y.shape[:1]:
        raise InvalidInput("data.name", str(path), f"must have as many of owner{part} as of y{part}")
    if "x_test" in arrays:
        if test is not None:
            raise InvalidInput("data.test", test, f"{path.name} has an x_test of its own")
        return Found(train=(x, y), test=_pair("data.name", path, arrays, "_test"), owner=owner)
    if test is None or isinstance(test, str):
        tested = None if test is None else _pair("data.test", Path(test), _arrays("data.test", Path(test)))
        return Found(train=(x, y), test=tested, owner=owner)
    first, second = held_out("data.test", len(y), test)
    return Found(train=(x[first], y[first]), test=(x[second], y[second]), owner=None if owner is None else owner[first])


def _arrays(field: str, path: Path) -> dict[str, np.ndarray]:
    with guarded(field, str(path), "cannot be read"), np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _pair(field: str, path: Path, arrays: dict[str, np.ndarray], part: str = "") -> tuple[np.ndarray, np.ndarray]:
    names = [f"x{part}", f"y{part}"]
    if not set(names) <= set(arrays):
        raise InvalidInput(field, str(path), f"must have {' and '.join(names)}; it has {', '.join(arrays)}")
    x, y = (arrays[name] for name in names)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise InvalidInput(field, str(path), f"must have as many of {names[1]} as of {names[0]}")
    return x, y
