"""Part of a tree that a rank holds: its clients and all their ancestors.

An ancestor whose clients are on several ranks is held by each of them, with the same row to the
last bit: its children are aggregated across these ranks, and all get the result. The first of them
owns the ancestor.

Shape suffixes: N nodes of a level of this part, M nodes of the level above, K children of one
parent, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.topology import Mask, Reducer, Topology, reduced
from stratafl.distributed.communicator import Communicator, Members


class SharedParent(NamedTuple):
    """Parent whose children are on several ranks."""

    number: int
    """Number of the parent in the whole tree."""
    members: Members


class SharedLevel(NamedTuple):
    """Shared parents of a level whose ranks are connected, directly or through other parents."""

    group: Members
    """All ranks of these parents."""
    parents: list[SharedParent]


@dataclass(frozen=True, eq=False)
class Branch(Topology):
    """Part of a tree on one rank, whose aggregations include the other ranks.

    `parents` are numbers within this part; `weights` are those among all siblings, on any rank.
    """

    full: Topology = field(kw_only=True)
    cuts: np.ndarray = field(kw_only=True)
    """First client of each rank, and the number of clients at the end."""
    ranks: Communicator = field(kw_only=True)

    @staticmethod
    def of_rank(tree: Topology, cuts: np.ndarray, ranks: Communicator) -> Branch:
        """Part of this rank; every rank must call this with the same tree and cuts."""
        for level in range(tree.depth):
            for shared in _shared_levels(tree, cuts, level):
                for members in (shared.group, *(parent.members for parent in shared.parents)):
                    ranks.request_group(members)
        spans = [held_nodes(tree, cuts, ranks.rank, level) for level in range(tree.depth + 1)]
        parents = [np.empty(0, dtype=np.int64)]
        parents += [tree.parents[m][spans[m]] - spans[m - 1].start for m in range(1, tree.depth + 1)]
        names = tuple(tree.names[m][spans[m]] for m in range(tree.depth + 1))
        weights = tuple(tree.weights[m][spans[m]] for m in range(tree.depth + 1))
        return Branch(tuple(parents), names, weights, full=tree, cuts=cuts, ranks=ranks)

    @property
    def whole(self) -> Topology:
        return self.full

    def restrict(self, level: int, values_N: np.ndarray) -> np.ndarray:
        return values_N[self._spans[level]]

    def owned(self, level: int) -> np.ndarray:
        return self._owned[level]

    def any_rank(self, level: int, flag: bool) -> bool:
        shared = self._shared_levels[level]
        if shared is None:
            return flag
        return bool(self.ranks.all_reduce_numbers(np.array([float(flag)]), shared.group)[0] > 0)

    def present_weight(self, level: int, present_N: Mask) -> np.ndarray:
        shared = self._shared_levels[level]
        if shared is None:
            return super().present_weight(level, present_N)
        share_M = super().present_weight(level, np.asarray(present_N) * self.owned(level))
        above = self._spans[level - 1]
        is_held = [above.start <= parent.number < above.stop for parent in shared.parents]
        numbers = [parent.number - above.start for parent, held in zip(shared.parents, is_held, strict=True) if held]
        partial = np.zeros(len(shared.parents))
        partial[is_held] = share_M[numbers]
        share_M[numbers] = self.ranks.all_reduce_numbers(partial, shared.group)[is_held]
        return share_M

    def sibling_median(
        self, level: int, values_N: np.ndarray, present_N: np.ndarray, upper: bool = False
    ) -> np.ndarray:
        shared, span = self._shared_levels[level], self._spans[level]
        if shared is None:
            return super().sibling_median(level, values_N, present_N, upper)
        # values and presence of the whole level, of which this rank knows its own nodes and their
        # siblings; all other nodes count as absent
        level_values = np.zeros((2, self.full.sizes[level]))
        level_values[:, span] = values_N, present_N
        is_shared = np.isin(self.full.parents[level], [parent.number for parent in shared.parents])
        is_owned = np.zeros_like(is_shared)
        is_owned[span] = self.owned(level)
        counted = is_owned[is_shared] & (level_values[1, is_shared] > 0)
        numbers = np.where(counted, level_values[:, is_shared], 0.0)
        level_values[:, is_shared] = self.ranks.all_reduce_numbers(numbers, shared.group)
        return self.full.sibling_median(level, level_values[0], level_values[1] > 0, upper)[span]

    def mean(
        self, level: int, rows_NP: Tensor, present_N: Mask | None = None, share_M: np.ndarray | None = None
    ) -> Tensor:
        if self._shared_levels[level] is None:
            return super().mean(level, rows_NP, present_N, share_M)
        present_N = np.ones(self.sizes[level], dtype=bool) if present_N is None else np.asarray(present_N)
        if share_M is None:
            share_M = self.present_weight(level, present_N)
        per_child_N = np.where(share_M > 0, share_M, 1.0)[self.parents[level]]
        counted_N = present_N & self.owned(level)
        weights_N = self.weights[level] * counted_N / per_child_N
        if not counted_N.all():
            # the rows of nodes that are not counted may be infinite, which a weight of zero turns
            # into NaN
            rows_NP = torch.where(to_device(counted_N, rows_NP.device)[:, None], rows_NP, rows_NP.new_zeros(()))
        sums_MP = self._sums(level, to_device(weights_N, rows_NP.device, rows_NP.dtype), rows_NP)
        if rows_NP.shape[1]:
            self.ranks.all_reduce_rows(
                [(parent.members, sums_MP[number]) for number, parent in self._shared_parents(level)]
            )
        return sums_MP

    def reduce(self, level: int, rows_NP: Tensor, present_N: np.ndarray, reducer: Reducer) -> Tensor:
        shared = self._shared_parents(level)
        is_local_N = ~np.isin(self.parents[level], [number for number, _ in shared])
        reduced_MP = super().reduce(level, rows_NP, present_N & is_local_N, reducer)
        for number, parent in shared:
            self._reduce_across(level, rows_NP, present_N, reducer, parent, reduced_MP[number])
        return reduced_MP

    def _reduce_across(
        self, level: int, rows_NP: Tensor, present_N: np.ndarray, reducer: Reducer, parent: SharedParent, row_P: Tensor
    ) -> None:
        """Reduce the rows of a parent's children on its first rank, and broadcast the result.

        The result is written to `row_P`. If no child is present, `row_P` does not change.
        """
        ranks, span, (first, *others) = self.ranks, self._spans[level], parent.members
        children = np.flatnonzero(self.full.parents[level] == parent.number)
        held = children[(children >= span.start) & (children < span.stop)] - span.start
        sent = held[(present_N & self.owned(level))[held]]
        present_K = ranks.all_reduce_numbers(np.isin(children, sent + span.start), parent.members) > 0
        if not present_K.any():
            return
        if ranks.rank != first:
            ranks.send(rows_NP[sent], first, "rows")
        else:
            rows = [rows_NP[sent]]
            for other in others:
                owned = owned_nodes(self.full, self.cuts, other, level)
                count = int(present_K[(children >= owned.start) & (children < owned.stop)].sum())
                out = torch.empty(count, rows_NP.shape[1], dtype=rows_NP.dtype)
                rows.append(ranks.receive(out, other).to(rows_NP.device))
            row_P.copy_(reduced(reducer, torch.cat(rows), self.full.weights[level][children[present_K]]))
        ranks.broadcast_row(row_P, parent.members)

    @cached_property
    def _spans(self) -> list[slice]:
        """Nodes of each level that this rank holds."""
        return [held_nodes(self.full, self.cuts, self.ranks.rank, level) for level in range(self.depth + 1)]

    @cached_property
    def _owned(self) -> list[np.ndarray]:
        """Whether this rank owns each node that it holds, by level."""
        masks = []
        for level, span in enumerate(self._spans):
            owned = owned_nodes(self.full, self.cuts, self.ranks.rank, level)
            number_N = np.arange(span.start, span.stop)
            masks.append((number_N >= owned.start) & (number_N < owned.stop))
        return masks

    @cached_property
    def _shared_levels(self) -> list[SharedLevel | None]:
        """Shared parents of each edge level whose aggregation includes this rank; None if none."""
        levels: list[SharedLevel | None] = [None]
        for level in range(self.depth):
            shared = _shared_levels(self.full, self.cuts, level)
            levels.append(next((part for part in shared if self.ranks.rank in part.group), None))
        return levels

    def _shared_parents(self, level: int) -> list[tuple[int, SharedParent]]:
        """Shared parents of an edge level that this rank holds, with their numbers in this part."""
        shared, first = self._shared_levels[level], self._spans[level - 1].start
        parents = () if shared is None else shared.parents
        return [(parent.number - first, parent) for parent in parents if self.ranks.rank in parent.members]


def held_nodes(tree: Topology, cuts: np.ndarray, rank: int, level: int) -> slice:
    """Nodes of a level that a rank has rows of."""
    ancestor_N = tree.ancestors(level)
    return slice(int(ancestor_N[cuts[rank]]), int(ancestor_N[cuts[rank + 1] - 1]) + 1)


def owned_nodes(tree: Topology, cuts: np.ndarray, rank: int, level: int) -> slice:
    """Nodes of a level that a rank owns: a shared one belongs to the first rank that holds it."""
    span = held_nodes(tree, cuts, rank, level)
    if rank > 0 and held_nodes(tree, cuts, rank - 1, level).stop > span.start:
        return slice(span.start + 1, max(span.stop, span.start + 1))
    return span


def _shared_levels(tree: Topology, cuts: np.ndarray, level: int) -> list[SharedLevel]:
    """Nodes of a level that are on several ranks, by groups that have no rank in common."""
    ancestor_N = tree.ancestors(level)
    levels: list[SharedLevel] = []
    for number in np.unique(ancestor_N[cuts[1:-1]]):
        clients = np.flatnonzero(ancestor_N == number)
        first, last = np.searchsorted(cuts, [clients[0], clients[-1]], side="right") - 1
        if first == last:
            continue
        parent = SharedParent(int(number), tuple(range(int(first), int(last) + 1)))
        if levels and levels[-1].group[-1] >= first:
            group = tuple(range(levels[-1].group[0], int(last) + 1))
            levels[-1] = SharedLevel(group, [*levels[-1].parents, parent])
        else:
            levels.append(SharedLevel(parent.members, [parent]))
    return levels
