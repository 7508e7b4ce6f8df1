"""The simulated tree: rounds, training results and synchronisation of its levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache, to_device
from stratafl.base.state_dict import StateDict, load_like
from stratafl.base.topology import Tree
from stratafl.core.channel import BUFFERS, MODEL, Channels, row_bytes
from stratafl.core.client_training import LocalRule, TrainRequest, TrainResult
from stratafl.core.client_update import Leaf, append_sgd_path, needs_sgd_path
from stratafl.core.participation import Participation, sample_participants
from stratafl.core.rows import DriftKernel, IndexedRows
from stratafl.core.rule import Edge, Path, Rows, Rule, average
from stratafl.federation import sync
from stratafl.federation.events import GradientsExchanged, LevelSynchronized, Observer, RoundBegan
from stratafl.federation.state import (
    LatePolicy,
    LevelState,
    PendingUpdates,
    add_missing_fields,
    with_current_corrections,
)
from stratafl.federation.sync import (
    AggregationResult,
    AggregatorState,
    Edges,
    ReceivedUpdates,
    Terms,
    Upload,
    choose,
    choose_rows,
    restart_from_gradients,
)
from stratafl.federation.update_checks import Limits, Refusal, update_factors, update_limits


class Standing:
    """What a federation has, and how it begins."""

    def __init__(
        self,
        tree: Tree,
        rules: Sequence[Rule],
        x_P: Tensor,
        b_B: Tensor,
        participation: Sequence[Participation],
        seed: int,
        update_limit: float | None = None,
        update_factor: object = None,
        drift_kernel: DriftKernel | None = None,
        watchers: Iterable[Observer] = (),
        channels: Sequence[Channels] | None = None,
        leaf: Leaf | None = None,
        kept: Rows | None = None,
        later: Mapping[int, LatePolicy] | None = None,
    ):
        """The rules, the participation and the channels are those of the edge levels, root first;
        the leaf's chain says what of it outlives a meeting: by default, nothing does. `kept` is a
        row of whatever else each leaf keeps to itself (see `home`). `later` has the edge levels at
        which late work counts, where those that take part are those that begin (see `late`)."""
        self.tree, self.seed, self.watchers = tree, seed, list(watchers)
        # Lists are indexed by level; those of edges have an unused entry 0, so that index m is edge
        # level m.
        self.rules: list[Rule] = [average(), *rules]
        self.participation: list[Participation] = [None, *participation]
        self._placed = DeviceCache(x_P.device)
        self._width, self.has_path = len(b_B), leaf is not None and needs_sgd_path(leaf, rules)
        self._optimiser = leaf.optimiser if leaf is not None and leaf.keeps else None
        self._kept_at_first, self._later = kept or {}, later or {}
        if self.has_path:
            b_B = append_sgd_path(b_B, torch.zeros_like(x_P))
        limits = zip(update_limits(update_limit, rules), update_factors(update_factor, rules), strict=True)
        channels = [Channels()] * tree.depth if channels is None else channels
        masked = not bool(b_B.isfinite().all())
        self._edges = [
            Edges(Terms(rule, level, seed, each), tree, level, Limits(*limit), self._placed, masked, drift_kernel)
            for level, (rule, each, limit) in enumerate(zip(rules, channels, limits, strict=True), 1)
        ]
        self.levels = [self._first(0, x_P[None], b_B[None])]
        for level in self._edge_levels():
            above = self.levels[-1].given
            self.levels.append(self._first(level, *(tree.to_children(level, above[name]) for name in (MODEL, BUFFERS))))
        self.top = 0
        """The topmost edge level of the last meeting: everything below it starts anew. 0: nothing
        met yet."""
        for level in self._edge_levels():
            self._correct(level)

    def _first(self, level: int, x_NP: Tensor, b_NB: Tensor) -> LevelState:
        """A level before the first round, with what came from above."""
        nodes = self.tree.sizes[level]
        own = {} if level < self.tree.depth else self._leaves_own(x_NP)
        first = LevelState(
            model=x_NP,
            buffers=b_NB,
            given={},
            given_bytes=0,
            memory={},
            state=self.rules[level].init(x_NP),
            correction=None,
            up_channel={},
            down_channel={},
            rate_N=np.zeros(nodes),
            brings_N=np.zeros(nodes, dtype=bool),
            active_N=np.ones(nodes, dtype=bool),
            begun_N=np.zeros(nodes, dtype=bool),
            rounds=0,
            optimiser=own,
            advanced=own if level in self._later else {},
            meetings_N=np.zeros(nodes, dtype=np.int64),
            pending=PendingUpdates.nothing(x_NP) if level in self._later else None,
        )
        if level > 0:
            channel = self._edge(level).terms.channels.up
            first = replace(first, up_channel=channel.init({MODEL: x_NP, BUFFERS: b_NB}))
        if level < self.tree.depth:
            terms = self._edge(level + 1).terms
            held = AggregatorState(x_NP, b_NB, terms.rule.open(x_NP))
            parcel = sync.broadcast_message(terms.rule, held)
            first = replace(first, given=parcel, memory=held.memory, down_channel=terms.channels.down.init(parcel))
            first = self._giving(level, first, held, 0, first.active_N)
        return first

    def _leaves_own(self, x_NP: Tensor) -> Rows:
        """What the leaves keep to themselves, before the first round."""
        own = {} if self._optimiser is None else self._optimiser.init(x_NP)
        return own | {name: row_1P.expand(len(x_NP), -1) for name, row_1P in self._kept_at_first.items()}

    # -- the state as plain data -------------------------------------------------------------------

    def saved(self) -> StateDict:
        """Everything that changes in the course of a run, as it stands."""
        pairs = zip(self.levels, self.tree.weights, strict=True)
        return {"top": self.top, "levels": [each.as_dict(weights_N) for each, weights_N in pairs]}

    def fitted(self, state: StateDict) -> StateDict:
        """A copy of a state of a federation made of the same things; a state of another is
        refused."""
        return load_like(self.saved(), add_missing_fields(state, self.tree.weights), "federation")

    def restore(self, fits: StateDict) -> None:
        """Go on from what `fitted` gave; states that were made under other weights are brought in
        line with these."""
        levels, weights = zip(*map(LevelState.of, fits["levels"]), strict=True)
        self.top, self.levels = fits["top"], list(levels)
        masked = not all(bool(each.given[BUFFERS].isfinite().all()) for each in self.levels[:-1])
        self._edges = [replace(edges, masked=masked) for edges in self._edges]
        before = replace(self.tree, weights=weights, _on_device={})
        for level in self._edge_levels():
            self._reweigh(level, before)

    def _reweigh(self, level: int, before: Tree) -> None:
        """Bring the states of an edge level, which were made under the weights of the tree
        `before`, in line with those of now."""
        reweigh, now, above = self.rules[level].reweigh, self.levels[level], self.levels[level - 1]
        is_same = np.array_equal(before.weights[level], self.tree.weights[level])
        if reweigh is None or not self.tree.any_rank(level, not is_same):
            return
        moved = {name: self.tree.mean(level, rows) - before.mean(level, rows) for name, rows in now.state.items()}
        memory, shift = reweigh(above.memory, moved, torch.zeros_like(above.model[:, :1]))
        state = {
            name: rows - self.tree.to_children(level, shift[name]) for name, rows in now.state.items() if name in shift
        }
        self._change(level, state=now.state | state)
        self._change(level - 1, memory=memory)
        self._correct(level)

    def _change(self, level: int, **changes: Any) -> None:
        self.levels[level] = replace(self.levels[level], **changes)

    def _edge(self, level: int) -> Edges:
        return self._edges[level - 1]

    def _edge_levels(self, top: int = 1) -> range:
        return range(max(top, 1), self.tree.depth + 1)

    def _giving(self, level: int, now: LevelState, held: AggregatorState, round: int, mask_N: np.ndarray) -> LevelState:
        """A level of which those in the mask give their children what they hold, in a round of
        these."""
        terms = self._edge(level + 1).terms
        channel, payload = sync.broadcast(terms, now.down_channel, held, terms.key(round, self._numbers(level)))
        return replace(
            now,
            given=choose_rows(mask_N, sync.decode_broadcast(terms, payload), now.given),
            given_bytes=row_bytes(payload),
            down_channel=choose_rows(mask_N, channel, now.down_channel),
        )

    # -- what follows from it ----------------------------------------------------------------------

    def _own(self) -> dict[str, IndexedRows]:
        """What each leaf kept to itself."""
        return {name: IndexedRows(rows) for name, rows in self.levels[-1].optimiser.items()}

    def _leaves(self, level: int, rows: Tensor) -> IndexedRows:
        """A level's rows as the leaves see them."""
        if level == self.tree.depth:
            return IndexedRows(rows)
        ancestor_N = self.tree.ancestors(level)
        return IndexedRows(rows, ancestor_N, self._placed(("leaves", level), ancestor_N))

    def _is_pending(self, level: int) -> np.ndarray:
        pending = self.levels[level].pending
        return np.zeros(self.tree.sizes[level], dtype=bool) if pending is None else pending.is_N

    def _reached(self, level: int, top: int) -> np.ndarray:
        """Who gets what comes from the parents of edge level `top`, which has just met: who is
        neither pending nor below somebody who is; above that, those at work are those who hold the
        meetings."""
        reached_N = np.ones(self.tree.sizes[0], dtype=bool)
        for each in range(1, level + 1):
            away_N = self._is_pending(each) & ~(self.levels[each].active_N & (each < top))
            reached_N = reached_N[self.tree.parents[each]] & ~away_N
        return reached_N

    def _meetings(self, level: int) -> np.ndarray:
        """How many meetings each node's parent has held."""
        return self.levels[level - 1].meetings_N[self.tree.parents[level]]

    def _correction(self, level: int) -> Tensor | None:
        note = sync.extras_of(self.levels[level - 1].given)
        spread = {name: self.tree.to_children(level, rows) for name, rows in note.items()}
        return sync.correction(self.rules[level], self.levels[level].state, spread)

    def _correct(self, level: int) -> None:
        now, new = self.levels[level], self._correction(level)
        if now.pending is not None and now.correction is not None and new is not None:
            new = choose(~now.pending.is_N, new, now.correction)
        self._change(level, correction=new)

    def buffers(self, level: int) -> Tensor:
        """The module's own, of all nodes of a level."""
        return self.levels[level].buffers[:, : self._width]

    def _path(self, edges: Edges, own_NB: Tensor, given: Rows, answer: Rows | None = None) -> Path | None:
        """Children's paths since they were given theirs, up to their own; with those of the answer
        to it. None where the tree has none."""
        if not self.has_path:
            return None
        merged = None if answer is None else edges.spread(answer[BUFFERS][:, self._width :])
        return Path(edges.spread(given[BUFFERS][:, self._width :]), own_NB[:, self._width :], merged)

    @property
    def _model_bytes(self) -> int:
        return row_bytes({MODEL: self.levels[0].model})

    def _numbers(self, level: int) -> np.ndarray:
        """The numbers that the nodes of a level have in the whole tree."""
        return self.tree.restrict(level, np.arange(self.tree.whole.sizes[level]))


