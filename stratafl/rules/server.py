"""Optimisers of a parent: the children's mean is a direction to step in, not yet the new model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stratafl.base.validation import check_number
from stratafl.core.rule import Rows, Rule, average
from stratafl.rules.registry import register


@register("momentum", at="root")
def momentum(lr: float = 1.0, beta: float = 0.9) -> Rule:
    """Momentum at the parent (FedAvgM), at the root when named for a whole tree."""
    lr = check_number("momentum.lr", lr, above=0)
    check_number("momentum.beta", beta, at_least=0, below=1)

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        m = beta * memory["m"] + (mean["model"] - start)
        return {"m": m}, start + lr * m

    return average()._replace(open=lambda x: {"m": torch.zeros_like(x)}, merge=merge)


@register("adam", at="root")
def adam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Rule:
    """Adam at the parent (FedAdam), at the root when named for a whole tree."""
    return _adaptive("adam", lr, beta1, beta2, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


@register("yogi", at="root")
def yogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Rule:
    """Yogi at the parent (FedYogi), at the root when named for a whole tree."""
    return _adaptive(
        "yogi",
        lr,
        beta1,
        beta2,
        tau,
        lambda v, square: v - (1 - beta2) * square * torch.sign(v - square),
    )


def _adaptive(
    name: str,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    second_moment: Callable[[Tensor, Tensor], Tensor],
) -> Rule:
    """Algorithm 2 of "Adaptive Federated Optimization" (Reddi et al., 2021): no bias correction, v
    from tau^2."""
    lr = check_number(f"{name}.lr", lr, above=0)
    check_number(f"{name}.beta1", beta1, at_least=0, below=1)
    check_number(f"{name}.beta2", beta2, at_least=0, below=1)
    tau = check_number(f"{name}.tau", tau, above=0)

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        delta = mean["model"] - start
        m = beta1 * memory["m"] + (1 - beta1) * delta
        v = second_moment(memory["v"], delta * delta)
        return {"m": m, "v": v}, start + lr * m / (v.sqrt() + tau)

    return average()._replace(
        open=lambda x: {"m": torch.zeros_like(x), "v": torch.full_like(x, tau * tau)}, merge=merge
    )
