"""Pipes that transfers share: against progressive filling, one pipe and one event at a time; and
what is left of them at any moment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl.network import links
from stratafl.network.links import remaining_bytes, transfer_end_times


class Pipes(NamedTuple):
    """Transfers over pipes, as `finished` takes them."""

    start_GK: np.ndarray
    bytes_GK: np.ndarray
    link_GK: np.ndarray
    pipe_G: np.ndarray
    there_GK: np.ndarray


@st.composite
def pipes(draw: st.DrawFn) -> Pipes:
    """Wide, tight and infinite pipes; transfers that are alike, that begin together, that are empty
    or not there; numbers that divide each other, so that much happens at the same moment."""
    count, most = draw(st.integers(1, 4)), draw(st.integers(1, 7))

    def matrix(*values: float) -> np.ndarray:
        anything = st.floats(min_value=1e-3, max_value=50)
        kind = draw(st.sampled_from([st.just(values[0]), st.sampled_from(values), anything]))
        return np.array([[draw(kind) for _ in range(most)] for _ in range(count)])

    pipe = st.one_of(st.sampled_from([1.0, 4.0, 10.0, np.inf]), st.floats(min_value=0.1, max_value=100))
    return Pipes(
        start_GK=matrix(0.0, 0.5, 1.0, 3.0),
        bytes_GK=matrix(4.0, 0.0, 8.0, 10.0),
        link_GK=matrix(2.0, 1.0, 4.0, 8.0),
        pipe_G=np.array([draw(pipe) for _ in range(count)]),
        there_GK=np.array([[draw(st.sampled_from([True, True, False])) for _ in range(most)] for _ in range(count)]),
    )


def filled(links: dict[int, float], pipe: float) -> dict[int, float]:
    """Fair rates: whoever's own link is the narrowest comes first."""
    rates, spare = {}, pipe
    for place, number in enumerate(sorted(links, key=lambda each: links[each])):
        rates[number] = min(links[number], spare / (len(links) - place))
        spare -= rates[number]
    return rates


def by_events(start: np.ndarray, size: np.ndarray, link: np.ndarray, pipe: float, there: np.ndarray) -> np.ndarray:
    """When the transfers over one pipe end."""
    ends, rest = start.copy(), {n: float(size[n]) for n in np.flatnonzero(there & (size > 0))}
    now = min((start[n] for n in rest), default=0.0)
    while rest:
        rates = filled({n: link[n] for n in rest if start[n] <= now}, pipe)
        over = min(((now + rest[n] / rate, n) for n, rate in rates.items()), default=(np.inf, -1))
        after = min([start[n] for n in rest if start[n] > now] + [over[0]])
        for n, rate in rates.items():
            rest[n] -= rate * (after - now)
            if rest[n] <= 1e-12 * size[n] or (after == over[0] and n == over[1]):
                ends[n] = after
                del rest[n]
        now = after
    return ends


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pipes())
def test_transfers_end_as_they_do_one_event_at_a_time(case: Pipes) -> None:
    ends_GK = transfer_end_times(*case)
    for row in range(len(case.pipe_G)):
        there_K = case.there_GK[row]
        np.testing.assert_allclose(ends_GK[row][there_K], by_events(*(each[row] for each in case))[there_K], rtol=1e-9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pipes(), st.floats(min_value=-0.1, max_value=1.2))
def test_what_is_left_ends_when_all_of_it_would_have(case: Pipes, share: float) -> None:
    ends_GK = transfer_end_times(*case)
    at_G = share * np.where(case.there_GK, ends_GK, 0.0).max(axis=1)
    left_GK = remaining_bytes(*case, at_G)
    at_G1, there_GK = at_G[:, None], case.there_GK
    assert (left_GK[~there_GK] == 0).all() and (left_GK >= 0).all() and (left_GK <= case.bytes_GK).all()
    waiting_GK = there_GK & (case.start_GK >= at_G1)
    assert (left_GK[waiting_GK] == case.bytes_GK[waiting_GK]).all()
    over_GK = there_GK & (left_GK == 0)
    assert (ends_GK <= np.maximum(at_G1, case.start_GK) + 1e-9)[over_GK].all()
    begin_GK, again_GK = np.maximum(case.start_GK, at_G1), there_GK & ~over_GK
    again = transfer_end_times(begin_GK, left_GK, case.link_GK, case.pipe_G, again_GK)
    np.testing.assert_allclose(again[again_GK], ends_GK[again_GK], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pipe", "at", "wanted"),
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
def test_bytes_left(pipe: float, at: float, wanted: list[float]) -> None:
    """10 bytes each over links of 10, the second half a second after the first."""
    given = np.array([[0.0, 0.5]]), np.full((1, 2), 10.0), np.full((1, 2), 10.0), np.array([pipe])
    there_GK = np.ones((1, 2), dtype=bool)
    np.testing.assert_allclose(remaining_bytes(*given, there_GK, np.array([at])), [wanted], atol=1e-12)
    np.testing.assert_allclose(remaining_bytes(*given, there_GK & [True, False], np.array([at]))[0, 1], 0)


def test_a_pipe_is_the_same_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    shape = 50, 6
    case = Pipes(
        start_GK=draw.uniform(0, 5, shape),
        bytes_GK=draw.uniform(1, 10, shape),
        link_GK=draw.uniform(1, 5, shape),
        pipe_G=draw.uniform(1, 10, shape[0]),
        there_GK=draw.random(shape) < 0.8,
    )
    ends_GK, left_GK = transfer_end_times(*case), remaining_bytes(*case, np.full(shape[0], 4.0))
    for block in (1, 20, 100):
        monkeypatch.setattr(links, "BLOCK", block)
        assert (transfer_end_times(*case) == ends_GK).all() and (
            remaining_bytes(*case, np.full(shape[0], 4.0)) == left_GK
        ).all()
    alone = transfer_end_times(*(each[7:8] for each in case))
    assert (alone == ends_GK[7]).all()
