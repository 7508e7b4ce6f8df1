"""What a chunk of clients computes with, and the leaf's chain on all its rows.

Shape suffixes: N leaves, C clients of a chunk, P parameters, Z buffer values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stratafl.engine.ops import Table, move
from stratafl.engine.work import Pull, Work
from stratafl.local import Leaf, Stage, clip, corrections, decay

Where = slice | list[int]
"""Rows of the leaves' matrices: a slice where they lie together, which needs no copy."""


def where(leaves: list[int]) -> Where:
    together = leaves == list(range(leaves[0], leaves[0] + len(leaves)))
    return slice(leaves[0], leaves[0] + len(leaves)) if together else leaves


class Rows(NamedTuple):
    """One chunk's part of the work; the models and the velocity change in place."""

    x_CP: Tensor
    b_CZ: Tensor
    velocity_CP: Tensor | None
    correction_CP: Tensor | None
    pulls: tuple[Pull, ...]

    @staticmethod
    def of(work: Work, x_NP: Tensor, leaves: list[int], momentum: float) -> Rows:
        chosen = where(leaves)
        x_CP = x_NP[chosen]
        return Rows(
            x_CP,
            work.b_NB[chosen],
            torch.zeros_like(x_CP) if momentum else None,
            None if work.correction_NP is None else work.correction_NP[chosen],
            tuple(Pull(local, edge.each(lambda rows: rows[chosen])) for local, edge in work.pulls),
        )

    def correct(self, x_CP: Tensor, direction_CP: Tensor) -> Tensor:
        """The directions with everything the rules add."""
        if self.correction_CP is not None:
            direction_CP = direction_CP + self.correction_CP
        for local, edge in self.pulls:
            direction_CP = local(x_CP, direction_CP, edge)
        return direction_CP

    def tensors(self) -> list[Tensor]:
        """Everything it holds, in a fixed order."""
        edges = [part for _, edge in self.pulls for part in edge.tensors()]
        held = [self.x_CP, self.b_CZ, self.velocity_CP, self.correction_CP, *edges]
        return [tensor for tensor in held if tensor is not None]

    def like(self) -> Rows:
        """Room for the same."""
        new = torch.empty_like
        return Rows(
            new(self.x_CP),
            new(self.b_CZ),
            None if self.velocity_CP is None else new(self.velocity_CP),
            None if self.correction_CP is None else new(self.correction_CP),
            tuple(Pull(local, edge.each(new)) for local, edge in self.pulls),
        )


def advance(rows: Rows, g_CP: Tensor, leaf: Leaf, lr: float | Tensor, ops: Table) -> None:
    """One step of all rows, in place, from their gradients, which are used up."""
    usual = None if rows.pulls else _usual(leaf.stages)
    if usual is not None:
        ops.update(rows.x_CP, g_CP, rows.correction_CP, lr, *usual, leaf.momentum, rows.velocity_CP)
        return
    direction_CP = g_CP
    for stage in leaf.stages:
        direction_CP = stage(direction_CP, rows.x_CP, rows.correct)
    if rows.velocity_CP is not None:
        direction_CP = rows.velocity_CP.mul_(leaf.momentum).add_(direction_CP)
    move(rows.x_CP, direction_CP, lr)


def _usual(stages: tuple[Stage, ...]) -> tuple[float | None, float] | None:
    """The norm and the rate of the usual chain, corrections -> clip -> decay, for a kernel that does all of it."""
    rest = list(stages)
    if not rest or rest.pop(0) is not corrections:
        return None
    norm = rest.pop(0) if rest and isinstance(rest[0], clip) else None
    rate = rest.pop(0) if rest and isinstance(rest[0], decay) else None
    if rest:
        return None
    return (norm.norm if isinstance(norm, clip) else None, rate.rate if isinstance(rate, decay) else 0.0)
