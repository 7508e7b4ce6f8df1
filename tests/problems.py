"""Small federations with known gradients: least squares, float64, full batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stratafl import ParticipationContext, Result, Simulation, Topology
from stratafl.base.topology import Shape
from tests.flat import simulate

SHAPES: dict[str, Shape] = {
    "depth 1": 4,
    "depth 2": "2x3",
    "depth 2, unequal": [2, 3, 1],
    "depth 3": "2x2x2",
    "depth 3, unequal": [[2, 1], [3], [1, 2, 2]],
}
PERIODS = {1: [4], 2: [3, 2], 3: [2, 3, 2]}


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


class LeastSquares:
    """Client i has f_i(x) = 1/(2 n_i) |A_i x - b_i|^2, with its own A_i and its own minimiser."""

    def __init__(
        self,
        shape: Shape,
        weights: str | Sequence | None = None,
        seed: int = 0,
        dim: int = 3,
        spread: float = 1.0,
    ):
        rng = np.random.default_rng(seed)
        tree = Topology.of(shape)
        self.A, self.b = [], []
        for _ in range(tree.leaves):
            n = int(rng.integers(3, 7))
            A = rng.normal(size=(n, dim))
            self.A.append(A)
            self.b.append(A @ (spread * rng.normal(size=dim)))
        self.sizes = [len(A) for A in self.A]
        self.tree = tree if weights is None else tree.weighted(weights, self.sizes)
        self.x0 = rng.normal(size=dim)
        ends = np.cumsum(self.sizes)
        self.partition = [np.arange(end - n, end) for end, n in zip(ends, self.sizes, strict=True)]

    def gradient(self, client: int, x: np.ndarray) -> np.ndarray:
        A, b = self.A[client], self.b[client]
        return A.T @ (A @ x - b) / len(b)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(np.concatenate(self.A)),
            torch.tensor(np.concatenate(self.b))[:, None],
        )

    def simulation(self, rules, periods=None, rounds: int = 3, lr=0.05, **settings) -> Simulation:
        dim = len(self.x0)
        settings = {"batch": None, **settings}
        return simulate(
            nn.Linear(dim, 1, bias=False, dtype=torch.float64),
            self.data,
            self.partition,
            self.tree,
            rules,
            periods=PERIODS[self.tree.depth] if periods is None else periods,
            rounds=rounds,
            leaf=lr,
            loss=half_squares,
            initial={"weight": torch.tensor(self.x0)[None]},
            **settings,
        )

    def run(self, rules, **settings) -> Result:
        return self.simulation(rules, **settings).run()

    def minimiser(self) -> np.ndarray:
        """Minimiser of the weighted mean of the clients' objectives."""
        leaf_weights = np.ones(1)
        for level in range(1, self.tree.depth + 1):
            leaf_weights = leaf_weights[self.tree.parents[level]] * self.tree.weights[level]
        H = sum(w * A.T @ A / len(A) for w, A in zip(leaf_weights, self.A, strict=True))
        c = sum(w * A.T @ b / len(b) for w, A, b in zip(leaf_weights, self.A, self.b, strict=True))
        return np.linalg.solve(H, c)


def root(result: Result) -> np.ndarray:
    return result.models[0][0].numpy()


def random_weights(shape: Shape, seed: int = 1) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(rng.uniform(0.2, 2, size=n)) for n in Topology.of(shape).sizes[1:]]


def without(*absent: int) -> Callable[[ParticipationContext], np.ndarray]:
    """Participation of all clients but these."""

    def present(chance: ParticipationContext) -> np.ndarray:
        return ~np.isin(np.arange(chance.tree.sizes[chance.level]), absent)

    return present
