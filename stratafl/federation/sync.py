"""Synchronisation of one edge level as pure functions: upload, aggregate, broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache, to_device
from stratafl.base.topology import Tree
from stratafl.core.channel import BUFFERS, MODEL, ChannelKey, Channels
from stratafl.core.rows import DriftKernel, IndexedRows
from stratafl.core.rule import Edge, Rows, Rule
from stratafl.federation.update_checks import (
    Limits,
    exceeds_ratio,
    keep_nonfinite,
    needs_inspection,
    norm_outliers,
    row_max_abs,
    rows_finite,
    size_outliers,
    zero_unchanged,
)


class Terms(NamedTuple):
    """What both ends of an edge level go by."""

    rule: Rule
    level: int
    seed: int
    channels: Channels = Channels()

    def key(self, round: int, nodes_N: np.ndarray) -> ChannelKey:
        return ChannelKey(self.seed, self.level, round, nodes_N)


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of one level: whom they join, and what a parent accepts over them."""

    terms: Terms
    tree: Tree
    level: int
    limits: Limits
    placed: DeviceCache
    masked: bool = True
    """Whether buffers may hold entries that are not finite, such as a mask's -inf: they cannot be
    averaged."""
    drift_kernel: DriftKernel | None = None

    def spread(self, rows_MP: Tensor) -> IndexedRows:
        """Parents' rows as their children see them."""
        parent_N = self.tree.parents[self.level]
        return IndexedRows(rows_MP, parent_N, self.placed(("children", self.level), parent_N), self.drift_kernel)

    def column(self, name: str, values_N: np.ndarray, like: Tensor) -> Tensor:
        """One number per node, to combine with rows."""
        return self.placed((name, self.level), values_N, like.dtype)[:, None]


class Upload(NamedTuple):
    """What children sent, and the states that it leads to where it counts."""

    payload: Rows
    state: Rows
    """The rule's state."""
    channel: Rows
    """The channel's memory."""
    model_NP: Tensor
    """The children's models as their parents know them: the parents' answer is compared with
    these."""
    buffers_NB: Tensor
    """The children's buffers as their parents know them."""


class ReceivedUpdates(NamedTuple):
    """What came to the parents."""

    message: Rows
    """Decoded, and with the buffers."""
    came_N: np.ndarray
    rate_N: np.ndarray
    """The sum of the learning rates since the children last met their parents."""


class AggregatorState(NamedTuple):
    """What parents hold when their children come: the model and the buffers that they gave, and the
    rule's memory."""

    model_MP: Tensor
    buffers_MB: Tensor
    memory: Rows


class AggregationResult(NamedTuple):
    """What a meeting came to. A parent for whom nothing counted holds what it held."""

    held: AggregatorState
    present_N: np.ndarray
    """Whose message counted."""
    lost_N: np.ndarray
    """Whose message was not finite."""
    large_N: np.ndarray
    """Whose message was finite, but far too large."""
    share_M: np.ndarray
    """The share of the children's weight that went into the result, for each parent."""
    sane_M: np.ndarray
    """Who heard somebody, and made something finite of it."""
    rate_M: np.ndarray
    """The mean of the children's sums of learning rates."""
    mean_MP: Tensor
    """The mean of the children's models."""
    merged_MP: Tensor
    """What the rule made of it, finite or not."""

    @property
    def failed_M(self) -> np.ndarray:
        """Whose result is not finite, although all that went into it is."""
        return (self.share_M > 0) & ~self.sane_M


# -- the children's side ---------------------------------------------------------------------------


def upload(terms: Terms, state: Rows, channel: Rows, x_NP: Tensor, b_NB: Tensor, edge: Edge, key: ChannelKey) -> Upload:
    """The report of children whose models are `x_NP`."""
    state, message = terms.rule.up(state, x_NP, edge)
    message = {**message, BUFFERS: b_NB}
    channel, payload = terms.channels.up.encode(channel, message, edge, key)
    heard, said_NP = terms.channels.up.decode(payload, edge), message[MODEL]
    # what a channel loses is missing from the model that the parent knows, too
    model_NP = x_NP if heard[MODEL] is said_NP else x_NP + (heard[MODEL] - said_NP)
    return Upload(payload, state, channel, model_NP, heard[BUFFERS])


def apply_answer(rule: Rule, state: Rows, x_NP: Tensor, edge: Edge) -> Rows:
    """Children's states after they saw their parents' new model, `edge.merged`; `edge.rate` is the
    siblings' mean."""
    return state if rule.down is None else rule.down(state, x_NP, edge)


def apply_from_above(rule: Rule, state: Rows, times: int = 1) -> Rows:
    """Children's states when newer models came from above their parents."""
    if rule.relay is not None:
        for _ in range(times):
            state = rule.relay(state)
    return state


