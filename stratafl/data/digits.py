"""The 1,797 handwritten digits that come with scikit-learn: 8 x 8 grey images of values 0..16."""

from __future__ import annotations

from functools import cache

import numpy as np

from stratafl.data.canonical import Dataset, Samples, complete
from stratafl.errors import MissingExtra

TITLE = "digits: 8 x 8 grey images of handwritten digits, 10 classes, nothing to download"
FORM = "embedded in scikit-learn"


@cache
def digits() -> Dataset:
    """Every fifth image of each class, in the order of the file, is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("the data set digits", "scikit-learn", "data") from None
    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[4::5]] = True
    arrays = {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}
    for array in arrays.values():
        array.flags.writeable = False  # one copy serves every caller
    samples = Samples(
        kind="image",
        classes=tuple("0123456789"),
        notes=("pixels run from 0 to 16; every fifth image of a class is in the test set",),
        **arrays,
    )
    return complete("digits", FORM, samples)
