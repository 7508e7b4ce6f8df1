"""Partition of a data set over the clients of a tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, generator
from stratafl.base.topology import Topology, balanced_hint, groups_of, subtree_counts
from stratafl.base.validation import check_integer, check_keys, check_number
from stratafl.data.dataset import ClientIndex
from stratafl.data.partition import methods as sizing
from stratafl.data.partition.methods import NodeSamples, PartitionMethod, parse


class Labels(NamedTuple):
    """Targets of all samples, and their owners if known."""

    y_train: np.ndarray
    y_test: np.ndarray
    owner_train: np.ndarray | None = None
    owner_test: np.ndarray | None = None


def like_train(data: Labels, leaves: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Test samples of each client, divided like the training samples in `leaves`.

    Nobody gets the test samples of an owner or class that no client has training samples of.
    """
    leaf_T = _by_owner(data, leaves)
    if leaf_T is None:
        leaf_T = _by_class(data, leaves, seed)
    return [np.flatnonzero(leaf_T == leaf) for leaf in range(len(leaves))]


def _by_owner(data: Labels, leaves: Sequence[np.ndarray]) -> np.ndarray | None:
    """Client of each test sample's owner, -1 for none; None if an owner has several clients."""
    if data.owner_train is None or data.owner_test is None:
        return None
    last = int(max(data.owner_train.max(initial=0), data.owner_test.max(initial=0)))
    leaf_of = np.full(last + 1, -1)
    for leaf, samples in enumerate(leaves):
        owners = np.unique(data.owner_train[samples])
        if (leaf_of[owners] >= 0).any():
            return None
        leaf_of[owners] = leaf
    return leaf_of[data.owner_test]


def _by_class(data: Labels, leaves: Sequence[np.ndarray], seed: int) -> np.ndarray:
    for labels in (data.y_train, data.y_test):
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            allowed = "needs one class for each sample, or owners of the samples"
            raise InvalidInput("data.test_partition", "like_train", allowed)
    leaf_T = np.full(len(data.y_test), -1)
    for label in np.unique(data.y_test):
        held_N = np.array([np.count_nonzero(data.y_train[samples] == label) for samples in leaves])
        if not held_N.any():
            continue
        draw = generator(seed, Stream.TEST, int(label))
        samples = draw.permutation(np.flatnonzero(data.y_test == label))
        leaf_T[samples] = np.repeat(np.arange(len(leaves)), _apportion(len(samples), held_N, draw))
    return leaf_T


