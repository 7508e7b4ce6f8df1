"""Assignment of clients to ranks, and the part of a tree that a rank holds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from stratafl import InvalidInput, Topology
from stratafl.core.participation import expected_share
from stratafl.core.schedule import SyncSchedule
from stratafl.distributed.assignment import MAX_IMBALANCE, assign_clients, client_cost
from stratafl.distributed.communicator import Communicator
from stratafl.distributed.subtree import Branch, held_nodes, owned_nodes
from tests.distributed.cases import SHAPES

MEETINGS = np.array([0, 1, 10, 100])


def crossing(tree: Topology, cuts: np.ndarray) -> int:
    """Synchronisations in a round that reach across ranks, except those of the root."""
    total = 0
    for level in range(1, tree.depth):
        ancestors = tree.ancestors(level)
        total += sum(MEETINGS[level + 1] for cut in cuts[1:-1] if ancestors[cut - 1] == ancestors[cut])
    return int(total)


def busiest(work: np.ndarray, cuts: np.ndarray) -> float:
    return max(work[begin:end].sum() for begin, end in itertools.pairwise(cuts))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_cuts_are_among_the_best_assignments(shape: str, ranks: int, seed: int | None) -> None:
    tree = Topology.of(SHAPES[shape])
    work = np.ones(tree.leaves) if seed is None else np.random.default_rng(seed).uniform(1, 9, tree.leaves)
    cuts = assign_clients(tree, work, MEETINGS, ranks)
    inner = itertools.combinations(range(1, tree.leaves), ranks - 1)
    ways = [np.array([0, *way, tree.leaves]) for way in inner]
    least = min(busiest(work, way) for way in ways)
    assert any((way == cuts).all() for way in ways)
    assert busiest(work, cuts) <= MAX_IMBALANCE * least * (1 + 1e-6)
    allowed = [way for way in ways if busiest(work, way) <= MAX_IMBALANCE * least]
    assert crossing(tree, cuts) <= min(crossing(tree, way) for way in allowed)


def test_groups_stay_whole_if_balance_allows() -> None:
    tree = Topology.of("4x5")
    assert assign_clients(tree, np.ones(20), MEETINGS, 2).tolist() == [0, 10, 20]
    assert assign_clients(tree, np.ones(20), MEETINGS, 4).tolist() == [0, 5, 10, 15, 20]
    large = Topology.of([12, 2, 2])
    assert assign_clients(large, np.ones(16), MEETINGS, 4).tolist() == [0, 4, 8, 12, 16]


def test_client_cost_depends_on_batch_and_sampling() -> None:
    work = client_cost([100, 10, 60], 50, "shuffle")
    assert work[0] > work[2] > work[1]
    assert client_cost([100, 60], 50, "replacement")[0] == client_cost([100, 60], 50, "replacement")[1]
    assert np.diff(client_cost([100, 10], None, "shuffle"))[0] == -90
    shares = expected_share([None, 1], Topology.of([4, 1]))
    assert shares.tolist() == [0.25] * 4 + [1.0]
    assert SyncSchedule((3, 2, 5)).meetings.tolist() == [0, 1, 3, 6]


def test_every_rank_needs_a_client() -> None:
    with pytest.raises(InvalidInput, match="every rank needs one"):
        assign_clients(Topology.of(3), np.ones(3), MEETINGS, 4)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_node_is_held_and_answered_for(shape: str) -> None:
    tree = Topology.of(SHAPES[shape])
    for ranks in range(1, 5):
        cuts = assign_clients(tree, np.ones(tree.leaves), MEETINGS, ranks)
        for level in range(tree.depth + 1):
            numbers = np.arange(tree.sizes[level])
            owned = [number for rank in range(ranks) for number in numbers[owned_nodes(tree, cuts, rank, level)]]
            assert owned == list(numbers)
            for rank in range(ranks):
                held = np.unique(tree.ancestors(level)[cuts[rank] : cuts[rank + 1]])
                assert held.tolist() == numbers[held_nodes(tree, cuts, rank, level)].tolist()


def test_one_rank_has_the_bits_of_the_tree() -> None:
    tree = Topology.of(SHAPES["uneven, depth 3"]).weighted("samples", list(range(1, 13)))
    branch = Branch.of_rank(tree, np.array([0, tree.leaves]), Communicator())
    random = torch.Generator().manual_seed(0)
    for level in range(1, tree.depth + 1):
        rows = torch.randn(tree.sizes[level], 5, generator=random)
        present = np.arange(tree.sizes[level]) % 3 > 0
        for there in (None, present):
            assert torch.equal(branch.mean(level, rows, there), tree.mean(level, rows, there))
        assert (branch.present_weight(level, present) == tree.present_weight(level, present)).all()
        assert branch.owned(level).all() and not branch.any_rank(level, False)