class SyncResult(NamedTuple):
    """What a meeting of several edge levels came to."""

    refused: list[Refusal]
    renewed: bool
    """Whether any of the topmost parents made a new model of it."""


class Federation(Standing):
    """What happens in the course of a run."""

    # -- the start of a round ----------------------------------------------------------------------

    def begin(self) -> None:
        """Draw who takes part on every level that just met, and give them their parents' models."""
        for level in self._edge_levels(self.top):
            now, above = self.levels[level], self.levels[level - 1]
            drawn = sample_participants(self.participation[level], self.tree.whole, level, now.rounds, self.seed)
            active_N = self.tree.restrict(level, drawn) & above.active_N[self.tree.parents[level]]
            new_N = active_N & ~now.begun_N
            self._change(level, active_N=active_N, begun_N=now.begun_N | active_N, rounds=now.rounds + 1)
            if now.rounds and new_N.any():
                self._enter(level, new_N)
            if now.pending is not None:
                model_NP, held_N = self.tree.to_children(level, above.given[MODEL]), self._meetings(level)
                self._change(level, pending=now.pending.begun(active_N, model_NP, held_N))
            sizes = above.given_bytes, self._model_bytes
            for watcher in self.watchers:
                watcher.began(RoundBegan(level, active_N, *sizes, self.wants_gradients))

    def _enter(self, level: int, new_N: np.ndarray) -> None:
        """Let those in the mask, who take part for the first time, begin with the model that they
        get now, where what they have depends on it. Until then they had what the run began with."""
        rows = to_device(np.flatnonzero(new_N), self.levels[level].model.device)
        now, above, rule = self.levels[level], self.levels[level - 1].given, self.rules[level]
        parent_A = self.tree.parents[level][new_N]
        x_AP, b_AB = (above[name].index_select(0, to_device(parent_A, rows.device)) for name in (MODEL, BUFFERS))

        def anew(old: Rows, new: Rows) -> Rows:
            same = all(torch.equal(old[name].index_select(0, rows), each) for name, each in new.items())
            return old if same else old | {name: old[name].index_copy(0, rows, each) for name, each in new.items()}

        channel = self._edge(level).terms.channels.up.init({MODEL: x_AP, BUFFERS: b_AB})
        state, up_channel = anew(now.state, rule.init(x_AP)), anew(now.up_channel, channel)
        own = {} if level < self.tree.depth or self._optimiser is None else self._optimiser.init(x_AP)
        self._change(level, state=state, up_channel=up_channel, optimiser=anew(now.optimiser, own))
        if level < self.tree.depth:
            memory = anew(now.memory, self.rules[level + 1].open(x_AP))
            if memory is not now.memory:
                x_NP, b_NB = (self.tree.to_children(level, above[name]) for name in (MODEL, BUFFERS))
                held = AggregatorState(x_NP, b_NB, memory)
                changed = replace(self.levels[level], memory=memory)
                self.levels[level] = self._giving(level, changed, held, self.levels[level + 1].rounds, new_N)
        self._correct(level)
        if level < self.tree.depth:
            self._correct(level + 1)

    @property
    def wants_gradients(self) -> bool:
        return bool(self._fresh())

    def _fresh(self) -> list[int]:
        """The edge levels whose corrections are to be set from gradients."""
        return [level for level in self._edge_levels(self.top + 1) if self.rules[level].from_gradient]

    def start_from_gradients(self, g_AP: Tensor) -> None:
        """Let the rules below the last meeting set their states from the gradients at the new model
        of the leaves that take part."""
        fresh, active_N = self._fresh(), self.levels[-1].active_N
        g_NP = _placed(active_N, g_AP, torch.zeros_like(self.levels[-1].model))
        states = [each.state for each in self.levels]
        limit = self._edge(self.tree.depth).limits.size
        new = restart_from_gradients(self.tree, self.rules, states, fresh, g_NP, active_N, limit)
        for level, state in new.states.items():
            self._change(level, state=state)
        for level in fresh:
            self._correct(level)
        everybody = [each.active_N for each in self.levels]
        for watcher in self.watchers:
            watcher.restarted(GradientsExchanged(self.top, fresh, new.sent, everybody, self._model_bytes))

    def work(self, step: int, steps: int, round: int) -> TrainRequest:
        """What the leaves are to do next."""
        corrections, pulls = [], []
        for level in self._edge_levels():
            now = self.levels[level]
            mine = None if now.correction is None else self._leaves(level, now.correction)
            if mine is not None:
                corrections.append(mine)
            local = self.rules[level].local
            if local is not None:
                model_MP = self.levels[level - 1].given[MODEL]
                rate_N1 = self._edge(level).column("rate", now.rate_N, model_MP)
                model = self._leaves(level - 1, model_MP)
                pulls.append(LocalRule(local, model, mine, self._leaves(level, rate_N1)))
        above = self.tree.depth - 1
        given = self.levels[above].given
        return TrainRequest(
            x=self._leaves(above, given[MODEL]),
            b=self._leaves(above, given[BUFFERS][:, : self._width]),
            corrections=tuple(corrections),
            pulls=tuple(pulls),
            active=np.flatnonzero(self.levels[-1].active_N).tolist(),
            step=step,
            steps=steps,
            round=round,
            optimiser=self._own(),
            has_path=self.has_path,
        )

    def probe_work(self, level: int, rows_NP: Tensor) -> TrainRequest:
        """All leaves at the models of their ancestors on a level: for a look at their gradients,
        not for training."""
        above = self.tree.depth - 1
        everybody = list(range(self.tree.leaves))
        buffers = self._leaves(above, self.levels[above].given[BUFFERS][:, : self._width])
        return TrainRequest(self._leaves(level, rows_NP), buffers, (), (), everybody, 0, 1, 0, optimiser=self._own())

    # -- the end of a round ------------------------------------------------------------------------

    def trained(self, trained: TrainResult, rate: float) -> None:
        """Take over what became of the leaves that take part, after steps whose learning rates add
        up to `rate`."""
        leaves, b_AB = self.levels[-1], trained.b_AB
        if self.has_path:
            start = self._leaves(self.tree.depth - 1, self.levels[-2].given[BUFFERS][:, self._width :])
            b_AB = append_sgd_path(b_AB, start.some(np.flatnonzero(leaves.active_N).tolist()) + trained.path_AP)
        self.levels[-1] = replace(
            leaves,
            model=_placed(leaves.active_N, trained.x_AP, leaves.model),
            buffers=_placed(leaves.active_N, b_AB, leaves.buffers),
            rate_N=leaves.rate_N + rate * leaves.active_N,
            brings_N=leaves.brings_N | leaves.active_N,
            advanced={
                name: _placed(leaves.active_N, rows, (leaves.advanced or leaves.optimiser)[name])
                for name, rows in trained.optimiser.items()
            },
        )

    def meet(self, top: int) -> SyncResult:
        """Synchronise the edge levels from the leaves' up to `top`."""
        refused: list[Refusal] = []
        for level in reversed(self._edge_levels(top)):
            outcome = self._meet(level, relayed=level > top)
            refused += self._refusals(level, outcome)
        for level in self._edge_levels(top):
            now, above = self.levels[level], self.levels[level - 1]
            is_pending_N = self._is_pending(level)
            self._change(level, rate_N=now.rate_N * is_pending_N, brings_N=now.brings_N & is_pending_N)
            self._change(level - 1, meetings_N=above.meetings_N + above.active_N)
            if level > top:
                self._relay(level, top)
            self._correct(level)
        for watcher in self.watchers:
            watcher.relayed(top, [each.correction for each in self.levels])
        self.top = top
        return SyncResult(refused, bool(outcome.sane_M.any()))

    def _meet(self, level: int, relayed: bool) -> AggregationResult:
        """Let one edge level meet; `relayed`: a newer model is about to come from above the
        parents."""
        edges, now, above = self._edge(level), self.levels[level], self.levels[level - 1]
        rule, start_MP, pending = edges.terms.rule, above.given[MODEL], now.pending
        parents = edges.spread(start_MP)
        start = parents if pending is None else IndexedRows(pending.start_NP)
        path = self._path(edges, now.buffers, above.given)
        edge = Edge(start, now.correction, edges.column("rate", now.rate_N, start_MP), path=path)
        heard_N = now.active_N if pending is None else self._heard(level)
        came_N, key = heard_N & now.brings_N, edges.terms.key(now.rounds, self._numbers(level))
        sent = sync.upload(edges.terms, now.state, now.up_channel, now.model, now.buffers, edge, key)
        arrived = ReceivedUpdates(sync.decode_upload(edges.terms, sent.payload, edge), came_N, now.rate_N)
        if pending is not None:
            arrived = self._moved(level, arrived, parents.all())
        outcome = sync.aggregate(edges, AggregatorState(start_MP, above.given[BUFFERS], above.memory), arrived)

        is_answered = sync.answers_reports(rule, relayed)
        self.levels[level - 1] = self._renewed(level - 1, outcome, travels=is_answered or not relayed)
        present_N, parcel_bytes = outcome.present_N, self.levels[level - 1].given_bytes
        facts = came_N, outcome, rule.reduce is None, row_bytes(sent.payload), parcel_bytes, is_answered
        model_NP = now.model if pending is None else arrived.message[MODEL]
        for watcher in self.watchers:
            watcher.met(LevelSynchronized(level, model_NP, start_MP, now.correction, *facts))

        state = choose_rows(present_N, sent.state, now.state)
        if is_answered:
            learn = self._learnt if pending is None else self._learnt_later
            state = choose_rows(present_N, learn(level, state, sent, above.given, outcome), state)
        self._change(
            level,
            state=state,
            up_channel=choose_rows(present_N, sent.channel, now.up_channel),
            optimiser=choose_rows(present_N, now.advanced, now.optimiser) or now.optimiser,
            advanced={} if pending is None else now.advanced,
            pending=None if pending is None else pending.without(heard_N),
        )
        return outcome

    def _learnt(self, level: int, state: Rows, sent: Upload, given: Rows, outcome: AggregationResult) -> Rows:
        """What children learn of their parents' answer; `given`: what these had given before."""
        edges, start_MP, answer = self._edge(level), given[MODEL], self.levels[level - 1].given
        # the siblings' mean rate keeps the corrections of a parent summing to zero also when some
        # lost a round
        shared_N1 = edges.column("mean rate", outcome.rate_M[self.tree.parents[level]], start_MP)
        path, correction = self._path(edges, sent.buffers_NB, given, answer), self.levels[level].correction
        edge = Edge(edges.spread(start_MP), correction, shared_N1, edges.spread(answer[MODEL]), path)
        return sync.apply_answer(edges.terms.rule, state, sent.model_NP, edge)

    def _renewed(self, level: int, outcome: AggregationResult, travels: bool) -> LevelState:
        """A level after its children came; `travels`: they get what came of it, and not a newer
        model instead."""
        now, held = self.levels[level], outcome.held
        rate_N = now.rate_N + outcome.rate_M
        # what is pending stays as it was reported while the others' rounds go on
        there_N = now.active_N | ~self._is_pending(level)
        model_NP, buffers_NB = choose(there_N, held.model_MP, now.model), choose(there_N, held.buffers_MB, now.buffers)
        brings_N = now.brings_N | outcome.sane_M
        new = replace(now, model=model_NP, buffers=buffers_NB, memory=held.memory, rate_N=rate_N, brings_N=brings_N)
        return self._giving(level, new, held, self.levels[level + 1].rounds, outcome.sane_M) if travels else new

    def _relay(self, level: int, top: int) -> None:
        """Hand what came from above the parents of an edge level on to them, and to their
        children."""
        parents, given = self.levels[level - 1], self.levels[level - 2].given
        model_MP, buffers_MB = (self.tree.to_children(level - 1, given[name]) for name in (MODEL, BUFFERS))
        held, reached_M = AggregatorState(model_MP, buffers_MB, parents.memory), self._reached(level - 1, top)
        self.levels[level - 1] = self._giving(level - 1, parents, held, self.levels[level].rounds, reached_M)
        before = self.levels[level].state
        state = choose_rows(
            reached_M[self.tree.parents[level]], sync.apply_from_above(self.rules[level], before), before
        )
        self._change(level, state=state)

    def _refusals(self, level: int, outcome: AggregationResult) -> list[Refusal]:
        tree = self.tree
        too_large = set(tree.owned_names(level, outcome.large_N))
        refused = [
            Refusal(name, name in too_large) for name in tree.owned_names(level, outcome.lost_N | outcome.large_N)
        ]
        return refused + [Refusal(name, False) for name in tree.owned_names(level - 1, outcome.failed_M)]

    # -- work that counts later --------------------------------------------------------------------

    def _heard(self, level: int) -> np.ndarray:
        """Whose reports the meeting merges that ends the level's round."""
        heard_N = self._later[level].heard(self.levels[level].rounds - 1)
        return self.tree.restrict(level, heard_N) & self._is_pending(level)

    def _moved(self, level: int, arrived: ReceivedUpdates, onto_NP: Tensor) -> ReceivedUpdates:
        """Reports put on the models that the parents have now, and weighted by their age; so are
        the rates, which say how far a parent's model was moved."""
        pending, held_N = self.levels[level].pending, self._meetings(level)
        assert pending is not None
        weight_N = pending.weights(self._later[level], held_N)
        message = arrived.message
        model_NP = pending.moved(message[MODEL], onto_NP, held_N, weight_N)
        return ReceivedUpdates({**message, MODEL: model_NP}, arrived.came_N, arrived.rate_N * weight_N)

    def _learnt_later(self, level: int, state: Rows, sent: Upload, given: Rows, outcome: AggregationResult) -> Rows:
        """What children learn of how far each came beside the others whose reports were merged."""
        edges, now, present_N = self._edge(level), self.levels[level], outcome.present_N
        pending, held_N = now.pending, self._meetings(level)
        x_NP, onto_NP = sent.model_NP, edges.spread(given[MODEL]).all()
        assert pending is not None
        has_NP = self._correction(level)
        rate_M = self.tree.present_weight(level, present_N * now.rate_N) / np.where(
            outcome.share_M > 0, outcome.share_M, 1.0
        )
        shared_N1 = edges.column("mean rate", rate_M[self.tree.parents[level]], x_NP)
        x_NP = pending.moved(
            with_current_corrections(x_NP, now.correction, has_NP, shared_N1), onto_NP, held_N, np.ones(len(x_NP))
        )
        mean = edges.spread(self.tree.mean(level, x_NP, present_N, outcome.share_M))
        return sync.apply_answer(
            edges.terms.rule, state, x_NP, Edge(IndexedRows(onto_NP), now.correction, shared_N1, mean)
        )


def _placed(mask_N: np.ndarray, new_AP: Tensor, old_NP: Tensor) -> Tensor:
    """The old rows with new ones for those in the mask."""
    if mask_N.all():
        return new_AP
    return old_NP.index_copy(0, to_device(np.flatnonzero(mask_N), old_NP.device), new_AP)
