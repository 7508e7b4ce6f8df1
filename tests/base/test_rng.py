"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.base.rng import Stream, derive_seed, generator, random_bits, uniform

words = st.integers(-(2**63), 2**63 - 1)
MASK = 2**64 - 1
GOLDEN_FIRST = 313702574736366215
GOLDEN_MODULE = 7807999050645206676
GOLDEN_BITS = [1940905156933390847, 1454762394412203107, 8485420577725376783]
GOLDEN_UNIFORM = 0.17651311431273775
GOLDEN_HOST = [2578679129, 2344363496]


@settings(max_examples=30, deadline=None)
@given(seed=words, purpose=st.sampled_from(list(Stream)), where=st.lists(words, max_size=4))
def test_plain_integers_and_tensors_give_the_same_bits(seed: int, purpose: Stream, where: list[int]) -> None:
    scalar = random_bits(seed, purpose, *where)
    assert scalar.dtype == torch.int64
    assert scalar.shape == ()
    assert derive_seed(seed, purpose, *where) == (scalar.item() & MASK) >> 1
    for first_tensor in range(len(where)):
        mixed = [torch.tensor([w]) if i >= first_tensor else w for i, w in enumerate(where)]
        assert random_bits(seed, purpose, *mixed).tolist() == [scalar.item()]
        mixed = [torch.tensor([w]) if i == first_tensor else w for i, w in enumerate(where)]
        assert random_bits(seed, purpose, *mixed).tolist() == [scalar.item()]


def test_tensors_broadcast_and_each_place_is_its_own_scalar() -> None:
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    table = random_bits(5, Stream.BATCH, rows, 9, columns)
    assert table.shape == (3, 4)
    expected = [[random_bits(5, Stream.BATCH, i, 9, j).item() for j in range(4)] for i in range(3)]
    assert table.tolist() == expected


def test_a_draw_does_not_depend_on_its_company() -> None:
    together = uniform(1, Stream.BATCH, 2, torch.arange(10))
    assert torch.equal(together[4:7], uniform(1, Stream.BATCH, 2, torch.arange(4, 7)))


def test_golden_values() -> None:
    """The stream must not change, or stored runs could not be reproduced."""
    assert derive_seed(0, Stream.BATCH) == GOLDEN_FIRST
    assert derive_seed(42, Stream.MODULE, 3, 1000) == GOLDEN_MODULE
    assert random_bits(7, Stream.BATCH, 1, torch.arange(3)).tolist() == GOLDEN_BITS
    assert uniform(7, Stream.TRANSFORM, 1).item() == GOLDEN_UNIFORM


def test_golden_values_of_a_host_generator() -> None:
    drawn = generator(7, Stream.PARTICIPATION, 2, 5).integers(2**32, size=2)
    assert drawn.tolist() == GOLDEN_HOST


def test_purposes_have_fixed_numbers() -> None:
    first = ["BATCH", "PARTICIPATION", "MODULE", "TRANSFORM", "WEIGHTS", "PARTITION"]
    assert [purpose.name for purpose in Stream][:6] == first
    assert [int(purpose) for purpose in Stream] == list(range(1, len(Stream) + 1))


def test_every_word_counts() -> None:
    places = [
        (seed, purpose, *where)
        for seed in (0, 1)
        for purpose in Stream
        for where in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0)]
    ]
    assert len({random_bits(*place).item() for place in places}) == len(places)
    assert len({derive_seed(*place) for place in places}) == len(places)


def test_generators_of_different_places_differ() -> None:
    places = [
        (7, Stream.PARTICIPATION),
        (7, Stream.PARTICIPATION, 0),
        (7, Stream.PARTICIPATION, 0, 0),
        (7, Stream.PARTICIPATION, 0, 1),
        (7, Stream.PARTICIPATION, 1, 0),
        (7, Stream.MODULE, 0, 0),
        (8, Stream.PARTICIPATION, 0, 0),
        (-7, Stream.PARTICIPATION, 0, 0),
    ]
    assert len({generator(*place).random() for place in places}) == len(places)


def test_a_large_seed_shares_no_generator_with_a_small_one() -> None:
    large = generator(7 + (2 << 32), Stream.BATCH, 5)
    assert large.random() != generator(7, Stream.PARTICIPATION, 1, 5).random()


def test_no_two_of_many_draws_are_equal() -> None:
    table = random_bits(0, Stream.BATCH, torch.arange(100)[:, None], torch.arange(100))
    assert table.unique().numel() == 10_000


def test_uniform_is_uniform() -> None:
    draws = uniform(3, Stream.BATCH, torch.arange(20_000))
    assert draws.dtype == torch.float64
    assert 0 <= draws.min() < 0.001
    assert 0.999 < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.var() - 1 / 12) < 0.003
    counts = torch.histc(draws, 10, 0, 1)
    assert (counts - 2000).abs().max() < 200


def test_consecutive_places_are_unrelated() -> None:
    draws = uniform(3, Stream.BATCH, torch.arange(20_000)).numpy()
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
    other_seed = uniform(4, Stream.BATCH, torch.arange(20_000)).numpy()
    assert abs(np.corrcoef(draws, other_seed)[0, 1]) < 0.02


def test_a_generator_starts_anew_each_time() -> None:
    first = generator(1, Stream.PARTITION, 2)
    before = first.random(5)
    np.testing.assert_array_equal(generator(1, Stream.PARTITION, 2).random(5), before)
    assert not np.array_equal(first.random(5), before)


def test_integers_can_seed_torch() -> None:
    seeds = [derive_seed(seed, Stream.MODULE, -seed) for seed in range(50)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch.Generator().manual_seed(max(seeds)).initial_seed() == max(seeds)


def test_drawing_leaves_the_global_generators_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    uniform(0, Stream.BATCH, torch.arange(5))
    generator(0, Stream.BATCH).random(5)
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)
