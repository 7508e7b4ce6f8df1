"""The paper's equations written down again, with dictionaries and loops, and none of the package's
code.

A node is the tuple (k_1, ..., k_m) of the paper's Algorithm 2; () is the root. `Setting` holds what
the equations take as given: the nodes, sibling weights, gradients, periods in local steps (P_1,
..., P_M) and the step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Node = tuple[int, ...]


@dataclass
class Setting:
    children: dict[Node, list[Node]]
    weight: dict[Node, float]
    gradient: Callable[[Node, np.ndarray], np.ndarray]
    P: list[int]
    lr: float
    x0: np.ndarray
    rounds: int

    @property
    def M(self) -> int:
        return len(self.P)

    def level(self, m: int) -> list[Node]:
        return sorted({child for kids in self.children.values() for child in kids if len(child) == m})

    def mean(self, node: Node, value: dict[Node, np.ndarray]) -> np.ndarray:
        return sum(self.weight[child] * value[child] for child in self.children[node])

    def leaves_below(self, node: Node) -> list[Node]:
        if node not in self.children:
            return [node]
        return [leaf for child in self.children[node] for leaf in self.leaves_below(child)]


def mtgc(s: Setting, restart: str, corrected: set[int]) -> tuple[np.ndarray, dict, dict]:
    """Algorithm 2, with corrections on the levels in `corrected` (all of them is MTGC)."""
    x = {leaf: s.x0.copy() for leaf in s.level(s.M)}
    nu = {node: np.zeros_like(s.x0) for m in range(1, s.M + 1) for node in s.level(m)}
    before: dict[Node, np.ndarray] = {}

    def initialise(below: int) -> None:
        if restart == "keep":
            return
        g = {leaf: s.gradient(leaf, x[leaf]) for leaf in s.level(s.M)}
        for m in range(s.M - 1, -1, -1):
            for node in [()] if m == 0 else s.level(m):
                g[node] = s.mean(node, g)
        for m in range(below + 1, s.M + 1):
            if m in corrected:
                for node in s.level(m):
                    nu[node] = g[node[:-1]] - g[node] if restart == "gradient" else 0 * s.x0

    for r in range(s.rounds * s.P[0]):
        if r == 0:
            initialise(0)
        else:
            met = [m for m in range(1, s.M + 1) if r % s.P[m - 1] == 0]
            if met:
                initialise(min(met))
        for leaf in s.level(s.M):
            path = sum(nu[leaf[:m]] for m in range(1, s.M + 1))
            x[leaf] = x[leaf] - s.lr * (s.gradient(leaf, x[leaf]) + path)
        at = dict(x)
        for i in range(s.M, 0, -1):
            if (r + 1) % s.P[i - 1] != 0:
                break
            before.update({node: at[node] for node in s.level(i)})
            for parent in [()] if i == 1 else s.level(i - 1):
                at[parent] = s.mean(parent, at)
                for node in s.children[parent]:
                    if i in corrected:
                        nu[node] = nu[node] + (at[node] - at[parent]) / (s.lr * s.P[i - 1])
                for leaf in s.leaves_below(parent):
                    x[leaf] = at[parent].copy()
    if restart != "keep":
        # the last meeting is the root's; what the next round would start from is not part of the
        # result
        for m in range(2, s.M + 1):
            if m in corrected:
                for node in s.level(m):
                    nu[node] = 0 * s.x0
    return at[()], nu, before


def inside_groups(s: Setting, group_round: Callable[[Node, np.ndarray], np.ndarray]) -> np.ndarray:
    """HFedAvg above, some method of plain federated learning between each lowest aggregator and its
    clients."""

    def run(node: Node, x: np.ndarray) -> np.ndarray:
        m = len(node)
        if m == s.M - 1:
            return group_round(node, x)
        repeats = s.P[m] // s.P[m + 1]
        held = dict.fromkeys(s.children[node], x)
        for child in s.children[node]:
            for _ in range(repeats):
                held[child] = run(child, held[child])
        return s.mean(node, held)

    x = s.x0.copy()
    for _ in range(s.rounds):
        x = run((), x)
    return x


def hfedavg(s: Setting) -> np.ndarray:
    return fedprox(s, mu=0.0)


def fedprox(s: Setting, mu: float) -> np.ndarray:
    def group_round(group: Node, start: np.ndarray) -> np.ndarray:
        x = {}
        for i in s.children[group]:
            x[i] = start
            for _ in range(s.P[-1]):
                x[i] = x[i] - s.lr * (s.gradient(i, x[i]) + mu * (x[i] - start))
        return s.mean(group, x)

    return inside_groups(s, group_round)


def feddyn(s: Setting, alpha: float) -> np.ndarray:
    linear = {i: np.zeros_like(s.x0) for i in s.level(s.M)}
    h: dict[Node, np.ndarray] = {}

    def group_round(group: Node, start: np.ndarray) -> np.ndarray:
        x = {}
        for i in s.children[group]:
            x[i] = start
            for _ in range(s.P[-1]):
                x[i] = x[i] - s.lr * (s.gradient(i, x[i]) - linear[i] + alpha * (x[i] - start))
            linear[i] = linear[i] - alpha * (x[i] - start)
        moved = sum(s.weight[i] * (x[i] - start) for i in s.children[group])
        h[group] = h.get(group, 0) - alpha * moved
        return s.mean(group, x) - h[group] / alpha

    return inside_groups(s, group_round)


def feddyn_as_released(s: Setting, alpha: float, norm: float, weight_decay: float) -> np.ndarray:
    """FedDyn of the code released with the paper: the loss has a linear term, its gradient is
    clipped, and alpha is added to SGD's weight decay."""
    moved = {i: np.zeros_like(s.x0) for i in s.level(s.M)}

    def group_round(group: Node, start: np.ndarray) -> np.ndarray:
        x = {}
        for i in s.children[group]:
            x[i] = start
            for _ in range(s.P[-1]):
                g = s.gradient(i, x[i]) + alpha * (moved[i] - start)
                g = g * min(1.0, norm / np.linalg.norm(g))
                x[i] = x[i] - s.lr * (g + (alpha + weight_decay) * x[i])
            moved[i] = moved[i] + x[i] - start
        return s.mean(group, x) + sum(s.weight[i] * moved[i] for i in s.children[group])

    return inside_groups(s, group_round)


