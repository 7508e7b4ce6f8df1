"""A simulated tree: the state of all its nodes, and what changes in it when levels meet.

One federation is driven like this (see `simulation`):

    begin()                       participants are drawn and get their parents' models
    start_from_gradients(g)       where a rule asks for it
    trained(trained, rate)        the leaves' work is done
    meet(top)                     edge levels D..top synchronise

Its state is a value: one `LevelState` per level of the tree, replaced as a whole when something of
it changes. What a meeting does is in `meeting`; who measures or counts is a `Watcher`.

Shape suffixes: N nodes of a level, M nodes of the level above, A leaves that take part, P
parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.state import State, fitted
from stratafl.base.transfer import Placed, placed
from stratafl.base.tree import Tree
from stratafl.core import meeting
from stratafl.core.channel import BUFFERS, MODEL, Channels, row_bytes
from stratafl.core.leaf import Leaf
from stratafl.core.levels import LevelState, completed
from stratafl.core.meeting import Arrived, Edges, Held, Outcome, Terms, choose_rows
from stratafl.core.optimise.path import wants_path, with_path
from stratafl.core.refusal import Limits, Refusal, far_off, largest, update_factors, update_limits
from stratafl.core.rule import Edge, Path, Rows, Rule, average
from stratafl.core.schedule import Participation, draw
from stratafl.core.shared_rows import DriftKernel, Spread
from stratafl.core.watch import Beginning, Meeting, Restart, Watcher
from stratafl.core.work import Pull, Trained, Work


class Met(NamedTuple):
    """What a meeting of several edge levels came to."""

    refused: list[Refusal]
    renewed: bool
    """Whether any of the topmost parents made a new model of it."""


class Federation:
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
        watchers: Iterable[Watcher] = (),
        channels: Sequence[Channels] | None = None,
        leaf: Leaf | None = None,
        kept: Rows | None = None,
    ):
        """The rules, the participation and the channels are those of the edge levels, root first;
        the leaf's chain says what of it outlives a meeting: by default, nothing does. `kept` is a
        row of whatever else each leaf keeps to itself (see `home`)."""
        self.tree, self.seed, self.watchers = tree, seed, list(watchers)
        # Lists are indexed by level; those of edges have an unused entry 0, so that index m is edge
        # level m.
        self.rules: list[Rule] = [average(), *rules]
        self.participation: list[Participation] = [None, *participation]
        self._placed = Placed(x_P.device)
        self._width, self.has_path = len(b_B), leaf is not None and wants_path(leaf, rules)
        self._optimiser = leaf.optimiser if leaf is not None and leaf.keeps else None
        self._kept_at_first = kept or {}
        if self.has_path:
            b_B = with_path(b_B, torch.zeros_like(x_P))
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
            self.levels.append(self._first(level, *(tree.spread(level, above[name]) for name in (MODEL, BUFFERS))))
        self.top = 0
        """The topmost edge level of the last meeting: everything below it starts anew. 0: nothing
        met yet."""
        for level in self._edge_levels():
            self._correct(level)

    def _first(self, level: int, x_NP: Tensor, b_NB: Tensor) -> LevelState:
        """A level before the first round, with what came from above."""
        nodes = self.tree.sizes[level]
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
            active_N=np.ones(nodes, dtype=bool),
            rounds=0,
            optimiser={} if level < self.tree.depth else self._leaves_own(x_NP),
            advanced={},
        )
        if level > 0:
            channel = self._edge(level).terms.channels.up
            first = replace(first, up_channel=channel.init({MODEL: x_NP, BUFFERS: b_NB}))
        if level < self.tree.depth:
            terms = self._edge(level + 1).terms
            held = Held(x_NP, b_NB, terms.rule.open(x_NP))
            parcel = meeting.parcel_of(terms.rule, held)
            first = replace(first, given=parcel, memory=held.memory, down_channel=terms.channels.down.init(parcel))
            first = self._giving(level, first, held, 0, first.active_N)
        return first

    def _leaves_own(self, x_NP: Tensor) -> Rows:
        """What the leaves keep to themselves, before the first round."""
        own = {} if self._optimiser is None else self._optimiser.init(x_NP)
        return own | {name: row_1P.expand(len(x_NP), -1) for name, row_1P in self._kept_at_first.items()}

    # -- the state as plain data -------------------------------------------------------------------

    def saved(self) -> State:
        """Everything that changes in the course of a run, as it stands."""
        return {"top": self.top, "levels": [each.as_dict() for each in self.levels]}

    def fitted(self, state: State) -> State:
        """A copy of a state of a federation made of the same things; a state of another is
        refused."""
        return fitted(self.saved(), completed(state), "federation")

    def restore(self, fits: State) -> None:
        """Go on from what `fitted` gave."""
        self.top, self.levels = fits["top"], [LevelState(**each) for each in fits["levels"]]
        masked = not all(bool(each.given[BUFFERS].isfinite().all()) for each in self.levels[:-1])
        self._edges = [replace(edges, masked=masked) for edges in self._edges]

    def _change(self, level: int, **changes: Any) -> None:
        self.levels[level] = replace(self.levels[level], **changes)

    def _edge(self, level: int) -> Edges:
        return self._edges[level - 1]

    def _edge_levels(self, top: int = 1) -> range:
        return range(max(top, 1), self.tree.depth + 1)

    # -- the start of a round ----------------------------------------------------------------------

    def begin(self) -> None:
        """Draw who takes part on every level that just met, and give them their parents' models."""
        for level in self._edge_levels(self.top):
            now, above = self.levels[level], self.levels[level - 1]
            drawn = draw(self.participation[level], self.tree.whole, level, now.rounds, self.seed)
            active_N = self.tree.here(level, drawn) & above.active_N[self.tree.parents[level]]
            self._change(level, active_N=active_N, rounds=now.rounds + 1)
            sizes = above.given_bytes, self._model_bytes
            for watcher in self.watchers:
                watcher.began(Beginning(level, active_N, *sizes, self.wants_gradients))

    @property
    def wants_gradients(self) -> bool:
        return bool(self._fresh())

    def _fresh(self) -> list[int]:
        """The edge levels whose corrections are to be set from gradients."""
        return [level for level in self._edge_levels(self.top + 1) if self.rules[level].from_gradient]

    def start_from_gradients(self, g_AP: Tensor) -> None:
        """Let the rules below the last meeting set their states from the gradients at the new model
        of the leaves that take part."""
        tree, fresh, sent = self.tree, self._fresh(), {}
        active_N = self.levels[-1].active_N
        g_NP = _placed(active_N, g_AP, torch.zeros_like(self.levels[-1].model))
        (largest_N,) = largest(g_NP)
        there_N = active_N & np.isfinite(largest_N)
        there_N &= ~far_off(tree, tree.depth, g_NP, largest_N, None, there_N, self._edge(tree.depth).limits.size)
        for level in range(tree.depth, fresh[0] - 1, -1):
            share_M = tree.share(level, there_N)
            mean_MP = tree.mean(level, g_NP, there_N, share_M)
            from_gradient, before = self.rules[level].from_gradient, self.levels[level].state
            if from_gradient:
                new = from_gradient(before, g_NP, tree.spread(level, mean_MP))
                self._change(level, state=choose_rows(there_N, new, before))
            sent[level] = there_N
            g_NP, there_N = mean_MP, share_M > 0
        for level in fresh:
            self._correct(level)
        everybody = [each.active_N for each in self.levels]
        for watcher in self.watchers:
            watcher.restarted(Restart(self.top, fresh, sent, everybody, self._model_bytes))

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

    def _own(self) -> dict[str, Spread]:
        """What each leaf kept to itself."""
        return {name: Spread(rows) for name, rows in self.levels[-1].optimiser.items()}

    def _leaves(self, level: int, rows: Tensor) -> Spread:
        """A level's rows as the leaves see them."""
        if level == self.tree.depth:
            return Spread(rows)
        ancestor_N = self.tree.ancestors(level)
        return Spread(rows, ancestor_N, self._placed(("leaves", level), ancestor_N))

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
            advanced={
                name: _placed(leaves.active_N, rows, leaves.optimiser[name]) for name, rows in trained.optimiser.items()
            },
        )

    def meet(self, top: int) -> Met:
        """Synchronise the edge levels from the leaves' up to `top`."""
        refused: list[Refusal] = []
        for level in reversed(self._edge_levels(top)):
            outcome = self._meet(level, relayed=level > top)
            refused += self._refusals(level, outcome)
        for level in self._edge_levels(top):
            self._change(level, rate_N=np.zeros_like(self.levels[level].rate_N))
            if level > top:
                self._relay(level)
            self._correct(level)
        for watcher in self.watchers:
            watcher.relayed(top, [each.correction for each in self.levels])
        self.top = top
        return Met(refused, bool(outcome.sane_M.any()))

    def _meet(self, level: int, relayed: bool) -> Outcome:
        """Let one edge level meet; `relayed`: a newer model is about to come from above the
        parents."""
        edges, now, above = self._edge(level), self.levels[level], self.levels[level - 1]
        rule, start_MP = edges.terms.rule, above.given[MODEL]
        start = edges.spread(start_MP)
        path = self._path(edges, now.buffers, above.given)
        edge = Edge(start, now.correction, edges.column("rate", now.rate_N, start_MP), path=path)
        came_N, key = now.active_N & (now.rate_N > 0), edges.terms.key(now.rounds, self._numbers(level))
        sent = meeting.send(edges.terms, now.state, now.up_channel, now.model, now.buffers, edge, key)
        arrived = Arrived(meeting.receive(edges.terms, sent.payload, edge), came_N, now.rate_N)
        outcome = meeting.meet(edges, Held(start_MP, above.given[BUFFERS], above.memory), arrived)

        is_answered = meeting.is_answered(rule, relayed)
        self.levels[level - 1] = self._renewed(level - 1, outcome, travels=is_answered or not relayed)
        present_N, parcel_bytes = outcome.present_N, self.levels[level - 1].given_bytes
        facts = came_N, outcome, rule.reduce is None, row_bytes(sent.payload), parcel_bytes, is_answered
        for watcher in self.watchers:
            watcher.met(Meeting(level, now.model, start_MP, now.correction, *facts))

        state = choose_rows(present_N, sent.state, now.state)
        if is_answered:
            answered = edges.spread(self.levels[level - 1].given[MODEL])
            # the siblings' mean rate keeps the corrections of a parent summing to zero also when
            # some lost a round
            shared_N1 = edges.column("mean rate", outcome.rate_M[self.tree.parents[level]], start_MP)
            path = self._path(edges, sent.buffers_NB, above.given, self.levels[level - 1].given)
            learnt = meeting.learn(rule, state, sent.model_NP, Edge(start, now.correction, shared_N1, answered, path))
            state = choose_rows(present_N, learnt, state)
        self._change(
            level,
            state=state,
            up_channel=choose_rows(present_N, sent.channel, now.up_channel),
            optimiser=choose_rows(present_N, now.advanced, now.optimiser) or now.optimiser,
            advanced={},
        )
        return outcome

    def _renewed(self, level: int, outcome: Outcome, travels: bool) -> LevelState:
        """A level after its children came; `travels`: they get what came of it, and not a newer
        model instead."""
        now, held = self.levels[level], outcome.held
        rate_N = now.rate_N + outcome.rate_M
        new = replace(now, model=held.model_MP, buffers=held.buffers_MB, memory=held.memory, rate_N=rate_N)
        return self._giving(level, new, held, self.levels[level + 1].rounds, outcome.sane_M) if travels else new

    def _giving(self, level: int, now: LevelState, held: Held, round: int, mask_N: np.ndarray) -> LevelState:
        """A level of which those in the mask give their children what they hold, in a round of
        these."""
        terms = self._edge(level + 1).terms
        channel, payload = meeting.give(terms, now.down_channel, held, terms.key(round, self._numbers(level)))
        return replace(
            now,
            given=choose_rows(mask_N, meeting.take(terms, payload), now.given),
            given_bytes=row_bytes(payload),
            down_channel=choose_rows(mask_N, channel, now.down_channel),
        )

    def _relay(self, level: int) -> None:
        """Hand what came from above the parents of an edge level on to them, and to their
        children."""
        parents, given = self.levels[level - 1], self.levels[level - 2].given
        model_MP, buffers_MB = (self.tree.spread(level - 1, given[name]) for name in (MODEL, BUFFERS))
        held, everybody = Held(model_MP, buffers_MB, parents.memory), np.ones(len(model_MP), dtype=bool)
        self.levels[level - 1] = self._giving(level - 1, parents, held, self.levels[level].rounds, everybody)
        self._change(level, state=meeting.relay(self.rules[level], self.levels[level].state))

    def _refusals(self, level: int, outcome: Outcome) -> list[Refusal]:
        tree = self.tree
        too_large = set(tree.named(level, outcome.large_N))
        refused = [Refusal(name, name in too_large) for name in tree.named(level, outcome.lost_N | outcome.large_N)]
        return refused + [Refusal(name, False) for name in tree.named(level - 1, outcome.failed_M)]

    def _correct(self, level: int) -> None:
        note = meeting.note_of(self.levels[level - 1].given)
        spread = {name: self.tree.spread(level, rows) for name, rows in note.items()}
        self._change(level, correction=meeting.correct(self.rules[level], self.levels[level].state, spread))

    # -- small things ------------------------------------------------------------------------------

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
        """Of the nodes of a level, in the whole tree."""
        return self.tree.here(level, np.arange(self.tree.whole.sizes[level]))


def _placed(mask_N: np.ndarray, new_AP: Tensor, old_NP: Tensor) -> Tensor:
    """The old rows with new ones for those in the mask."""
    if mask_N.all():
        return new_AP
    return old_NP.index_copy(0, placed(np.flatnonzero(mask_N), old_NP.device), new_AP)
