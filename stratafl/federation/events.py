"""Who watches a federation: measures of drift, the account of what was sent. Watching changes
nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stratafl.federation.sync import AggregationResult


class RoundBegan(NamedTuple):
    """A round of one edge level begins."""

    level: int
    active_N: np.ndarray
    """Who takes part."""
    parcel_bytes: int
    """What each gets, if it does not have it yet: the parent's model with its buffers and the
    rule's note."""
    model_bytes: int
    restarting: bool
    """Whether corrections are about to be set from gradients, and come with these."""


class GradientsExchanged(NamedTuple):
    """Corrections below the last meeting were set from gradients."""

    top: int
    """The topmost edge level of the last meeting."""
    fresh: Sequence[int]
    """The edge levels whose corrections are new."""
    sent: Mapping[int, np.ndarray]
    """Per edge level, who sent a gradient to its parent."""
    active: Sequence[np.ndarray]
    """Per level, who takes part."""
    model_bytes: int


class LevelSynchronized(NamedTuple):
    """One edge level has met."""

    level: int
    model_NP: Tensor
    """The children's models."""
    start_MP: Tensor
    """What their parents had given them."""
    correction_NP: Tensor | None
    """What they had used until then."""
    came_N: np.ndarray
    outcome: AggregationResult
    is_mean: bool
    """Whether the parents took the mean, rather than what a reducer of the rule's own makes of
    it."""
    sent_bytes: int
    """The bytes that each child that came has sent."""
    parcel_bytes: int
    is_answered: bool
    """Whether those that count got the new model for it."""


class Observer:
    """Sees what happens; a watcher overrides what it cares for."""

    def began(self, beginning: RoundBegan) -> None: ...

    def restarted(self, restart: GradientsExchanged) -> None: ...

    def met(self, meeting: LevelSynchronized) -> None: ...

    def relayed(self, top: int, corrections: Sequence[Tensor | None]) -> None:
        """Models of edge level `top` went down to the leaves; `corrections` are those in force, by
        edge level."""
