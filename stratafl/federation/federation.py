"""The simulated tree: rounds, training results and synchronisation of its levels.

A parent's answer is its new model, sent at once to the children whose updates count, if their rule
learns from it (`Rule.down`); otherwise they get the model when their next round begins.

Shape suffixes: N nodes of a level, M nodes of the level above, A clients that take part, P
parameters, B buffer values, 1 a single row or column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache, to_device
from stratafl.base.state_dict import StateDict, load_like
from stratafl.base.topology import Topology
from stratafl.core.channel import BUFFERS, MODEL, ChannelKey, row_bytes
from stratafl.core.client_training import LocalRule, TrainRequest, TrainResult
from stratafl.core.client_update import ClientUpdate, append_sgd_path, needs_sgd_path
from stratafl.core.participation import sample_participants
from stratafl.core.rows import DriftKernel, IndexedRows, scatter_rows, where_rows, where_tables
from stratafl.core.rule import Edge, Rows, Rule, SgdPath
from stratafl.federation import sync
from stratafl.federation.events import (
    GradientsExchanged,
    LevelSynchronized,
    ModelFromAbove,
    Observer,
    RoundBegan,
    SyncCounts,
    SyncModels,
    TrainingBegan,
)
from stratafl.federation.local_parameters import ClientTrainer
from stratafl.federation.state import LevelState, receives_broadcast
from stratafl.federation.sync import (
    AggregationResult,
    AggregatorState,
    EdgeLevel,
    EdgeNodes,
    ReceivedUpdates,
    SyncResult,
    Upload,
)
from stratafl.federation.update_checks import Rejection


class Federation:
    """State of all nodes of a tree, and the algorithm that changes it round by round."""

    def __init__(
        self,
        tree: Topology,
        edges: Sequence[EdgeLevel],
        model_P: Tensor,
        buffers_B: Tensor,
        *,
        client_update: ClientUpdate | None = None,
        local_rows: Rows | None = None,
        observers: Iterable[Observer] = (),
        drift_kernel: DriftKernel | None = None,
    ):
        """Initialise all nodes with the same model and buffers.

        edges: one entry per edge level, root first.
        client_update: the clients' chain of gradient transforms (see
            `core.client_update.ClientUpdate`), which says whether optimizer states outlive a
            synchronisation; without it they do not.
        local_rows: one row for each other thing that clients keep to themselves (see
            `local_parameters`); every client begins with a copy.
        """
        self.tree, self.observers = tree, list(observers)
        self.edges = {edge.level: edge for edge in edges}
        """Settings by edge level, from 1, the root's, to the clients'."""
        update, self._local_rows = client_update, local_rows or {}
        self.has_path = update is not None and needs_sgd_path(update, self.rules)
        self._optimizer = update.optimizer if update is not None and update.keeps_optimizer_state else None
        self._buffer_width = len(buffers_B)
        if self.has_path:
            buffers_B = append_sgd_path(buffers_B, torch.zeros_like(model_P))
        self._cache = DeviceCache(model_P.device)
        may_be_nonfinite = not bool(buffers_B.isfinite().all())
        self._nodes = {
            level: EdgeNodes(
                tree=tree,
                level=level,
                cache=self._cache,
                may_be_nonfinite=may_be_nonfinite,
                drift_kernel=drift_kernel,
            )
            for level in self.edges
        }
        self.levels: list[LevelState] = []
        self.levels.append(self._initial_level(0, model_P[None], buffers_B[None]))
        for level in self._levels_from(1):
            above = self.levels[-1].broadcast
            self.levels.append(self._initial_level(level, *self._from_parents(level, above)))
        self.last_sync_level = 0
        """Topmost edge level of the last synchronisation: it and all levels below it begin a round
        next. 0 before the first synchronisation."""
        for level in self._levels_from(1):
            self._update_correction(level)

    @property
    def rules(self) -> list[Rule]:
        """The rule of every edge level, root first."""
        return [edge.rule for edge in self.edges.values()]

    def _initial_level(self, level: int, model_NP: Tensor, buffers_NB: Tensor) -> LevelState:
        """State of a level before the first round, given the parents' broadcast."""
        edge = self.edges.get(level)
        state = LevelState.initial(
            model_NP,
            buffers_NB,
            state={} if edge is None else edge.rule.init(model_NP),
            up_channel={} if edge is None else edge.channels.up.init({MODEL: model_NP, BUFFERS: buffers_NB}),
            is_late=edge is not None and edge.late is not None,
            client_rows={} if level < self.tree.depth else self._initial_client_rows(model_NP),
        )
        if level == self.tree.depth:
            return state
        below = self.edges[level + 1]
        aggregator = AggregatorState(model_MP=model_NP, buffers_MB=buffers_NB, memory=below.rule.open(model_NP))
        message = sync.broadcast_message(below.rule, aggregator)
        state = replace(
            state, broadcast=message, memory=aggregator.memory, down_channel=below.channels.down.init(message)
        )
        return self._broadcast(level, state, aggregator, mask_N=state.active_N)

    def _initial_client_rows(self, model_NP: Tensor) -> Rows:
        """Rows that the clients keep to themselves, before the first round."""
        optimizer_state = {} if self._optimizer is None else self._optimizer.init(model_NP)
        return optimizer_state | {name: row_1P.expand(len(model_NP), -1) for name, row_1P in self._local_rows.items()}

    # -- the state as plain data -------------------------------------------------------------------

    def saved(self) -> StateDict:
        """Plain data of everything that changes in the course of a run."""
        weighted = zip(self.levels, self.tree.weights, strict=True)
        levels = [level.as_dict(weights_N) for level, weights_N in weighted]
        return {"last_sync_level": self.last_sync_level, "levels": levels}

    def fitted(self, state: StateDict) -> StateDict:
        """Copy a state that `saved` made of a federation with the same tree, rules and model; raise
        for any other."""
        return load_like(self.saved(), state, "federation")

    def restore(self, fitted: StateDict) -> None:
        """Restore a state that `fitted` returned. Rule states made under other weights of the tree
        are adapted to the present weights."""
        levels, weights = zip(*map(LevelState.of, fitted["levels"]), strict=True)
        self.last_sync_level, self.levels = fitted["last_sync_level"], list(levels)
        may_be_nonfinite = not all(bool(level.broadcast[BUFFERS].isfinite().all()) for level in self.levels[:-1])
        self._nodes = {level: replace(nodes, may_be_nonfinite=may_be_nonfinite) for level, nodes in self._nodes.items()}
        previous_tree = replace(self.tree, weights=weights, _on_device={})
        for level in self._levels_from(1):
            self._reweigh(level, previous_tree)

    def _reweigh(self, level: int, previous_tree: Topology) -> None:
        """Adapt the states of an edge level, made under the weights of another tree, to this one's
        weights."""
        rule, children, parents = self.edges[level].rule, self.levels[level], self.levels[level - 1]
        has_changed = not np.array_equal(previous_tree.weights[level], self.tree.weights[level])
        if rule.reweigh is None or not self.tree.any_rank(level, has_changed):
            return
        state, memory = sync.reweigh(rule, self.tree, previous_tree, level, children.state, parents)
        self._change(level, state=state)
        self._change(level - 1, memory=memory)
        self._update_correction(level)

    # -- a round -----------------------------------------------------------------------------------

    def train_and_synchronize(
        self, trainer: ClientTrainer, *, round: int, first_step: int, steps: int, top_level: int
    ) -> SyncResult:
        """Train the clients until their next synchronisation, and synchronise the edge levels up to
        `top_level`.

        round: number of the global round, which decides the learning rate.
        first_step: number of local steps before.
        """
        self.begin_round()
        if self.needs_gradients:
            self.restart_from_gradients(trainer.gradients(self.train_request(first_step, 1, round)))
        began = TrainingBegan(
            top_level=top_level,
            corrections=[level.correction for level in self.levels],
            model_MP=self.levels[-2].broadcast[MODEL],
        )
        for observer in self.observers:
            observer.on_training_begin(began)
        result = trainer.train(self.train_request(first_step, steps, round))
        self.apply_training(result, trainer.engine.client_update.lr_sum(round, steps))
        return self.synchronize(top_level)

    # -- the start of a round ----------------------------------------------------------------------

    def begin_round(self) -> None:
        """Begin a round of every edge level from `last_sync_level` down: sample its participants,
        and give them their parents' models."""
        for level in self._levels_from(self.last_sync_level):
            edge, children, parents = self.edges[level], self.levels[level], self.levels[level - 1]
            sampled_N = sample_participants(
                edge.participation, self.tree.whole, level, round=children.rounds_begun, seed=edge.seed
            )
            active_N = self.tree.restrict(level, sampled_N) & parents.active_N[self.tree.parents[level]]
            joining_N = active_N & ~children.has_joined_N
            self._change(
                level,
                active_N=active_N,
                has_joined_N=children.has_joined_N | active_N,
                rounds_begun=children.rounds_begun + 1,
            )
            if children.rounds_begun and joining_N.any():
                self._join(level, joining_N)
            if children.pending is not None:
                model_NP = self.tree.to_children(level, parents.broadcast[MODEL])
                pending = children.pending.begin(active_N, model_NP, self._syncs_of_parents(level))
                self._change(level, pending=pending)
            began = RoundBegan(
                level=level,
                active_N=active_N,
                broadcast_bytes=parents.broadcast_bytes,
                model_bytes=self._model_bytes,
                restarts_from_gradients=self.needs_gradients,
            )
            for observer in self.observers:
                observer.on_round_begin(began)

    def _join(self, level: int, joining_N: np.ndarray) -> None:
        """Initialise the states of nodes that take part for the first time, from their parents'
        present model. Until then they had states for the model at the start of the run."""
        joining_A = to_device(np.flatnonzero(joining_N), self.levels[level].model.device)
        edge, children, above = self.edges[level], self.levels[level], self.levels[level - 1].broadcast
        parent_A = to_device(self.tree.parents[level][joining_N], joining_A.device)
        model_AP, buffers_AB = (above[name].index_select(0, parent_A) for name in (MODEL, BUFFERS))

        def initialised(rows: Rows, initial: Rows) -> Rows:
            is_same = all(torch.equal(rows[name].index_select(0, joining_A), new) for name, new in initial.items())
            if is_same:
                return rows
            return rows | {name: rows[name].index_copy(0, joining_A, new) for name, new in initial.items()}

        initial_channel = edge.channels.up.init({MODEL: model_AP, BUFFERS: buffers_AB})
        is_client = level == self.tree.depth
        optimizer_state = self._optimizer.init(model_AP) if is_client and self._optimizer is not None else {}
        self._change(
            level,
            state=initialised(children.state, edge.rule.init(model_AP)),
            up_channel=initialised(children.up_channel, initial_channel),
            client_rows=initialised(children.client_rows, optimizer_state),
        )
        if not is_client:
            memory = initialised(children.memory, self.edges[level + 1].rule.open(model_AP))
            if memory is not children.memory:
                model_NP, buffers_NB = self._from_parents(level, above)
                aggregator = AggregatorState(model_MP=model_NP, buffers_MB=buffers_NB, memory=memory)
                changed = replace(self.levels[level], memory=memory)
                self.levels[level] = self._broadcast(level, changed, aggregator, mask_N=joining_N)
        self._update_correction(level)
        if not is_client:
            self._update_correction(level + 1)

    @property
    def needs_gradients(self) -> bool:
        """Whether corrections are set from gradients before the clients train."""
        return bool(self._levels_from_gradients())

    def _levels_from_gradients(self) -> list[int]:
        """Edge levels whose corrections are set from gradients before the clients train."""
        levels = self._levels_from(self.last_sync_level + 1)
        return [level for level in levels if self.edges[level].rule.from_gradient]

    def restart_from_gradients(self, gradient_AP: Tensor) -> None:
        """Set states of rules from gradients, at the edge levels strictly below `last_sync_level`.

        gradient_AP: gradients at the new models of the clients that take part.
        """
        levels, active_N = self._levels_from_gradients(), self.levels[-1].active_N
        restart = sync.restart_from_gradients(
            self.tree,
            self.edges,
            states=[level.state for level in self.levels],
            levels=levels,
            gradient_NP=scatter_rows(active_N, gradient_AP, torch.zeros_like(self.levels[-1].model)),
            active_N=active_N,
        )
        for level, state in restart.states.items():
            self._change(level, state=state)
        for level in levels:
            self._update_correction(level)
        exchanged = GradientsExchanged(
            top_level=self.last_sync_level,
            restarted_levels=levels,
            sent=restart.sent,
            active=[level.active_N for level in self.levels],
            model_bytes=self._model_bytes,
        )
        for observer in self.observers:
            observer.on_gradients_exchanged(exchanged)

    def train_request(self, first_step: int, steps: int, round: int) -> TrainRequest:
        """Request the training of the clients until their next synchronisation."""
        corrections, local_rules = [], []
        for level in self._levels_from(1):
            correction_NP = self.levels[level].correction
            correction = None if correction_NP is None else self._rows_of_clients(level, correction_NP)
            if correction is not None:
                corrections.append(correction)
            local = self.edges[level].rule.local
            if local is not None:
                model_MP = self.levels[level - 1].broadcast[MODEL]
                lr_sum_N1 = self._nodes[level].column("lr sum", self.levels[level].lr_sum_N, model_MP)
                local_rules.append(
                    LocalRule(
                        local=local,
                        model=self._rows_of_clients(level - 1, model_MP),
                        correction=correction,
                        lr_sum=self._rows_of_clients(level, lr_sum_N1),
                    )
                )
        return TrainRequest(
            model=self._rows_of_clients(self.tree.depth - 1, self.levels[-2].broadcast[MODEL]),
            buffers=self._broadcast_buffers(),
            corrections=tuple(corrections),
            local_rules=tuple(local_rules),
            clients=self._participants(),
            first_step=first_step,
            steps=steps,
            round=round,
            client_rows=self._client_rows(),
            wants_sgd_path=self.has_path,
        )

    def gradient_request(self, level: int, model_NP: Tensor) -> TrainRequest:
        """Request the gradients of all clients at the models of their ancestors on a level."""
        return TrainRequest(
            model=self._rows_of_clients(level, model_NP),
            buffers=self._broadcast_buffers(),
            clients=list(range(self.tree.leaves)),
            client_rows=self._client_rows(),
        )

    # -- the end of a round ------------------------------------------------------------------------

    def apply_training(self, result: TrainResult, lr_sum: float) -> None:
        """Take over the training results of the clients that took part; lr_sum: of their steps."""
        clients, buffers_AB = self.levels[-1], result.buffers_AB
        if self.has_path:
            start_MB = self.levels[-2].broadcast[BUFFERS][:, self._buffer_width :]
            start = self._rows_of_clients(self.tree.depth - 1, start_MB)
            path_AP = start.take(self._participants()) + result.path_AP
            buffers_AB = append_sgd_path(buffers_AB, path_AP)
        # staged: taken over only when the client's update is accepted
        previous = clients.staged_client_rows or clients.client_rows
        self.levels[-1] = replace(
            clients,
            model=scatter_rows(clients.active_N, result.model_AP, clients.model),
            buffers=scatter_rows(clients.active_N, buffers_AB, clients.buffers),
            lr_sum_N=clients.lr_sum_N + lr_sum * clients.active_N,
            has_update_N=clients.has_update_N | clients.active_N,
            staged_client_rows={
                name: scatter_rows(clients.active_N, rows, previous[name]) for name, rows in result.client_rows.items()
            },
        )

    def synchronize(self, top_level: int) -> SyncResult:
        """Synchronise the edge levels from the clients' up to `top_level`."""
        rejected: list[Rejection] = []
        for level in reversed(self._levels_from(top_level)):
            result = self._synchronize_level(level, is_overwritten=level > top_level)
            rejected += result.rejections(self.tree, level)
        for level in self._levels_from(top_level):
            children, parents = self.levels[level], self.levels[level - 1]
            kept_N = children.is_pending_N
            self._change(level, lr_sum_N=children.lr_sum_N * kept_N, has_update_N=children.has_update_N & kept_N)
            self._change(level - 1, syncs_N=parents.syncs_N + parents.active_N)
            if level > top_level:
                self._forward_from_above(level, top_level)
            self._update_correction(level)
        from_above = ModelFromAbove(
            top_level=top_level, has_correction=[level.correction is not None for level in self.levels]
        )
        for observer in self.observers:
            observer.on_model_from_above(from_above)
        self.last_sync_level = top_level
        return SyncResult(
            top_level=top_level,
            participants=self._participants(),
            rejected=rejected,
            renewed=bool(result.updated_M.any()),
        )

    def _synchronize_level(self, level: int, is_overwritten: bool) -> AggregationResult:
        """Let the children of one level report, their parents aggregate, and the children take the
        answer.

        is_overwritten: whether a model is about to come from above the parents, and replaces their
            answer.
        """
        edge, children, parents = self.edges[level], self.levels[level], self.levels[level - 1]
        reporting_N = children.active_N
        if edge.late is not None:
            due_N = edge.late.reporting(children.rounds_begun - 1)
            reporting_N = self.tree.restrict(level, due_N) & children.is_pending_N
        upload, received = self._reports(level, reporting_N)
        before = AggregatorState(
            model_MP=parents.broadcast[MODEL], buffers_MB=parents.broadcast[BUFFERS], memory=parents.memory
        )
        result = sync.aggregate(edge, self._nodes[level], before, received)
        is_answered = sync.answers_reports(edge.rule, is_overwritten)
        self.levels[level - 1] = self._after_aggregation(
            level - 1, result, broadcasts=is_answered or not is_overwritten
        )
        self._after_upload(level, upload, parents.broadcast, result, reporting_N, is_answered)
        counts = SyncCounts(
            reported_N=received.reported_N,
            accepted_N=result.accepted_N,
            upload_bytes=row_bytes(upload.payload),
            broadcast_bytes=self.levels[level - 1].broadcast_bytes,
            is_answered=is_answered,
        )
        models = SyncModels(
            model_NP=children.model if edge.late is None else received.message[MODEL],
            start_MP=before.model_MP,
            correction_NP=children.correction,
            result=result,
            takes_mean=edge.rule.reduce is None,
        )
        for observer in self.observers:
            observer.on_level_synchronized(LevelSynchronized(level=level, counts=counts, models=models))
        return result

    def _reports(self, level: int, reporting_N: np.ndarray) -> tuple[Upload, ReceivedUpdates]:
        """Updates of all children as they would send them, and what the parents receive from those
        in the mask."""
        edge, nodes = self.edges[level], self._nodes[level]
        children, broadcast = self.levels[level], self.levels[level - 1].broadcast
        start = nodes.to_children(broadcast[MODEL])
        view = Edge(
            start if children.pending is None else IndexedRows(children.pending.start_NP),
            children.correction,
            nodes.column("lr sum", children.lr_sum_N, children.model),
            path=self._sgd_path(level, children.buffers, broadcast),
        )
        upload = sync.upload(
            edge,
            state=children.state,
            channel=children.up_channel,
            model_NP=children.model,
            buffers_NB=children.buffers,
            view=view,
            key=self._channel_key(level, children.rounds_begun, sender_level=level),
        )
        reported_N = reporting_N & children.has_update_N
        received = ReceivedUpdates(message=upload.message, reported_N=reported_N, lr_sum_N=children.lr_sum_N)
        if edge.late is not None:
            received = sync.rebase_late_updates(edge, children, received, start.dense(), self._syncs_of_parents(level))
        return upload, received

    def _after_aggregation(self, level: int, result: AggregationResult, broadcasts: bool) -> LevelState:
        """State of parents after aggregation; broadcasts: whether they send the result to their
        children."""
        parents, new = self.levels[level], result.state
        # pending updates stay as they were reported while the others' rounds go on
        changes_N = parents.active_N | ~self.levels[level].is_pending_N
        changed = replace(
            parents,
            model=where_rows(changes_N, new.model_MP, parents.model),
            buffers=where_rows(changes_N, new.buffers_MB, parents.buffers),
            memory=new.memory,
            lr_sum_N=parents.lr_sum_N + result.lr_sum_M,
            has_update_N=parents.has_update_N | result.updated_M,
        )
        return self._broadcast(level, changed, new, mask_N=result.updated_M) if broadcasts else changed

    def _broadcast(self, level: int, nodes: LevelState, aggregator: AggregatorState, mask_N: np.ndarray) -> LevelState:
        """State of nodes of which those in the mask sent their aggregator state to their
        children."""
        edge = self.edges[level + 1]
        round = self.levels[level + 1].rounds_begun if level + 1 < len(self.levels) else 0
        key = self._channel_key(level + 1, round, sender_level=level)
        channel, payload = sync.broadcast(edge, nodes.down_channel, aggregator, key)
        return replace(
            nodes,
            broadcast=where_tables(mask_N, sync.decode_broadcast(edge, payload), nodes.broadcast),
            broadcast_bytes=row_bytes(payload),
            down_channel=where_tables(mask_N, channel, nodes.down_channel),
        )

    def _after_upload(
        self,
        level: int,
        upload: Upload,
        broadcast: Rows,
        result: AggregationResult,
        reporting_N: np.ndarray,
        is_answered: bool,
    ) -> None:
        """Update the children's states after their reports; broadcast: the parents' last one
        before."""
        edge, children, accepted_N = self.edges[level], self.levels[level], result.accepted_N
        pending = children.pending
        state = where_tables(accepted_N, upload.state, children.state)
        if is_answered:
            view, model_NP = self._answer_view(level, upload, broadcast, result)
            state = where_tables(accepted_N, sync.apply_answer(edge.rule, state, model_NP, view), state)
        client_rows = where_tables(accepted_N, children.staged_client_rows, children.client_rows)
        self._change(
            level,
            state=state,
            up_channel=where_tables(accepted_N, upload.channel, children.up_channel),
            client_rows=client_rows or children.client_rows,
            staged_client_rows={} if pending is None else children.staged_client_rows,
            pending=None if pending is None else pending.remove(reporting_N),
        )

    def _answer_view(
        self, level: int, upload: Upload, broadcast: Rows, result: AggregationResult
    ) -> tuple[Edge, Tensor]:
        """Values that children know with their parents' answer, and the models to compare with it;
        broadcast: the parents' last one before."""
        nodes, children, start_MP = self._nodes[level], self.levels[level], broadcast[MODEL]
        if children.pending is not None:
            current_NP, syncs_N = self._compute_correction(level), self._syncs_of_parents(level)
            return sync.late_answer_view(nodes, children, upload, start_MP, result, current_NP, syncs_N)
        answer = self.levels[level - 1].broadcast
        # the siblings' mean sum of learning rates keeps the corrections of a parent summing to zero
        # also when some lost a round
        lr_sum_N1 = nodes.column("mean lr sum", result.lr_sum_M[self.tree.parents[level]], start_MP)
        view = Edge(
            nodes.to_children(start_MP),
            children.correction,
            lr_sum_N1,
            merged=nodes.to_children(answer[MODEL]),
            path=self._sgd_path(level, upload.buffers_NB, broadcast, answer),
        )
        return view, upload.model_NP

    def _forward_from_above(self, level: int, top_level: int) -> None:
        """Hand a model that came from above the parents of an edge level on to these parents and
        their children, and apply `relay` to the children's states."""
        parents, above = self.levels[level - 1], self.levels[level - 2].broadcast
        model_MP, buffers_MB = self._from_parents(level - 1, above)
        aggregator = AggregatorState(model_MP=model_MP, buffers_MB=buffers_MB, memory=parents.memory)
        reached_M = receives_broadcast(self.tree, self.levels, level - 1, top_level)
        self.levels[level - 1] = self._broadcast(level - 1, parents, aggregator, mask_N=reached_M)
        state = self.levels[level].state
        forwarded = sync.apply_from_above(self.edges[level].rule, state)
        self._change(level, state=where_tables(reached_M[self.tree.parents[level]], forwarded, state))

    # -- values derived from the state -------------------------------------------------------------

    def _participants(self) -> list[int]:
        """Numbers of the clients that take part in the round under way."""
        numbers: list[int] = np.flatnonzero(self.levels[-1].active_N).tolist()
        return numbers

    def buffers(self, level: int) -> Tensor:
        """Buffers of the modules of all nodes of a level, without their SGD paths."""
        return self.levels[level].buffers[:, : self._buffer_width]

    def _change(self, level: int, **changes: Any) -> None:
        self.levels[level] = replace(self.levels[level], **changes)

    def _levels_from(self, top_level: int) -> range:
        """Edge levels from this one down to the clients'."""
        return range(max(top_level, 1), self.tree.depth + 1)

    def _from_parents(self, level: int, broadcast: Rows) -> tuple[Tensor, Tensor]:
        """The model and buffers that each node of a level got from its parent."""
        return self.tree.to_children(level, broadcast[MODEL]), self.tree.to_children(level, broadcast[BUFFERS])

    def _client_rows(self) -> dict[str, IndexedRows]:
        """Rows that the clients keep to themselves."""
        return {name: IndexedRows(rows) for name, rows in self.levels[-1].client_rows.items()}

    def _rows_of_clients(self, level: int, rows: Tensor) -> IndexedRows:
        """Rows of the clients' ancestors on a level, one for each client."""
        if level == self.tree.depth:
            return IndexedRows(rows)
        ancestor_N = self.tree.ancestors(level)
        return IndexedRows(rows, ancestor_N, self._cache(("clients", level), ancestor_N))

    def _broadcast_buffers(self) -> IndexedRows:
        """Buffers of the modules that the clients got from their parents."""
        buffers_MB = self.levels[-2].broadcast[BUFFERS][:, : self._buffer_width]
        return self._rows_of_clients(self.tree.depth - 1, buffers_MB)

    def _syncs_of_parents(self, level: int) -> np.ndarray:
        """Number of synchronisations that each node's parent has held."""
        return self.levels[level - 1].syncs_N[self.tree.parents[level]]

    def _compute_correction(self, level: int) -> Tensor | None:
        extras = sync.extras_of(self.levels[level - 1].broadcast)
        received = {name: self.tree.to_children(level, rows) for name, rows in extras.items()}
        return sync.correction(self.edges[level].rule, self.levels[level].state, received)

    def _update_correction(self, level: int) -> None:
        nodes, correction = self.levels[level], self._compute_correction(level)
        if nodes.pending is not None and nodes.correction is not None and correction is not None:
            correction = where_rows(~nodes.pending.mask_N, correction, nodes.correction)
        self._change(level, correction=correction)

    def _sgd_path(self, level: int, buffers_NB: Tensor, broadcast: Rows, answer: Rows | None = None) -> SgdPath | None:
        """Children's SGD paths from their parents' broadcast to their own buffers, and that of the
        answer; None where nodes carry none."""
        if not self.has_path:
            return None
        nodes, width = self._nodes[level], self._buffer_width
        return SgdPath(
            start=nodes.to_children(broadcast[BUFFERS][:, width:]),
            end=buffers_NB[:, width:],
            merged=None if answer is None else nodes.to_children(answer[BUFFERS][:, width:]),
        )

    @property
    def _model_bytes(self) -> int:
        return row_bytes({MODEL: self.levels[0].model})

    def _channel_key(self, level: int, round: int, sender_level: int) -> ChannelKey:
        senders_N = self.tree.restrict(sender_level, np.arange(self.tree.whole.sizes[sender_level]))
        return self.edges[level].channel_key(round, senders_N)
