"""Synchronisation of one edge level as pure functions: upload, aggregate, broadcast.

Shape suffixes: N children, M parents, P parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache
from stratafl.base.topology import Topology
from stratafl.core.channel import BUFFERS, EXACT, MODEL, ChannelKey, Channels
from stratafl.core.participation import Participation
from stratafl.core.rows import DriftKernel, IndexedRows, where_rows, where_tables
from stratafl.core.rule import Edge, Rows, Rule
from stratafl.federation.state import LatePolicy, LevelState, with_current_corrections
from stratafl.federation.update_checks import (
    NO_LIMITS,
    Rejection,
    UpdateLimits,
    exceeds_ratio,
    keep_nonfinite,
    limits_by_level,
    needs_inspection,
    norm_outliers,
    row_max_abs,
    rows_finite,
    size_outliers,
    zero_unchanged,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeLevel:
    """Settings that both ends of one edge level share."""

    level: int
    """1 for the edges to the root."""
    rule: Rule
    seed: int
    """Seed of the run: participants and channels draw random numbers from it."""
    participation: Participation = None
    limits: UpdateLimits = NO_LIMITS
    channels: Channels = EXACT
    late: LatePolicy | None = None
    """How late updates count; None where none do, and parents wait for all participants."""

    def channel_key(self, round: int, senders_N: np.ndarray) -> ChannelKey:
        """Key of the random numbers of a channel; senders_N: their numbers in the whole tree."""
        return ChannelKey(seed=self.seed, level=self.level, round=round, nodes_N=senders_N)


def edge_levels(
    rules: Sequence[Rule],
    *,
    seed: int,
    participation: Sequence[Participation] | None = None,
    update_limit: float | None = None,
    update_factor: object = None,
    checks_all_parts: bool = False,
    channels: Sequence[Channels] | None = None,
    late: Mapping[int, LatePolicy] | None = None,
) -> list[EdgeLevel]:
    """Settings of all edge levels, root first.

    participation: all children, unless given.
    channels: everything is sent as it is, unless given.
    late: by edge level, where late updates count.
    """
    limits = limits_by_level(rules, update_limit, update_factor, checks_all_parts=checks_all_parts)
    return [
        EdgeLevel(
            level=level,
            rule=rule,
            seed=seed,
            participation=None if participation is None else participation[level - 1],
            limits=limits[level - 1],
            channels=channels[level - 1] if channels else EXACT,
            late=None if late is None else late.get(level),
        )
        for level, rule in enumerate(rules, 1)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeNodes:
    """The children and parents of one edge level, and what is kept on their device."""

    tree: Topology
    level: int
    """Level of the children in `tree`."""
    cache: DeviceCache
    may_be_nonfinite: bool = True
    """Whether buffers may hold entries that are not finite, such as the -inf of a mask: these
    cannot be averaged."""
    drift_kernel: DriftKernel | None = None

    def to_children(self, rows_MP: Tensor) -> IndexedRows:
        """Rows of the children's parents, one for each child."""
        parent_N = self.tree.parents[self.level]
        return IndexedRows(rows_MP, parent_N, self.cache(("children", self.level), parent_N), self.drift_kernel)

    def column(self, name: str, values_N: np.ndarray, like: Tensor) -> Tensor:
        """Convert one number per node to an N x 1 tensor, to combine with rows."""
        return self.cache((name, self.level), values_N, like.dtype)[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Upload:
    """Reports of children, and the states that the children take if their report is accepted."""

    payload: Rows
    message: Rows
    """The payload as the parents decode it."""
    state: Rows
    """The rule's state."""
    channel: Rows
    """The channel's memory."""
    model_NP: Tensor
    """The children's models as their parents decoded them; rules compare them with the parent's new
    model."""

    @property
    def buffers_NB(self) -> Tensor:
        """The children's buffers as their parents know them."""
        return self.message[BUFFERS]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReceivedUpdates:
    """Reports that reached the parents."""

    message: Rows
    """Decoded, with the buffers."""
    reported_N: np.ndarray
    lr_sum_N: np.ndarray
    """Sums of learning rates since the children last synchronised."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AggregatorState:
    """Models and buffers of parents, and the rule's memory.

    Before an aggregation, models and buffers are as the children decoded them; after it, they are
    the new ones, which are not sent yet.
    """

    model_MP: Tensor
    buffers_MB: Tensor
    memory: Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AggregationResult:
    """Outcome of one aggregation."""

    state: AggregatorState
    """The parents' new state; unchanged for a parent that has no valid result."""
    accepted_N: np.ndarray
    """Children whose updates count."""
    nonfinite_N: np.ndarray
    """Children whose updates were not finite."""
    oversized_N: np.ndarray
    """Children whose updates were finite, but far too large."""
    weight_M: np.ndarray
    """Share of each parent's weight, from 0 to 1, that the aggregated updates have."""
    updated_M: np.ndarray
    """Parents that aggregated something, with a finite result."""
    lr_sum_M: np.ndarray
    """Mean of the children's sums of learning rates."""
    mean_MP: Tensor
    """Mean of the aggregated children's models, or what the rule's `reduce` makes of them."""
    merged_MP: Tensor
    """The rule's new model, finite or not."""

    @property
    def failed_M(self) -> np.ndarray:
        """Parents whose result is not finite, although all aggregated updates are."""
        return (self.weight_M > 0) & ~self.updated_M

    def rejections(self, tree: Topology, level: int) -> list[Rejection]:
        """Children whose updates were rejected, and parents whose result was; level: the
        children's."""
        oversized = set(tree.owned_names(level, self.oversized_N))
        children = tree.owned_names(level, self.nonfinite_N | self.oversized_N)
        parents = tree.owned_names(level - 1, self.failed_M)
        return [Rejection(name, is_oversized=name in oversized) for name in [*children, *parents]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """Outcome of a synchronisation of several edge levels."""

    top_level: int
    """Topmost edge level that synchronised."""
    participants: list[int]
    """Numbers of the clients that took part."""
    rejected: list[Rejection]
    renewed: bool
    """Whether at least one of the topmost parents has a new model."""


# -- the children report ---------------------------------------------------------------------------


def upload(
    edge: EdgeLevel,
    *,
    state: Rows,
    channel: Rows,
    model_NP: Tensor,
    buffers_NB: Tensor,
    view: Edge,
    key: ChannelKey,
) -> Upload:
    """Make the reports of children with these models and buffers.

    view: values that children and parents have in common, for the functions of the rule.
    """
    state, message = edge.rule.up(state, model_NP, view)
    message = {**message, BUFFERS: buffers_NB}
    channel, payload = edge.channels.up.encode(channel, message, view, key)
    decoded, sent_NP = edge.channels.up.decode(payload, view), message[MODEL]
    # what a channel loses is missing from the model that the parent knows, too
    is_exact = decoded[MODEL] is sent_NP
    return Upload(
        payload=payload,
        message=decoded,
        state=state,
        channel=channel,
        model_NP=model_NP if is_exact else model_NP + (decoded[MODEL] - sent_NP),
    )


def decode_upload(edge: EdgeLevel, payload: Rows, view: Edge) -> Rows:
    """Decode the children's messages."""
    return edge.channels.up.decode(payload, view)


# -- the parents aggregate and answer --------------------------------------------------------------


def aggregate(
    edge: EdgeLevel, nodes: EdgeNodes, state: AggregatorState, received: ReceivedUpdates
) -> AggregationResult:
    """Aggregate the updates that reached the parents. Where the tree lies in several parts, all of
    them must call this."""
    tree, level, limits = nodes.tree, nodes.level, edge.limits
    reported_N = received.reported_N
    nonfinite_N = oversized_N = np.zeros_like(reported_N)
    # A mean is finite only if all that went into it is, so rows are inspected one by one only if it
    # is not. They always are for a reducer, such as a median, which may hide what is not finite,
    # and for limits other than `ratio`.
    always_inspects = edge.rule.reduce is not None or limits.norm_ratio is not None or limits.checks_all_parts
    merged = None if always_inspects else _merge(edge, nodes, state, received.message, reported_N)
    if merged is None or tree.any_rank(level, merged.is_doubtful):
        nonfinite_N, oversized_N = _find_invalid(edge, nodes, state, received)
        valid_N = reported_N & ~nonfinite_N & ~oversized_N
        merged = _merge(edge, nodes, state, received.message, valid_N, is_inspected=True)
    has_updates_M = merged.weight_M > 0
    updated_M = has_updates_M & merged.finite_M
    accepted_N = reported_N & ~nonfinite_N & ~oversized_N & updated_M[tree.parents[level]]
    weight_M = np.where(has_updates_M, merged.weight_M, 1.0)
    return AggregationResult(
        state=AggregatorState(
            model_MP=where_rows(updated_M, merged.model_MP, state.model_MP),
            buffers_MB=where_rows(updated_M, merged.buffers_MB, state.buffers_MB),
            memory=where_tables(updated_M, merged.memory, state.memory),
        ),
        accepted_N=accepted_N,
        nonfinite_N=nonfinite_N,
        oversized_N=oversized_N,
        weight_M=merged.weight_M,
        updated_M=updated_M,
        lr_sum_M=tree.present_weight(level, accepted_N * received.lr_sum_N) / weight_M,
        mean_MP=merged.mean_MP,
        merged_MP=merged.model_MP,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Aggregate:
    """Result of a rule's `merge`, before it is known to be valid."""

    memory: Rows
    mean_MP: Tensor
    model_MP: Tensor
    buffers_MB: Tensor
    finite_M: np.ndarray
    """Parents whose whole result is finite."""
    weight_M: np.ndarray
    suspicious_N: np.ndarray
    """Children whose message may be invalid although the mean is finite."""

    @property
    def is_doubtful(self) -> bool:
        """Whether children's updates must be inspected one by one."""
        return not (self.finite_M | (self.weight_M == 0)).all() or bool(self.suspicious_N.any())


def _merge(
    edge: EdgeLevel,
    nodes: EdgeNodes,
    state: AggregatorState,
    message: Rows,
    present_N: np.ndarray,
    is_inspected: bool = False,
) -> _Aggregate:
    """Reduce the messages of the children in the mask, and merge the result into the parents'
    state; is_inspected: all these messages are known to be valid."""
    tree, level, rule = nodes.tree, nodes.level, edge.rule
    weight_M = tree.present_weight(level, present_N)

    def reduced(rows_NP: Tensor) -> Tensor:
        if rule.reduce is None:
            return tree.mean(level, rows_NP, present_N, weight_M)
        return tree.reduce(level, rows_NP, present_N, rule.reduce)

    mean = {name: reduced(rows) for name, rows in message.items() if name != BUFFERS}
    buffers_MB = tree.mean(level, message[BUFFERS], present_N, weight_M)
    if nodes.may_be_nonfinite:
        buffers_MB = keep_nonfinite(buffers_MB, state.buffers_MB)
    weight_M1 = nodes.column("weight", weight_M, state.model_MP)
    memory, model_MP = rule.merge(state.memory, state.model_MP, mean, weight_M1)

    changed_MB = zero_unchanged(buffers_MB, state.buffers_MB) if nodes.may_be_nonfinite else buffers_MB
    results = [model_MP, changed_MB, *mean.values()]
    inspected = [] if is_inspected else _rows_to_inspect(edge, nodes, state, message)
    sizes = row_max_abs(*results, *(rows_NP for rows_NP, _ in inspected))
    suspicious = [
        needs_inspection(size_N, ratio) for size_N, (_, ratio) in zip(sizes[len(results) :], inspected, strict=True)
    ]
    return _Aggregate(
        memory=memory,
        mean_MP=mean[MODEL],
        model_MP=model_MP,
        buffers_MB=buffers_MB,
        finite_M=rows_finite(sizes[: len(results)]),
        weight_M=weight_M,
        suspicious_N=present_N & np.any(suspicious, axis=0),
    )


def _rows_to_inspect(
    edge: EdgeLevel, nodes: EdgeNodes, state: AggregatorState, message: Rows
) -> list[tuple[Tensor, float | None]]:
    """Children's rows that may be invalid although their mean is finite, with the largest accepted
    ratio of their sizes."""
    ratio = edge.limits.ratio
    models = [] if ratio is None else [(message[MODEL], ratio)]
    return models + ([(_changed_buffers(nodes, state, message), None)] if nodes.may_be_nonfinite else [])


def _changed_buffers(nodes: EdgeNodes, state: AggregatorState, message: Rows) -> Tensor:
    """Children's buffers, with zeros for entries that are as the parents sent them, finite or
    not."""
    if not nodes.may_be_nonfinite:
        return message[BUFFERS]
    return zero_unchanged(message[BUFFERS], nodes.tree.to_children(nodes.level, state.buffers_MB))


def _find_invalid(
    edge: EdgeLevel, nodes: EdgeNodes, state: AggregatorState, received: ReceivedUpdates
) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the children whose updates are not finite, and of those whose updates are finite but
    far too large."""
    tree, level, limits = nodes.tree, nodes.level, edge.limits
    message = {**received.message, BUFFERS: _changed_buffers(nodes, state, received.message)}
    sizes = dict(zip(message, row_max_abs(*message.values()), strict=True))
    nonfinite_N = received.reported_N & ~rows_finite(list(sizes.values()))
    present_N, start_MP = received.reported_N & ~nonfinite_N, state.model_MP
    model_NP = message[MODEL]
    oversized_N = size_outliers(tree, level, model_NP, sizes[MODEL], start_MP, present_N, limits.ratio)
    if limits.checks_all_parts and limits.ratio is not None:
        extras = {name: size_N for name, size_N in sizes.items() if name not in (MODEL, BUFFERS)}
        start_M, buffers_M = row_max_abs(start_MP, state.buffers_MB.nan_to_num(0.0, 0.0, 0.0))
        # buffers may hold variances, which grow with the square: so does their limit
        parts = [(sizes[BUFFERS], buffers_M, limits.ratio**2)]
        parts += [(size_N, start_M, limits.ratio) for size_N in extras.values()]
        for size_N, reference_M, ratio in parts:
            oversized_N = oversized_N | exceeds_ratio(tree, level, size_N, reference_M, present_N, ratio)
    present_N &= ~oversized_N
    return nonfinite_N, oversized_N | norm_outliers(tree, level, model_NP, start_MP, present_N, limits.norm_ratio)


def answers_reports(rule: Rule, is_overwritten: bool) -> bool:
    """Whether children that reported apply the rule's `down` to their parents' new model.

    Where a newer model is about to come from above and overwrites it (`is_overwritten`), only a
    rule without `relay` does, to learn from its own synchronisation. Children that do not still get
    the model, unless it is overwritten.
    """
    return rule.down is not None and not (is_overwritten and rule.relay is not None)


def broadcast(edge: EdgeLevel, channel: Rows, state: AggregatorState, key: ChannelKey) -> tuple[Rows, Rows]:
    """Encode the parents' message to their children: the channel's new memory, and the payload."""
    return edge.channels.down.encode(channel, broadcast_message(edge.rule, state), None, key)


def decode_broadcast(edge: EdgeLevel, payload: Rows) -> Rows:
    """Decode the parents' broadcast."""
    return edge.channels.down.decode(payload, None)


def broadcast_message(rule: Rule, state: AggregatorState) -> Rows:
    """Message of parents to their children: model, buffers and the rule's `note`."""
    return {**rule.note(state.memory), MODEL: state.model_MP, BUFFERS: state.buffers_MB}


def extras_of(broadcast: Rows) -> Rows:
    """The rule's `note` in a broadcast: all rows besides the model and its buffers."""
    return {name: rows for name, rows in broadcast.items() if name not in (MODEL, BUFFERS)}


# -- the children take the answer ------------------------------------------------------------------


def apply_answer(rule: Rule, state: Rows, model_NP: Tensor, view: Edge) -> Rows:
    """Children's states after their parents' new model, `view.merged`; `view.rate` is the mean
    over the siblings."""
    return state if rule.down is None else rule.down(state, model_NP, view)


def apply_from_above(rule: Rule, state: Rows, times: int = 1) -> Rows:
    """Children's states after newer models came from above their parents, so many times."""
    if rule.relay is not None:
        for _ in range(times):
            state = rule.relay(state)
    return state


def correction(rule: Rule, state: Rows, broadcast: Rows) -> Tensor | None:
    """Corrections that children's subtrees add to their gradients; broadcast: a row for each child
    of what its parent sent."""
    return rule.correction(state, extras_of(broadcast))


# -- late updates ----------------------------------------------------------------------------------


def rebase_late_updates(
    edge: EdgeLevel, children: LevelState, received: ReceivedUpdates, model_NP: Tensor, syncs_N: np.ndarray
) -> ReceivedUpdates:
    """Apply pending updates to the parents' present models, weighted by their age.

    The sums of learning rates are weighted alike, since rules that measure gradients divide a
    model's change by them.

    model_NP, syncs_N: the parents' models, and the number of synchronisations that they have held.
    """
    pending, late = children.pending, edge.late
    assert pending is not None and late is not None
    weight_N = pending.weights(late, syncs_N)
    rebased_NP = pending.rebase(received.message[MODEL], model_NP, syncs_N, weight_N)
    return ReceivedUpdates(
        message={**received.message, MODEL: rebased_NP},
        reported_N=received.reported_N,
        lr_sum_N=received.lr_sum_N * weight_N,
    )


def late_answer_view(
    nodes: EdgeNodes,
    children: LevelState,
    upload: Upload,
    start_MP: Tensor,
    result: AggregationResult,
    current_NP: Tensor | None,
    syncs_N: np.ndarray,
) -> tuple[Edge, Tensor]:
    """The `Edge` and the children's models for `apply_answer` where late updates count.

    The models are those that children would have, had they begun from `start_MP` under the current
    corrections; the parents' new model is the mean of the accepted ones.

    start_MP, syncs_N: the parents' models before, and the number of synchronisations that they have
        held.
    current_NP: the children's corrections after the aggregation.
    """
    tree, level, pending, accepted_N = nodes.tree, nodes.level, children.pending, result.accepted_N
    assert pending is not None
    model_NP, start_NP = upload.model_NP, nodes.to_children(start_MP).dense()
    weight_M = np.where(result.weight_M > 0, result.weight_M, 1.0)
    lr_sum_M = tree.present_weight(level, accepted_N * children.lr_sum_N) / weight_M
    lr_sum_N1 = nodes.column("mean lr sum", lr_sum_M[tree.parents[level]], model_NP)
    corrected_NP = with_current_corrections(
        model_NP, used_NP=children.correction, current_NP=current_NP, lr_sum_N1=lr_sum_N1
    )
    rebased_NP = pending.rebase(corrected_NP, start_NP, syncs_N, np.ones(len(model_NP)))
    mean = nodes.to_children(tree.mean(level, rebased_NP, accepted_N, result.weight_M))
    return Edge(IndexedRows(start_NP), children.correction, lr_sum_N1, merged=mean), rebased_NP


# -- states under other weights --------------------------------------------------------------------


def reweigh(
    rule: Rule, tree: Topology, previous_tree: Topology, level: int, state: Rows, parents: LevelState
) -> tuple[Rows, Rows]:
    """Adapt children's states and parents' memory, made under the weights of another tree, to the
    present weights."""
    assert rule.reweigh is not None
    moved = {name: tree.mean(level, rows) - previous_tree.mean(level, rows) for name, rows in state.items()}
    # `gain` is 0: normalised weights add up to 1 before and after (see `core.rule`)
    memory, shift = rule.reweigh(parents.memory, moved, torch.zeros_like(parents.model[:, :1]))
    shifted = {name: rows - tree.to_children(level, shift[name]) for name, rows in state.items() if name in shift}
    return state | shifted, memory


# -- states from gradients -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientRestart:
    """Rule states set from gradients, by edge level."""

    states: dict[int, Rows]
    sent: dict[int, np.ndarray]
    """Nodes that sent a gradient to their parent, rejected ones included."""


def restart_from_gradients(
    tree: Topology,
    edges: Mapping[int, EdgeLevel],
    *,
    states: Sequence[Rows],
    levels: Sequence[int],
    gradient_NP: Tensor,
    active_N: np.ndarray,
) -> GradientRestart:
    """Average gradients up the tree, and let the rules that ask for it set their states from them.

    states: by level.
    levels: edge levels whose rules ask for it; gradients travel from the clients up to the first.
    gradient_NP: the clients' gradients; those not finite or far too large are left out.
    """
    restart = GradientRestart(states={}, sent={})
    (size_N,) = row_max_abs(gradient_NP)
    accepted_N = active_N & np.isfinite(size_N)
    ratio = edges[tree.depth].limits.ratio
    accepted_N &= ~size_outliers(tree, tree.depth, gradient_NP, size_N, None, accepted_N, ratio)
    restart.sent[tree.depth] = active_N
    for level in range(tree.depth, levels[0] - 1, -1):
        restart.sent.setdefault(level, accepted_N)
        weight_M = tree.present_weight(level, accepted_N)
        mean_MP = tree.mean(level, gradient_NP, accepted_N, weight_M)
        from_gradient = edges[level].rule.from_gradient
        if from_gradient:
            state = from_gradient(states[level], gradient_NP, tree.to_children(level, mean_MP))
            restart.states[level] = where_tables(accepted_N, state, states[level])
        gradient_NP, accepted_N = mean_MP, weight_M > 0
    return restart
