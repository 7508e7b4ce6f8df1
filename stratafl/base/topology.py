"""The tree of a federation: parents, names and weights of its nodes.

Level 0 is the root, level D the leaves (clients). Nodes of a level are numbered so that siblings
are neighbours, and a level's models are the rows of one matrix. Edge level m joins the nodes of
level m to their parents on level m - 1.

Shape suffixes: N nodes of the level, M nodes of the level above, P parameters.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.errors import InvalidInput, format_value
from stratafl.base.validation import plain

Shape = int | str | Sequence | Mapping

Mask = np.ndarray | Tensor
"""One boolean per node of a level, on the host."""

Reducer = Callable[[Tensor, Tensor], Tensor]
"""Aggregate the children of one parent: (K x P rows, K weights) to one row."""

ROOT = "root"
ALL = 1 - 1e-9
"""A sum of sibling weights above this is 1 up to rounding: no sibling is missing."""

LEAF = object()
MOST_NODES, MOST_LEVELS = 10_000_000, 100
"""Limits of a tree's size below the root; trees with more than a few levels are rare."""

TOO_LARGE = f"at most {MOST_NODES:,} nodes below the root, on at most {MOST_LEVELS} levels"


@dataclass(frozen=True, eq=False)
class Topology:
    """Immutable tree whose leaves, the clients, all have the same depth.

    `parents[m]` gives each node of level m its parent's number on level m - 1 (entry 0 is empty);
    `weights[m]` sums to one over all siblings, of which a part of a tree may lack some; `names[m]`
    are paths, unique within the tree.
    """

    parents: tuple[np.ndarray, ...]
    names: tuple[tuple[str, ...], ...]
    weights: tuple[np.ndarray, ...]
    _on_device: dict = field(default_factory=dict, repr=False)

    @staticmethod
    def of(shape: Topology | Shape) -> Topology:
        """Build a tree from any of its notations.

        `"4x5x5"` or `"20"` (balanced, root first); `20` (depth 1); `[3, 5, 2]` (three groups of 3,
        5 and 2 clients); `[[2, 3], [4]]` (one level more); `{"paris": 3, "rome": ["a", "b"]}`
        (named).
        """
        if isinstance(shape, Topology):
            return shape
        shape = plain(shape)
        if isinstance(shape, str):
            return Topology._build(_parse_balanced(shape))
        return Topology._build(shape)

    @staticmethod
    def _build(shape: object) -> Topology:
        parents: list[list[int]] = []
        names: list[list[str]] = []
        leaf_level: set[int] = set()

        _check_size(shape)

        def add(level: int, parent: int, path: str, below: object) -> None:
            while len(parents) < level + 1:
                parents.append([])
                names.append([])
            parents[level].append(parent)
            names[level].append(path)
            me = len(parents[level]) - 1
            if below is LEAF:
                leaf_level.add(level)
                return
            for name, child in _children(below):
                add(level + 1, me, name if level == 0 else f"{path}/{name}", child)

        add(0, 0, ROOT, shape)
        if len(leaf_level) != 1:
            raise InvalidInput("tree.shape", shape, "all clients must be at the same depth")
        counted = Counter(name for level in names for name in level)
        if len(counted) != sum(map(len, names)):
            raise InvalidInput("tree.shape", shape, f"two nodes are named {format_value(counted.most_common(1)[0][0])}")
        arrays = [np.array(p, dtype=np.int64) for p in parents]
        arrays[0] = np.empty(0, dtype=np.int64)
        uniform = [np.ones(len(n)) for n in names]
        return Topology(tuple(arrays), tuple(map(tuple, names)), _normalize(arrays, uniform))

    @staticmethod
    def family(parent: str, children: Sequence[str], weights: np.ndarray) -> Topology:
        """Tree of one parent and some of its children, each with its weight among all of them."""
        parents = np.empty(0, dtype=np.int64), np.zeros(len(children), dtype=np.int64)
        return Topology(parents, ((parent,), tuple(children)), (np.ones(1), weights))

    @property
    def depth(self) -> int:
        return len(self.parents) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level, root first."""
        return tuple(len(names) for names in self.names)

    @property
    def leaves(self) -> int:
        return self.sizes[-1]

    def find(self, name: str) -> tuple[int, int]:
        """Level and number of the node with this name."""
        if name not in self._places:
            raise InvalidInput("node", name, "no node of the tree has this name")
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {name: (level, i) for level, names in enumerate(self.names) for i, name in enumerate(names)}

    def children(self, level: int) -> np.ndarray:
        """Number of children of each node of this level."""
        return np.bincount(self.parents[level + 1], minlength=self.sizes[level])

    def subtree(self, level: int, number: int) -> frozenset[str]:
        """Names of a node and of all nodes below it."""
        names, inside = {self.names[level][number]}, np.arange(self.sizes[level]) == number
        for below in range(level + 1, self.depth + 1):
            inside = inside[self.parents[below]]
            names.update(self.names[below][i] for i in np.flatnonzero(inside))
        return frozenset(names)

    def ancestors(self, level: int) -> np.ndarray:
        """Number of each client's ancestor on the given level."""
        up = np.arange(self.leaves)
        for lower in range(self.depth, level, -1):
            up = self.parents[lower][up]
        return up

    def weighted(self, weights: str | Sequence | np.ndarray, samples: Sequence[int] | None = None) -> Topology:
        """The same tree with other sibling weights.

        `"uniform"`; `"samples"` (by the number of samples below a node); one positive number per
        client, summed towards the root; or one such list per level, root's children first.
        """
        if isinstance(weights, str):
            if weights == "uniform":
                per_level = [np.ones(n) for n in self.sizes]
            elif weights == "samples":
                if samples is None:
                    raise InvalidInput("tree.weights", weights, "needs the sample counts of the clients")
                per_level = self._subtree_sums(np.asarray(samples, dtype=float))
            else:
                raise InvalidInput("tree.weights", weights, 'must be "uniform", "samples" or positive numbers')
        else:
            try:
                levels = [plain(value) for value in _in_order(weights)]
                nested = bool(levels) and isinstance(levels[0], Sequence) and not isinstance(levels[0], str)
                arrays = [np.asarray(_in_order(w), dtype=float) for w in (levels if nested else [levels])]
            except (TypeError, ValueError, OverflowError):
                raise InvalidInput(
                    "tree.weights", weights, 'must be "uniform", "samples" or positive numbers'
                ) from None
            if nested and len(levels) != self.depth:
                raise InvalidInput("tree.weights", levels, f"needs one list per level, {self.depth} of them")
            per_level = [np.ones(1), *arrays] if nested else self._subtree_sums(arrays[0])
        # the leaves first, so that an error shows the user's own numbers instead of sums of them
        for level, values in reversed(list(enumerate(per_level))):
            if values.shape != (self.sizes[level],):
                raise InvalidInput("tree.weights", values, f"level {level} has {self.sizes[level]} nodes")
            with np.errstate(over="ignore"):
                is_finite = np.isfinite(values.sum())
            if not (is_finite and (values > 0).all()):
                raise InvalidInput("tree.weights", values, "must be positive and finite, also added up")
        return replace(self, weights=_normalize(self.parents, per_level), _on_device={})

    def _subtree_sums(self, leaf_weights: np.ndarray) -> list[np.ndarray]:
        if leaf_weights.shape != (self.leaves,):
            raise InvalidInput("tree.weights", leaf_weights.tolist(), f"needs one per client, {self.leaves} of them")
        levels = [leaf_weights]
        for level in range(self.depth, 0, -1):
            sums = np.bincount(self.parents[level], weights=levels[0], minlength=self.sizes[level - 1])
            levels.insert(0, sums)
        return levels

    # -- for a tree that is divided over several processes (see `distributed.subtree`)

    @property
    def whole(self) -> Topology:
        """The whole tree that this one is a part of; this tree, if it is no part."""
        return self

    def restrict(self, level: int, values_N: np.ndarray) -> np.ndarray:
        """Values of this part's nodes, selected from the values of all nodes of a level."""
        return values_N

    def owned(self, level: int) -> np.ndarray:
        """Mask of the nodes this part owns; a node in several parts is owned by one of them."""
        return np.ones(self.sizes[level], dtype=bool)

    def owned_names(self, level: int, mask_N: np.ndarray) -> list[str]:
        """Names of the owned nodes that are in the mask."""
        return [self.names[level][i] for i in np.flatnonzero(mask_N & self.owned(level))]

    def any_rank(self, level: int, flag: bool) -> bool:
        """Whether `flag` is true on any rank that shares parents on edge level `level`."""
        return flag

    def sibling_median(
        self, level: int, values_N: np.ndarray, present_N: np.ndarray, upper: bool = False
    ) -> np.ndarray:
        """Median of each node's present siblings: see the function `sibling_median`."""
        return sibling_median(values_N, present_N, self.parents[level], upper)

    def mean(
        self, level: int, rows_NP: Tensor, present_N: Mask | None = None, share_M: np.ndarray | None = None
    ) -> Tensor:
        """Weighted mean of each parent's present children; zero for a parent without any.

        Rows of absent children are ignored, also if they are NaN. `share_M` is
        `present_weight(level, present_N)`, where it is known already.
        """
        present = np.ones(self.sizes[level], dtype=bool) if present_N is None else np.asarray(present_N)
        if present.all() and self._all_siblings_present[level]:
            key = level, rows_NP.device, rows_NP.dtype
            if key not in self._on_device:
                self._on_device[key] = to_device(self.weights[level], rows_NP.device, rows_NP.dtype)
            return self._sums(level, self._on_device[key], rows_NP)
        total_M = self.present_weight(level, present) if share_M is None else share_M
        weights_N = self.weights[level] * present / np.where(total_M > 0, total_M, 1.0)[self.parents[level]]
        here_N1 = to_device(present, rows_NP.device)[:, None]
        rows_NP = torch.where(here_N1, rows_NP, rows_NP.new_zeros(()))
        return self._sums(level, to_device(weights_N, rows_NP.device, rows_NP.dtype), rows_NP)

    def _sums(self, level: int, weights_N: Tensor, rows_NP: Tensor) -> Tensor:
        """Weighted sum of each parent's children, whose rows are neighbours."""
        counts = self._family_sizes[level]
        if rows_NP.shape[1] == 0:
            return rows_NP.new_zeros(len(counts), 0)
        if len(set(counts)) == 1:
            families = (len(counts), counts[0], -1)
            return torch.bmm(weights_N.view(families).mT, rows_NP.view(families))[:, 0]
        parts = zip(weights_N.split(counts), rows_NP.split(counts), strict=True)
        return torch.stack([weights_K @ rows_KP for weights_K, rows_KP in parts])

    @cached_property
    def _all_siblings_present(self) -> list[bool]:
        """Whether the tree holds all siblings of each level, so that their weights add up to 1."""
        sums = [np.ones(1), *(np.bincount(self.parents[m], self.weights[m]) for m in range(1, self.depth + 1))]
        return [bool((sum_M > ALL).all()) for sum_M in sums]

    @cached_property
    def _family_sizes(self) -> list[list[int]]:
        """Number of children of each parent, per level of the children."""
        return [[], *(self.children(level).tolist() for level in range(self.depth))]

    def reduce(self, level: int, rows_NP: Tensor, present_N: np.ndarray, reducer: Reducer) -> Tensor:
        """Apply a reducer to each parent's present children; zero for a parent without any."""
        reduced_MP = rows_NP.new_zeros(self.sizes[level - 1], rows_NP.shape[1])
        # a reducer gets one parent's children at a time
        for parent in np.unique(self.parents[level][present_N]):
            children = np.flatnonzero(present_N & (self.parents[level] == parent))
            reduced_MP[parent] = reduced(reducer, rows_NP[children], self.weights[level][children])
        return reduced_MP

    def to_children(self, level: int, rows_MP: Tensor) -> Tensor:
        """Repeat each parent's row for its children on `level`."""
        key = level, rows_MP.device
        if key not in self._on_device:
            self._on_device[key] = to_device(self.parents[level], rows_MP.device)
        return rows_MP.index_select(0, self._on_device[key])

    def present_weight(self, level: int, present_N: Mask) -> np.ndarray:
        """Sum of the weights of each parent's present children (1 if all are)."""
        weights_N = self.weights[level] * np.asarray(present_N)
        return np.bincount(self.parents[level], weights=weights_N, minlength=self.sizes[level - 1])

    def __str__(self) -> str:
        if all(len(set(self.children(level))) == 1 for level in range(self.depth)):
            return "x".join(str(self.children(level)[0]) for level in range(self.depth))
        return " > ".join(map(str, self.sizes)) + " nodes"


