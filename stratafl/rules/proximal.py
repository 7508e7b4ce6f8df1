"""Rules that pull clients towards the model that their parent sent: FedProx and FedDyn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stratafl.base.validation import check_choice, check_number
from stratafl.core.rule import Edge, Proximal, Rows, Rule, average
from stratafl.rules.registry import register


@register("fedprox")
def fedprox(mu: float = 0.01) -> Rule:
    """FedProx: adds mu (x - model) to the gradient, where the model is the one that the parent
    sent.

    Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020).
    """
    mu = check_number("fedprox.mu", mu, at_least=0)
    return average()._replace(local=Proximal(mu))


@register("feddyn")
def feddyn(alpha: float = 0.01, pull: Literal["before_clip", "after_clip"] = "before_clip") -> Rule:
    """FedDyn: a proximal term of strength alpha, and a linear term per child that sums up its past
    displacements.

    Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021). With h_i the
    child's linear term, h the parent's and `model` the one that the parent sent,

        x     <- x - lr (g - h_i + alpha (x - model))
        h_i   <- h_i - alpha (x - model)
        h     <- h - alpha * share * ((mean of x) - model)
        model <- (mean of x) - h / alpha

    where `share` is the part of all children's weight that took part.

    pull: where a client's step adds alpha * x: "before_clip", so that the clip bounds the gradient
    of FedDyn's whole objective, or "after_clip", as weight decay, as in the code released with the
    paper. The remaining terms, -h_i - alpha * model, are always clipped. Without a clip both are
    the same.
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
        # the parent's h is the mean of its children's, which stay as they are
        reweigh=lambda memory, moved, gain: ({"h": memory["h"] * (1 - gain) + moved["h"]}, {}),
        local=Proximal(alpha, after_clip=pull == "after_clip"),
    )