def _apportion(total: int, held_N: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Divide `total` in proportion to `held_N` into integers, by largest remainders.

    Equal remainders are decided at random.
    """
    exact_N = total * held_N / held_N.sum()
    whole_N = np.floor(exact_N).astype(np.int64)
    order = np.lexsort((draw.permutation(len(held_N)), whole_N - exact_N))
    whole_N[order[: total - whole_N.sum()]] += 1
    return whole_N


MOST_DEGREES = 1e6
"""Largest rotation in degrees; in far larger ones, float64 has few digits for the angle itself."""


def leaf_angles(
    parents: Sequence[Sequence[int] | np.ndarray], start: float = -50.0, step: float = 10.0, level: int = 1
) -> np.ndarray:
    """Angle of each client in degrees: node i (from 0) of the level has start + step * i.

    The defaults are the paper's; if its groups are counted from 1, start is -40.
    """
    depth = len(parents) - 1
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= depth:
        raise InvalidInput("rotation.level", level, f"must be a level of the tree, 1 to {depth}")
    start, step = (
        check_number(f"rotation.{name}", value, at_least=-MOST_DEGREES, at_most=MOST_DEGREES)
        for name, value in (("start", start), ("step", step))
    )
    node = np.arange(len(parents[-1]))
    for lower in range(depth, level, -1):
        node = np.asarray(parents[lower])[node]
    return start + step * node


ROTATION = ("start", "step", "level")


@dataclass(frozen=True, eq=False)
class Partition:
    """Samples of each client, in order of the tree's leaves; each client's are ascending.

    `methods` describes how each level was divided, root first. `angles` are the degrees by which
    each client's training images are rotated; None if they are not.
    """

    leaves: tuple[np.ndarray, ...]
    dropped: int
    methods: tuple[str, ...]
    seed: int
    angles: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(leaf) for leaf in self.leaves])


def partition(
    labels: np.ndarray,
    parents: Sequence[Sequence[int] | np.ndarray],
    levels: Sequence[object],
    seed: int,
    *,
    owner: np.ndarray | None = None,
    rotation: Mapping[str, object] | None = None,
) -> Partition:
    """Divide samples over the clients of a tree; the same seed gives the same partition.

    labels     the class of each sample, a whole number, at least 0
    parents    `parents[m][i]` is the parent, on level m - 1, of node i of level m; entry 0 is empty
    levels     one method per edge level, root first: `{"name": "dirichlet", "alpha": 0.1}`, a bare
               name, or what a function of `methods` returned. All but natural and lognormal take
               `sizes`: "equal" (the default; for classes, what the classes give),
               {"lognormal": sigma}, or one count per node of the level. Counts on a level also set
               the sizes of the levels above it that ask for none.
    owner      the owner of each sample, for `natural`
    rotation   rotate training images by node: `{"start": -50, "step": 10, "level": 1}`
    """
    labels, seed = _whole_numbers("labels", labels), check_integer("seed", seed)
    owner = None if owner is None else _whole_numbers("owner", owner)
    if owner is not None and len(owner) != len(labels):
        raise InvalidInput("owner", len(owner), f"needs one per sample, {len(labels)} of them")
    tree = _check_parents(parents)
    methods = _parse_methods(levels, tree)
    below = subtree_counts(tree, np.ones(len(tree[-1]), dtype=np.int64))
    if len(labels) < len(below[-1]):
        raise InvalidInput("labels", len(labels), f"fewer samples than leaves ({len(below[-1])})")
    owners, least = _required_owners(methods, tree, below)
    angles = None if rotation is None else _parse_rotation(rotation, tree)

    held = [np.arange(len(labels))]
    for level, method in enumerate(methods, start=1):
        firsts = np.searchsorted(tree[level], np.arange(len(held) + 1))
        children: list[np.ndarray] = []
        for number, samples in enumerate(held):
            nodes = slice(int(firsts[number]), int(firsts[number + 1]))
            node = NodeSamples(
                labels[samples],
                None if owner is None else owner[samples],
                below[level][nodes],
                owners[level - 1][nodes],
                least[level - 1],
                _sampler_of_sizes(method, below[level][nodes], nodes),
            )
            stream = generator(seed, Stream.PARTITION, level, number)
            children += _children(samples, node, method, stream, f"levels[{level - 1}]", nodes.start)
        held = children
    kept = sum(map(len, held))
    texts = tuple(method.text for method in methods)
    return Partition(tuple(held), len(labels) - kept, texts, seed, angles)


def _children(
    samples: np.ndarray, node: NodeSamples, method: PartitionMethod, stream: np.random.Generator, where: str, first: int
) -> list[np.ndarray]:
    """Divide a node's samples over its children.

    For error messages, `where` is the method's place in the config and `first` the number of the
    first child.
    """
    try:
        child_S = method.assign(node, stream)
    except InvalidInput as error:
        raise InvalidInput(f"{where}.{error.field}", error.value, error.allowed) from None
    order = np.argsort(child_S, kind="stable")
    ends = np.searchsorted(child_S[order], np.arange(len(node.leaves_N) + 1))
    parts = np.split(samples[order], ends)[1:-1]
    for number, (part, leaves) in enumerate(zip(parts, node.leaves_N, strict=True), start=first):
        if len(part) < leaves:
            raise InvalidInput(where, method.text, f"node {number} gets {len(part)} samples for {leaves} leaves")
    return parts


def _sampler_of_sizes(
    method: PartitionMethod, leaves_N: np.ndarray, nodes: slice
) -> Callable[[int, np.random.Generator], np.ndarray] | None:
    sizes = method.sizes
    if sizes is None:
        return None

    def draw(total: int, rng: np.random.Generator) -> np.ndarray:
        if total < leaves_N.sum():
            raise InvalidInput("sizes", total, f"too few samples for {leaves_N.sum()} leaves; each needs one")
        sizes_N = sizes.draw(total, leaves_N, nodes, rng)
        if sizes_N.sum() > total:
            raise InvalidInput("sizes", sizes_N.tolist(), f"must not add up to more than the {total} there are")
        return sizes_N

    return draw


def _parse_methods(levels: Sequence[object], tree: list[np.ndarray]) -> list[PartitionMethod]:
    depth = len(tree) - 1
    if isinstance(levels, str | Mapping) or not isinstance(levels, Sequence):
        raise InvalidInput("levels", levels, "must be a list with one split per level")
    if len(levels) != depth:
        raise InvalidInput("levels", list(levels), f"needs one split per level of the tree, {depth} of them")
    methods = [parse(spec, f"levels[{m}]") for m, spec in enumerate(levels)]
    counts: np.ndarray | None = None
    for level in range(depth, 0, -1):
        method = methods[level - 1]
        if isinstance(method.sizes, sizing.GivenSizes):
            counts = np.array(method.sizes.counts)
            if len(counts) != len(tree[level]):
                raise InvalidInput(
                    f"levels[{level - 1}].sizes",
                    counts.tolist(),
                    f"needs one count per node, {len(tree[level])} of them",
                )
        elif method.sizes is not None or method.name == "natural":
            counts = None
        elif counts is not None:
            methods[level - 1] = method._replace(sizes=sizing.GivenSizes(tuple(counts.tolist())))
        else:
            methods[level - 1] = method._replace(sizes=method.default_sizes)
        if counts is not None:
            counts = np.bincount(tree[level], weights=counts).astype(np.int64)
    return methods


def _parse_rotation(rotation: Mapping[str, object], tree: list[np.ndarray]) -> np.ndarray:
    if not isinstance(rotation, Mapping):
        raise InvalidInput("rotation", rotation, f"must be a table of {', '.join(ROTATION)}")
    check_keys("rotation", rotation, ROTATION)
    return leaf_angles(tree, **rotation)  # type: ignore[arg-type]


def _required_owners(
    methods: list[PartitionMethod], tree: list[np.ndarray], below: list[np.ndarray]
) -> tuple[list[np.ndarray], list[int]]:
    """Number of owners that each node gets, and fewest samples an owner may have, per edge level.

    Only `natural` uses them. Each node of the last of consecutive `natural` levels gets one owner,
    who needs a sample for each client below.
    """
    owners: list[np.ndarray] = []
    least: list[int] = []
    for level in range(len(tree) - 1, 0, -1):
        method = methods[level - 1]
        runs_on = level < len(methods) and methods[level].name == "natural"
        if method.name == "natural" and runs_on:
            owners.insert(0, np.bincount(tree[level + 1], weights=owners[0]).astype(np.int64))
            least.insert(0, max(least[0], method.params["samples"] or 1))
        else:
            owners.insert(0, np.ones(len(tree[level]), dtype=np.int64))
            asked = method.params.get("samples") or 1
            least.insert(0, max(int(below[level].max()), asked))
    return owners, least


def _check_parents(parents: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
    try:
        tree = [np.asarray(level, dtype=np.int64) for level in parents]
    except (TypeError, ValueError):
        tree = []
    if any(level.ndim != 1 for level in tree):
        raise InvalidInput("parents", parents, "must be a list of parents for each level")
    if len(tree) < 2:
        raise InvalidInput("parents", parents, "needs at least one level below the root")
    above = 1
    for m, level in enumerate(tree[1:], start=1):
        # siblings are neighbours and every parent has children: each number is that of the node
        # before or the next one, from 0 to the last parent
        steps = np.diff(level, prepend=0)
        if not len(level) or level[-1] != above - 1 or steps.min() < 0 or steps.max() > 1:
            raise InvalidInput(f"parents[{m}]", level.tolist(), f"must run from 0 to {above - 1}, siblings adjacent")
        above = len(level)
    return tree


def _whole_numbers(field: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and array.min() < 0):
        raise InvalidInput(field, array, "must be a list of whole numbers, none below 0")
    return array.astype(np.int64)


def check_partition(lists: Sequence | ClientIndex, tree: Topology, samples: int) -> ClientIndex:
    """Check each client's sample numbers: at least one, within the data, none used twice."""
    try:
        count = len(lists)
    except TypeError:
        count = 0
    if isinstance(lists, str | bytes | Mapping) or not count:
        raise InvalidInput("data.partition", lists, "must be a list of sample numbers for each client")
    if count != tree.leaves:
        hint = balanced_hint(tree) if math.prod(groups_of(tree)) == count else ""
        allowed = f"needs one per client of the tree, {tree.leaves} of them{hint}"
        raise InvalidInput("data.partition", f"{count} lists", allowed)
    holder = np.full(samples, -1)
    parts = []
    for client, indices in enumerate(lists):
        name = tree.names[-1][client]
        numbers = check_sample_numbers(f"data.partition[{client}]", indices, samples)
        if numbers.size == 0:
            raise InvalidInput(f"data.partition[{client}]", [], f"client {name} has no samples")
        values, counts = np.unique(numbers, return_counts=True)
        repeated = values[(holder[values] >= 0) | (counts > 1)]
        if repeated.size:
            other = holder[repeated[0]] if holder[repeated[0]] >= 0 else client
            raise InvalidInput(
                f"data.partition[{client}]",
                int(repeated[0]),
                f"each sample may be used once; client {tree.names[-1][other]} has it already",
            )
        holder[numbers] = client
        parts.append(numbers)
    return ClientIndex.from_lists(parts)


def check_sample_numbers(field: str, value: object, samples: int) -> np.ndarray:
    """Check a list of sample numbers below `samples`; it may be empty."""
    try:
        numbers = np.asarray(value)
    except Exception:
        raise InvalidInput(field, value, "must be a list of whole numbers") from None
    if numbers.size == 0:
        return np.empty(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InvalidInput(field, value, "must be a list of whole numbers")
    if numbers.min() < 0 or numbers.max() >= samples:
        outside = numbers[(numbers < 0) | (numbers >= samples)][0]
        raise InvalidInput(field, int(outside), f"sample numbers go from 0 to {samples - 1}")
    return numbers.astype(np.int64)