def correction(rule: Rule, state: Rows, given: Rows) -> Tensor | None:
    """What children's subtrees add to their gradients; `given` is what their parents gave, a row
    for each child."""
    return rule.correction(state, extras_of(given))


def answers_reports(rule: Rule, relayed: bool) -> bool:
    """Whether children get their parents' new model for their report, also where a newer one is
    about to come from above (`relayed`): some rules learn from what came of their own meeting."""
    return rule.down is not None and not (relayed and rule.relay is not None)


# -- the parents' side -----------------------------------------------------------------------------


def decode_upload(terms: Terms, payload: Rows, edge: Edge) -> Rows:
    """Children's messages as their parents understand them."""
    return terms.channels.up.decode(payload, edge)


def broadcast(terms: Terms, channel: Rows, held: AggregatorState, key: ChannelKey) -> tuple[Rows, Rows]:
    """The channel's memory and the payload of what parents give to their children."""
    return terms.channels.down.encode(channel, broadcast_message(terms.rule, held), None, key)


def decode_broadcast(terms: Terms, payload: Rows) -> Rows:
    """What parents gave, as their children understand it."""
    return terms.channels.down.decode(payload, None)


def broadcast_message(rule: Rule, held: AggregatorState) -> Rows:
    """What parents give to their children: the model, its buffers and the rule's note."""
    return {**rule.note(held.memory), MODEL: held.model_MP, BUFFERS: held.buffers_MB}


def extras_of(given: Rows) -> Rows:
    """What came beside the model and its buffers."""
    return {name: rows for name, rows in given.items() if name not in (MODEL, BUFFERS)}


def aggregate(edges: Edges, held: AggregatorState, arrived: ReceivedUpdates) -> AggregationResult:
    """What parents make of what came. Where the tree lies in several parts, all of them must call
    it."""
    tree, level, rule, limits = edges.tree, edges.level, edges.terms.rule, edges.limits
    came_N = arrived.came_N
    lost_N = large_N = np.zeros_like(came_N)
    # a mean is finite only if all that went into it is, so that rows are looked at one by one only
    # if it is not, unless they are to be in line with their siblings'
    always = rule.reduce is not None or limits.factor is not None or limits.every_part
    merged = None if always else _merge(edges, held, arrived.message, came_N)
    if merged is None or tree.any_rank(level, merged.is_doubtful):
        lost_N, large_N = _find_invalid(edges, held, arrived)
        merged = _merge(edges, held, arrived.message, came_N & ~lost_N & ~large_N, seen=True)
    heard_M = merged.share_M > 0
    sane_M = heard_M & merged.finite_M
    present_N = came_N & ~lost_N & ~large_N & sane_M[tree.parents[level]]
    rate_M = tree.present_weight(level, present_N * arrived.rate_N) / np.where(heard_M, merged.share_M, 1.0)
    new = AggregatorState(
        choose(sane_M, merged.model_MP, held.model_MP),
        choose(sane_M, merged.buffers_MB, held.buffers_MB),
        choose_rows(sane_M, merged.memory, held.memory),
    )
    found = merged.share_M, sane_M, rate_M, merged.mean_MP, merged.model_MP
    return AggregationResult(new, present_N, lost_N, large_N, *found)


class _Aggregate(NamedTuple):
    """What parents make of their children's messages, and for which of them all of it is finite."""

    memory: Rows
    mean_MP: Tensor
    model_MP: Tensor
    buffers_MB: Tensor
    finite_M: np.ndarray
    share_M: np.ndarray
    doubtful_N: np.ndarray
    """Whose message may be unsound although the mean is finite."""

    @property
    def is_doubtful(self) -> bool:
        return not (self.finite_M | (self.share_M == 0)).all() or bool(self.doubtful_N.any())


def _merge(edges: Edges, held: AggregatorState, message: Rows, present_N: np.ndarray, seen: bool = False) -> _Aggregate:
    """What the parents make of what those present sent. `seen`: it was looked at and found
    sound."""
    tree, level, rule = edges.tree, edges.level, edges.terms.rule
    share_M = tree.present_weight(level, present_N)

    def reduced(rows_NP: Tensor) -> Tensor:
        if rule.reduce is None:
            return tree.mean(level, rows_NP, present_N, share_M)
        return tree.reduce(level, rows_NP, present_N, rule.reduce)

    mean = {name: reduced(rows) for name, rows in message.items() if name != BUFFERS}
    buffers_MB = tree.mean(level, message[BUFFERS], present_N, share_M)
    if edges.masked:
        buffers_MB = keep_nonfinite(buffers_MB, held.buffers_MB)
    share_M1 = edges.column("share", share_M, held.model_MP)
    memory, model_MP = rule.merge(held.memory, held.model_MP, mean, share_M1)

    new_MB = zero_unchanged(buffers_MB, held.buffers_MB) if edges.masked else buffers_MB
    parents = [model_MP, new_MB, *mean.values()]
    looks = [] if seen else _rows_to_inspect(edges, held, message)
    sizes = row_max_abs(*parents, *(rows_NP for rows_NP, _ in looks))
    finite_M = rows_finite(sizes[: len(parents)])
    doubts = [needs_inspection(each_N, limit) for each_N, (_, limit) in zip(sizes[len(parents) :], looks, strict=True)]
    doubtful_N = present_N & np.any(doubts, axis=0)
    return _Aggregate(memory, mean[MODEL], model_MP, buffers_MB, finite_M, share_M, doubtful_N)


