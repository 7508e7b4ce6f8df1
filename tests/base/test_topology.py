"""Trees: notations, names, weights, means over siblings, and values for children."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl import InvalidInput, Topology
from tests.problems import SHAPES, random_weights

UNEVEN = [[2, 1], [3], [1, 2, 2]]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())

groups = st.lists(st.integers(1, 3), min_size=1, max_size=3)
shapes = st.one_of(st.integers(1, 5), groups, st.lists(groups, min_size=1, max_size=3))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("20", (1, 20)),
        (20, (1, 20)),
        ("4x5", (1, 4, 20)),
        ("2x3x2", (1, 2, 6, 12)),
        ("2x1x2x3", (1, 2, 2, 4, 12)),
        ([3, 5, 2], (1, 3, 10)),
        ([[2, 3], [4]], (1, 2, 3, 9)),
        ([[[1, 2]], [[3], [1]]], (1, 2, 3, 4, 7)),
        (["a", "b"], (1, 2)),
        ({"paris": 3, "rome": ["a", "b"]}, (1, 2, 5)),
        ({"eu": {"paris": 3, "rome": ["a"]}, "us": [2]}, (1, 2, 3, 6)),
        ((1, 2), (1, 2, 3)),
    ],
)
def test_notations(shape, sizes: tuple[int, ...]) -> None:
    tree = Topology.of(shape)
    assert tree.sizes == sizes
    assert tree.depth == len(sizes) - 1
    assert tree.leaves == sizes[-1]
    assert [len(names) for names in tree.names] == list(sizes)


def test_a_tree_is_its_own_notation() -> None:
    tree = Topology.of("2x2")
    assert Topology.of(tree) is tree


def test_the_notations_of_one_shape_agree() -> None:
    trees = [Topology.of(shape) for shape in ("2x3", [3, 3], {"0": 3, "1": ["0", "1", "2"]})]
    for tree in trees:
        assert tree.names == trees[0].names
        assert [p.tolist() for p in tree.parents] == [[], [0, 0], [0, 0, 0, 1, 1, 1]]


def test_names_are_paths() -> None:
    tree = Topology.of({"paris": 2, "rome": ["a", "b"]})
    assert tree.names == (
        ("root",),
        ("paris", "rome"),
        ("paris/0", "paris/1", "rome/a", "rome/b"),
    )


@EVERY_SHAPE
def test_find_is_the_inverse_of_names(shape) -> None:
    tree = Topology.of(shape)
    for level, names in enumerate(tree.names):
        assert [tree.find(name) for name in names] == [(level, i) for i in range(len(names))]


def test_find_refuses_a_stranger() -> None:
    with pytest.raises(InvalidInput, match=r"node = 'paris'.*no node"):
        Topology.of("2x2").find("paris")


def test_children_and_ancestors_of_an_uneven_tree() -> None:
    tree = Topology.of(UNEVEN)
    assert tree.children(0).tolist() == [3]
    assert tree.children(1).tolist() == [2, 1, 3]
    assert tree.children(2).tolist() == [2, 1, 3, 1, 2, 2]
    assert tree.ancestors(0).tolist() == [0] * 11
    assert tree.ancestors(1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert tree.ancestors(2).tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5]
    assert tree.ancestors(3).tolist() == list(range(11))


def sibling_sums(tree: Topology, level: int) -> np.ndarray:
    return np.bincount(tree.parents[level], weights=tree.weights[level])


@EVERY_SHAPE
@pytest.mark.parametrize("kind", ["uniform", "samples", "per leaf", "per level"])
def test_weights_sum_to_one_over_siblings(shape, kind: str) -> None:
    tree = Topology.of(shape)
    counts = np.arange(1, tree.leaves + 1)
    given = {"per leaf": counts / 7, "per level": random_weights(shape)}.get(kind, kind)
    weighted = tree.weighted(given, counts)
    for level in range(1, tree.depth + 1):
        np.testing.assert_allclose(sibling_sums(weighted, level), 1, rtol=1e-14)
    assert weighted.names == tree.names


def test_weights_by_samples_add_up_towards_the_root() -> None:
    tree = Topology.of([2, 3]).weighted("samples", [1, 3, 2, 2, 4])
    np.testing.assert_allclose(tree.weights[2], [1 / 4, 3 / 4, 2 / 8, 2 / 8, 4 / 8])
    np.testing.assert_allclose(tree.weights[1], [4 / 12, 8 / 12])
    per_leaf = Topology.of([2, 3]).weighted([1, 3, 2, 2, 4])
    np.testing.assert_array_equal(per_leaf.weights[1], tree.weights[1])


def test_weights_per_level_and_back_to_uniform() -> None:
    tree = Topology.of([2, 1]).weighted([[1, 3], [1, 4, 9]])
    np.testing.assert_allclose(tree.weights[1], [1 / 4, 3 / 4])
    np.testing.assert_allclose(tree.weights[2], [1 / 5, 4 / 5, 1])
    np.testing.assert_allclose(tree.weighted("uniform").weights[1], [1 / 2, 1 / 2])


def test_weighted_leaves_the_tree_and_its_cache_alone() -> None:
    tree = Topology.of([2, 2])
    rows = torch.tensor([[1.0], [3.0], [0.0], [8.0]])
    assert tree.mean(2, rows).flatten().tolist() == [2, 4]
    assert tree.weighted([1, 3, 1, 3]).mean(2, rows).flatten().tolist() == [2.5, 6]
    assert tree.mean(2, rows).flatten().tolist() == [2, 4]


def mean_by_hand(tree: Topology, level: int, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    out = np.zeros((tree.sizes[level - 1], rows.shape[1]))
    for parent in range(tree.sizes[level - 1]):
        mine = [i for i in range(tree.sizes[level]) if tree.parents[level][i] == parent and present[i]]
        total = sum(tree.weights[level][i] for i in mine)
        for i in mine:
            out[parent] += tree.weights[level][i] / total * rows[i]
    return out


@settings(max_examples=25, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), masked=st.booleans())
def test_mean_is_the_plain_loop(shape, seed: int, masked: bool) -> None:
    rng = np.random.default_rng(seed)
    tree = Topology.of(shape).weighted(random_weights(shape, seed))
    for level in range(1, tree.depth + 1):
        rows = rng.normal(size=(tree.sizes[level], 3))
        present = rng.random(tree.sizes[level]) < 0.6 if masked else np.ones(len(rows), dtype=bool)
        expected = mean_by_hand(tree, level, rows, present)
        rows[~present] = np.nan
        mask = torch.tensor(present) if masked else None
        actual = tree.mean(level, torch.tensor(rows), mask)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-14)


def test_a_parent_with_nobody_present_gets_zero() -> None:
    tree = Topology.of([2, 2])
    rows = torch.full((4, 2), torch.nan)
    rows[2] = 5
    there = torch.tensor([False, False, True, False])
    assert tree.mean(2, rows, there).tolist() == [[0, 0], [5, 5]]
    assert tree.present_weight(2, there).tolist() == [0, 0.5]


def test_share_is_the_weight_that_came() -> None:
    tree = Topology.of([2, 3]).weighted([1, 3, 2, 2, 4])
    there = torch.tensor([True, False, True, False, True])
    np.testing.assert_allclose(tree.present_weight(2, there), [1 / 4, 6 / 8])
    np.testing.assert_allclose(tree.present_weight(2, torch.ones(5, dtype=torch.bool)), [1, 1])


@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99))
def test_the_mean_undoes_the_spread(shape, seed: int) -> None:
    tree = Topology.of(shape).weighted(random_weights(shape, seed))
    for level in range(1, tree.depth + 1):
        rows = torch.tensor(np.random.default_rng(seed).normal(size=(tree.sizes[level - 1], 2)))
        spread = tree.to_children(level, rows)
        assert torch.equal(spread, rows[torch.as_tensor(tree.parents[level])])
        torch.testing.assert_close(tree.mean(level, spread), rows, rtol=0, atol=1e-14)


@EVERY_SHAPE
def test_ancestors_are_parents_of_parents(shape) -> None:
    tree = Topology.of(shape)
    for level in range(tree.depth + 1):
        rows = torch.arange(tree.sizes[level])[:, None]
        for lower in range(level + 1, tree.depth + 1):
            rows = tree.to_children(lower, rows)
        assert rows[:, 0].tolist() == tree.ancestors(level).tolist()


def test_mean_keeps_the_type_of_the_rows() -> None:
    assert Topology.of("2x2").mean(2, torch.ones(4, 1)).dtype == torch.float32
    assert Topology.of("2x2").mean(2, torch.ones(4, 1).double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("4x5", "4x5"),
        (7, "7"),
        ("2x3x4", "2x3x4"),
        ({"a": 2, "b": ["x", "y"]}, "2x2"),
        ([3, 5, 2], "1 > 3 > 10 nodes"),
        (UNEVEN, "1 > 3 > 6 > 11 nodes"),
    ],
)
def test_a_tree_in_words(shape, text: str) -> None:
    assert str(Topology.of(shape)) == text


@pytest.mark.parametrize(
    "shape",
    [
        0,
        -3,
        True,
        2.5,
        None,
        "",
        "4x",
        "4x0",
        "4x-2",
        "4,5",
        "four",
        "100000x100000",
        [],
        {},
        [3, 0],
        [3, []],
        [3, 2.5],
        [3, [2]],
        [[2], 3],
        ["a", 3],
        ["a", "a"],
        ["root", "b"],
        {"a": "bc"},
        {"a": 2, "b": {}},
        {"a/0": [1], "a": [[1]]},
    ],
    ids=repr,
)
def test_bad_shapes(shape) -> None:
    with pytest.raises(InvalidInput) as caught:
        Topology.of(shape)
    assert caught.value.field == "tree.shape"
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("tree.shape = ")


@pytest.mark.parametrize(
    ("weights", "samples"),
    [
        ("equal", None),
        ("samples", None),
        ("samples", [1, 2, 3]),
        ("samples", [1, 2, 3, 0]),
        ([1, 2, 3], None),
        ([1, 2, 3, 4, 5], None),
        ([], None),
        ([1, 2, 3, 0], None),
        ([1, 2, 3, -1], None),
        ([1, 2, 3, float("nan")], None),
        ([1, 2, 3, float("inf")], None),
        ([[1, 1]], None),
        ([[1, 1], [1, 1, 1]], None),
        ([[1, 1, 1], [1, 1, 1, 1]], None),
        ([[1, -1], [1, 1, 1, 1]], None),
        ([[1, 1], 4], None),
        (["a", "b", "c", "d"], None),
        (5, None),
    ],
    ids=repr,
)
def test_bad_weights(weights, samples) -> None:
    with pytest.raises(InvalidInput) as caught:
        Topology.of("2x2").weighted(weights, samples)
    assert caught.value.field == "tree.weights"
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("tree.weights = ")
