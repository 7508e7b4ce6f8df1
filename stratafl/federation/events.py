"""Events of a federation, and the base class of what observes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stratafl.federation.sync import AggregationResult


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundBegan:
    """A round of an edge level began."""

    level: int
    active_N: np.ndarray
    """Nodes that take part."""
    broadcast_bytes: int
    """Size of the parent's message (model, buffers and `Rule.note`), sent to each node that
    does not have it yet."""
    model_bytes: int
    """Size of the parameters alone, which is that of a correction."""
    restarts_from_gradients: bool
    """Whether corrections are about to be set from gradients; they are then sent as
    `GradientsExchanged` says, and not with this message."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientsExchanged:
    """Corrections of edge levels below the last synchronisation were set from gradients."""

    top_level: int
    """Topmost edge level of the last synchronisation; the root's is 1."""
    restarted_levels: Sequence[int]
    """Edge levels whose corrections are new."""
    sent: Mapping[int, np.ndarray]
    """By edge level, the nodes whose gradient was averaged; rejected ones are not among them."""
    active: Sequence[np.ndarray]
    """By level, the nodes that take part."""
    model_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBegan:
    """The clients begin to train, with all models and corrections in place."""

    top_level: int
    """Topmost edge level of the synchronisation that follows."""
    corrections: Sequence[Tensor | None]
    """By level, the corrections of its nodes."""
    model_MP: Tensor
    """The models of the clients' parents."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyncCounts:
    """Messages of one synchronisation of one edge level."""

    reported_N: np.ndarray
    """Children whose reports arrived."""
    accepted_N: np.ndarray
    """Children whose updates count."""
    upload_bytes: int
    """Size of a child's report."""
    broadcast_bytes: int
    """Size of the parent's message with the new model."""
    is_answered: bool
    """Whether the children whose updates count get the new model at once, in return."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyncModels:
    """Models and corrections of one synchronisation of one edge level."""

    model_NP: Tensor
    """The children's models."""
    start_MP: Tensor
    """The models that their parents had sent them."""
    correction_NP: Tensor | None
    """The corrections that the children's subtrees used until then."""
    result: AggregationResult
    takes_mean: bool
    """Whether the parents took the mean, instead of the result of `Rule.reduce`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSynchronized:
    """An edge level was synchronised."""

    level: int
    counts: SyncCounts
    models: SyncModels | None
    """None where only messages are counted."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelFromAbove:
    """New models of an edge level's parents replace those of all levels below, whose nodes get them
    when their next round begins."""

    top_level: int
    """Topmost edge level that synchronised; nodes below it do not have the new model yet."""
    has_correction: Sequence[bool]
    """By level, whether its nodes have corrections."""


class Observer:
    """Base class of observers; they override the methods of the events they use."""

    def on_round_begin(self, event: RoundBegan) -> None: ...

    def on_gradients_exchanged(self, event: GradientsExchanged) -> None: ...

    def on_training_begin(self, event: TrainingBegan) -> None: ...

    def on_level_synchronized(self, event: LevelSynchronized) -> None: ...

    def on_model_from_above(self, event: ModelFromAbove) -> None: ...
