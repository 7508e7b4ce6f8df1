"""Max-min fair sharing of a parent's bandwidth, for all groups of siblings at once.

Shape suffixes: G groups of siblings, K transfers of a group, B groups simulated side by side; in
`SiblingGroups`: R rounds, N children, M parents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratafl.base.topology import Topology

BLOCK = 1 << 17
"""Approximate number of transfers simulated side by side: enough to be worth a NumPy call, few
enough for a processor's cache."""


class Transfers(NamedTuple):
    """Transfers of groups of siblings, one row per group."""

    start_GK: np.ndarray
    bytes_GK: np.ndarray
    rate_GK: np.ndarray
    """Bytes per second of each child's own link."""
    capacity_G: np.ndarray
    """Bytes per second of the parent's link, which all children share."""
    is_sent_GK: np.ndarray
    """Whether there is such a transfer."""

    def select(self, group_G: np.ndarray) -> Transfers:
        """Transfers of the groups in a mask."""
        return Transfers(*(values[group_G] for values in self))

    @property
    def is_limited_G(self) -> np.ndarray:
        """Groups whose shared link cannot carry all transfers at their full rates."""
        return np.asarray((self.rate_GK * self.is_sent_GK).sum(axis=1) > self.capacity_G)

    @property
    def unshared_end_GK(self) -> np.ndarray:
        """End times if no link were shared."""
        return self.start_GK + self.bytes_GK / self.rate_GK


def transfer_end_times(transfers: Transfers) -> np.ndarray:
    """End time of each transfer; its start where nothing is sent."""
    start_GK, bytes_GK, rate_GK, capacity_G, is_sent_GK = transfers
    end_GK = np.where(is_sent_GK, transfers.unshared_end_GK, start_GK)
    is_limited_G = transfers.is_limited_G
    # equal transfers that begin together end together: the common case, which needs no simulation
    is_uniform_G = is_limited_G & np.logical_and.reduce(
        [_has_equal_values(values_GK, is_sent_GK) for values_GK in (start_GK, bytes_GK, rate_GK)]
    )
    common_end_GK = start_GK + bytes_GK * (is_sent_GK.sum(axis=1) / capacity_G)[:, None]
    end_GK = np.where(is_uniform_G[:, None] & is_sent_GK, common_end_GK, end_GK)
    is_mixed_G = is_limited_G & ~is_uniform_G
    if is_mixed_G.any():
        mixed = transfers.select(is_mixed_G)
        end_GK[is_mixed_G], _ = simulate_shared_links(mixed, np.full_like(mixed.capacity_G, np.inf))
    return end_GK


def remaining_bytes(transfers: Transfers, time_G: np.ndarray) -> np.ndarray:
    """Bytes of each transfer that are not yet sent at a given time of its group.

    Sending them from that time, or from a later start, ends as `transfer_end_times` says.
    """
    time_G1 = time_G[:, None]
    sent_GK = transfers.rate_GK * np.maximum(time_G1 - transfers.start_GK, 0.0)
    is_finished_GK = ~transfers.is_sent_GK | (transfers.unshared_end_GK <= time_G1)
    remaining_GK = np.where(is_finished_GK, 0.0, np.maximum(transfers.bytes_GK - sent_GK, 0.0))
    is_limited_G = transfers.is_limited_G
    if is_limited_G.any():
        _, remaining_GK[is_limited_G] = simulate_shared_links(transfers.select(is_limited_G), time_G[is_limited_G])
    return remaining_GK


def _has_equal_values(values_GK: np.ndarray, is_sent_GK: np.ndarray) -> np.ndarray:
    """Groups in which all transfers have the same value."""
    largest_G = np.where(is_sent_GK, values_GK, -np.inf).max(axis=1)
    return np.asarray(np.where(is_sent_GK, values_GK, np.inf).min(axis=1) == largest_G)


