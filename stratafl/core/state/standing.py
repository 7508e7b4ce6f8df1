"""Where a simulated tree stands: the state of all its nodes, and what can be read from it.

The state is a value: one `LevelState` per level of the tree, replaced as a whole when something of
it changes.

Shape suffixes: N nodes of a level, M nodes of the level above, P parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import DeviceCache
from stratafl.base.state_dict import State, fitted
from stratafl.base.topology import Tree
from stratafl.core import meeting
from stratafl.core.channel import BUFFERS, MODEL, Channels, row_bytes
from stratafl.core.leaf import Leaf
from stratafl.core.meeting import Edges, Held, Terms, choose, choose_rows
from stratafl.core.optimise.path import wants_path, with_path
from stratafl.core.refusal import Limits, update_factors, update_limits
from stratafl.core.rule import Path, Rows, Rule, average
from stratafl.core.schedule import Participation
from stratafl.core.shared_rows import DriftKernel, Spread
from stratafl.core.state.late import Later, Pending
from stratafl.core.state.levels import LevelState, completed
from stratafl.core.watch import Watcher


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
        watchers: Iterable[Watcher] = (),
        channels: Sequence[Channels] | None = None,
        leaf: Leaf | None = None,
        kept: Rows | None = None,
        later: Mapping[int, Later] | None = None,
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
        self._width, self.has_path = len(b_B), leaf is not None and wants_path(leaf, rules)
        self._optimiser = leaf.optimiser if leaf is not None and leaf.keeps else None
        self._kept_at_first, self._later = kept or {}, later or {}
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
            pending=Pending.nothing(x_NP) if level in self._later else None,
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
        pairs = zip(self.levels, self.tree.weights, strict=True)
        return {"top": self.top, "levels": [each.as_dict(weights_N) for each, weights_N in pairs]}

    def fitted(self, state: State) -> State:
        """A copy of a state of a federation made of the same things; a state of another is
        refused."""
        return fitted(self.saved(), completed(state, self.tree.weights), "federation")

    def restore(self, fits: State) -> None:
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
        if reweigh is None or not self.tree.agreed(level, not is_same):
            return
        moved = {name: self.tree.mean(level, rows) - before.mean(level, rows) for name, rows in now.state.items()}
        memory, shift = reweigh(above.memory, moved, torch.zeros_like(above.model[:, :1]))
        state = {name: rows - self.tree.spread(level, shift[name]) for name, rows in now.state.items() if name in shift}
        self._change(level, state=now.state | state)
        self._change(level - 1, memory=memory)
        self._correct(level)

    def _change(self, level: int, **changes: Any) -> None:
        self.levels[level] = replace(self.levels[level], **changes)

    def _edge(self, level: int) -> Edges:
        return self._edges[level - 1]

    def _edge_levels(self, top: int = 1) -> range:
        return range(max(top, 1), self.tree.depth + 1)

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

    # -- what follows from it ----------------------------------------------------------------------

    def _own(self) -> dict[str, Spread]:
        """What each leaf kept to itself."""
        return {name: Spread(rows) for name, rows in self.levels[-1].optimiser.items()}

    def _leaves(self, level: int, rows: Tensor) -> Spread:
        """A level's rows as the leaves see them."""
        if level == self.tree.depth:
            return Spread(rows)
        ancestor_N = self.tree.ancestors(level)
        return Spread(rows, ancestor_N, self._placed(("leaves", level), ancestor_N))

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
        note = meeting.note_of(self.levels[level - 1].given)
        spread = {name: self.tree.spread(level, rows) for name, rows in note.items()}
        return meeting.correct(self.rules[level], self.levels[level].state, spread)

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
        return self.tree.here(level, np.arange(self.tree.whole.sizes[level]))
