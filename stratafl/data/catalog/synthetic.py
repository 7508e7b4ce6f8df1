"""Synthetic logistic-regression data with a separate heterogeneity per level.

It follows Synthetic(alpha, beta) of FedProx (Li et al., 2020): a client draws x ~ N(v,
diag(j^-1.2)) and labels it by the arg max of W x + b. W, b and v are sums along the client's path
in the tree: a root model, plus at each level m a model shift scaled by alpha_m and a feature shift
scaled by beta_m, shared by all clients below the node. Zero at a level therefore makes its siblings
alike; with FedProx's (0, 0) each client still has its own model. FedProx's shift common to all
weights is left out, because it changes all logits equally and so no label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, generator
from stratafl.base.validation import check_integer, check_number
from stratafl.data.catalog.storage import StoredDataset

MOST, MOST_WIDE, MOST_SHIFT = 1 << 30, 1 << 16, 1e6
"""Largest number of values, features or classes, and largest shift of a level.

Beyond these memory runs out, or float32 overflows.
"""


def synthetic(
    parents: Sequence[np.ndarray],
    samples: int | Sequence[int] | np.ndarray,
    alpha: float | Sequence[float] = 1.0,
    beta: float | Sequence[float] = 1.0,
    *,
    features: int = 60,
    classes: int = 10,
    test_share: float = 0.2,
    seed: int = 0,
) -> tuple[StoredDataset, list[np.ndarray]]:
    """Generate a data set for a tree, and the training samples of each client.

    `parents[m][i]` is the parent on level m - 1 of node i on level m; `parents[0]` is empty.
    `alpha` and `beta` are one number for all levels or one per level below the root. `samples` is
    the number of training samples per client; each client adds `test_share` as many test samples.
    """
    depth = len(parents) - 1
    leaves = _check_tree(parents)
    alphas, betas = _shifts("alpha", alpha, depth), _shifts("beta", beta, depth)
    features, classes = _check_width("features", features, 1), _check_width("classes", classes, 2)
    test_share = check_number("test_share", test_share, above=0, at_most=1)
    sizes = _sizes(samples, leaves)
    if int(sizes.sum()) * max(features, classes) > MOST:
        allowed = f"at most {MOST:,} numbers in all, and there are {leaves:,} leaves, {features:,} features"
        raise InvalidInput("samples", samples, f"{allowed} and {classes:,} classes")

    path = _paths(parents, leaves)
    scale = np.arange(1, features + 1) ** -0.6
    weights_CF1 = generator(seed, Stream.SAMPLES, 0, 0).standard_normal((classes, features + 1))
    parts: dict[str, list[np.ndarray]] = {"x_train": [], "y_train": [], "x_test": [], "y_test": []}
    for leaf, size in enumerate(sizes):
        model_CF1, centre_F = weights_CF1.copy(), np.zeros(features)
        for level in range(1, depth + 1):
            draw = generator(seed, Stream.SAMPLES, level, int(path[level][leaf]))
            model_CF1 += alphas[level - 1] * draw.standard_normal(model_CF1.shape)
            common = draw.standard_normal()
            centre_F += betas[level - 1] * (common + draw.standard_normal(features))
        draw = generator(seed, Stream.SAMPLES, depth + 1, leaf)
        for part, count in (("train", size), ("test", max(1, round(test_share * size)))):
            x = (centre_F + scale * draw.standard_normal((count, features))).astype(np.float32)
            parts[f"x_{part}"].append(x)
            parts[f"y_{part}"].append((x @ model_CF1[:, :-1].T + model_CF1[:, -1]).argmax(1))
    arrays: dict[str, Any] = {field: np.concatenate(pieces) for field, pieces in parts.items()}
    owner = np.arange(leaves, dtype=np.int32)
    dataset = StoredDataset(
        name="synthetic",
        kind="vector",
        form="generated",
        classes=tuple(str(label) for label in range(classes)),
        owner_train=np.repeat(owner, sizes),
        owner_test=np.repeat(owner, [len(y) for y in parts["y_test"]]),
        owners=tuple(f"leaf {leaf}" for leaf in range(leaves)),
        notes=(f"alpha {alphas}, beta {betas} by level, seed {seed}",),
        **arrays,
    )
    return dataset, np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])


def _check_tree(parents: Sequence[np.ndarray]) -> int:
    if len(parents) < 2 or len(parents[0]):
        raise InvalidInput("parents", len(parents), "an empty array, then one array per level below")
    above = 1
    for level, array in enumerate(parents[1:], start=1):
        nodes = np.asarray(array)
        if nodes.ndim != 1 or not len(nodes) or nodes.min() < 0 or nodes.max() >= above:
            raise InvalidInput(f"parents[{level}]", array, f"a list of numbers in 0..{above - 1}")
        above = len(nodes)
    return above


def _paths(parents: Sequence[np.ndarray], leaves: int) -> list[np.ndarray]:
    """Ancestor of each client on every level."""
    path = [np.arange(leaves)]
    for level in range(len(parents) - 1, 0, -1):
        path.append(np.asarray(parents[level])[path[-1]])
    return path[::-1]


def _check_width(field: str, value: object, least: int) -> int:
    try:
        return check_integer(field, value, at_least=least, at_most=MOST_WIDE)
    except InvalidInput:
        raise InvalidInput(field, value, f"at least {least}, and at most {MOST_WIDE:,}") from None


def _shifts(field: str, value: float | Sequence[float], depth: int) -> tuple[float, ...]:
    allowed = f"one number >= 0, or {depth}: one per level below the root; at most {MOST_SHIFT:g}"
    try:
        return tuple(check_number(field, shift, at_least=0, at_most=MOST_SHIFT) for shift in _per_entry(value, depth))
    except InvalidInput:
        raise InvalidInput(field, value, allowed) from None


def _sizes(samples: int | Sequence[int] | np.ndarray, leaves: int) -> np.ndarray:
    allowed = f"a whole number >= 1, or {leaves}: one per leaf; at most {MOST:,}"
    try:
        sizes = [check_integer("samples", count, at_least=1, at_most=MOST) for count in _per_entry(samples, leaves)]
    except InvalidInput:
        raise InvalidInput("samples", samples, allowed) from None
    return np.array(sizes, dtype=np.int64)


def _per_entry(value: Any, count: int) -> Sequence[Any]:
    """Repeat a single value for all levels, or check one value per level."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return [value] * count
    if len(value) != count:
        raise InvalidInput("count", len(value), f"must be {count}")
    return value