def simulate_shared_links(transfers: Transfers, until_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Simulate transfers up to a given time of each group; returns the end times of finished
    transfers and the remaining bytes of the others."""
    end_GK = transfers.start_GK.copy()
    remaining_GK = np.where(transfers.is_sent_GK, transfers.bytes_GK, 0.0)
    size = max(1, BLOCK // end_GK.shape[1])
    for first in range(0, len(until_G), size):
        block = slice(first, first + size)
        values = transfers.rate_GK[block], transfers.capacity_G[block], until_G[block]
        state, low = _LinkState.of(transfers.start_GK[block], remaining_GK[block], *values), 0
        while len(state.time_B):
            state = state.without_idle(end_GK[block], remaining_GK[block])
            state.begin()
            low = state.advance(low)
    return end_GK, remaining_GK


class _LinkState(NamedTuple):
    """Simulation of groups (B), each of which advances to its own next start or end of a transfer.

    Transfers (K) are ordered by their start and lie along the first axis, so that an operation on a
    transfer applies to all groups at once.
    """

    group_B: np.ndarray
    """Number of the group among all."""
    order_KB: np.ndarray
    """Position of the transfer among those of its group."""
    start_KB: np.ndarray
    """Start times, followed by an infinite one."""
    link_rate_KB: np.ndarray
    capacity_B: np.ndarray
    until_B: np.ndarray
    remaining_KB: np.ndarray
    """Bytes to send; infinite for finished transfers, which so never end next."""
    active_rates_KB: np.ndarray
    """Rates of the links of running transfers; 0 for all others."""
    end_KB: np.ndarray
    time_B: np.ndarray
    started_B: np.ndarray
    """Number of transfers that have started."""
    next_start_B: np.ndarray
    """Start time of the next transfer."""
    active_B: np.ndarray
    """Number of running transfers."""

    @staticmethod
    def of(
        start_GK: np.ndarray, remaining_GK: np.ndarray, rate_GK: np.ndarray, capacity_G: np.ndarray, until_G: np.ndarray
    ) -> _LinkState:
        """State before the first transfer starts."""
        start_or_inf_GK = np.where(remaining_GK > 0, start_GK, np.inf)
        order_GK = np.argsort(start_or_inf_GK, axis=1, kind="stable")

        def sorted_KB(values_GK: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.take_along_axis(values_GK, order_GK, axis=1).T)

        start_or_inf_KB, remaining_KB = sorted_KB(start_or_inf_GK), sorted_KB(remaining_GK)
        return _LinkState(
            group_B=np.arange(len(capacity_G)),
            order_KB=order_GK.T,
            start_KB=np.concatenate([start_or_inf_KB, np.full((1, len(capacity_G)), np.inf)]),
            link_rate_KB=sorted_KB(rate_GK),
            capacity_B=capacity_G,
            until_B=until_G,
            remaining_KB=np.where(remaining_KB > 0, remaining_KB, np.inf),
            active_rates_KB=np.zeros_like(remaining_KB),
            end_KB=sorted_KB(start_GK),
            time_B=np.where(np.isfinite(start_or_inf_KB[0]), start_or_inf_KB[0], 0.0),
            started_B=np.zeros(len(capacity_G), dtype=np.int64),
            next_start_B=start_or_inf_KB[0].copy(),
            active_B=np.zeros(len(capacity_G)),
        )

    def is_idle_B(self) -> np.ndarray:
        """Groups without further events."""
        return (self.time_B >= self.until_B) | ((self.active_B == 0) & np.isinf(self.next_start_B))

    def without_idle(self, end_GK: np.ndarray, remaining_GK: np.ndarray) -> _LinkState:
        """State of the groups with further events; the results of the others are written to the
        arguments.

        While only a few groups are finished they stay, since removing them copies all others.
        """
        is_idle_B = self.is_idle_B()
        idle, busy = np.flatnonzero(is_idle_B), np.flatnonzero(~is_idle_B)
        if 4 * len(idle) < len(is_idle_B):
            return self
        index = self.group_B[idle], self.order_KB[:, idle]
        remaining_KB = self.remaining_KB[:, idle]
        end_GK[index], remaining_GK[index] = self.end_KB[:, idle], np.where(np.isinf(remaining_KB), 0.0, remaining_KB)
        return _LinkState(*(np.take(values, busy, axis=-1) for values in self))

    def begin(self) -> None:
        """Start the transfers whose start time has come."""
        while len(groups := np.flatnonzero(self.next_start_B <= self.time_B)):
            positions = self.started_B[groups]
            self.active_rates_KB[positions, groups] = self.link_rate_KB[positions, groups]
            self.next_start_B[groups] = self.start_KB[positions + 1, groups]
            self.started_B[groups] += 1
            self.active_B[groups] += 1

    def advance(self, low: int) -> int:
        """Advance to the next event. low: position before which all transfers are finished; returns
        the new one."""
        high = self.started_B.max(initial=0)
        while low < high and np.isinf(self.remaining_KB[low]).all():
            low += 1
        remaining_KB, active_rates_KB, end_KB = (
            values_KB[low:high] for values_KB in (self.remaining_KB, self.active_rates_KB, self.end_KB)
        )
        rate_KB = np.minimum(active_rates_KB, fair_share_rate(active_rates_KB, self.active_B, self.capacity_B))
        with np.errstate(divide="ignore"):
            duration_KB = remaining_KB / rate_KB
        first_end_B = duration_KB.min(axis=0, initial=np.inf)
        limit_B = np.minimum(self.next_start_B, self.until_B)
        is_transfer_end_B, is_idle_B = self.time_B + first_end_B <= limit_B, self.is_idle_B()
        step_B = np.where(is_idle_B, 0.0, np.where(is_transfer_end_B, first_end_B, limit_B - self.time_B))
        next_time_B = np.where(is_transfer_end_B, self.time_B + first_end_B, limit_B)
        self.time_B[:] = np.where(is_idle_B, self.time_B, next_time_B)
        remaining_KB -= rate_KB * step_B
        is_finished_KB = (duration_KB <= step_B) | (remaining_KB <= 0)
        # for a few true entries among many this is ten times as fast as `nonzero`
        positions, groups = np.divmod(np.flatnonzero(is_finished_KB), len(step_B))
        end_KB[positions, groups] = self.time_B[groups]
        remaining_KB[positions, groups], active_rates_KB[positions, groups] = np.inf, 0.0
        self.active_B[:] -= np.bincount(groups, minlength=len(step_B))
        return low


def fair_share_rate(active_rates_KB: np.ndarray, active_B: np.ndarray, capacity_B: np.ndarray) -> np.ndarray:
    """Largest rate that each shared link grants a transfer (max-min fair); infinite where all
    transfers are limited by their own links.

    Transfers whose own links are slower than an equal share keep their rates, and the others share
    the rest equally. This is repeated until the share no longer grows.
    """
    share_B = capacity_B / np.maximum(active_B, 1)
    while True:
        is_below_KB = active_rates_KB < share_B
        others_B = len(active_rates_KB) - is_below_KB.sum(axis=0)
        spare_B = capacity_B - (active_rates_KB * is_below_KB).sum(axis=0)
        larger_share_B = np.where(others_B > 0, spare_B / np.maximum(others_B, 1), np.inf)
        if (larger_share_B <= share_B).all():
            return share_B
        share_B = np.maximum(share_B, larger_share_B)


class SiblingGroups:
    """Sums, maxima and transfers over the children of every parent of a level, who are
    neighbours."""

    def __init__(self, tree: Topology, level: int):
        counts_M = tree.children(level - 1)
        self._starts_M = np.cumsum(counts_M) - counts_M
        self._parents, self._largest_group = len(counts_M), int(counts_M.max())
        self._is_regular = bool((counts_M == self._largest_group).all())
        self._parent_N = tree.parents[level]
        self._position_N = (
            self._parent_N * self._largest_group + np.arange(len(self._parent_N)) - self._starts_M[self._parent_N]
        )

    def sum(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_regular:
            return values_RN.reshape(len(values_RN), self._parents, self._largest_group).sum(axis=2)
        return np.add.reduceat(values_RN, self._starts_M, axis=1)

    def max(self, values_RN: np.ndarray) -> np.ndarray:
        if self._is_regular:
            return values_RN.reshape(len(values_RN), self._parents, self._largest_group).max(axis=2)
        return np.maximum.reduceat(values_RN, self._starts_M, axis=1)

    def min(self, values_RN: np.ndarray) -> np.ndarray:
        return -self.max(-values_RN)

    def to_children(self, values_RM: np.ndarray) -> np.ndarray:
        """Repeat each parent's value for its children."""
        return values_RM[:, self._parent_N]

    def arrival_rank(self, times_RN: np.ndarray) -> np.ndarray:
        """Rank of each child among its siblings by arrival time, from 0; ties in the order of the
        tree."""
        order = np.argsort(self._pad(times_RN, np.inf), axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(self._largest_group)[None], axis=1)
        return rank.reshape(len(times_RN), -1)[:, self._position_N]

    def transfer_end_times(self, transfers: Transfers) -> np.ndarray:
        """End times of the children's transfers (R x N); their starts where nothing is sent.

        transfers: starts, bytes and `is_sent` (R x N), rates (N) and capacities (M).
        """
        if np.isinf(transfers.capacity_G).all():
            return np.where(transfers.is_sent_GK, transfers.unshared_end_GK, transfers.start_GK)
        ends = transfer_end_times(self._by_group(transfers))
        return ends.reshape(len(transfers.is_sent_GK), -1)[:, self._position_N]

    def remaining_bytes(self, transfers: Transfers, time_RM: np.ndarray) -> np.ndarray:
        """Bytes of the children's transfers that are not yet sent at a given time of their
        parent."""
        remaining = remaining_bytes(self._by_group(transfers), time_RM.reshape(-1))
        return remaining.reshape(len(transfers.is_sent_GK), -1)[:, self._position_N]

    def _by_group(self, transfers: Transfers) -> Transfers:
        """Arrange transfers of rounds and nodes (R x N) with one row per round and parent.

        Rates and capacities are given once for all rounds: (N) and (M).
        """
        start_RN, bytes_RN, rate_N, capacity_M, is_sent_RN = transfers
        rate_RN = np.broadcast_to(rate_N, is_sent_RN.shape)
        start, byte_count, rate = self._pad(start_RN, 0.0), self._pad(bytes_RN, 0.0), self._pad(rate_RN, 1.0)
        return Transfers(start, byte_count, rate, np.tile(capacity_M, len(is_sent_RN)), self._pad(is_sent_RN, False))

    def _pad(self, values_RN: np.ndarray, fill: float | bool) -> np.ndarray:
        padded = np.full((len(values_RN), self._parents * self._largest_group), fill, dtype=values_RN.dtype)
        padded[:, self._position_N] = values_RN
        return padded.reshape(-1, self._largest_group)
