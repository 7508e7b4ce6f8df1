"""Partitions: each sample used once, requested sizes, reproducibility and label skew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.data.partition import methods
from stratafl.data.partition.heterogeneity import class_counts, heterogeneity
from stratafl.data.partition.methods import apportion, fill_fixed_priors, fill_released_code
from stratafl.data.partition.partition import Partition, partition

CIFAR_LIKE = np.arange(50_000) % 10
DIRICHLET = {"name": "dirichlet", "alpha": 0.1}
RELEASE = {"name": "release_dirichlet", "alpha": 0.1}


@st.composite
def trees(draw: st.DrawFn) -> list[np.ndarray]:
    """Trees of depth 1 to 3 whose nodes have different numbers of children."""
    parents, nodes = [np.empty(0, dtype=np.int64)], 1
    for _ in range(draw(st.integers(1, 3))):
        children = draw(st.lists(st.integers(1, 4), min_size=nodes, max_size=nodes))
        parents.append(np.repeat(np.arange(nodes), children))
        nodes = sum(children)
    return parents


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, list[np.ndarray], list[object], int]:
    """Uneven trees, classes with one or with many samples, any method on any level."""
    parents = draw(trees())
    counts = draw(st.lists(st.sampled_from([1, 2, 7, 60, 300]), min_size=1, max_size=8))
    counts[0] += 8 * len(parents[-1])
    labels = np.repeat(np.arange(len(counts)), counts)
    alpha = st.sampled_from([0.001, 0.01, 0.1, 1.0, 10_000.0])
    sizes = st.sampled_from([None, "equal", {"lognormal": 0.0}, {"lognormal": 1.5}])
    dirichlet = st.sampled_from(["dirichlet", "release_dirichlet"])
    method = st.one_of(
        st.builds(lambda s: {"name": "iid", "sizes": s}, sizes),
        st.builds(lambda n, a, s: {"name": n, "alpha": a, "sizes": s}, dirichlet, alpha, sizes),
        st.just({"name": "classes", "k": 1}),
    )
    levels = [draw(method) for _ in parents[1:]]
    return labels, parents, levels, draw(st.integers(0, 2**63 - 1))


def check_cover(result: Partition, samples: int) -> None:
    kept = np.concatenate(result.leaves)
    assert len(np.unique(kept)) == len(kept) == samples - result.dropped
    assert all(len(leaf) and (np.diff(leaf) > 0).all() for leaf in result.leaves)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_every_sample_goes_to_one_leaf_or_is_counted(problem):
    labels, parents, levels, seed = problem
    try:
        result = partition(labels, parents, levels, seed)
    except InvalidInput:
        # One class per node can leave a small class with a whole subtree, and only that may fail.
        if any(level["name"] == "classes" for level in levels):
            return
        raise
    check_cover(result, len(labels))
    again = partition(labels, parents, levels, seed)
    assert all(map(np.array_equal, result.leaves, again.leaves))
    if all(level.get("sizes") in (None, "equal") for level in levels) and not any(
        level["name"] == "classes" for level in levels
    ):
        assert set(result.sizes) == {len(labels) // len(parents[-1])}
        assert result.dropped == len(labels) % len(parents[-1])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([fill_fixed_priors, fill_released_code]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([0.001, 0.003, 0.1, 5.0]),
    st.integers(0, 1000),
)
def test_filling_ends_and_holds_both_margins(fill, pool, siblings, alpha, seed):
    sizes = apportion(sum(pool), np.ones(siblings), np.zeros(siblings, dtype=np.int64))
    counts = fill(np.array(pool), sizes, alpha, np.random.default_rng(seed))
    assert (counts.sum(axis=0) == pool).all() and (counts.sum(axis=1) == sizes).all()
    assert (counts >= 0).all()


def distances(levels: list[object], seeds: range) -> np.ndarray:
    """Mean distances over seeds: client to group, group to global, and client to global."""
    parents = Topology.of("10x10").parents
    rows = []
    for seed in seeds:
        result = partition(CIFAR_LIKE, parents, levels, seed)
        group, client = heterogeneity(CIFAR_LIKE, result.leaves, parents).levels
        rows.append((client.to_parent, group.to_global, client.to_global))
    return np.mean(rows, axis=0)


def test_dirichlet_is_as_uneven_as_its_alpha_says():
    client_to_group, group_to_global, client_to_global = distances([DIRICHLET] * 2, range(5))
    assert 0.36 <= client_to_group <= 0.39
    assert 0.55 <= group_to_global <= 0.60
    assert 0.70 <= client_to_global <= 0.74


def test_release_dirichlet_is_milder():
    client_to_group, group_to_global, client_to_global = distances([RELEASE] * 2, range(5))
    assert 0.18 <= client_to_group <= 0.26
    assert 0.32 <= group_to_global <= 0.43
    assert 0.44 <= client_to_global <= 0.51


def test_one_level_can_be_even_and_the_other_not():
    client_to_group, group_to_global, _ = distances(["iid", DIRICHLET], range(2))
    assert group_to_global < 0.03 and client_to_group > 0.5
    client_to_group, group_to_global, _ = distances([DIRICHLET, "iid"], range(2))
    assert group_to_global > 0.5 and client_to_group < 0.06


def literal_release(pool, sizes, alpha, rng):
    """The released procedure, literally, one sample at a time."""
    cumulative = np.cumsum(rng.dirichlet([alpha] * len(pool), size=len(sizes)), axis=1)
    left, need, empty = pool.copy(), sizes.copy(), set()
    counts = np.zeros((len(sizes), len(pool)), dtype=np.int64)
    while need.any():
        i = rng.choice(np.flatnonzero(need))
        need[i] -= 1
        vector = cumulative[i].copy()
        c = np.argmax(rng.random() <= vector)
        while not left[c]:
            empty.add(c)
            vector[list(empty)] = 0.0
            vector /= vector.sum()
            cumulative[i] = np.cumsum(vector)
            c = np.argmax(rng.random() <= vector)
        left[c] -= 1
        counts[i, c] += 1
    return counts


def test_release_dirichlet_agrees_with_the_literal_procedure():
    pool, sizes = np.full(6, 40), np.full(6, 40)
    runs = 60
    shape = {}
    for fill in (fill_released_code, literal_release, fill_fixed_priors):
        rng = np.random.default_rng(7)
        counts = np.stack([fill(pool, sizes, 0.2, rng) for _ in range(runs)])
        # How much of each class the fullest sibling has (the mangled prior favours late classes
        # over early ones), and the distance to the even split.
        distance = np.abs(counts / 40 - 1 / 6).sum(axis=2).mean() / 2
        shape[fill.__name__] = np.append(counts.max(axis=1).mean(axis=0) / 40, distance)
    difference = np.abs(shape["fill_released_code"] - shape["literal_release"])
    assert difference.max() < 0.08 and difference[-1] < 0.03
    assert shape["fill_fixed_priors"][-1] - shape["fill_released_code"][-1] > 0.05


def test_a_kept_prior_survives_the_end_of_its_favourite_class():
    # At this alpha a prior is one class, then another far behind: a sibling whose first choice is
    # the small class must go on with its second choice alone.
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = fill_fixed_priors(np.array([10, 5000, 5000]), np.array([600, 600]), 0.001, rng)
        assert (counts.max(axis=1) >= 580).all()


@pytest.mark.parametrize("sizes", [None, "equal"])
def test_label_shift_gives_groups_three_and_clients_two_classes(sizes):
    labels, parents = np.arange(60_000) % 10, Topology.of("10x10").parents
    levels = [
        {"name": "classes", "k": 3, "sizes": sizes},
        {"name": "classes", "k": 2, "sizes": sizes},
    ]
    result = partition(labels, parents, levels, seed=3)
    check_cover(result, len(labels))
    _, groups, clients = class_counts(labels, result.leaves, parents)
    assert ((groups > 0).sum(axis=1) == 3).all() and ((clients > 0).sum(axis=1) == 2).all()
    assert groups[groups > 0].min() > 0.9 * 2000 and groups.max() < 1.1 * 2000
    assert clients[clients > 0].min() > 0.5 * clients.max()
    assert result.dropped == 0
    if sizes == "equal":
        assert set(result.sizes) == {600}


def test_label_shift_counts_dropped_classes_without_a_holder():
    labels = np.arange(1000) % 10
    result = partition(labels, Topology.of("2").parents, [{"name": "classes", "k": 3}], seed=0)
    check_cover(result, 1000)
    assert result.dropped == 400


def test_label_shift_refuses_sizes_its_classes_cannot_give():
    labels = np.repeat([0, 1], [100, 3])
    levels = [{"name": "classes", "k": 1, "sizes": "equal"}]
    with pytest.raises(InvalidInput, match=r"levels\[0\].sizes = .*cannot give"):
        partition(labels, Topology.of("2").parents, levels, seed=0)


def test_given_counts_are_held_and_set_the_groups_above():
    parents = [np.empty(0, int), np.array([0, 0]), np.array([0, 0, 1])]
    counts = [30, 5, 65]
    for above in (DIRICHLET, "iid", {"name": "classes", "k": 4}):
        levels = [above, {"name": "dirichlet", "alpha": 0.01, "sizes": counts}]
        result = partition(np.arange(120) % 6, parents, levels, seed=1)
        check_cover(result, 120)
        assert result.sizes.tolist() == counts
        assert result.dropped == 20


def test_lognormal_sizes_spread_with_sigma_and_use_every_sample():
    spreads = []
    for sigma in (0.0, 0.5, 1.5):
        levels = [{"name": "lognormal", "sigma": sigma}]
        result = partition(CIFAR_LIKE, Topology.of("200").parents, levels, seed=0)
        check_cover(result, len(CIFAR_LIKE))
        assert result.dropped == 0
        spreads.append(np.log(result.sizes).std())
    assert spreads[0] < 1e-9 and abs(spreads[1] - 0.5) < 0.07 and abs(spreads[2] - 1.5) < 0.2


def test_unequal_groups_have_equal_clients():
    parents = [np.empty(0, int), np.array([0, 0]), np.array([0, 0, 0, 1])]
    result = partition(np.arange(403) % 5, parents, [DIRICHLET, DIRICHLET], seed=0)
    assert result.sizes.tolist() == [100] * 4 and result.dropped == 3


def test_natural_gives_each_client_one_owner_in_order():
    owner = np.repeat(np.arange(8), [30, 5, 40, 30, 31, 60, 35, 33])
    parents = [np.empty(0, int), np.array([0, 0]), np.array([0, 0, 1, 1, 1])]
    levels = ["natural", {"name": "natural", "samples": 30}]
    result = partition(np.zeros(len(owner), int), parents, levels, seed=5, owner=owner)
    check_cover(result, len(owner))
    owners = [set(owner[leaf]) for leaf in result.leaves]
    assert all(len(one) == 1 for one in owners) and len(set().union(*owners)) == 5
    assert set(result.sizes) == {30} and 1 not in set().union(*owners)
    for leaf in result.leaves:
        first = np.flatnonzero(owner == owner[leaf[0]])[:30]
        assert np.array_equal(leaf, first)


def test_natural_groups_may_be_split_among_their_clients():
    owner = np.repeat([4, 9], [50, 70])
    result = partition(np.arange(120) % 3, Topology.of("2x5").parents, ["natural", "iid"], 0, owner=owner)
    check_cover(result, 120)
    assert sorted(result.sizes) == [10] * 5 + [14] * 5
    for group in (result.leaves[:5], result.leaves[5:]):
        assert len(set(owner[np.concatenate(group)])) == 1


def test_seeds_differ_and_levels_may_be_objects():
    parents = Topology.of("3x2").parents
    first = partition(CIFAR_LIKE[:600], parents, [methods.iid(), methods.dirichlet(0.5)], seed=1)
    other = partition(CIFAR_LIKE[:600], parents, [methods.iid(), methods.dirichlet(0.5)], seed=2)
    table = partition(CIFAR_LIKE[:600], parents, [{"name": "iid"}, {"name": "dirichlet", "alpha": 0.5}], seed=1)
    assert all(map(np.array_equal, first.leaves, table.leaves))
    assert not all(map(np.array_equal, first.leaves, other.leaves))
    assert table.methods == ("iid equal sizes", "dirichlet (alpha 0.5) equal sizes")


def test_rotation_travels_with_the_partition():
    result = partition(CIFAR_LIKE, Topology.of("10x10").parents, ["iid", "iid"], 0, rotation={"start": -50, "step": 10})
    assert result.angles is not None
    assert result.angles.reshape(10, 10)[:, 0].tolist() == list(range(-50, 50, 10))
    assert (np.ptp(result.angles.reshape(10, 10), axis=1) == 0).all()


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (["iid"], "levels = .*needs one split per level of the tree, 2"),
        (["iid", "dirichlt"], r"levels\[1\].name = 'dirichlt'.*did you mean 'dirichlet'"),
        (["iid", {"name": "dirichlet"}], r"levels\[1\].alpha = None: dirichlet needs it"),
        (
            ["iid", {"name": "dirichlet", "alfa": 1}],
            r"levels\[1\] key = 'alfa'.*did you mean 'alpha'",
        ),
        (["iid", {"name": "dirichlet", "alpha": 0}], r"levels\[1\].alpha = 0: must be from"),
        (
            ["iid", {"name": "dirichlet", "alpha": "x"}],
            r"levels\[1\].alpha = 'x': must be a number",
        ),
        (["iid", {"name": "classes", "k": 11}], r"levels\[1\].k = 11: .*only 10 classes"),
        (["iid", {"name": "iid", "sizes": [1, 2]}], r"levels\[1\].sizes = .*per node, 4"),
        (["iid", {"name": "iid", "sizes": "big"}], r"levels\[1\].sizes = 'big'"),
        (["natural", "natural"], r"levels\[0\].name = 'natural': .*who owns"),
    ],
)
def test_bad_input_names_the_field(levels, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        partition(np.arange(100) % 10, Topology.of("2x2").parents, levels, seed=0)
    assert "\n" not in str(caught.value)


def test_too_few_samples_and_broken_trees_are_refused():
    with pytest.raises(InvalidInput, match="fewer samples than leaves"):
        partition(np.zeros(3, int), Topology.of("2x2").parents, ["iid", "iid"], seed=0)
    with pytest.raises(InvalidInput, match=r"parents\[2\]"):
        partition(np.zeros(9, int), [[], [0, 0], [1, 0]], ["iid", "iid"], seed=0)
    with pytest.raises(InvalidInput, match=r"parents = .*for each level"):
        partition(np.zeros(9, int), np.arange(6), ["iid", "iid"], seed=0)
    with pytest.raises(InvalidInput, match=r"seed = .*whole number"):
        partition(np.zeros(9, int), Topology.of("2").parents, ["iid"], seed=np.arange(2))
    with pytest.raises(InvalidInput, match=r"rotation = .*a table of"):
        partition(np.zeros(9, int), Topology.of("2").parents, ["iid"], seed=0, rotation=[np.arange(2)])
    with pytest.raises(InvalidInput, match="must not add up to more than"):
        partition(np.zeros(9, int), Topology.of("2").parents, [{"name": "iid", "sizes": [5, 5]}], seed=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=30), st.integers(0, 10_000))
def test_apportion_holds_total_and_leasts(weights, extra):
    least = np.arange(len(weights)) % 4
    total = int(least.sum()) + extra
    sizes = apportion(total, np.array(weights), least)
    assert sizes.sum() == total and (sizes >= least).all()
    ideal = total * np.array(weights) / np.sum(weights)
    if (ideal >= least).all():
        assert np.abs(sizes - ideal).max() < 1 + 1e-6