def _in_order(weights: Sequence | np.ndarray) -> list:
    """Weights as a list; text, mappings and sets are refused."""
    if isinstance(weights, str | Mapping | Set):
        raise TypeError
    values = list(weights)
    if any(isinstance(value, str | bytes) for value in values):
        raise TypeError
    return values


def sibling_median(
    values_N: np.ndarray, present_N: np.ndarray, parent_N: np.ndarray, upper: bool = False
) -> np.ndarray:
    """Median of the values of each present node's present siblings, without its own value.

    With an even number of siblings it is the lower of the two middle values, so that two of three
    nodes cannot hide each other; with `upper` it is the upper one, so that one small node of three
    does not make the other two look large. Zero for a node without siblings.
    """
    medians_N = np.zeros(len(values_N))
    present = np.flatnonzero(present_N)
    value, parent = values_N[present], parent_N[present]
    ordered = value[np.lexsort((value, parent))]
    count = np.bincount(parent)
    end = np.cumsum(count)
    # without a node's own value, the middle is this entry of the sorted values, or the next one
    # where the own value is not above this entry
    middle = (end - count + (np.maximum(count - 2, 0) + upper) // 2)[parent]
    at, beyond = ordered[middle], ordered[np.minimum(middle + 1, len(ordered) - 1)]
    medians_N[present] = np.where(count[parent] > 1, np.where(value <= at, beyond, at), 0.0)
    return medians_N


def reduced(reducer: Reducer, rows_KP: Tensor, weights: np.ndarray) -> Tensor:
    """Apply a reducer to the children of one parent, with weights that add up to 1."""
    return reducer(rows_KP, to_device(weights / weights.sum(), rows_KP.device, rows_KP.dtype))


def _normalize(parents: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    shares = [np.ones(1)]
    for parent, weight in zip(parents[1:], weights[1:], strict=True):
        shares.append(weight / np.bincount(parent, weights=weight)[parent])
    return tuple(shares)


def _parse_balanced(text: str) -> object:
    try:
        counts = [int(part) for part in text.split("x")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InvalidInput("tree.shape", text, 'must be positive numbers joined by x, such as "4x5"')
    if len(counts) > MOST_LEVELS or sum(accumulate(counts, operator.mul)) > MOST_NODES:
        raise InvalidInput("tree.shape", text, TOO_LARGE)
    shape: object = counts.pop()
    while counts:
        shape = [shape] * counts.pop()
    return shape


def _check_size(shape: object) -> None:
    """Refuse a notation of too large a tree before the tree is built."""
    nodes, remaining = 0, [(shape, 1)]
    while remaining:
        part, level = remaining.pop()
        if isinstance(part, Mapping):
            part = list(part.values())
        if isinstance(part, Integral):
            nodes += max(int(part), 0)
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            nodes += len(part)
            remaining += [(below, level + 1) for below in part]
        else:
            continue
        if nodes > MOST_NODES or level > MOST_LEVELS:
            raise InvalidInput("tree.shape", shape, TOO_LARGE)


def _children(shape: object) -> list[tuple[str, object]]:
    """Names and notations of the children in a notation; the notation of a client is LEAF."""
    if isinstance(shape, bool | bytes) or not isinstance(shape, Integral | Sequence | Mapping):
        raise InvalidInput("tree.shape", shape, "must be a number, a list, or a table of named groups")
    if isinstance(shape, Integral):
        if shape < 1:
            raise InvalidInput("tree.shape", shape, "a group needs at least one child")
        return [(str(i), LEAF) for i in range(int(shape))]
    if len(shape) == 0:
        raise InvalidInput("tree.shape", shape, "a group needs at least one child")
    if isinstance(shape, Mapping):
        return [(name if isinstance(name, str) else format_value(name), below) for name, below in shape.items()]
    if isinstance(shape, str):
        raise InvalidInput("tree.shape", shape, "must be a number, a list, or a table of named groups")
    if all(isinstance(child, str) for child in shape):
        return [(child, LEAF) for child in shape]
    return [(str(i), child) for i, child in enumerate(shape)]


def subtree_counts(parents: Sequence[Sequence[int] | np.ndarray], leaves_N: np.ndarray) -> list[np.ndarray]:
    """Sums of the clients' counts below each node, per level, root first.

    `parents` is that of a tree; counts may have further axes, such as one of classes.
    """
    counts = [leaves_N]
    for level in range(len(parents) - 1, 0, -1):
        above = 1 if level == 1 else len(parents[level - 1])
        counts.insert(0, np.zeros((above, *leaves_N.shape[1:]), dtype=leaves_N.dtype))
        np.add.at(counts[0], np.asarray(parents[level], dtype=np.int64), counts[1])
    return counts


def groups_of(tree: Topology) -> list[int]:
    """Number of clients of each group of a two-level tree; empty for all other trees."""
    sizes = tree.children(tree.depth - 1).tolist()
    return sizes if tree.depth == 2 and len(sizes) > 1 else []


def balanced_hint(tree: Topology) -> str:
    """Hint at the balanced tree that a list of group sizes may have been meant as."""
    sizes = groups_of(tree)
    if not sizes:
        return ""
    return f': {sizes} is {len(sizes)} groups of so many clients, and a balanced tree "{"x".join(map(str, sizes))}"'
