"""The state of a level of a federation: a value, replaced as a whole when something changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

from stratafl.base.state_dict import State
from stratafl.core.rule import Rows
from stratafl.core.state.late import Pending


@dataclass(frozen=True, eq=False)
class LevelState:
    """Everything that the nodes of one level have; rows are nodes in the tree's order."""

    model: Tensor
    """The model of each node as it last sent it up, before its parent's answer replaced it."""
    buffers: Tensor
    """The buffers of each node, with its path behind them where the tree has paths."""
    given: Rows
    """What each node last gave to its children, as they understand it: model, buffers and the
    rule's note; nothing on the leaves' level."""
    given_bytes: int
    """The bytes that this took on its way to a child."""
    memory: Rows
    """The rule's memory at a parent, for the edge level below; nothing on the leaves' level."""
    state: Rows
    """The rule's state at a child, for the edge to its parent; nothing on the root's level."""
    correction: Tensor | None
    """What a node's subtree adds to its gradients for that edge."""
    up_channel: Rows
    """The channel's memory on the way to the parent."""
    down_channel: Rows
    """The channel's memory on the way to the children."""
    rate_N: np.ndarray
    """The sum of learning rates since a node last met its parent."""
    brings_N: np.ndarray
    """Who has something to bring to the parent: a leaf that trained, whatever its learning rate,
    and a parent that heard somebody since it last met its own."""
    active_N: np.ndarray
    """Who takes part in the round that is under way."""
    begun_N: np.ndarray
    """Who has ever taken part."""
    rounds: int
    """How many rounds of the edge level above have begun."""
    optimiser: Rows
    """What the leaves keep to themselves: the states of their optimiser, where they are kept, and
    what of their models stays with them (see `home`); nothing on other levels."""
    advanced: Rows
    """What they keep after the work of those that take part, which counts once their reports do;
    nothing between a meeting and the next work, unless late work counts."""
    meetings_N: np.ndarray
    """How many meetings each has held with its children."""
    pending: Pending | None
    """The work that is under way, where late work counts; None where it does not."""

    def as_dict(self, weights_N: np.ndarray) -> State:
        """`weights_N`: of the nodes among their siblings, which the states were made under."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "pending": {} if self.pending is None else vars(self.pending), "weights_N": weights_N}

    @staticmethod
    def of(values: State) -> tuple[LevelState, np.ndarray]:
        """Read a level, and the weights that its states were made under, from what `as_dict`
        gave."""
        rest = {name: value for name, value in values.items() if name != "weights_N"}
        pending = Pending(**values["pending"]) if values["pending"] else None
        return LevelState(**{**rest, "pending": pending}), values["weights_N"]


def completed(state: State, weights: Sequence[np.ndarray]) -> State:
    """A federation's state with what one that was stored before it was known does not have: kept
    states of optimisers and pending work, of which there were none; who had taken part, which was
    no matter; and the weights, which are taken for those of now, by level."""
    levels = state.get("levels")
    if not isinstance(levels, list) or len(levels) != len(weights):
        return state
    paired = zip(levels, weights, strict=True)
    return {**state, "levels": [_completed(each, own) if isinstance(each, dict) else each for each, own in paired]}


def _completed(level: State, weights_N: np.ndarray) -> State:
    active_N, rate_N = level.get("active_N"), level.get("rate_N")
    nodes = len(active_N) if isinstance(active_N, np.ndarray) and active_N.ndim else 0
    none: State = {
        "optimiser": {},
        "advanced": {},
        "meetings_N": np.zeros(nodes, dtype=np.int64),
        "pending": {},
        "brings_N": rate_N > 0 if isinstance(rate_N, np.ndarray) else np.zeros(nodes, dtype=bool),
        "begun_N": np.ones(nodes, dtype=bool),
        "weights_N": weights_N,
    }
    return none | level
