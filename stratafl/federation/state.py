"""State of the nodes of one level, with late updates of asynchronous levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.state_dict import StateDict
from stratafl.base.topology import Topology
from stratafl.core.rule import Rows, Rule


@dataclass(frozen=True, kw_only=True)
class LatePolicy:
    """Policy for updates that arrive late at an edge level."""

    reporting: Callable[[int], np.ndarray]
    """(number of the level's round) -> mask of all nodes of the level whose updates are aggregated
    at the end of that round."""
    staleness_exponent: float

    def weight(self, age_N: np.ndarray) -> np.ndarray:
        """Polynomial weight of FedAsync (arXiv:1903.03934): (1 + age)^-exponent, with the age in
        synchronisations."""
        return np.asarray((1.0 + age_N) ** -self.staleness_exponent)


@dataclass(frozen=True, eq=False)
class PendingUpdates:
    """Updates of a level's nodes that are being computed, or wait to be aggregated."""

    start_NP: Tensor
    """The model that each node began with."""
    mask_N: np.ndarray
    """Nodes with a pending update."""
    begun_at_N: np.ndarray
    """Number of synchronisations that a node's parent had held when the node began."""

    @staticmethod
    def none(model_NP: Tensor) -> PendingUpdates:
        """An empty table of pending updates, for nodes with these models."""
        size = len(model_NP)
        return PendingUpdates(model_NP, np.zeros(size, dtype=bool), np.zeros(size, dtype=np.int64))

    def begin(self, beginning_N: np.ndarray, model_NP: Tensor, syncs_N: np.ndarray) -> PendingUpdates:
        """Add updates of the nodes in the mask, which begin another one.

        syncs_N: number of synchronisations that their parents have held.
        """
        beginning_N1 = to_device(beginning_N, model_NP.device)[:, None]
        return PendingUpdates(
            start_NP=torch.where(beginning_N1, model_NP, self.start_NP),
            mask_N=self.mask_N | beginning_N,
            begun_at_N=np.where(beginning_N, syncs_N, self.begun_at_N),
        )

    def remove(self, aggregated_N: np.ndarray) -> PendingUpdates:
        """Remove the updates that were aggregated."""
        return replace(self, mask_N=self.mask_N & ~aggregated_N)

    def weights(self, late: LatePolicy, syncs_N: np.ndarray) -> np.ndarray:
        """Present weight of every update, by its age."""
        return np.where(self.mask_N, late.weight(np.maximum(syncs_N - self.begun_at_N, 0)), 1.0)

    def rebase(self, model_NP: Tensor, onto_NP: Tensor, syncs_N: np.ndarray, weight_N: np.ndarray) -> Tensor:
        """Models of children, with the updates that began from older models than `onto_NP` applied
        to `onto_NP` with their weight."""
        is_stale_N1 = to_device(syncs_N > self.begun_at_N, model_NP.device)[:, None]
        weight_N1 = to_device(weight_N, model_NP.device, model_NP.dtype)[:, None]
        return torch.where(is_stale_N1, onto_NP + weight_N1 * (model_NP - self.start_NP), model_NP)


def with_current_corrections(
    model_NP: Tensor, *, used_NP: Tensor | None, current_NP: Tensor | None, lr_sum_N1: Tensor
) -> Tensor:
    """Models that children would have reached with their current corrections instead of the ones
    that they used."""
    if used_NP is None or current_NP is None:
        return model_NP
    return model_NP + lr_sum_N1 * (used_NP - current_NP)


def supports_late_updates(rule: Rule) -> bool:
    """Whether a rule declares that it supports late updates, or keeps nothing at its children that
    they could affect."""
    if rule.counts_late:
        return True
    x_11 = torch.zeros(1, 1)
    state = rule.init(x_11)
    keeps_state = bool(state) or rule.down is not None or rule.from_gradient is not None
    return not keeps_state and rule.correction(state, rule.note(rule.open(x_11))) is None


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelState:
    """State of the nodes of one level; every row is a node, in the tree's order."""

    model: Tensor
    """Each node's model as it was last sent up, before the parent's answer replaced it."""
    buffers: Tensor
    """Each node's buffers, followed by its SGD path where nodes carry one."""
    broadcast: Rows
    """Each node's last message to its children, as they understand it: model, buffers and the
    rule's `note`; empty on the clients' level."""
    broadcast_bytes: int
    """Size of this message."""
    memory: Rows
    """The rule's memory at a parent, for the edge level below; empty on the clients' level."""
    state: Rows
    """The rule's state at a child, for the edge to its parent; empty on the root's level."""
    correction: Tensor | None
    """Correction that a node's subtree adds to its gradients for that edge."""
    up_channel: Rows
    """Memory of the channel to the parent."""
    down_channel: Rows
    """Memory of the channel to the children."""
    lr_sum_N: np.ndarray
    """Sum of learning rates since a node's last synchronisation with its parent."""
    has_update_N: np.ndarray
    """Nodes with an update for their parent: clients that trained, whatever their learning rate,
    and parents that aggregated an update since they last synchronised with their own."""
    active_N: np.ndarray
    """Nodes that take part in the round under way."""
    has_joined_N: np.ndarray
    """Nodes that have ever taken part."""
    rounds_begun: int
    """Number of rounds of the edge level above that have begun."""
    client_rows: Rows
    """Rows that clients keep to themselves: optimizer states, where they outlive a
    synchronisation, and local parameters (see `local_parameters`); empty on other levels."""
    staged_client_rows: Rows
    """The same after the training of the clients that took part; they count once its report is
    accepted. Empty between a synchronisation and the next training, unless late updates count."""
    syncs_N: np.ndarray
    """Number of synchronisations that each node has held with its children."""
    pending: PendingUpdates | None
    """None where late updates do not count."""

    @staticmethod
    def initial(
        model_NP: Tensor, buffers_NB: Tensor, *, state: Rows, up_channel: Rows, client_rows: Rows, is_late: bool
    ) -> LevelState:
        """State of a level before the first round; is_late: whether late updates count."""
        size = len(model_NP)
        return LevelState(
            model=model_NP,
            buffers=buffers_NB,
            broadcast={},
            broadcast_bytes=0,
            memory={},
            state=state,
            correction=None,
            up_channel=up_channel,
            down_channel={},
            lr_sum_N=np.zeros(size),
            has_update_N=np.zeros(size, dtype=bool),
            active_N=np.ones(size, dtype=bool),
            has_joined_N=np.zeros(size, dtype=bool),
            rounds_begun=0,
            client_rows=client_rows,
            staged_client_rows=client_rows if is_late else {},
            syncs_N=np.zeros(size, dtype=np.int64),
            pending=PendingUpdates.none(model_NP) if is_late else None,
        )

    @property
    def is_pending_N(self) -> np.ndarray:
        """Mask of the nodes with a pending update."""
        return np.zeros(len(self.active_N), dtype=bool) if self.pending is None else self.pending.mask_N

    def as_dict(self, weights_N: np.ndarray) -> StateDict:
        """The state as plain data; weights_N: weights of the nodes among their siblings, under
        which the states were made."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "pending": {} if self.pending is None else vars(self.pending), "weights_N": weights_N}

    @staticmethod
    def of(values: StateDict) -> tuple[LevelState, np.ndarray]:
        """Read a level and the weights under which its states were made, as `as_dict` wrote
        them."""
        state = {name: value for name, value in values.items() if name != "weights_N"}
        pending = PendingUpdates(**values["pending"]) if values["pending"] else None
        return LevelState(**{**state, "pending": pending}), values["weights_N"]


def receives_broadcast(tree: Topology, levels: Sequence[LevelState], level: int, top_level: int) -> np.ndarray:
    """Mask of the nodes that get a model from the parents of edge level `top_level`: all nodes that
    are neither pending nor below a pending node. Above that level, a node that takes part
    synchronises, and is not pending."""
    reached_N = np.ones(tree.sizes[0], dtype=bool)
    for lower in range(1, level + 1):
        nodes = levels[lower]
        is_away_N = nodes.is_pending_N & ~(nodes.active_N & (lower < top_level))
        reached_N = reached_N[tree.parents[lower]] & ~is_away_N
    return reached_N
