"""A rank's part of a tree: its leaves and all their ancestors, as a tree that adds up with the
other ranks' parts.

An ancestor whose leaves lie on several ranks is on each of them, with the same row to the last bit:
what its children make of it is added up in one place and handed to all. The first of those ranks
answers for it.

Shape suffixes: N nodes of this part's level, M nodes of the level above, K children of one parent,
P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.topology import Mask, Reducer, Tree, reduced
from stratafl.distributed.communicator import Communicator, Members


class SharedParent(NamedTuple):
    """A parent whose children lie on several ranks."""

    number: int
    """The parent's number in the whole tree."""
    members: Members


class SharedLevel(NamedTuple):
    """Parents of a level that are shared with this rank, or with a rank that shares one with it,
    and so on."""

    circle: Members
    """All ranks concerned."""
    parents: list[SharedParent]


@dataclass(frozen=True, eq=False)
class Branch(Tree):
    """`parents` are numbers within this part; `weights` are those among all siblings, wherever they
    are."""

    full: Tree = field(kw_only=True)
    cuts: np.ndarray = field(kw_only=True)
    """Where each rank's leaves begin, and where the last one's end."""
    ranks: Communicator = field(kw_only=True)

    @staticmethod
    def of_rank(tree: Tree, cuts: np.ndarray, ranks: Communicator) -> Branch:
        """Every rank must make its own of the same tree and cuts."""
        for level in range(tree.depth):
            for shares in _shares(tree, cuts, level):
                for members in (shares.circle, *(parent.members for parent in shares.parents)):
                    ranks.circle(members)
        spans = [held_nodes(tree, cuts, ranks.rank, level) for level in range(tree.depth + 1)]
        none = np.empty(0, dtype=np.int64)
        parents = [none, *(tree.parents[m][spans[m]] - spans[m - 1].start for m in range(1, tree.depth + 1))]
        names = tuple(tree.names[m][spans[m]] for m in range(tree.depth + 1))
        weights = tuple(tree.weights[m][spans[m]] for m in range(tree.depth + 1))
        return Branch(tuple(parents), names, weights, full=tree, cuts=cuts, ranks=ranks)

    @property
    def whole(self) -> Tree:
        return self.full

    def restrict(self, level: int, values_N: np.ndarray) -> np.ndarray:
        return values_N[self._spans[level]]

    def owned(self, level: int) -> np.ndarray:
        return self._counted[level]

    def any_rank(self, level: int, flag: bool) -> bool:
        shares = self._shares[level]
        if shares is None:
            return flag
        return bool(self.ranks.add_numbers(np.array([float(flag)]), shares.circle)[0] > 0)

    def present_weight(self, level: int, present_N: Mask) -> np.ndarray:
        shares = self._shares[level]
        if shares is None:
            return super().present_weight(level, present_N)
        share_M = super().present_weight(level, np.asarray(present_N) * self.owned(level))
        above = self._spans[level - 1]
        mine = [above.start <= parent.number < above.stop for parent in shares.parents]
        places = [parent.number - above.start for parent, is_mine in zip(shares.parents, mine, strict=True) if is_mine]
        partial = np.zeros(len(shares.parents))
        partial[mine] = share_M[places]
        share_M[places] = self.ranks.add_numbers(partial, shares.circle)[mine]
        return share_M

    def sibling_median(
        self, level: int, values_N: np.ndarray, present_N: np.ndarray, upper: bool = False
    ) -> np.ndarray:
        shares, span = self._shares[level], self._spans[level]
        if shares is None:
            return super().sibling_median(level, values_N, present_N, upper)
        # what the level looks like where this rank or its siblings' ranks see it; nobody is there
        # elsewhere
        seen = np.zeros((2, self.full.sizes[level]))
        seen[:, span] = values_N, present_N
        shared = np.isin(self.full.parents[level], [parent.number for parent in shares.parents])
        mine = np.zeros_like(shared)
        mine[span] = self.owned(level)
        numbers = np.where(mine[shared] & (seen[1, shared] > 0), seen[:, shared], 0.0)
        seen[:, shared] = self.ranks.add_numbers(numbers, shares.circle)
        return self.full.sibling_median(level, seen[0], seen[1] > 0, upper)[span]

    def mean(
        self, level: int, rows_NP: Tensor, present_N: Mask | None = None, share_M: np.ndarray | None = None
    ) -> Tensor:
        if self._shares[level] is None:
            return super().mean(level, rows_NP, present_N, share_M)
        here_N = np.ones(self.sizes[level], dtype=bool) if present_N is None else np.asarray(present_N)
        if share_M is None:
            share_M = self.present_weight(level, here_N)
        per_child_N = np.where(share_M > 0, share_M, 1.0)[self.parents[level]]
        mine_N = here_N & self.owned(level)
        weights_N = self.weights[level] * mine_N / per_child_N
        if not mine_N.all():
            # those that do not count may hold anything, also infinity, which no weight of zero
            # takes away
            rows_NP = torch.where(to_device(mine_N, rows_NP.device)[:, None], rows_NP, rows_NP.new_zeros(()))
        sums_MP = self._sums(level, to_device(weights_N, rows_NP.device, rows_NP.dtype), rows_NP)
        if rows_NP.shape[1]:
            self.ranks.add_rows([(parent.members, sums_MP[place]) for place, parent in self._shared(level)])
        return sums_MP

    def reduce(self, level: int, rows_NP: Tensor, present_N: np.ndarray, reducer: Reducer) -> Tensor:
        shared = self._shared(level)
        alone_N = ~np.isin(self.parents[level], [place for place, _ in shared])
        reduced_MP = super().reduce(level, rows_NP, present_N & alone_N, reducer)
        for place, parent in shared:
            self._reduce_across(level, rows_NP, present_N, reducer, parent, reduced_MP[place])
        return reduced_MP

    def _reduce_across(
        self, level: int, rows_NP: Tensor, present_N: np.ndarray, reducer: Reducer, parent: SharedParent, row_P: Tensor
    ) -> None:
        """Collect the messages of a parent's children on its first rank, reduce them there, and
        hand the row to all."""
        ranks, span, (first, *others) = self.ranks, self._spans[level], parent.members
        family = np.flatnonzero(self.full.parents[level] == parent.number)
        mine = family[(family >= span.start) & (family < span.stop)] - span.start
        sending = mine[(present_N & self.owned(level))[mine]]
        there_K = ranks.add_numbers(np.isin(family, sending + span.start), parent.members) > 0
        if not there_K.any():
            return
        if ranks.rank != first:
            ranks.send(rows_NP[sending], first, "rows")
        else:
            rows = [rows_NP[sending]]
            for other in others:
                theirs = owned_nodes(self.full, self.cuts, other, level)
                count = int(there_K[(family >= theirs.start) & (family < theirs.stop)].sum())
                room = torch.empty(count, rows_NP.shape[1], dtype=rows_NP.dtype)
                rows.append(ranks.receive(room, other).to(rows_NP.device))
            row_P.copy_(reduced(reducer, torch.cat(rows), self.full.weights[level][family[there_K]]))
        ranks.spread_row(row_P, parent.members)

    @cached_property
    def _spans(self) -> list[slice]:
        return [held_nodes(self.full, self.cuts, self.ranks.rank, level) for level in range(self.depth + 1)]

    @cached_property
    def _counted(self) -> list[np.ndarray]:
        masks = []
        for level, span in enumerate(self._spans):
            mine = owned_nodes(self.full, self.cuts, self.ranks.rank, level)
            number_N = np.arange(span.start, span.stop)
            masks.append((number_N >= mine.start) & (number_N < mine.stop))
        return masks

    @cached_property
    def _shares(self) -> list[SharedLevel | None]:
        """What of each edge level reaches across ranks and concerns this one."""
        found: list[SharedLevel | None] = [None]
        for level in range(self.depth):
            mine = (shares for shares in _shares(self.full, self.cuts, level) if self.ranks.rank in shares.circle)
            found.append(next(mine, None))
        return found

    def _shared(self, level: int) -> list[tuple[int, SharedParent]]:
        """The shared parents of an edge level that are here, with their numbers in this part."""
        shares, first = self._shares[level], self._spans[level - 1].start
        parents = () if shares is None else shares.parents
        return [(each.number - first, each) for each in parents if self.ranks.rank in each.members]


