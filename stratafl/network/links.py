"""Max-min fair sharing of bandwidth, for all groups of siblings at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratafl.base.topology import Tree

BLOCK = 1 << 17
"""Transfers that are gone through side by side, about: enough to be worth a call of NumPy, and few
enough to stay in a processor's cache."""


def transfer_end_times(
    start_GK: np.ndarray, bytes_GK: np.ndarray, link_GK: np.ndarray, pipe_G: np.ndarray, there_GK: np.ndarray
) -> np.ndarray:
    """When each transfer ends that is there; the others' times mean nothing."""
    end_GK = np.where(there_GK, start_GK + bytes_GK / link_GK, start_GK)
    # a pipe that takes all links together at once is none
    tight_G = (link_GK * there_GK).sum(axis=1) > pipe_G
    # those that begin together and are alike end together: the usual case, and no need for steps
    alike_G = tight_G & np.logical_and.reduce([_is_even(each, there_GK) for each in (start_GK, bytes_GK, link_GK)])
    together_GK = start_GK + bytes_GK * (there_GK.sum(axis=1) / pipe_G)[:, None]
    end_GK = np.where(alike_G[:, None] & there_GK, together_GK, end_GK)
    apart_G = tight_G & ~alike_G
    if apart_G.any():
        never_G = np.full_like(pipe_G, np.inf)
        given = (values[apart_G] for values in (start_GK, bytes_GK, link_GK, pipe_G, there_GK, never_G))
        end_GK[apart_G], _ = simulate_shared_links(*given)
    return end_GK


def remaining_bytes(
    start_GK: np.ndarray,
    bytes_GK: np.ndarray,
    link_GK: np.ndarray,
    pipe_G: np.ndarray,
    there_GK: np.ndarray,
    at_G: np.ndarray,
) -> np.ndarray:
    """The bytes of each transfer that are not yet sent at a moment of its pipe; of one that is not
    there, none.

    What is left, begun then or at its own later start, ends when `finished` says.
    """
    at_G1 = at_G[:, None]
    sent_GK = link_GK * np.maximum(at_G1 - start_GK, 0.0)
    is_over_GK = ~there_GK | (start_GK + bytes_GK / link_GK <= at_G1)
    left_GK = np.where(is_over_GK, 0.0, np.maximum(bytes_GK - sent_GK, 0.0))
    tight_G = (link_GK * there_GK).sum(axis=1) > pipe_G
    if tight_G.any():
        given = (values[tight_G] for values in (start_GK, bytes_GK, link_GK, pipe_G, there_GK, at_G))
        _, left_GK[tight_G] = simulate_shared_links(*given)
    return left_GK


def _is_even(values_GK: np.ndarray, there_GK: np.ndarray) -> np.ndarray:
    """Over which pipes all transfers that are there have the same value."""
    largest_G = np.where(there_GK, values_GK, -np.inf).max(axis=1)
    return np.asarray(np.where(there_GK, values_GK, np.inf).min(axis=1) == largest_G)