def _rows_to_inspect(edges: Edges, held: AggregatorState, message: Rows) -> list[tuple[Tensor, float | None]]:
    """Children's rows whose soundness does not show in their mean, with the limit of their size."""
    limit = edges.limits.size
    models = [] if limit is None else [(message[MODEL], limit)]
    return models + ([(_changed_buffers(edges, held, message), None)] if edges.masked else [])


def _changed_buffers(edges: Edges, held: AggregatorState, message: Rows) -> Tensor:
    """Children's buffers, less what their parent gave and is as it was, whether finite or not."""
    if not edges.masked:
        return message[BUFFERS]
    return zero_unchanged(message[BUFFERS], edges.tree.to_children(edges.level, held.buffers_MB))


def _find_invalid(edges: Edges, held: AggregatorState, arrived: ReceivedUpdates) -> tuple[np.ndarray, np.ndarray]:
    """Whose message is not finite, and whose is finite but far too large, among those that came."""
    tree, level, limits = edges.tree, edges.level, edges.limits
    message = {**arrived.message, BUFFERS: _changed_buffers(edges, held, arrived.message)}
    sizes = dict(zip(message, row_max_abs(*message.values()), strict=True))
    lost_N = arrived.came_N & ~rows_finite(list(sizes.values()))
    present_N, start_MP = arrived.came_N & ~lost_N, held.model_MP
    model_NP = message[MODEL]
    large_N = size_outliers(tree, level, model_NP, sizes[MODEL], start_MP, present_N, limits.size)
    if limits.every_part and limits.size is not None:
        others = {name: each_N for name, each_N in sizes.items() if name not in (MODEL, BUFFERS)}
        start_M, buffers_M = row_max_abs(start_MP, held.buffers_MB.nan_to_num(0.0, 0.0, 0.0))
        # a variance among the buffers goes with the square of what the others go with
        looks = [(sizes[BUFFERS], buffers_M, limits.size**2)]
        looks += [(each_N, start_M, limits.size) for each_N in others.values()]
        for each_N, begun_M, most in looks:
            large_N = large_N | exceeds_ratio(tree, level, each_N, begun_M, present_N, most)
    present_N &= ~large_N
    return lost_N, large_N | norm_outliers(tree, level, model_NP, start_MP, present_N, limits.factor)


# -- rows of which some change ---------------------------------------------------------------------


def choose(mask_N: np.ndarray, new_NP: Tensor, old_NP: Tensor) -> Tensor:
    """The new rows for those in the mask, the old ones for the others."""
    if mask_N.all():
        return new_NP
    return torch.where(to_device(mask_N, new_NP.device)[:, None], new_NP, old_NP)


def choose_rows(mask_N: np.ndarray, new: Rows, old: Rows) -> Rows:
    """The new rows for those in the mask, the old ones for the others, table by table."""
    return {name: choose(mask_N, rows, old[name]) for name, rows in new.items()}


class GradientRestart(NamedTuple):
    """What came of it, by edge level."""

    states: dict[int, Rows]
    sent: dict[int, np.ndarray]
    """Who sent a gradient to its parent."""


def restart_from_gradients(
    tree: Tree,
    rules: Sequence[Rule],
    states: Sequence[Rows],
    fresh: Sequence[int],
    g_NP: Tensor,
    active_N: np.ndarray,
    limit: float | None,
) -> GradientRestart:
    """The states of edge levels from the leaves' up to the first of `fresh`, whose rules ask for
    it; rules and states by level, gradients the leaves', sizes of which `limit` bounds."""
    found = GradientRestart({}, {})
    (largest_N,) = row_max_abs(g_NP)
    there_N = active_N & np.isfinite(largest_N)
    there_N &= ~size_outliers(tree, tree.depth, g_NP, largest_N, None, there_N, limit)
    for level in range(tree.depth, fresh[0] - 1, -1):
        share_M = tree.present_weight(level, there_N)
        mean_MP = tree.mean(level, g_NP, there_N, share_M)
        from_gradient, before = rules[level].from_gradient, states[level]
        if from_gradient:
            new = from_gradient(before, g_NP, tree.to_children(level, mean_MP))
            found.states[level] = choose_rows(there_N, new, before)
        found.sent[level] = there_N
        g_NP, there_N = mean_MP, share_M > 0
    return found
