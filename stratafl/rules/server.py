"""Server optimizers: the parent steps from its model in the direction of the children's mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stratafl.base.validation import check_number
from stratafl.core.rule import Rows, Rule, average
from stratafl.rules.registry import register


@register("momentum", levels="root")
def momentum(lr: float = 1.0, beta: float = 0.9) -> Rule:
    """Momentum at the parent (FedAvgM). For a whole tree: at the root, and other levels average.

    Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification" (2019): m <- beta m + (mean - model), model <- model + lr m.
    """
    lr = check_number("momentum.lr", lr, above=0)
    check_number("momentum.beta", beta, at_least=0, below=1)

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        m = beta * memory["m"] + (mean["model"] - start)
        return {"m": m}, start + lr * m

    return average()._replace(open=lambda x: {"m": torch.zeros_like(x)}, merge=merge)


@register("adam", levels="root")
def adam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Rule:
    """Adam at the parent (FedAdam). For a whole tree: at the root, and other levels average."""
    return _adaptive("adam", lr, beta1, beta2, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


@register("yogi", levels="root")
def yogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Rule:
    """Yogi at the parent (FedYogi). For a whole tree: at the root, and other levels average."""

    def second_moment(v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - beta2) * square * torch.sign(v - square)

    return _adaptive("yogi", lr, beta1, beta2, tau, second_moment)


def _adaptive(
    name: str, lr: float, beta1: float, beta2: float, tau: float, second_moment: Callable[[Tensor, Tensor], Tensor]
) -> Rule:
    """Algorithm 2 of Reddi et al., "Adaptive Federated Optimization" (ICLR 2021).

    With delta = mean - model: m <- beta1 m + (1 - beta1) delta, v <- second_moment(v, delta^2),
    model <- model + lr m / (sqrt(v) + tau). v starts at tau^2, and there is no bias correction.
    """
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
