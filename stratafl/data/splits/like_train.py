"""Test data divided over the leaves as the training data was.

Where samples have owners, and each owner's training samples are all at one leaf, its test samples
are that leaf's. Otherwise a leaf gets the same share of each class's test samples as it has of the
class's training samples: so its test data has the distribution of labels that its training data
has, as far as whole samples allow. A sample goes to one leaf, or to none where nobody holds its
owner or class; a leaf may get none.

Shape suffixes: N leaves, T test samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Purpose, generator


class Labels(NamedTuple):
    """The targets of all samples, and whose they are where that is known."""

    y_train: np.ndarray
    y_test: np.ndarray
    owner_train: np.ndarray | None = None
    owner_test: np.ndarray | None = None


def like_train(data: Labels, leaves: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """The test samples of each leaf, whose training samples these are."""
    leaf_T = _by_owner(data, leaves)
    if leaf_T is None:
        leaf_T = _by_class(data, leaves, seed)
    return [np.flatnonzero(leaf_T == leaf) for leaf in range(len(leaves))]


def _by_owner(data: Labels, leaves: Sequence[np.ndarray]) -> np.ndarray | None:
    """The leaf of each test sample's owner, -1 for nobody; None where owners are divided."""
    if data.owner_train is None or data.owner_test is None:
        return None
    last = int(max(data.owner_train.max(initial=0), data.owner_test.max(initial=0)))
    leaf_of = np.full(last + 1, -1)
    for leaf, mine in enumerate(leaves):
        owners = np.unique(data.owner_train[mine])
        if (leaf_of[owners] >= 0).any():
            return None
        leaf_of[owners] = leaf
    return leaf_of[data.owner_test]


def _by_class(data: Labels, leaves: Sequence[np.ndarray], seed: int) -> np.ndarray:
    for labels in (data.y_train, data.y_test):
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            told = "needs one class for each sample, or owners of the samples"
            raise InvalidInput("data.test_partition", "like_train", told)
    leaf_T = np.full(len(data.y_test), -1)
    for label in np.unique(data.y_test):
        held_N = np.array([np.count_nonzero(data.y_train[mine] == label) for mine in leaves])
        if not held_N.any():
            continue
        draw = generator(seed, Purpose.TEST, int(label))
        samples = draw.permutation(np.flatnonzero(data.y_test == label))
        leaf_T[samples] = np.repeat(np.arange(len(leaves)), _shares(len(samples), held_N, draw))
    return leaf_T


def _shares(total: int, held_N: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """How many each gets of so many, in proportion to what is held: whole numbers, what is left
    over to those who lack the most, by lot where that is the same."""
    exact_N = total * held_N / held_N.sum()
    whole_N = np.floor(exact_N).astype(np.int64)
    order = np.lexsort((draw.permutation(len(held_N)), whole_N - exact_N))
    whole_N[order[: total - whole_N.sum()]] += 1
    return whole_N