def held_nodes(tree: Tree, cuts: np.ndarray, rank: int, level: int) -> slice:
    """The nodes of a level that a rank has rows of."""
    ancestor_N = tree.ancestors(level)
    return slice(int(ancestor_N[cuts[rank]]), int(ancestor_N[cuts[rank + 1] - 1]) + 1)


def owned_nodes(tree: Tree, cuts: np.ndarray, rank: int, level: int) -> slice:
    """The nodes of a level that a rank answers for, of those that it holds."""
    span = held_nodes(tree, cuts, rank, level)
    if rank > 0 and held_nodes(tree, cuts, rank - 1, level).stop > span.start:
        return slice(span.start + 1, max(span.stop, span.start + 1))
    return span


def _shares(tree: Tree, cuts: np.ndarray, level: int) -> list[SharedLevel]:
    """The nodes of a level that lie on several ranks, in circles that have no rank in common."""
    ancestor_N = tree.ancestors(level)
    found: list[SharedLevel] = []
    for number in np.unique(ancestor_N[cuts[1:-1]]):
        leaves = np.flatnonzero(ancestor_N == number)
        first, last = np.searchsorted(cuts, [leaves[0], leaves[-1]], side="right") - 1
        if first == last:
            continue
        parent = SharedParent(int(number), tuple(range(int(first), int(last) + 1)))
        if found and found[-1].circle[-1] >= first:
            circle = tuple(range(found[-1].circle[0], int(last) + 1))
            found[-1] = SharedLevel(circle, [*found[-1].parents, parent])
        else:
            found.append(SharedLevel(parent.members, [parent]))
    return found
