"""What is done with the children of each parent of a level, for all parents and rounds at once.

Shape suffixes: R rounds, N nodes of a level, M nodes of the level above.
"""

from __future__ import annotations

import numpy as np

from stratafl.base.topology import Tree
from stratafl.clock.model.sharing import finished, left


class Families:
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
        ends = finished(begin, size, link, pipe, there)
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
        rest = left(begin, size, link, pipe, there, at_RM.reshape(-1))
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
