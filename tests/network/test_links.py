"""Shared links against progressive filling of one link and one event at a time, and the bytes that
remain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.network import links
from stratafl.network.links import Transfers, remaining_bytes, transfer_end_times


@st.composite
def transfers(draw: st.DrawFn) -> Transfers:
    """Wide, narrow and infinite links; equal, simultaneous, empty and missing transfers; numbers
    that divide each other, so that events coincide."""
    count, most = draw(st.integers(1, 4)), draw(st.integers(1, 7))

    def matrix(*values: float) -> np.ndarray:
        anything = st.floats(min_value=1e-3, max_value=50)
        kind = draw(st.sampled_from([st.just(values[0]), st.sampled_from(values), anything]))
        return np.array([[draw(kind) for _ in range(most)] for _ in range(count)])

    pipe = st.one_of(st.sampled_from([1.0, 4.0, 10.0, np.inf]), st.floats(min_value=0.1, max_value=100))
    return Transfers(
        start_GK=matrix(0.0, 0.5, 1.0, 3.0),
        bytes_GK=matrix(4.0, 0.0, 8.0, 10.0),
        rate_GK=matrix(2.0, 1.0, 4.0, 8.0),
        capacity_G=np.array([draw(pipe) for _ in range(count)]),
        is_sent_GK=np.array([[draw(st.sampled_from([True, True, False])) for _ in range(most)] for _ in range(count)]),
    )


def fair_rates(links: dict[int, float], pipe: float) -> dict[int, float]:
    """Max-min fair rates: the narrowest link is served first."""
    rates, spare = {}, pipe
    for place, number in enumerate(sorted(links, key=lambda child: links[child])):
        rates[number] = min(links[number], spare / (len(links) - place))
        spare -= rates[number]
    return rates


def by_events(start: np.ndarray, size: np.ndarray, link: np.ndarray, pipe: float, is_sent: np.ndarray) -> np.ndarray:
    """End times of the transfers over one shared link."""
    ends, remaining = start.copy(), {n: float(size[n]) for n in np.flatnonzero(is_sent & (size > 0))}
    time = min((start[n] for n in remaining), default=0.0)
    while remaining:
        rates = fair_rates({n: link[n] for n in remaining if start[n] <= time}, pipe)
        over = min(((time + remaining[n] / rate, n) for n, rate in rates.items()), default=(np.inf, -1))
        after = min([start[n] for n in remaining if start[n] > time] + [over[0]])
        for n, rate in rates.items():
            remaining[n] -= rate * (after - time)
            if remaining[n] <= 1e-12 * size[n] or (after == over[0] and n == over[1]):
                ends[n] = after
                del remaining[n]
        time = after
    return ends


@settings(max_examples=300, deadline=None, derandomize=True)
@given(transfers())
def test_transfers_end_as_they_do_one_event_at_a_time(case: Transfers) -> None:
    ends_GK = transfer_end_times(case)
    for row in range(len(case.capacity_G)):
        is_sent_K = case.is_sent_GK[row]
        np.testing.assert_allclose(
            ends_GK[row][is_sent_K], by_events(*(values[row] for values in case))[is_sent_K], rtol=1e-9
        )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(transfers(), st.floats(min_value=-0.1, max_value=1.2))
def test_what_is_left_ends_when_all_of_it_would_have(case: Transfers, share: float) -> None:
    ends_GK = transfer_end_times(case)
    at_G = share * np.where(case.is_sent_GK, ends_GK, 0.0).max(axis=1)
    remaining_GK = remaining_bytes(case, at_G)
    at_G1, is_sent_GK = at_G[:, None], case.is_sent_GK
    assert (
        (remaining_GK[~is_sent_GK] == 0).all() and (remaining_GK >= 0).all() and (remaining_GK <= case.bytes_GK).all()
    )
    waiting_GK = is_sent_GK & (case.start_GK >= at_G1)
    assert (remaining_GK[waiting_GK] == case.bytes_GK[waiting_GK]).all()
    over_GK = is_sent_GK & (remaining_GK == 0)
    assert (ends_GK <= np.maximum(at_G1, case.start_GK) + 1e-9)[over_GK].all()
    begin_GK, again_GK = np.maximum(case.start_GK, at_G1), is_sent_GK & ~over_GK
    again = transfer_end_times(Transfers(begin_GK, remaining_GK, case.rate_GK, case.capacity_G, again_GK))
    np.testing.assert_allclose(again[again_GK], ends_GK[again_GK], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pipe", "at", "expected"),
    [
        (10.0, 0.25, [7.5, 10.0]),
        (10.0, 1.0, [2.5, 7.5]),
        (10.0, 1.5, [0.0, 5.0]),
        (10.0, 9.0, [0.0, 0.0]),
        (20.0, 0.75, [2.5, 7.5]),
        (np.inf, 0.75, [2.5, 7.5]),
        (np.inf, 1.0, [0.0, 5.0]),
        (np.inf, np.inf, [0.0, 0.0]),
    ],
)
def test_bytes_left(pipe: float, at: float, expected: list[float]) -> None:
    """10 bytes each over links of 10, the second half a second after the first."""
    size_GK, is_sent_GK = np.full((1, 2), 10.0), np.ones((1, 2), dtype=bool)
    both = Transfers(np.array([[0.0, 0.5]]), size_GK, size_GK, np.array([pipe]), is_sent_GK)
    np.testing.assert_allclose(remaining_bytes(both, np.array([at])), [expected], atol=1e-12)
    one = both._replace(is_sent_GK=is_sent_GK & [True, False])
    np.testing.assert_allclose(remaining_bytes(one, np.array([at]))[0, 1], 0)


def test_a_pipe_is_the_same_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    shape = 50, 6
    case = Transfers(
        start_GK=draw.uniform(0, 5, shape),
        bytes_GK=draw.uniform(1, 10, shape),
        rate_GK=draw.uniform(1, 5, shape),
        capacity_G=draw.uniform(1, 10, shape[0]),
        is_sent_GK=draw.random(shape) < 0.8,
    )
    ends_GK, remaining_GK = transfer_end_times(case), remaining_bytes(case, np.full(shape[0], 4.0))
    for block in (1, 20, 100):
        monkeypatch.setattr(links, "BLOCK", block)
        assert (transfer_end_times(case) == ends_GK).all() and (
            remaining_bytes(case, np.full(shape[0], 4.0)) == remaining_GK
        ).all()
    alone = transfer_end_times(Transfers(*(values[7:8] for values in case)))
    assert (alone == ends_GK[7]).all()
