"""Samples of a client's steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.data.batches import batch_indices, padded_batches


def positions(**changes) -> list[list[int]]:
    call = {"seed": 0, "client": 0, "size": 10, "first": 0, "steps": 6, "batch": 4, **changes}
    return [batch.tolist() for batch in batch_indices(**call)]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 20), batch=st.integers(1, 25), epoch=st.integers(0, 5))
def test_an_epoch_covers_each_sample_once(size: int, batch: int, epoch: int) -> None:
    per_epoch = -(-size // min(batch, size))
    chosen = positions(size=size, batch=batch, first=epoch * per_epoch, steps=per_epoch)
    assert sorted(i for part in chosen for i in part) == list(range(size))
    assert [len(part) for part in chosen[:-1]] == [min(batch, size)] * (per_epoch - 1)


def test_the_last_batch_holds_what_is_left() -> None:
    assert [len(part) for part in positions()] == [4, 4, 2, 4, 4, 2]
    assert [len(part) for part in positions(size=8)] == [4] * 6


def test_epochs_differ() -> None:
    chosen = positions(steps=9)
    epochs = [chosen[i : i + 3] for i in (0, 3, 6)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_client_smaller_than_a_batch_uses_all_it_has() -> None:
    chosen = positions(size=3, batch=32)
    assert [sorted(part) for part in chosen] == [[0, 1, 2]] * 6
    assert positions(size=1, batch=32) == [[0]] * 6


def test_replacement_draws_within_the_client() -> None:
    chosen = positions(sampling="replacement", steps=200)
    assert {len(part) for part in chosen} == {4}
    drawn = torch.tensor(chosen).flatten()
    assert drawn.unique().tolist() == list(range(10))
    assert any(len(set(part)) < 4 for part in chosen), "draws are independent, so some repeat"
    assert (torch.bincount(drawn) - 80).abs().max() < 40


def test_replacement_caps_the_batch_at_the_client_s_size() -> None:
    chosen = positions(sampling="replacement", size=3, batch=32, steps=20)
    assert {len(part) for part in chosen} == {3}
    assert all(0 <= i < 3 for part in chosen for i in part)


@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
def test_full_batches_are_in_order(sampling: str) -> None:
    assert positions(batch=None, size=4, steps=3, sampling=sampling) == [[0, 1, 2, 3]] * 3


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 12),
    batch=st.one_of(st.none(), st.integers(1, 8)),
    first=st.integers(0, 10),
    steps=st.integers(0, 8),
    sampling=st.sampled_from(["shuffle", "replacement"]),
)
def test_a_later_start_is_a_slice_of_a_longer_call(
    size: int, batch: int | None, first: int, steps: int, sampling: str
) -> None:
    longer = positions(size=size, batch=batch, steps=first + steps, sampling=sampling)
    part = positions(size=size, batch=batch, first=first, steps=steps, sampling=sampling)
    assert part == longer[first:]


@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
def test_clients_and_seeds_differ(sampling: str) -> None:
    base = positions(sampling=sampling)
    assert positions(sampling=sampling) == base
    assert positions(sampling=sampling, client=1) != base
    assert positions(sampling=sampling, seed=1) != base


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=0, max_size=6),
    batch=st.one_of(st.none(), st.integers(1, 9)),
    first=st.integers(0, 40),
    steps=st.integers(0, 9),
    sampling=st.sampled_from(["shuffle", "replacement"]),
    skip=st.integers(1, 3),
    seed=st.integers(-3, 3),
    places=st.one_of(st.none(), st.integers(1, 20)),
)
def test_all_clients_at_once_get_what_each_gets_alone(
    sizes: list[int],
    batch: int | None,
    first: int,
    steps: int,
    sampling: str,
    skip: int,
    seed: int,
    places: int | None,
) -> None:
    clients = [skip * place for place in range(len(sizes))]
    stack = padded_batches(seed, clients, sizes, first, steps, batch, sampling, places=places)
    assert stack.position_CHB.shape == stack.mask_CHB.shape
    assert stack.position_CHB.shape[:2] == (len(sizes), steps) == stack.length_CH.shape
    for place, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        for step, alone in enumerate(batch_indices(seed, client, size, first, steps, batch, sampling)):
            position_B, mask_B = stack.position_CHB[place, step], stack.mask_CHB[place, step]
            assert position_B[mask_B].tolist() == alone.tolist()
            assert mask_B.sum() == len(alone) == stack.length_CH[place, step]
            assert bool((position_B[~mask_B] == alone[0]).all()), "padding repeats a sample of the same batch"
