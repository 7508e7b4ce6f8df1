"""Every node's model, correction and rule state, and what changes when levels meet.

One federation is driven like this (see `simulate`):

    begin()                       participants are drawn and get their parents' models
    start_from_gradients(g)       where a rule asks for it
    trained(x, b, rate)           the leaves' work is done
    meet(top)                     edge levels D..top synchronise

Shape suffixes: N nodes of a level, M nodes of the level above, A leaves that take part, P parameters, B buffer values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.communication import Communication
from stratafl.drift import Drift
from stratafl.engine.spread import Spread
from stratafl.engine.work import Pull, Work
from stratafl.placing import Placed, placed
from stratafl.refusal import (
    Met,
    Refusal,
    carried,
    changed,
    far_off,
    finite,
    largest,
    out_of_line,
    suspicious,
    update_factors,
    update_limits,
)
from stratafl.rule import Edge, Rows, Rule, average
from stratafl.schedule import Participation, draw
from stratafl.state import State, fitted
from stratafl.tree import Tree

BUFFERS = "buffers"


class Merged(NamedTuple):
    """What parents make of their children's messages, and for which of them all of it is finite."""

    memory: Rows
    mean_MP: Tensor
    """Of the children's models."""
    model_MP: Tensor
    buffers_MB: Tensor
    finite_M: np.ndarray
    share_M: np.ndarray
    """Of the children's weight that went into it."""
    doubtful_N: np.ndarray
    """Whose message may be unsound although the mean is finite."""


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
    ):
        self.tree, self.seed = tree, seed
        self.device = x_P.device
        # Lists are indexed by level; edge things have an unused entry 0 so that index m is edge level m.
        self.rules: list[Rule] = [average(), *rules]
        self.participation: list[Participation] = [None, *participation]
        self.limits: list[float | None] = [None, *update_limits(update_limit, rules)]
        self.factors: list[float | None] = [None, *update_factors(update_factor, rules)]
        self.own = [x_P.repeat(n, 1) for n in tree.sizes]
        """Each node's model as it last sent it up, before its parent's answer replaced it."""
        self.held = self.own[:-1]
        """What each aggregator currently gives its children."""
        self.own_buffers = [b_B.repeat(n, 1) for n in tree.sizes]
        self.held_buffers = self.own_buffers[:-1]
        self.state: list[Rows] = [rule.init(x) for rule, x in zip(self.rules, self.own, strict=True)]
        self.memory: list[Rows] = [{}, *(r.open(x) for r, x in zip(rules, self.held, strict=True))]
        self.correction: list[Tensor | None] = [None] * (tree.depth + 1)
        # Who is there and what rates were used is kept on the host: small, and decided on at every meeting.
        self.rate_N = [np.zeros(n) for n in tree.sizes]
        """Sum of learning rates since the node last met its parent."""
        self.active_N = [np.ones(n, dtype=bool) for n in tree.sizes]
        self.rounds = [0] * (tree.depth + 1)
        """How many rounds each edge level has begun."""
        self.top = 0
        """The topmost edge level of the last meeting: everything below it starts anew. 0: nothing met yet."""
        self.communication = Communication(tree)
        self.drift: Drift | None = None
        """Where given, it is shown every meeting."""
        self._placed = Placed(self.device)
        self._stale = [np.ones(n, dtype=bool) for n in tree.sizes]
        self._owed = [np.zeros(n, dtype=bool) for n in tree.sizes]
        self._masked = not bool(b_B.isfinite().all())
        """Whether buffers began with entries that are not finite, such as a mask's -inf: they cannot be averaged."""
        for level in self._edges():
            self._correct(level)

    GIVEN = ("tree", "seed", "device", "rules", "participation", "limits", "factors", "drift", "_placed", "_masked")
    """What a federation is made of; everything else it holds is its state."""

    def saved(self) -> State:
        """Everything that changes in the course of a run, as it stands: later meetings may change what is in it."""
        changing = {name: value for name, value in vars(self).items() if name not in self.GIVEN}
        return {**changing, "communication": self.communication.saved()}

    def restore(self, state: State) -> None:
        """Go on from a state of a federation made of the same things; a state of another is refused."""
        fit = fitted(self.saved(), state, "federation")
        self.communication.restore(fit.pop("communication"))
        vars(self).update(fit)
        self._masked = not all(bool(rows.isfinite().all()) for rows in self.held_buffers)

    def _edges(self, top: int = 1) -> range:
        return range(max(top, 1), self.tree.depth + 1)

    # -- the start of a round -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Draw who takes part on every level that just met, and give them their parents' models."""
        for level in self._edges(self.top):
            drawn = draw(self.participation[level], self.tree.whole, level, self.rounds[level], self.seed)
            taking_part = self.tree.here(level, drawn)
            self.active_N[level] = taking_part & self.active_N[level - 1][self.tree.parents[level]]
            self.rounds[level] += 1
            self._pull(level)

    @property
    def client_bytes(self) -> int:
        """Sent and received by the clients so far."""
        sent = self.communication
        return int((sent.up.bytes[-1] + sent.down.bytes[-1]).sum())

    @property
    def wants_gradients(self) -> bool:
        return any(self.rules[level].from_gradient for level in self._edges(self.top + 1))

    def start_from_gradients(self, g_AP: Tensor) -> None:
        """Let the rules below the last meeting set their states from the gradients at the new model of the leaves
        that take part."""
        fresh = [level for level in self._edges(self.top + 1) if self.rules[level].from_gradient]
        g_NP = _placed(self.active_N[-1], g_AP, torch.zeros_like(self.own[-1]))
        (largest_N,) = largest(g_NP)
        there_N = self.active_N[-1] & np.isfinite(largest_N)
        there_N &= ~far_off(self.tree, self.tree.depth, g_NP, largest_N, None, there_N, self.limits[-1])
        for level in range(self.tree.depth, fresh[0] - 1, -1):
            share_M = self.tree.share(level, there_N)
            mean_MP = self.tree.mean(level, g_NP, there_N, share_M)
            rule = self.rules[level]
            if rule.from_gradient:
                new = rule.from_gradient(self.state[level], g_NP, self.tree.spread(level, mean_MP))
                self.state[level] = _where(there_N, new, self.state[level])
            self.communication.up.add(level, there_N, self._model_bytes)
            g_NP, there_N = mean_MP, share_M > 0
        for level in fresh:
            self._correct(level)
        for level in self._edges(self.top):
            self._owed[level] |= level > fresh[0]
            vectors = int(level in fresh) + self._owed[level]
            answered = self.active_N[level] & (vectors > 0)
            self.communication.down.add(level, answered, vectors * self._model_bytes)
            self._owed[level] &= ~self.active_N[level]

    def work(self, step: int, steps: int, round: int) -> Work:
        """What the leaves are to do next."""
        corrections, pulls = [], []
        for level in self._edges():
            correction = self.correction[level]
            mine = None if correction is None else self._leaves(level, correction)
            if mine is not None:
                corrections.append(mine)
            local = self.rules[level].local
            if local is not None:
                model = self._leaves(level - 1, self.held[level - 1])
                pulls.append(
                    Pull(local, model, mine, self._leaves(level, self._column(("rate", level), self.rate_N[level])))
                )
        above = self.tree.depth - 1
        return Work(
            x=self._leaves(above, self.held[above]),
            b=self._leaves(above, self.held_buffers[above]),
            corrections=tuple(corrections),
            pulls=tuple(pulls),
            active=np.flatnonzero(self.active_N[-1]).tolist(),
            step=step,
            steps=steps,
            round=round,
        )

    def looking(self, level: int, rows_NP: Tensor) -> Work:
        """All leaves at the models of their ancestors on a level: for a look at their gradients, not for training."""
        above = self.tree.depth - 1
        everybody = list(range(self.tree.leaves))
        buffers = self._leaves(above, self.held_buffers[above])
        return Work(self._leaves(level, rows_NP), buffers, (), (), everybody, step=0, steps=1, round=0)

    def _leaves(self, level: int, rows: Tensor) -> Spread:
        """A level's rows as the leaves see them."""
        if level == self.tree.depth:
            return Spread(rows)
        ancestor_N = self.tree.ancestors(level)
        return Spread(rows, ancestor_N, self._placed(("leaves", level), ancestor_N))

    def _children(self, level: int, rows_MP: Tensor) -> Spread:
        """Parents' rows as their children on `level` see them."""
        parent_N = self.tree.parents[level]
        return Spread(rows_MP, parent_N, self._placed(("children", level), parent_N))

    # -- the end of a round ---------------------------------------------------------------------------------------

    def trained(self, x_AP: Tensor, b_AB: Tensor, rate: float) -> None:
        """Take the new models of the leaves that take part, after steps whose learning rates add up to `rate`."""
        active_N = self.active_N[-1]
        self.own[-1] = _placed(active_N, x_AP, self.own[-1])
        self.own_buffers[-1] = _placed(active_N, b_AB, self.own_buffers[-1])
        self.rate_N[-1] = self.rate_N[-1] + rate * active_N

    def meet(self, top: int) -> Met:
        """Synchronise the edge levels from the leaves' up to `top`."""
        refused: list[Refusal] = []
        for level in reversed(self._edges(top)):
            met = self._meet(level, relayed=level > top)
            refused += met.refused
        for level in self._edges(top):
            self.rate_N[level] = np.zeros_like(self.rate_N[level])
            if level > top:
                self.held[level - 1] = self.tree.spread(level - 1, self.held[level - 2])
                self.held_buffers[level - 1] = self.tree.spread(level - 1, self.held_buffers[level - 2])
                relay = self.rules[level].relay
                if relay is not None:
                    self.state[level] = relay(self.state[level])
                self._stale[level][:] = True
                above = self.correction[top:level]
                self._owed[level] |= any(correction is not None for correction in above)
            self._correct(level)
        self.top = top
        return Met(refused, met.renewed)

    def _meet(self, level: int, relayed: bool) -> Met:
        tree, rule, own = self.tree, self.rules[level], self.own[level]
        start = self._children(level, self.held[level - 1])
        edge = Edge(start, self.correction[level], self._column(("rate", level), self.rate_N[level]))
        state, message = rule.up(self.state[level], own, edge)
        sent = {**message, BUFFERS: self.own_buffers[level]}

        came_N = self.active_N[level] & (self.rate_N[level] > 0)
        self.communication.up.add(level, came_N, _row_bytes(sent))
        merged = self._merge(level, sent, came_N) if rule.reduce is None else None
        lost_N = large_N = np.zeros_like(came_N)
        # a mean is finite only if all that went into it is, so that rows are looked at one by one only if it is not,
        # or where they are to be in line with their siblings'
        doubt = merged is None or not (merged.finite_M | (merged.share_M == 0)).all() or merged.doubtful_N.any()
        if tree.agreed(level, bool(doubt)) or merged is None or self.factors[level] is not None:
            lost_N, large_N = self._unsound(level, sent, came_N)
            merged = self._merge(level, sent, came_N & ~lost_N & ~large_N, seen=True)
        heard_M = merged.share_M > 0
        sane_M = heard_M & merged.finite_M
        too_large = set(tree.named(level, large_N))
        refused = [Refusal(name, name in too_large) for name in tree.named(level, lost_N | large_N)]
        refused += [Refusal(name, False) for name in tree.named(level - 1, heard_M & ~sane_M)]
        present_N = came_N & ~lost_N & ~large_N & sane_M[tree.parents[level]]
        if self.drift is not None:
            models = own, self.held[level - 1], merged.mean_MP, merged.model_MP
            share_M = merged.share_M * sane_M
            self.drift.met(level, *models, self.correction[level], present_N, share_M, is_mean=rule.reduce is None)

        self.memory[level] = _where(sane_M, merged.memory, self.memory[level])
        self.held[level - 1] = _choose(sane_M, merged.model_MP, self.held[level - 1])
        self.own[level - 1] = self.held[level - 1]
        self.held_buffers[level - 1] = _choose(sane_M, merged.buffers_MB, self.held_buffers[level - 1])
        self.own_buffers[level - 1] = self.held_buffers[level - 1]
        mean_rate_M = tree.share(level, present_N * self.rate_N[level]) / np.where(heard_M, merged.share_M, 1.0)
        self.rate_N[level - 1] = self.rate_N[level - 1] + mean_rate_M

        state = _where(present_N, state, self.state[level])
        self._stale[level][:] = True
        if rule.down is not None and not (relayed and rule.relay is not None):
            answered = self._children(level, self.held[level - 1])
            # the siblings' mean rate keeps the corrections of a parent summing to zero also when some lost a round
            shared_N1 = self._column(("mean rate", level), mean_rate_M[tree.parents[level]])
            learnt = rule.down(state, own, Edge(start, self.correction[level], shared_N1, answered))
            state = _where(present_N, learnt, state)
            self._stale[level] = ~present_N
            self.communication.down.add(level, present_N, self._parcel(level))
        self.state[level] = state
        return Met(refused, bool(sane_M.any()))

    def _unsound(self, level: int, sent: Rows, came_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of those that came, whose message is not finite, and whose is but has a model that is too far off."""
        judged = {**sent, BUFFERS: self._judged(level, sent[BUFFERS])}
        sizes = dict(zip(judged, largest(*judged.values()), strict=True))
        lost_N = came_N & ~finite(list(sizes.values()))
        present_N, start_MP = came_N & ~lost_N, self.held[level - 1]
        model_NP, limit = sent["model"], self.limits[level]
        large_N = far_off(self.tree, level, model_NP, sizes["model"], start_MP, present_N, limit)
        present_N &= ~large_N
        return lost_N, large_N | out_of_line(self.tree, level, model_NP, start_MP, present_N, self.factors[level])

    def _judged(self, level: int, buffers_NB: Tensor) -> Tensor:
        """Children's buffers, less what their parent gave and is as it was, whether finite or not."""
        if not self._masked:
            return buffers_NB
        return changed(buffers_NB, self.tree.spread(level, self.held_buffers[level - 1]))

    def _looks(self, level: int, sent: Rows) -> list[tuple[Tensor, float | None]]:
        """Children's rows whose soundness does not show in their mean, with the limit of their size."""
        limit = self.limits[level]
        models = [] if limit is None else [(sent["model"], limit)]
        return models + ([(self._judged(level, sent[BUFFERS]), None)] if self._masked else [])

    def _merge(self, level: int, sent: Rows, present_N: np.ndarray, seen: bool = False) -> Merged:
        """What the parents make of what those present sent. `seen`: it was looked at and found sound."""
        tree, reduce = self.tree, self.rules[level].reduce
        share_M = tree.share(level, present_N)

        def merged(rows_NP: Tensor) -> Tensor:
            if reduce is None:
                return tree.mean(level, rows_NP, present_N, share_M)
            return tree.reduce(level, rows_NP, present_N, reduce)

        mean = {name: merged(rows) for name, rows in sent.items() if name != BUFFERS}
        given_MB, buffers_MB = self.held_buffers[level - 1], tree.mean(level, sent[BUFFERS], present_N, share_M)
        if self._masked:
            buffers_MB = carried(buffers_MB, given_MB)
        share_M1 = self._column(("share", level), share_M)
        memory, model_MP = self.rules[level].merge(self.memory[level], self.held[level - 1], mean, share_M1)

        parents = [model_MP, changed(buffers_MB, given_MB) if self._masked else buffers_MB, *mean.values()]
        looks = [] if seen else self._looks(level, sent)
        sizes = largest(*parents, *(rows_NP for rows_NP, _ in looks))
        finite_M = finite(sizes[: len(parents)])
        doubts = [suspicious(each_N, limit) for each_N, (_, limit) in zip(sizes[len(parents) :], looks, strict=True)]
        doubtful_N = present_N & np.any(doubts, axis=0)
        return Merged(memory, mean["model"], model_MP, buffers_MB, finite_M, share_M, doubtful_N)

    # -- small things -----------------------------------------------------------------------------------------------

    def _correct(self, level: int) -> None:
        note = self.rules[level].note(self.memory[level])
        spread = {name: self.tree.spread(level, rows) for name, rows in note.items()}
        self.correction[level] = self.rules[level].correction(self.state[level], spread)

    def _pull(self, level: int) -> None:
        """Account for the models that those taking part do not have yet, with the corrections from above."""
        asking = self.active_N[level] & self._stale[level]
        self._stale[level] &= ~asking
        if self.wants_gradients:
            # the corrections are about to change and come with the mean gradients
            self.communication.down.add(level, asking, self._parcel(level))
        else:
            extra = self._owed[level] * self._model_bytes
            self.communication.down.add(level, asking, self._parcel(level) + extra)
            self._owed[level] &= ~asking

    @property
    def _model_bytes(self) -> int:
        return _row_bytes({"model": self.held[0]})

    def _parcel(self, level: int) -> int:
        """Bytes of what a parent gives a child: its model, its buffers and the rule's note."""
        note = self.rules[level].note(self.memory[level])
        return _row_bytes({"model": self.held[0], "buffers": self.held_buffers[0], **note})

    def _column(self, name: object, values_N: np.ndarray) -> Tensor:
        """One number per node, to combine with rows."""
        return self._placed(name, values_N, self.held[0].dtype)[:, None]


def _placed(mask_N: np.ndarray, new_AP: Tensor, old_NP: Tensor) -> Tensor:
    """The old rows with new ones for those in the mask."""
    if mask_N.all():
        return new_AP
    return old_NP.index_copy(0, placed(np.flatnonzero(mask_N), old_NP.device), new_AP)


def _choose(mask_N: np.ndarray, new_NP: Tensor, old_NP: Tensor) -> Tensor:
    if mask_N.all():
        return new_NP
    return torch.where(placed(mask_N, new_NP.device)[:, None], new_NP, old_NP)


def _where(mask_N: np.ndarray, new: Rows, old: Rows) -> Rows:
    return {name: _choose(mask_N, rows, old[name]) for name, rows in new.items()}


def _row_bytes(rows: Rows) -> int:
    return sum(matrix.shape[1] * matrix.element_size() for matrix in rows.values())
