"""Rules that hold a leaf near the model its parent gave: FedProx and FedDyn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stratafl.base.validation import check_choice, check_number
from stratafl.core.rule import Edge, Proximal, Rows, Rule, average
from stratafl.rules.registry import register


@register("fedprox")
def fedprox(mu: float = 0.01) -> Rule:
    """FedProx: a pull of strength mu towards the model the parent gave."""
    mu = check_number("fedprox.mu", mu, at_least=0)
    return average()._replace(local=Proximal(mu))


@register("feddyn")
def feddyn(alpha: float = 0.01, pull: Literal["before_clip", "after_clip"] = "before_clip") -> Rule:
    """FedDyn: a pull of strength alpha and a linear term per child that remembers where it was
    pulled.

    `pull` says where a leaf's step adds alpha * x; the rest of the pull, -alpha * model, and the
    linear term are always clipped. With "before_clip" so is alpha * x: the clip bounds the gradient
    of FedDyn's whole objective. With "after_clip" alpha * x is weight decay, as in the code
    released with the paper. Without a clip both are the same.
    """
    alpha = check_number("feddyn.alpha", alpha, above=0)
    check_choice("feddyn.pull", pull, ("before_clip", "after_clip"))

    def up(state: Rows, x: Tensor, edge: Edge) -> tuple[Rows, Rows]:
        return {"h": state["h"] - alpha * (x - edge.model)}, {"model": x}

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        h = memory["h"] - alpha * share * (mean["model"] - start)
        return {"h": h}, mean["model"] - h / alpha

    return average()._replace(
        init=lambda x: {"h": torch.zeros_like(x)},
        up=up,
        open=lambda x: {"h": torch.zeros_like(x)},
        merge=merge,
        correction=lambda state, note: -state["h"],
        # the parent's h is the mean of its children's
        reweigh=lambda memory, moved, gain: ({"h": memory["h"] * (1 - gain) + moved["h"]}, {}),
        local=Proximal(alpha, after_clip=pull == "after_clip"),
    )
