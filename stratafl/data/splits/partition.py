"""Who holds which samples: a data set divided over a tree, each level in its own way.

The root holds everything; each node's samples are split over its children by the method of their
edge level. A sample goes to exactly one leaf, or is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stratafl.base.errors import InvalidInput, unknown
from stratafl.base.rng import Purpose, generator
from stratafl.base.validation import check_integer
from stratafl.data.splits import sizes as sizing
from stratafl.data.splits.methods import Node, Split, parse
from stratafl.data.splits.rotation import leaf_angles

ROTATION = ("start", "step", "level")


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each leaf, in leaf order; a leaf's own are ascending, as in the data set.

    `methods` says in words what was done on each level, root first. `angles` are the degrees by
    which each leaf's training images are turned, None where they stay upright.
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
    """Divide samples over the leaves of a tree; the same seed gives the same partition.

    labels     the class of each sample, a whole number, at least 0
    parents    `parents[m][i]` is the parent, on level m - 1, of node i of level m; entry 0 is empty
    levels     one split per edge level, root first: `{"name": "dirichlet", "alpha": 0.1}`, a bare
               name, or what a function of `splits` returned. All but natural and lognormal take
               `sizes`: "equal" (the default; for classes, what the classes give),
               {"lognormal": sigma}, or one count per node of the level. Counts on a level also set
               the sizes of the levels above it that ask for none.
    owner      the owner of each sample, for `natural`
    rotation   turn training images by node: `{"start": -50, "step": 10, "level": 1}`
    """
    labels, seed = _whole("labels", labels), check_integer("seed", seed)
    owner = None if owner is None else _whole("owner", owner)
    if owner is not None and len(owner) != len(labels):
        raise InvalidInput("owner", len(owner), f"needs one per sample, {len(labels)} of them")
    tree = _checked(parents)
    methods = _methods(levels, tree)
    below = _leaves_below(tree)
    if len(labels) < len(below[-1]):
        raise InvalidInput("labels", len(labels), f"fewer samples than leaves ({len(below[-1])})")
    owners, least = _owners_wanted(methods, tree, below)
    angles = None if rotation is None else _angles(rotation, tree)

    held = [np.arange(len(labels))]
    for level, method in enumerate(methods, start=1):
        firsts = np.searchsorted(tree[level], np.arange(len(held) + 1))
        children: list[np.ndarray] = []
        for number, samples in enumerate(held):
            nodes = slice(int(firsts[number]), int(firsts[number + 1]))
            node = Node(
                labels[samples],
                None if owner is None else owner[samples],
                below[level][nodes],
                owners[level - 1][nodes],
                least[level - 1],
                _sizes_of(method, below[level][nodes], nodes),
            )
            stream = generator(seed, Purpose.PARTITION, level, number)
            children += _children(samples, node, method, stream, f"levels[{level - 1}]", nodes.start)
        held = children
    kept = sum(map(len, held))
    texts = tuple(method.text for method in methods)
    return Partition(tuple(held), len(labels) - kept, texts, seed, angles)


def _children(
    samples: np.ndarray, node: Node, method: Split, stream: np.random.Generator, where: str, first: int
) -> list[np.ndarray]:
    """A node's samples, divided over its children; `where` is the method's place in the config, and
    `first` the number of the first child, for complaints."""
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


def _sizes_of(
    method: Split, leaves_N: np.ndarray, nodes: slice
) -> Callable[[int, np.random.Generator], np.ndarray] | None:
    sizes = method.sizes
    if sizes is None:
        return None

    def draw(total: int, rng: np.random.Generator) -> np.ndarray:
        if total < leaves_N.sum():
            raise InvalidInput("sizes", total, f"too few samples for {leaves_N.sum()} leaves; each needs one")
        wanted_N = sizes.draw(total, leaves_N, nodes, rng)
        if wanted_N.sum() > total:
            raise InvalidInput("sizes", wanted_N.tolist(), f"must not add up to more than the {total} there are")
        return wanted_N

    return draw


def _methods(levels: Sequence[object], tree: list[np.ndarray]) -> list[Split]:
    depth = len(tree) - 1
    if isinstance(levels, str | Mapping) or not isinstance(levels, Sequence):
        raise InvalidInput("levels", levels, "must be a list with one split per level")
    if len(levels) != depth:
        raise InvalidInput("levels", list(levels), f"needs one split per level of the tree, {depth} of them")
    methods = [parse(spec, f"levels[{m}]") for m, spec in enumerate(levels)]
    counts: np.ndarray | None = None
    for level in range(depth, 0, -1):
        method = methods[level - 1]
        if isinstance(method.sizes, sizing.Counts):
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
            methods[level - 1] = method._replace(sizes=sizing.Counts(tuple(counts.tolist())))
        else:
            methods[level - 1] = method._replace(sizes=method.otherwise)
        if counts is not None:
            counts = np.bincount(tree[level], weights=counts).astype(np.int64)
    return methods


def _angles(rotation: Mapping[str, object], tree: list[np.ndarray]) -> np.ndarray:
    if not isinstance(rotation, Mapping):
        raise InvalidInput("rotation", rotation, f"must be a table of {', '.join(ROTATION)}")
    for key in rotation:
        if key not in ROTATION:
            raise unknown("rotation key", key, ROTATION)
    return leaf_angles(tree, **rotation)  # type: ignore[arg-type]


def _owners_wanted(
    methods: list[Split], tree: list[np.ndarray], below: list[np.ndarray]
) -> tuple[list[np.ndarray], list[int]]:
    """Per edge level: how many owners each node holds, and how many samples each of them needs.

    Owners count the nodes of the last level of a run of `natural` levels, and must feed the leaves
    below it.
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


def _checked(parents: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
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
        # Siblings are neighbours and nobody above is childless: up by at most one from 0 to the
        # last.
        steps = np.diff(level, prepend=0)
        if not len(level) or level[-1] != above - 1 or steps.min() < 0 or steps.max() > 1:
            raise InvalidInput(
                f"parents[{m}]",
                level.tolist(),
                f"must run from 0 to {above - 1}, siblings adjacent",
            )
        above = len(level)
    return tree


def _leaves_below(tree: list[np.ndarray]) -> list[np.ndarray]:
    """How many leaves each node of each level has below it; a leaf counts itself."""
    below = [np.ones(len(tree[-1]), dtype=np.int64)]
    for level in range(len(tree) - 1, 0, -1):
        below.insert(0, np.bincount(tree[level], weights=below[0]).astype(np.int64))
    return below


def _whole(field: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and array.min() < 0):
        raise InvalidInput(field, array, "must be a list of whole numbers, none below 0")
    return array.astype(np.int64)
