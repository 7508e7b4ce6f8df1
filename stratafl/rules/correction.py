"""Rules that correct the gradient: MTGC (any edge, any depth) and SCAFFOLD."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stratafl.base.validation import check_choice
from stratafl.core.rule import Edge, Rows, Rule, average
from stratafl.rules.registry import register


@register("group_correction", at="inner", summary="MTGC's correction between groups only; clients average.")
@register("local_correction", at="leaf", summary="MTGC's correction of clients only; groups average.")
@register("mtgc", at="every")
def mtgc(restart: Literal["zero", "gradient", "keep"] = "zero") -> Rule:
    """Multi-timescale gradient correction: one correction per edge, updated whenever the edge
    synchronises.

    `restart` says how a correction starts anew when a model comes from above its parent: at zero
    (the paper's experiments), from the gradients at the new model (its analysis, one exchange
    more), or not at all.
    """

    def down(state: Rows, x: Tensor, edge: Edge) -> Rows:
        return {"z": edge.drift(x, plus=state["z"])}

    def forget(state: Rows) -> Rows:
        # one row of zeros for all: nothing is written, and nothing read when the next meeting adds
        # to them
        return {"z": torch.zeros_like(state["z"][:1]).expand_as(state["z"])}

    rule = average()._replace(
        init=lambda x: {"z": torch.zeros_like(x)},
        down=down,
        correction=lambda state, note: state["z"],
        # the sum of n_i' z_i is that of d_i z_i: less its mean, corrections sum to zero again
        reweigh=lambda memory, moved, gain: (memory, moved),
        measures=True,
        counts_late=True,
    )
    if check_choice("mtgc.restart", restart, ("zero", "gradient", "keep")) == "keep":
        return rule
    if restart == "zero":
        return rule._replace(relay=forget)
    return rule._replace(relay=forget, from_gradient=lambda state, g, mean_g: {"z": mean_g - g})


@register("scaffold")
def scaffold() -> Rule:
    """SCAFFOLD (option II): each child has a control variate, the parent the mean of all of
    them."""

    def control(before: Tensor, x: Tensor, edge: Edge) -> Tensor:
        # c_i - c + (start - x) / (K lr), where the edge's correction is c - c_i; a child whose
        # learning rate is 0 has seen nothing of its gradients
        assert edge.correction is not None
        return torch.where(edge.rate == 0, before, edge.gradient(x) - edge.correction)

    def up(state: Rows, x: Tensor, edge: Edge) -> tuple[Rows, Rows]:
        new = control(state["c"], x, edge)
        return {"c": new}, {"model": x, "control": new - state["c"]}

    def merge(memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> tuple[Rows, Tensor]:
        # the children that stayed away did not change theirs, so the mean over all moves by the
        # share that came
        return {"c": memory["c"] + share * mean["control"]}, mean["model"]

    return average()._replace(
        init=lambda x: {"c": torch.zeros_like(x)},
        up=up,
        open=lambda x: {"c": torch.zeros_like(x)},
        merge=merge,
        note=lambda memory: memory,
        correction=lambda state, note: note["c"] - state["c"],
        # (N / N') c + sum of (d_i / N') c_i is the mean under the new weights
        reweigh=lambda memory, moved, gain: ({"c": memory["c"] * (1 - gain) + moved["c"]}, {}),
        measures=True,
        counts_late=True,
    )
