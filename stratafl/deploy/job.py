"""What every node of a deployed run agrees on, and what follows from it without a word being said.

Who takes part, when levels meet and when corrections start anew are functions of the seed, the schedule and the step,
so that no message has to carry them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from stratafl.errors import InvalidInput
from stratafl.refusal import update_limits
from stratafl.rule import Rule
from stratafl.schedule import Participation, Schedule, draw
from stratafl.tree import Tree


@dataclass(frozen=True)
class Patience:
    """How long a parent waits for its children, and how many it needs."""

    deadline: float | None = None
    """Seconds; None to wait for all that were asked."""
    min_children: int = 1
    """With fewer a round does not count: the parent keeps its model, as if it had heard nobody."""


@dataclass(frozen=True)
class Job:
    """One run on one tree."""

    name: str
    """Tells this run's messages from another's."""
    tree: Tree
    rules: tuple[Rule, ...]
    schedule: Schedule
    participation: tuple[Participation, ...]
    seed: int
    rounds: int
    parameters: int
    buffers: int
    dtype: torch.dtype
    by_samples: bool = False
    """Whether children count by the samples they report, rather than by the tree's weights."""
    patience: tuple[Patience, ...] = ()
    """Per edge level, root first."""
    update_limit: float | None = None
    """Updates so many times larger than their siblings' median are refused: see `refusal`."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """What all nodes must have in common, part by part: see `fingerprint`."""

    def __post_init__(self) -> None:
        for level, rule in enumerate(self.rules, 1):
            if rule.local is not None and level < self.tree.depth:
                wanted = "a rule with its own direction of a leaf's step can only be deployed on the leaves' edge"
                raise InvalidInput("rules", f"level {level}", wanted)
            if rule.from_gradient is not None:
                raise InvalidInput("rules", f"level {level}", "a restart from gradients cannot be deployed")

    @cached_property
    def fingerprint(self) -> str:
        """Of what this node is made of, empty where that is not said: no two with different ones work together."""
        parts = json.dumps(dict(self.made_of), sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest() if self.made_of else ""

    @cached_property
    def every(self) -> tuple[int, ...]:
        """Local steps between two meetings of an edge level; entry 0, which is no edge, is that of the root's."""
        return (self.schedule.steps[0], *self.schedule.steps)

    @cached_property
    def limits(self) -> list[float | None]:
        """Of updates, per edge level, root first."""
        return update_limits(self.update_limit, self.rules)

    def meetings_below(self, level: int) -> int:
        """How often a node of this level meets its children before it meets its parent; the root once a round."""
        return self.every[level] // self.every[level + 1]

    def restarts(self, level: int, since: int, step: int) -> int:
        """How often, between two steps, a model came from above the parents of this level's nodes."""
        return 0 if level == 1 else step // self.every[level - 1] - since // self.every[level - 1]

    def global_round(self, step: int) -> int:
        return step // self.every[0]

    def taking_part(self, level: int, step: int) -> np.ndarray:
        """Which nodes of a level are drawn for the round of their edges that begins at this step."""
        return draw(self.participation[level - 1], self.tree, level, step // self.every[level], self.seed)

    def children(self, level: int, number: int) -> Sequence[int]:
        """The numbers, on the next level, of a node's children."""
        return np.flatnonzero(self.tree.parents[level + 1] == number).tolist()

    def patience_at(self, edge: int) -> Patience:
        return self.patience[edge - 1] if self.patience else Patience()
