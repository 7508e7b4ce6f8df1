"""How large the messages of a method are, found by letting a tree with one node per level meet
once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stratafl.base.tree import Tree
from stratafl.core.federation import Federation
from stratafl.core.leaf import Leaf
from stratafl.core.meeting import is_answered
from stratafl.core.rule import Rule
from stratafl.core.watch import Meeting, Watcher
from stratafl.core.work import Trained


@dataclass(frozen=True)
class LevelMessages:
    """What the nodes of one edge level send each other."""

    report: int
    """Bytes of a child's message."""
    parcel: int
    """Bytes of what a parent gives: its model with buffers and the rule's note."""
    is_answered: bool
    """Whether children get the parent's new model for their report."""
    is_answered_below: bool
    """Whether they do even where a newer one is about to come from above."""
    has_correction: bool
    """Whether subtrees add a correction, which nodes below must hear of."""
    from_gradient: bool
    """Whether corrections are set from gradients after a meeting above."""


@dataclass(frozen=True)
class MessageSizes:
    """Those of a run: one entry per edge level, root first."""

    levels: tuple[LevelMessages, ...]
    model: int
    """Bytes of a model, a gradient or a correction alone."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> MessageSizes:
        """From what `dataclasses.asdict` made of it, also by way of JSON."""
        return MessageSizes(tuple(LevelMessages(**each) for each in values["levels"]), int(values["model"]))

    def edge(self, level: int) -> LevelMessages:
        return self.levels[level - 1]


class _Scale(Watcher):
    """Notes what is sent at each level's meeting."""

    def __init__(self) -> None:
        self.met_at: dict[int, tuple[int, int]] = {}

    def met(self, meeting: Meeting) -> None:
        self.met_at[meeting.level] = meeting.sent_bytes, meeting.parcel_bytes


def message_sizes(
    rules: Sequence[Rule], parameters: int, buffers: int, leaf: Leaf | None = None, dtype: torch.dtype = torch.float32
) -> MessageSizes:
    """Those of a model with so many parameters and buffer values."""
    scale = _Scale()
    tree = Tree.of("x".join("1" for _ in rules))
    x_P, b_B = torch.zeros(parameters, dtype=dtype), torch.zeros(buffers, dtype=dtype)
    federation = Federation(tree, rules, x_P, b_B, [None] * tree.depth, 0, watchers=[scale], leaf=leaf)
    federation.begin()
    if federation.wants_gradients:
        federation.start_from_gradients(x_P[None])
    path_AP = x_P[None] if federation.has_path else x_P[None, :0]
    federation.trained(Trained(x_P[None], b_B[None], path_AP, federation.levels[-1].optimiser), 1.0)
    federation.meet(1)
    found = []
    for level, rule in enumerate(rules, 1):
        report, parcel = scale.met_at[level]
        found.append(
            LevelMessages(
                report=report,
                parcel=parcel,
                is_answered=is_answered(rule, relayed=False),
                is_answered_below=is_answered(rule, relayed=True),
                has_correction=federation.levels[level].correction is not None,
                from_gradient=rule.from_gradient is not None,
            )
        )
    return MessageSizes(tuple(found), x_P.element_size() * parameters)
