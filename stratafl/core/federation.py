"""A simulated tree: the state of all its nodes, and what changes in it when levels meet.

One federation is driven like this (see `simulation`):

    begin()                       participants are drawn and get their parents' models
    start_from_gradients(g)       where a rule asks for it
    trained(trained, rate)        the leaves' work is done
    meet(top)                     edge levels D..top synchronise

Its state is a value (`state.standing`). What a meeting does is in `meeting`; who measures or counts
is a `Watcher`.

Shape suffixes: N nodes of a level, M nodes of the level above, A leaves that take part, P
parameters, B buffer values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import placed
from stratafl.core import meeting
from stratafl.core.channel import BUFFERS, MODEL, row_bytes
from stratafl.core.meeting import Arrived, Held, Outcome, Sent, choose, choose_rows
from stratafl.core.optimise.path import with_path
from stratafl.core.refusal import Refusal
from stratafl.core.restart import from_gradients
from stratafl.core.rule import Edge, Rows
from stratafl.core.schedule import draw
from stratafl.core.shared_rows import Spread
from stratafl.core.state.late import compared
from stratafl.core.state.levels import LevelState
from stratafl.core.state.standing import Standing
from stratafl.core.watch import Beginning, Meeting, Restart
from stratafl.core.work import Pull, Trained, Work


class Met(NamedTuple):
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
            drawn = draw(self.participation[level], self.tree.whole, level, now.rounds, self.seed)
            active_N = self.tree.here(level, drawn) & above.active_N[self.tree.parents[level]]
            new_N = active_N & ~now.begun_N
            self._change(level, active_N=active_N, begun_N=now.begun_N | active_N, rounds=now.rounds + 1)
            if now.rounds and new_N.any():
                self._enter(level, new_N)
            if now.pending is not None:
                model_NP, held_N = self.tree.spread(level, above.given[MODEL]), self._meetings(level)
                self._change(level, pending=now.pending.begun(active_N, model_NP, held_N))
            sizes = above.given_bytes, self._model_bytes
            for watcher in self.watchers:
                watcher.began(Beginning(level, active_N, *sizes, self.wants_gradients))

    def _enter(self, level: int, new_N: np.ndarray) -> None:
        """Let those in the mask, who take part for the first time, begin with the model that they
        get now, where what they have depends on it. Until then they had what the run began with."""
        rows = placed(np.flatnonzero(new_N), self.levels[level].model.device)
        now, above, rule = self.levels[level], self.levels[level - 1].given, self.rules[level]
        parent_A = self.tree.parents[level][new_N]
        x_AP, b_AB = (above[name].index_select(0, placed(parent_A, rows.device)) for name in (MODEL, BUFFERS))

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
                x_NP, b_NB = (self.tree.spread(level, above[name]) for name in (MODEL, BUFFERS))
                held = Held(x_NP, b_NB, memory)
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
        new = from_gradients(self.tree, self.rules, states, fresh, g_NP, active_N, limit)
        for level, state in new.states.items():
            self._change(level, state=state)
        for level in fresh:
            self._correct(level)
        everybody = [each.active_N for each in self.levels]
        for watcher in self.watchers:
            watcher.restarted(Restart(self.top, fresh, new.sent, everybody, self._model_bytes))

    def work(self, step: int, steps: int, round: int) -> Work:
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
                pulls.append(Pull(local, model, mine, self._leaves(level, rate_N1)))
        above = self.tree.depth - 1
        given = self.levels[above].given
        return Work(
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

    def probe_work(self, level: int, rows_NP: Tensor) -> Work:
        """All leaves at the models of their ancestors on a level: for a look at their gradients,
        not for training."""
        above = self.tree.depth - 1
        everybody = list(range(self.tree.leaves))
        buffers = self._leaves(above, self.levels[above].given[BUFFERS][:, : self._width])
        return Work(self._leaves(level, rows_NP), buffers, (), (), everybody, 0, 1, 0, optimiser=self._own())

    # -- the end of a round ------------------------------------------------------------------------

    def trained(self, trained: Trained, rate: float) -> None:
        """Take over what became of the leaves that take part, after steps whose learning rates add
        up to `rate`."""
        leaves, b_AB = self.levels[-1], trained.b_AB
        if self.has_path:
            start = self._leaves(self.tree.depth - 1, self.levels[-2].given[BUFFERS][:, self._width :])
            b_AB = with_path(b_AB, start.some(np.flatnonzero(leaves.active_N).tolist()) + trained.path_AP)
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

    def meet(self, top: int) -> Met:
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
        return Met(refused, bool(outcome.sane_M.any()))

    def _meet(self, level: int, relayed: bool) -> Outcome:
        """Let one edge level meet; `relayed`: a newer model is about to come from above the
        parents."""
        edges, now, above = self._edge(level), self.levels[level], self.levels[level - 1]
        rule, start_MP, pending = edges.terms.rule, above.given[MODEL], now.pending
        parents = edges.spread(start_MP)
        start = parents if pending is None else Spread(pending.start_NP)
        path = self._path(edges, now.buffers, above.given)
        edge = Edge(start, now.correction, edges.column("rate", now.rate_N, start_MP), path=path)
        heard_N = now.active_N if pending is None else self._heard(level)
        came_N, key = heard_N & now.brings_N, edges.terms.key(now.rounds, self._numbers(level))
        sent = meeting.send(edges.terms, now.state, now.up_channel, now.model, now.buffers, edge, key)
        arrived = Arrived(meeting.receive(edges.terms, sent.payload, edge), came_N, now.rate_N)
        if pending is not None:
            arrived = self._moved(level, arrived, parents.all())
        outcome = meeting.meet(edges, Held(start_MP, above.given[BUFFERS], above.memory), arrived)

        is_answered = meeting.is_answered(rule, relayed)
        self.levels[level - 1] = self._renewed(level - 1, outcome, travels=is_answered or not relayed)
        present_N, parcel_bytes = outcome.present_N, self.levels[level - 1].given_bytes
        facts = came_N, outcome, rule.reduce is None, row_bytes(sent.payload), parcel_bytes, is_answered
        model_NP = now.model if pending is None else arrived.message[MODEL]
        for watcher in self.watchers:
            watcher.met(Meeting(level, model_NP, start_MP, now.correction, *facts))

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

    def _learnt(self, level: int, state: Rows, sent: Sent, given: Rows, outcome: Outcome) -> Rows:
        """What children learn of their parents' answer; `given`: what these had given before."""
        edges, start_MP, answer = self._edge(level), given[MODEL], self.levels[level - 1].given
        # the siblings' mean rate keeps the corrections of a parent summing to zero also when some
        # lost a round
        shared_N1 = edges.column("mean rate", outcome.rate_M[self.tree.parents[level]], start_MP)
        path, correction = self._path(edges, sent.buffers_NB, given, answer), self.levels[level].correction
        edge = Edge(edges.spread(start_MP), correction, shared_N1, edges.spread(answer[MODEL]), path)
        return meeting.learn(edges.terms.rule, state, sent.model_NP, edge)

    def _renewed(self, level: int, outcome: Outcome, travels: bool) -> LevelState:
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
        model_MP, buffers_MB = (self.tree.spread(level - 1, given[name]) for name in (MODEL, BUFFERS))
        held, reached_M = Held(model_MP, buffers_MB, parents.memory), self._reached(level - 1, top)
        self.levels[level - 1] = self._giving(level - 1, parents, held, self.levels[level].rounds, reached_M)
        before = self.levels[level].state
        state = choose_rows(reached_M[self.tree.parents[level]], meeting.relay(self.rules[level], before), before)
        self._change(level, state=state)

    def _refusals(self, level: int, outcome: Outcome) -> list[Refusal]:
        tree = self.tree
        too_large = set(tree.named(level, outcome.large_N))
        refused = [Refusal(name, name in too_large) for name in tree.named(level, outcome.lost_N | outcome.large_N)]
        return refused + [Refusal(name, False) for name in tree.named(level - 1, outcome.failed_M)]

    # -- work that counts later --------------------------------------------------------------------

    def _heard(self, level: int) -> np.ndarray:
        """Whose reports the meeting merges that ends the level's round."""
        heard_N = self._later[level].heard(self.levels[level].rounds - 1)
        return self.tree.here(level, heard_N) & self._is_pending(level)

    def _moved(self, level: int, arrived: Arrived, onto_NP: Tensor) -> Arrived:
        """Reports put on the models that the parents have now, and weighted by their age; so are
        the rates, which say how far a parent's model was moved."""
        pending, held_N = self.levels[level].pending, self._meetings(level)
        assert pending is not None
        weight_N = pending.weights(self._later[level], held_N)
        message = arrived.message
        model_NP = pending.moved(message[MODEL], onto_NP, held_N, weight_N)
        return Arrived({**message, MODEL: model_NP}, arrived.came_N, arrived.rate_N * weight_N)

    def _learnt_later(self, level: int, state: Rows, sent: Sent, given: Rows, outcome: Outcome) -> Rows:
        """What children learn of how far each came beside the others whose reports were merged."""
        edges, now, present_N = self._edge(level), self.levels[level], outcome.present_N
        pending, held_N = now.pending, self._meetings(level)
        x_NP, onto_NP = sent.model_NP, edges.spread(given[MODEL]).all()
        assert pending is not None
        has_NP = self._correction(level)
        rate_M = self.tree.share(level, present_N * now.rate_N) / np.where(outcome.share_M > 0, outcome.share_M, 1.0)
        shared_N1 = edges.column("mean rate", rate_M[self.tree.parents[level]], x_NP)
        x_NP = pending.moved(compared(x_NP, now.correction, has_NP, shared_N1), onto_NP, held_N, np.ones(len(x_NP)))
        mean = edges.spread(self.tree.mean(level, x_NP, present_N, outcome.share_M))
        return meeting.learn(edges.terms.rule, state, x_NP, Edge(Spread(onto_NP), now.correction, shared_N1, mean))


def _placed(mask_N: np.ndarray, new_AP: Tensor, old_NP: Tensor) -> Tensor:
    """The old rows with new ones for those in the mask."""
    if mask_N.all():
        return new_AP
    return old_NP.index_copy(0, placed(np.flatnonzero(mask_N), old_NP.device), new_AP)
