"""Rules that correct the gradient: MTGC (on any edge level of a tree of any depth) and SCAFFOLD."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stratafl.base.validation import check_choice
from stratafl.core.rule import Edge, Rows, Rule, average
from stratafl.rules.registry import register


@register("group_correction", levels="aggregators", summary="MTGC's correction between groups only; clients average.")
@register("local_correction", levels="clients", summary="MTGC's correction of clients only; groups average.")
@register("mtgc", levels="all")
def mtgc(restart: Literal["zero", "gradient", "keep"] = "zero") -> Rule:
    """Multi-timescale gradient correction: one correction per edge, updated whenever the edge
    synchronises.

    Algorithms 1 and 2 of Fang et al., "Hierarchical Federated Learning with Multi-Timescale
    Gradient Correction" (NeurIPS 2024). With z the corrections of an edge level, a client's step
    and the update of z at a synchronisation are

        x <- x - lr (g + sum of z over the edges on the client's path to the root)
        z <- z + (x_child - x_parent) / (sum of the learning rates since the last synchronisation)

    restart: value that z starts from when a newer model comes from above the parent: zero ("zero",
    as in the paper's experiments), the gradients at the new model ("gradient", line 4 of Algorithm
    1, which costs one more exchange), or its last value ("keep").
    """

    def down(state: Rows, x: Tensor, edge: Edge) -> Rows:
        return {"z": edge.drift(x, plus=state["z"])}

    def relay(state: Rows) -> Rows:
        # one row of zeros, expanded, so that no memory is written now, nor read by the next `down`
        return {"z": torch.zeros_like(state["z"][:1]).expand_as(state["z"])}

    rule = average()._replace(
        init=lambda x: {"z": torch.zeros_like(x)},
        down=down,
        correction=lambda state, note: state["z"],
        # sum_i n_i' z_i = sum_i d_i z_i, so that z less `moved` sums to zero under the new weights
        reweigh=lambda memory, moved, gain: (memory, moved),
        measures=True,
        counts_late=True,
    )
    if check_choice("mtgc.restart", restart, ("zero", "gradient", "keep")) == "keep":
        return rule
    if restart == "zero":
        return rule._replace(relay=relay)
    return rule._replace(relay=relay, from_gradient=lambda state, g, mean_g: {"z": mean_g - g})


@register("scaffold")
def scaffold() -> Rule:
    """SCAFFOLD (option II): each child has a control variate, and the parent has their mean.

    Algorithm 1 of Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning" (ICML 2020). With c_i the child's control variate and c the parent's,

        x   <- x - lr (g - c_i + c)
        c_i <- c_i - c + (x_start - x) / (sum of the learning rates since the last synchronisation)
        c   <- c + share * mean of the changes of c_i
    """

    def up(state: Rows, x: Tensor, edge: Edge) -> tuple[Rows, Rows]:
        # the edge's correction is c - c_i; with a learning rate of 0 no gradient was applied
        assert edge.correction is not None
        control = torch.where(edge.rate == 0, state["c"], edge.gradient(x) - edge.correction)
        return {"c": control}, {"model": x, "control": control - state["c"]}

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        # absent children did not change c_i, so the mean over all children moves by the share of
        # the weight that is present
        return {"c": memory["c"] + share * mean["control"]}, mean["model"]

    return average()._replace(
        init=lambda x: {"c": torch.zeros_like(x)},
        up=up,
        open=lambda x: {"c": torch.zeros_like(x)},
        merge=merge,
        note=lambda memory: memory,
        correction=lambda state, note: note["c"] - state["c"],
        # (N / N') c + sum_i (d_i / N') c_i is the mean under the new weights
        reweigh=lambda memory, moved, gain: ({"c": memory["c"] * (1 - gain) + moved["c"]}, {}),
        measures=True,
        counts_late=True,
    )
