"""Work that counts in a later meeting than the one for which it was begun.

A child whose work is *pending* began it from a model that its parent gave some meetings ago. What
counts then is how far it came, put on the parent's model of now:

    parent's model + weight * (child's model - its start),      weight = (1 + age) ^ -staleness

with the age in meetings that the parent has held since. At the age 0 that is the report itself. All
else in a message, and buffers, which are statistics rather than steps, count as they are.

A rule whose children keep nothing bears this as it is. One that corrects compares siblings by how
far each came, unweighted, so that what they learn still adds up to zero: `compared` gives models
that differ by just that. A correction may also have begun anew since the child began (MTGC's, when
a model comes from above its parent). Then what the child used and what it has are two things, and
the model is taken to where it would have come with the latter: used and had differ by a constant in
every direction of the work.

Shape suffixes: N children, M parents, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import placed
from stratafl.core.rule import Rule


@dataclass(frozen=True)
class Later:
    """How late work counts at an edge level."""

    heard: Callable[[int], np.ndarray]
    """Whose reports the meeting of a round merges: from the number of the level's round to a mask
    of the whole level."""
    staleness: float

    def weight(self, age_N: np.ndarray) -> np.ndarray:
        return np.asarray((1.0 + age_N) ** -self.staleness)


@dataclass(frozen=True, eq=False)
class Pending:
    """The work under way of the nodes of a level."""

    start_NP: Tensor
    """The model that each began from."""
    is_N: np.ndarray
    """Whose work is under way, or done and not merged."""
    since_N: np.ndarray
    """How many meetings its parent had held when it began."""

    @staticmethod
    def nothing(x_NP: Tensor) -> Pending:
        count = len(x_NP)
        return Pending(x_NP, np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64))

    def begun(self, who_N: np.ndarray, model_NP: Tensor, meetings_N: np.ndarray) -> Pending:
        """The work under way after those in the mask began anew; meetings_N: how many meetings
        their parents have held."""
        chosen = placed(who_N, model_NP.device)[:, None]
        start_NP = torch.where(chosen, model_NP, self.start_NP)
        return Pending(start_NP, self.is_N | who_N, np.where(who_N, meetings_N, self.since_N))

    def without(self, merged_N: np.ndarray) -> Pending:
        return replace(self, is_N=self.is_N & ~merged_N)

    def weights(self, later: Later, meetings_N: np.ndarray) -> np.ndarray:
        """What each counts now."""
        return np.where(self.is_N, later.weight(np.maximum(meetings_N - self.since_N, 0)), 1.0)

    def moved(self, model_NP: Tensor, onto_NP: Tensor, meetings_N: np.ndarray, weight_N: np.ndarray) -> Tensor:
        """Models of children that began from older ones than `onto_NP`, put on these."""
        old = placed(meetings_N > self.since_N, model_NP.device)[:, None]
        weight_N1 = placed(weight_N, model_NP.device, model_NP.dtype)[:, None]
        return torch.where(old, onto_NP + weight_N1 * (model_NP - self.start_NP), model_NP)


def compared(model_NP: Tensor, used_NP: Tensor | None, has_NP: Tensor | None, rate_N1: Tensor) -> Tensor:
    """Where children would have come with the corrections that they have, rather than with those
    that they used."""
    if used_NP is None or has_NP is None:
        return model_NP
    return model_NP + rate_N1 * (used_NP - has_NP)


def bears_late_work(rule: Rule) -> bool:
    """Whether a rule says what late work does to it, or has nothing at its children that it could
    do something to."""
    if rule.counts_late:
        return True
    x_11 = torch.zeros(1, 1)
    state = rule.init(x_11)
    keeps = bool(state) or rule.down is not None or rule.from_gradient is not None
    return not keeps and rule.correction(state, rule.note(rule.open(x_11))) is None
