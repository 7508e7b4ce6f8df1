"""What every node of a deployed run agrees on, and what follows from it without a word being said.

Who takes part, when levels meet and when corrections start anew are functions of the seed, the
schedule and the step, so that no message has to carry them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.core.channel import Channels
from stratafl.core.client_update import ClientUpdate, needs_sgd_path
from stratafl.core.participation import Participation, sample_participants
from stratafl.core.rule import Edge, Rows, Rule
from stratafl.core.schedule import SyncSchedule
from stratafl.federation.sync import EdgeLevel, edge_levels

VERSION = "stratafl"
"""The part of what a node is made of that is the version of the package."""


@dataclass(frozen=True)
class Patience:
    """How long a parent waits for its children, and how many it needs."""

    deadline: float | None = None
    """Seconds; None to wait for all that were asked."""
    min_children: int = 1
    """The fewest children with which a round counts: with fewer the parent keeps its model, as if
    it had heard nobody."""


@dataclass(frozen=True)
class Job:
    """One run on one tree."""

    name: str
    """Tells this run's messages from another's."""
    tree: Topology
    rules: tuple[Rule, ...]
    schedule: SyncSchedule
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
    update_factor: float | Sequence[float] | None = None
    """How many times longer than its siblings' median an update may be before it is refused; any
    length unless given."""
    leaf: ClientUpdate | None = None
    """A leaf's step, which says what learning rates it uses; None where that is not known."""
    samples: tuple[int, ...] = ()
    """Per leaf, as declared when the run was made; 0, or none at all, where that is not known."""
    channels: tuple[Channels, ...] = ()
    """Per edge level, root first; none where everything is sent as it is."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """What all nodes must have in common, part by part: see `fingerprint`."""

    def __post_init__(self) -> None:
        for level, rule in enumerate(self.rules, 1):
            if rule.local is not None and level < self.tree.depth:
                wanted = "a rule with its own direction of a leaf's step can only be deployed on the leaves' edge"
                raise InvalidInput("method.rules", f"level {level}", wanted)
            if rule.from_gradient is not None:
                raise InvalidInput("method.rules", f"level {level}", "a restart from gradients cannot be deployed")

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what this node is made of, empty where that is not said: no two with
        different ones work together. The version of the package is told, but no part of it: what
        must be the same has a number of its own, the protocol's."""
        parts = json.dumps({key: value for key, value in self.made_of.items() if key != VERSION}, sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest() if self.made_of else ""

    @cached_property
    def every(self) -> tuple[int, ...]:
        """Local steps between two meetings of an edge level; entry 0, which is no edge, is that of
        the root's."""
        return (self.schedule.steps[0], *self.schedule.steps)

    @cached_property
    def edges(self) -> list[EdgeLevel]:
        """Settings of the edge levels, root first."""
        return edge_levels(
            self.rules,
            seed=self.seed,
            update_limit=self.update_limit,
            update_factor=self.update_factor,
            checks_all_parts=True,
            channels=self.channels,
        )

    @cached_property
    def has_path(self) -> bool:
        """Whether nodes carry paths behind their buffers."""
        return self.leaf is not None and needs_sgd_path(self.leaf, self.rules)

    @property
    def carried(self) -> int:
        """Numbers that are averaged beside a model: the module's buffers, and the path."""
        return self.buffers + self.parameters * self.has_path

    def edge(self, level: int) -> EdgeLevel:
        """Settings that both ends of an edge level share."""
        return self.edges[level - 1]

    def restarts(self, level: int, since: int, step: int) -> int:
        """How often, between two steps, a model came from above the parents of this level's
        nodes."""
        return 0 if level == 1 else step // self.every[level - 1] - since // self.every[level - 1]

    def global_round(self, step: int) -> int:
        return step // self.every[0]

    def taking_part(self, level: int, step: int) -> np.ndarray:
        """Which nodes of a level are drawn for the round of their edges that begins at this
        step."""
        return sample_participants(
            self.participation[level - 1], self.tree, level, step // self.every[level], self.seed
        )

    def rates(self, level: int, step: int) -> tuple[float, float] | None:
        """The least and the most that learning rates can add up to in a round of this level's nodes
        that begins at this step, of a node that trained at all; None where they are not known."""
        if self.leaf is None:
            return None
        each = self.leaf.lr_sum(self.global_round(step), self.every[-1])
        return each, each * (self.every[level] // self.every[-1])

    def declared(self, level: int, number: int) -> tuple[int, ...]:
        """The samples of the leaves below a node, or of the leaf it is; 0 where they were not
        declared."""
        leaves = np.flatnonzero(self.tree.ancestors(level) == number)
        return tuple(self.samples[leaf] if self.samples else 0 for leaf in leaves)

    def subtree(self, level: int, number: int) -> frozenset[str]:
        """The names of a node and of all below it."""
        return self.tree.subtree(level, number)

    @cached_property
    def report_names(self) -> tuple[frozenset[str], ...]:
        """Per edge level, root first: the arrays of a child's report, found by trying the rule on a
        row of zeros."""
        found = []
        for rule in self.rules:
            x_1P = torch.zeros(1, self.parameters, dtype=self.dtype)
            state = rule.init(x_1P)
            correction = rule.correction(state, rule.note(rule.open(x_1P)))
            _, message = rule.up(state, x_1P, Edge(x_1P, correction, torch.ones(1, 1, dtype=self.dtype)))
            found.append(frozenset(message))
        return tuple(found)

    @cached_property
    def states(self) -> tuple[Rows | None, ...]:
        """Per edge level, root first: a child's state in form, where it has to be known when the
        weights of children change; None where they never do, or the rule does not mind."""

        def state(rule: Rule) -> Rows | None:
            return rule.init(torch.zeros(1, self.parameters, dtype=self.dtype)) if rule.reweigh else None

        return tuple(state(rule) if self.by_samples else None for rule in self.rules)

    @cached_property
    def note_names(self) -> tuple[frozenset[str], ...]:
        """The names of what a parent sends beside its model, per edge level."""
        x_1P = torch.zeros(1, self.parameters, dtype=self.dtype)
        return tuple(frozenset(rule.note(rule.open(x_1P))) for rule in self.rules)

    def children(self, level: int, number: int) -> Sequence[int]:
        """The numbers, on the next level, of a node's children."""
        return np.flatnonzero(self.tree.parents[level + 1] == number).tolist()

    def patience_at(self, edge: int) -> Patience:
        return self.patience[edge - 1] if self.patience else Patience()
