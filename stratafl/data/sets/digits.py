"""The 1,797 handwritten digits that come with scikit-learn: 8 x 8 grey images of values 0..16."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.data.canonical import Dataset, Samples, complete
from stratafl.errors import MissingExtra

TITLE = "digits: 8 x 8 grey images of handwritten digits, 10 classes, nothing to download"
FORM = "embedded in scikit-learn"
FILE = Path("datasets", "data", "digits.csv.gz")
"""In scikit-learn's folder."""


@cache
def digits() -> Dataset:
    """Every fifth image of each class, in the order of the file, is for testing."""
    table = _table()
    x, y = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[4::5]] = True
    arrays: dict[str, Any] = {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}
    for array in arrays.values():
        array.flags.writeable = False  # one copy serves every caller
    samples = Samples(
        kind="image",
        classes=tuple("0123456789"),
        notes=("pixels run from 0 to 16; every fifth image of a class is in the test set",),
        **arrays,
    )
    return complete("digits", FORM, samples)


def _table() -> np.ndarray:
    """An image a row, its class last; read from the file, as importing scikit-learn adds seconds to every start."""
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise MissingExtra("the data set digits", "scikit-learn", "data")
    for folder in found.submodule_search_locations or ():
        if (Path(folder) / FILE).is_file():
            return np.loadtxt(Path(folder) / FILE, np.uint8, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
