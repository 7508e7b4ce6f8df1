"""The 1,797 handwritten digits that come with the package: 8 x 8 grey images of values 0..16.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, CC BY 4.0), as scikit-learn has them, too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.data.sets.on_disk import Dataset, Samples, complete

TITLE = "digits: 8 x 8 grey images of handwritten digits, 10 classes, nothing to download"
FORM = "embedded in the package"
FILE = Path(__file__).with_name("digits.npz")


@cache
def digits() -> Dataset:
    """Every fifth image of each class, in the order of the file, is for testing."""
    with np.load(FILE) as stored:
        x, y = stored["images"], stored["labels"].astype(np.int64)
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
