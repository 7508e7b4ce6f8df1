"""A user's own data as it was read from wherever it is, and what readers of it share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Purpose, generator
from stratafl.base.validation import check_number
from stratafl.data.sets.on_disk import Dataset


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """Data to train and to test on, in any of the forms that `simulate` takes."""

    train: object
    test: object = None
    classes: tuple[str, ...] = ()
    """The names of the classes; empty where they have none, or where targets are no classes."""
    owner: Sequence[object] | np.ndarray | None = None
    """Whose each sample is."""
    partition: object = None
    """Each client's sample numbers, where the data comes with them."""
    stored: Dataset | None = None
    """The whole as one of the library's own data sets, where it can be one."""


def codes(field: str, values: Sequence[object] | np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Each value as its place among all that occur, and what they are called."""
    array = np.asarray(values, dtype=object if len({isinstance(each, str) for each in values}) > 1 else None)
    if array.ndim != 1 or array.dtype.kind in "OV" or (array.dtype.kind == "f" and np.isnan(array).any()):
        raise InvalidInput(field, array, "must be all numbers or all texts, and none missing")
    known, numbers = np.unique(array, return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, known))


def held_out(field: str, count: int, share: object) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the samples to train and to test on; the same in every run, whatever its
    seed."""
    tested = round(check_number(field, share, above=0, below=1) * count)
    if not 0 < tested < count:
        raise InvalidInput(field, share, f"leaves nothing to train or to test on, of {count:,} samples")
    order = generator(0, Purpose.SAMPLES, count).permutation(count)
    return np.sort(order[tested:]), np.sort(order[:tested])


def needs_test(field: str, path: Path) -> InvalidInput:
    """The complaint about data with which nothing says what to test on."""
    allowed = "say what to test on: test = a path, or a share of the samples such as 0.2"
    return InvalidInput(field, str(path), allowed)