def simulate_shared_links(
    start_GK: np.ndarray,
    bytes_GK: np.ndarray,
    link_GK: np.ndarray,
    pipe_G: np.ndarray,
    there_GK: np.ndarray,
    until_G: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Up to some moment of each pipe: when transfers end that end by then, and what is left of the
    others."""
    end_GK, left_GK = start_GK.copy(), np.where(there_GK, bytes_GK, 0.0)
    size = max(1, BLOCK // start_GK.shape[1])
    for first in range(0, len(pipe_G), size):
        some = slice(first, first + size)
        pipes, low = _LinkState.of(start_GK[some], left_GK[some], link_GK[some], pipe_G[some], until_G[some]), 0
        while len(pipes.now_B):
            pipes = pipes.without_idle(end_GK[some], left_GK[some])
            pipes.begin()
            low = pipes.advance(low)
    return end_GK, left_GK


class _LinkState(NamedTuple):
    """Some pipes (B) side by side, each at a moment of its own, from which it goes on to the next
    beginning or end of a transfer. Transfers (K) come in the order in which they begin, and lie
    along the first axis, so that what is done to them is done to all pipes at once."""

    number_B: np.ndarray
    """Which pipe it is."""
    place_KB: np.ndarray
    """Which of its transfers this is."""
    start_KB: np.ndarray
    """With one more that never begins."""
    link_KB: np.ndarray
    pipe_B: np.ndarray
    until_B: np.ndarray
    rest_KB: np.ndarray
    """Bytes; without an end where nothing is left, so that the next end is another's."""
    taken_KB: np.ndarray
    """The links of transfers that are under way; 0 for all others."""
    end_KB: np.ndarray
    now_B: np.ndarray
    begun_B: np.ndarray
    """How many have begun."""
    begins_B: np.ndarray
    """When the next begins."""
    live_B: np.ndarray
    """How many are under way."""

    @staticmethod
    def of(
        start_GK: np.ndarray, left_GK: np.ndarray, link_GK: np.ndarray, pipe_G: np.ndarray, until_G: np.ndarray
    ) -> _LinkState:
        """Before anything has begun."""
        begin_GK = np.where(left_GK > 0, start_GK, np.inf)
        place_GK = np.argsort(begin_GK, axis=1, kind="stable")

        def sorted_KB(values_GK: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.take_along_axis(values_GK, place_GK, axis=1).T)

        begin_KB, rest_KB = sorted_KB(begin_GK), sorted_KB(left_GK)
        return _LinkState(
            number_B=np.arange(len(pipe_G)),
            place_KB=place_GK.T,
            start_KB=np.concatenate([begin_KB, np.full((1, len(pipe_G)), np.inf)]),
            link_KB=sorted_KB(link_GK),
            pipe_B=pipe_G,
            until_B=until_G,
            rest_KB=np.where(rest_KB > 0, rest_KB, np.inf),
            taken_KB=np.zeros_like(rest_KB),
            end_KB=sorted_KB(start_GK),
            now_B=np.where(np.isfinite(begin_KB[0]), begin_KB[0], 0.0),
            begun_B=np.zeros(len(pipe_G), dtype=np.int64),
            begins_B=begin_KB[0].copy(),
            live_B=np.zeros(len(pipe_G)),
        )

    def is_idle_B(self) -> np.ndarray:
        """Where nothing more happens."""
        return (self.now_B >= self.until_B) | ((self.live_B == 0) & np.isinf(self.begins_B))

    def without_idle(self, end_GK: np.ndarray, left_GK: np.ndarray) -> _LinkState:
        """Those that go on; of the others, write down when transfers ended and what is left. They
        stay where they are few, since to leave them behind is to copy all."""
        is_idle_B = self.is_idle_B()
        idle, going = np.flatnonzero(is_idle_B), np.flatnonzero(~is_idle_B)
        if 4 * len(idle) < len(is_idle_B):
            return self
        where = self.number_B[idle], self.place_KB[:, idle]
        rest_KB = self.rest_KB[:, idle]
        end_GK[where], left_GK[where] = self.end_KB[:, idle], np.where(np.isinf(rest_KB), 0.0, rest_KB)
        return _LinkState(*(np.take(values, going, axis=-1) for values in self))

    def begin(self) -> None:
        """Let transfers begin whose time has come."""
        while len(these := np.flatnonzero(self.begins_B <= self.now_B)):
            places = self.begun_B[these]
            self.taken_KB[places, these] = self.link_KB[places, these]
            self.begins_B[these] = self.start_KB[places + 1, these]
            self.begun_B[these] += 1
            self.live_B[these] += 1

    def advance(self, low: int) -> int:
        """Go on to the next moment; low: before which place all are over, which is returned."""
        high = self.begun_B.max(initial=0)
        while low < high and np.isinf(self.rest_KB[low]).all():
            low += 1
        rest_KB, taken_KB, end_KB = (each[low:high] for each in (self.rest_KB, self.taken_KB, self.end_KB))
        rate_KB = np.minimum(taken_KB, fair_share_rate(taken_KB, self.live_B, self.pipe_B))
        with np.errstate(divide="ignore"):
            needs_KB = rest_KB / rate_KB
        ends_B = needs_KB.min(axis=0, initial=np.inf)
        stops_B = np.minimum(self.begins_B, self.until_B)
        is_end_B, is_idle_B = self.now_B + ends_B <= stops_B, self.is_idle_B()
        step_B = np.where(is_idle_B, 0.0, np.where(is_end_B, ends_B, stops_B - self.now_B))
        then_B = np.where(is_end_B, self.now_B + ends_B, stops_B)
        self.now_B[:] = np.where(is_idle_B, self.now_B, then_B)
        rest_KB -= rate_KB * step_B
        is_over_KB = (needs_KB <= step_B) | (rest_KB <= 0)
        # of few among many, this is ten times as fast as `nonzero`
        places, these = np.divmod(np.flatnonzero(is_over_KB), len(step_B))
        end_KB[places, these] = self.now_B[these]
        rest_KB[places, these], taken_KB[places, these] = np.inf, 0.0
        self.live_B[:] -= np.bincount(these, minlength=len(step_B))
        return low


def fair_share_rate(taken_KB: np.ndarray, live_B: np.ndarray, pipe_B: np.ndarray) -> np.ndarray:
    """The most that anybody gets of each pipe, without an end where all are limited by their links.

    Equal parts of what those leave over whose links take less are never too much, and the more
    links are found to take less, the larger are the others' parts; until no link is.
    """
    level_B = pipe_B / np.maximum(live_B, 1)
    while True:
        is_less_KB = taken_KB < level_B
        others_B = len(taken_KB) - is_less_KB.sum(axis=0)
        spare_B = pipe_B - (taken_KB * is_less_KB).sum(axis=0)
        more_B = np.where(others_B > 0, spare_B / np.maximum(others_B, 1), np.inf)
        if (more_B <= level_B).all():
            return level_B
        level_B = np.maximum(level_B, more_B)


class SiblingGroups:
    """The children of each parent of a level, who are neighbours."""

    def __init__(self, tree: Tree, level: int):
        counts_M = tree.children(level - 1)
        self._starts_M = np.cumsum(counts_M) - counts_M
        self._parents, self._most = len(counts_M), int(counts_M.max())
        self._is_even = bool((counts_M == self._most).all())
        self._parent_N = tree.parents[level]
        self._place_N = self._parent_N * self._most + np.arange(len(self._parent_N)) - self._starts_M[self._parent_N]

    def sum(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_even:
            return values_RN.reshape(len(values_RN), self._parents, self._most).sum(axis=2)
        return np.add.reduceat(values_RN, self._starts_M, axis=1)

    def max(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_even:
            return values_RN.reshape(len(values_RN), self._parents, self._most).max(axis=2)
        return np.maximum.reduceat(values_RN, self._starts_M, axis=1)

    def min(self, values_RN: np.ndarray) -> np.ndarray:
        return -self.max(-values_RN)

    def spread(self, values_RM: np.ndarray) -> np.ndarray:
        """Each parent's value for all its children."""
        return values_RM[:, self._parent_N]

    def earliest(self, times_RN: np.ndarray) -> np.ndarray:
        """Each child's place among its siblings by its time, from 0; of equal times the first in
        the tree's order comes first."""
        order = np.argsort(self._padded(times_RN, np.inf), axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(self._most)[None], axis=1)
        return place.reshape(len(times_RN), -1)[:, self._place_N]

    def transfer(
        self, begin_RN: np.ndarray, size_RN: np.ndarray, link_N: np.ndarray, pipe_M: np.ndarray, there_RN: np.ndarray
    ) -> np.ndarray:
        """When transfers end; where none is, its own beginning."""
        if np.isinf(pipe_M).all():
            return np.where(there_RN, begin_RN + size_RN / link_N, begin_RN)
        begin, size, link, pipe, there = self._pipes(begin_RN, size_RN, link_N, pipe_M, there_RN)
        ends = transfer_end_times(begin, size, link, pipe, there)
        return ends.reshape(len(there_RN), -1)[:, self._place_N]

    def left(
        self,
        begin_RN: np.ndarray,
        size_RN: np.ndarray,
        link_N: np.ndarray,
        pipe_M: np.ndarray,
        there_RN: np.ndarray,
        at_RM: np.ndarray,
    ) -> np.ndarray:
        """What is not yet sent of transfers at a moment of their parent's."""
        begin, size, link, pipe, there = self._pipes(begin_RN, size_RN, link_N, pipe_M, there_RN)
        rest = remaining_bytes(begin, size, link, pipe, there, at_RM.reshape(-1))
        return rest.reshape(len(there_RN), -1)[:, self._place_N]

    def _pipes(
        self, begin_RN: np.ndarray, size_RN: np.ndarray, link_N: np.ndarray, pipe_M: np.ndarray, there_RN: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """A row for each parent's pipe, as `sharing` takes them."""
        link_RN = np.broadcast_to(link_N, there_RN.shape)
        begin, size, link, there = (self._padded(values, fill) for values, fill in
                                    ((begin_RN, 0.0), (size_RN, 0.0), (link_RN, 1.0), (there_RN, False)))  # fmt: skip
        return begin, size, link, np.tile(pipe_M, len(there_RN)), there

    def _padded(self, values_RN: np.ndarray, fill: float | bool) -> np.ndarray:
        padded = np.full((len(values_RN), self._parents * self._most), fill, dtype=values_RN.dtype)
        padded[:, self._place_N] = values_RN
        return padded.reshape(-1, self._most)
