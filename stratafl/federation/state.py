"""State of the nodes of one edge level, with late updates of asynchronous levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.state_dict import StateDict
from stratafl.core.rule import Rows, Rule


@dataclass(frozen=True)
class LatePolicy:
    """How late work counts at an edge level."""

    heard: Callable[[int], np.ndarray]
    """Whose reports the meeting of a round merges: from the number of the level's round to a mask
    of the whole level."""
    staleness: float

    def weight(self, age_N: np.ndarray) -> np.ndarray:
        return np.asarray((1.0 + age_N) ** -self.staleness)


@dataclass(frozen=True, eq=False)
class PendingUpdates:
    """The work under way of the nodes of a level."""

    start_NP: Tensor
    """The model that each began from."""
    is_N: np.ndarray
    """Whose work is under way, or done and not merged."""
    since_N: np.ndarray
    """How many meetings its parent had held when it began."""

    @staticmethod
    def nothing(x_NP: Tensor) -> PendingUpdates:
        count = len(x_NP)
        return PendingUpdates(x_NP, np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64))

    def begun(self, who_N: np.ndarray, model_NP: Tensor, meetings_N: np.ndarray) -> PendingUpdates:
        """The work under way after those in the mask began anew; meetings_N: how many meetings
        their parents have held."""
        chosen = to_device(who_N, model_NP.device)[:, None]
        start_NP = torch.where(chosen, model_NP, self.start_NP)
        return PendingUpdates(start_NP, self.is_N | who_N, np.where(who_N, meetings_N, self.since_N))

    def without(self, merged_N: np.ndarray) -> PendingUpdates:
        return replace(self, is_N=self.is_N & ~merged_N)

    def weights(self, later: LatePolicy, meetings_N: np.ndarray) -> np.ndarray:
        """What each counts now."""
        return np.where(self.is_N, later.weight(np.maximum(meetings_N - self.since_N, 0)), 1.0)

    def moved(self, model_NP: Tensor, onto_NP: Tensor, meetings_N: np.ndarray, weight_N: np.ndarray) -> Tensor:
        """Models of children that began from older ones than `onto_NP`, put on these."""
        old = to_device(meetings_N > self.since_N, model_NP.device)[:, None]
        weight_N1 = to_device(weight_N, model_NP.device, model_NP.dtype)[:, None]
        return torch.where(old, onto_NP + weight_N1 * (model_NP - self.start_NP), model_NP)


def with_current_corrections(
    model_NP: Tensor, used_NP: Tensor | None, has_NP: Tensor | None, rate_N1: Tensor
) -> Tensor:
    """Where children would have come with the corrections that they have, rather than with those
    that they used."""
    if used_NP is None or has_NP is None:
        return model_NP
    return model_NP + rate_N1 * (used_NP - has_NP)


def supports_late_updates(rule: Rule) -> bool:
    """Whether a rule says what late work does to it, or has nothing at its children that it could
    do something to."""
    if rule.counts_late:
        return True
    x_11 = torch.zeros(1, 1)
    state = rule.init(x_11)
    keeps = bool(state) or rule.down is not None or rule.from_gradient is not None
    return not keeps and rule.correction(state, rule.note(rule.open(x_11))) is None


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
    pending: PendingUpdates | None
    """The work that is under way, where late work counts; None where it does not."""

    def as_dict(self, weights_N: np.ndarray) -> StateDict:
        """`weights_N`: of the nodes among their siblings, which the states were made under."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "pending": {} if self.pending is None else vars(self.pending), "weights_N": weights_N}

    @staticmethod
    def of(values: StateDict) -> tuple[LevelState, np.ndarray]:
        """Read a level, and the weights that its states were made under, from what `as_dict`
        gave."""
        rest = {name: value for name, value in values.items() if name != "weights_N"}
        pending = PendingUpdates(**values["pending"]) if values["pending"] else None
        return LevelState(**{**rest, "pending": pending}), values["weights_N"]


def add_missing_fields(state: StateDict, weights: Sequence[np.ndarray]) -> StateDict:
    """A federation's state with what one that was stored before it was known does not have: kept
    states of optimisers and pending work, of which there were none; who had taken part, which was
    no matter; and the weights, which are taken for those of now, by level."""
    levels = state.get("levels")
    if not isinstance(levels, list) or len(levels) != len(weights):
        return state
    paired = zip(levels, weights, strict=True)
    return {**state, "levels": [_completed(each, own) if isinstance(each, dict) else each for each, own in paired]}


def _completed(level: StateDict, weights_N: np.ndarray) -> StateDict:
    active_N, rate_N = level.get("active_N"), level.get("rate_N")
    nodes = len(active_N) if isinstance(active_N, np.ndarray) and active_N.ndim else 0
    none: StateDict = {
        "optimiser": {},
        "advanced": {},
        "meetings_N": np.zeros(nodes, dtype=np.int64),
        "pending": {},
        "brings_N": rate_N > 0 if isinstance(rate_N, np.ndarray) else np.zeros(nodes, dtype=bool),
        "begun_N": np.ones(nodes, dtype=bool),
        "weights_N": weights_N,
    }
    return none | level
