"""Synthetic clients: alpha and beta of a level change that level's siblings only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog.synthetic import synthetic

# Two groups of two clients each.
PARENTS = [np.array([], int), np.array([0, 0]), np.array([0, 0, 1, 1])]

VALID: dict[str, Any] = {"parents": PARENTS, "samples": 3}


def _centres(beta: tuple[float, float]) -> np.ndarray:
    dataset, leaves = synthetic(PARENTS, 400, 0.0, beta, seed=3)
    return np.stack([dataset.x_train[rows].mean(0) for rows in leaves])


def _accuracy(alpha: tuple[float, float]) -> np.ndarray:
    """Accuracy on each client's labels of a linear fit to one client's; features are alike."""
    dataset, leaves = synthetic(PARENTS, 2_000, alpha, 0.0, seed=5)
    scores = np.zeros((4, 4))
    for fitted, rows in enumerate(leaves):
        x = np.column_stack([dataset.x_train[rows], np.ones(len(rows))])
        target = np.eye(10)[dataset.y_train[rows]]
        weights = np.linalg.lstsq(x, target, rcond=None)[0]
        for tried, others in enumerate(leaves):
            x = np.column_stack([dataset.x_train[others], np.ones(len(others))])
            scores[fitted, tried] = ((x @ weights).argmax(1) == dataset.y_train[others]).mean()
    return scores


def _distances(centres: np.ndarray) -> tuple[float, float]:
    """Mean distances of siblings, and of clients of different groups."""
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    return (apart[0, 1] + apart[2, 3]) / 2, apart[:2, 2:].mean()


def test_feature_shift_appears_on_the_level_that_asks_for_it() -> None:
    same = _distances(_centres((0.0, 0.0)))
    groups = _distances(_centres((2.0, 0.0)))
    clients = _distances(_centres((0.0, 2.0)))
    noise = max(same)
    assert noise < 0.3
    assert groups[0] < 0.3 and groups[1] > 10
    assert min(clients) > 10


def test_model_shift_appears_on_the_level_that_asks_for_it() -> None:
    same = _accuracy((0.0, 0.0))
    groups = _accuracy((3.0, 0.0))
    clients = _accuracy((0.0, 3.0))
    other = ~np.eye(4, dtype=bool)
    across = np.kron(~np.eye(2, dtype=bool), np.ones((2, 2), bool))
    assert same[other].min() > same.diagonal().min() - 0.1
    assert groups[other & ~across].min() > 0.5 > groups[across].max()
    assert clients[other].max() < 0.5 < clients.diagonal().min()


def test_leaves_hold_their_samples_in_order() -> None:
    dataset, leaves = synthetic(PARENTS, [5, 1, 7, 3], seed=1, test_share=0.4)
    assert [len(rows) for rows in leaves] == [5, 1, 7, 3]
    np.testing.assert_array_equal(np.concatenate(leaves), np.arange(16))
    for leaf, rows in enumerate(leaves):
        assert dataset.owner_train is not None and (dataset.owner_train[rows] == leaf).all()
    assert dataset.owner_test is not None
    assert np.bincount(dataset.owner_test).tolist() == [2, 1, 3, 1]
    assert dataset.kind == "vector" and dataset.x_train.dtype == np.float32


def test_a_leaf_does_not_depend_on_leaves_beside_it() -> None:
    wider = [*PARENTS[:2], np.array([0, 0, 1, 1, 1])]
    (few, rows), (many, _) = synthetic(PARENTS, 20, seed=2), synthetic(wider, 20, seed=2)
    np.testing.assert_array_equal(few.x_train[rows[0]], many.x_train[rows[0]])
    np.testing.assert_array_equal(few.y_train[rows[0]], many.y_train[rows[0]])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31), st.data())
def test_any_tree_is_served_and_the_seed_decides(widths: list[int], seed: int, data: st.DataObject) -> None:
    parents = [np.array([], int)]
    above = 1
    for width in widths:
        parents.append(np.array([data.draw(st.integers(0, above - 1)) for _ in range(width)]))
        above = width
    first, leaves = synthetic(parents, 3, seed=seed, features=4, classes=3)
    again, _ = synthetic(parents, 3, seed=seed, features=4, classes=3)
    assert len(leaves) == widths[-1] and first.x_train.shape == (3 * widths[-1], 4)
    np.testing.assert_array_equal(first.x_train, again.x_train)
    assert first.y_train.max() < 3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"parents": [np.array([0])]}, "parents = "),
        ({"parents": [np.array([], int), np.array([0, 1])]}, r"parents\[1\] = .*0\.\.0"),
        ({"samples": 0}, "samples = 0: a whole number >= 1, or 4"),
        ({"samples": [1, 2]}, "samples = "),
        ({"samples": 1.5}, "samples = 1.5"),
        ({"alpha": -1.0}, "alpha = -1.0: one number >= 0, or 2"),
        ({"beta": [1.0]}, r"beta = \[1.0\]"),
        ({"beta": float("nan")}, "beta = nan"),
        ({"classes": 1}, "classes = 1: at least 2"),
        ({"features": 0}, "features = 0"),
        ({"test_share": 0.0}, "test_share = 0.0"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        synthetic(**{**VALID, **change})