def scaffold(s: Setting) -> np.ndarray:
    control = {i: np.zeros_like(s.x0) for i in s.level(s.M)}
    server = {i[:-1]: np.zeros_like(s.x0) for i in s.level(s.M)}
    K = s.P[-1]

    def group_round(group: Node, start: np.ndarray) -> np.ndarray:
        x, new = {}, {}
        for i in s.children[group]:
            x[i] = start
            for _ in range(K):
                x[i] = x[i] - s.lr * (s.gradient(i, x[i]) - control[i] + server[group])
            new[i] = control[i] - server[group] + (start - x[i]) / (K * s.lr)
        server[group] = server[group] + sum(s.weight[i] * (new[i] - control[i]) for i in s.children[group])
        control.update(new)
        return s.mean(group, x)

    return inside_groups(s, group_round)


def algorithm_1(s: Setting, restart: str) -> tuple[np.ndarray, dict, dict]:
    """The paper's Algorithm 1, two levels, line by line."""
    E, H, lr = s.P[0] // s.P[1], s.P[1], s.lr
    groups, C = s.level(1), s.children
    x_bar = s.x0.copy()
    grad = s.gradient
    z = {i: np.zeros_like(s.x0) for i in s.level(2)}
    y = {j: np.zeros_like(s.x0) for j in groups}
    if restart == "gradient":
        f_j = {j: sum(s.weight[i] * grad(i, x_bar) for i in C[j]) for j in groups}
        f = sum(s.weight[j] * f_j[j] for j in groups)
        y = {j: -f_j[j] + f for j in groups}
    for _t in range(s.rounds):
        x_group = dict.fromkeys(groups, x_bar)
        for j in groups:
            for i in C[j]:
                if restart == "zero":
                    z[i] = np.zeros_like(s.x0)
                if restart == "gradient":
                    mean = sum(s.weight[k] * grad(k, x_bar) for k in C[j])
                    z[i] = -grad(i, x_bar) + mean
            for _e in range(E):
                x = dict.fromkeys(C[j], x_group[j])
                for _h in range(H):
                    for i in C[j]:
                        x[i] = x[i] - lr * (grad(i, x[i]) + z[i] + y[j])
                x_group[j] = sum(s.weight[i] * x[i] for i in C[j])
                for i in C[j]:
                    z[i] = z[i] + (x[i] - x_group[j]) / (H * lr)
        x_bar = sum(s.weight[j] * x_group[j] for j in groups)
        for j in groups:
            y[j] = y[j] + (x_group[j] - x_bar) / (H * E * lr)
    return x_bar, z, y
