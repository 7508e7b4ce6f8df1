"""How much each child of a deployed parent counts, and what becomes of the family's states when
that changes.

MTGC's corrections of a parent's children sum to zero under the children's weights, SCAFFOLD's
control variate of the parent is the mean of theirs, and so is FedDyn's h. Counts n_i of samples
change while such states are in use: a leaf that nobody declared is heard for the first time, and so
its aggregator counts more. With d_j the change of a child's count and N' the new sum, the rule's
`reweigh` makes the invariant exact again from the states of these children alone, which send them
along. What is to be taken from every child's state, also an absent one's, is a `Shift`: the parent
keeps it until all have it.

Where a state is gone (a child lost it, or is out for the run) nobody knows its part of the sum.
Then the whole family begins anew: a shift without rows, and the parent's memory as at first. So it
does where more shifts than `MOST_SHIFTS` wait for a child that is away.

Shape suffixes: K children, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stratafl.core.rule import Rows, Rule
from stratafl.deploy.protocol.messages import Shift
from stratafl.federation.sync import apply_from_above
from stratafl.federation.update_checks import UpdateLimits, is_oversized, row_max_abs, rows_finite

MOST_SHIFTS = 4
"""Shifts that a parent keeps for children that are away."""


def reweighed(
    rule: Rule, memory: Rows, before_K: np.ndarray, after_K: np.ndarray, states: Mapping[int, Rows]
) -> tuple[Rows, Rows]:
    """The parent's memory, and what is taken from each child's state, when the children's counts
    change. states: of those whose count does, by their place."""
    if rule.reweigh is None or not states:
        return memory, {}
    part_K = (after_K - before_K) / after_K.sum()
    first = next(iter(states.values()))
    moved = {name: torch.stack([float(part_K[k]) * states[k][name] for k in states]).sum(dim=0) for name in first}
    like = next(iter(first.values()))
    return rule.reweigh(memory, moved, like.new_full((1, 1), float(part_K.sum())))


def unsound(state: Rows, model_1P: torch.Tensor, limits: UpdateLimits) -> tuple[bool, bool]:
    """Whether a child's state is not finite, and whether it is far too large beside its parent's
    model."""
    sizes = row_max_abs(*state.values())
    if not rows_finite(sizes).all():
        return True, False
    (start_1,), none = row_max_abs(model_1P), np.zeros(1)
    return False, limits.ratio is not None and any(bool(is_oversized(s, none, start_1, limits.ratio)[0]) for s in sizes)


def undelivered(shifts: Sequence[Shift], known: int | None) -> tuple[Shift, ...]:
    """Those that a child may not have which last replied to this round."""
    return tuple(shift for shift in shifts if known is None or shift.step > known)


def after_restart(rule: Rule, shifts: Sequence[Shift], form: Rows | None) -> tuple[Shift, ...]:
    """Those that a model from above the parent leaves something of; `form`: a state of zeros."""
    if rule.relay is None or form is None:
        return tuple(shifts)

    def is_left(rows: Rows) -> bool:
        return any(bool(each.any()) for each in apply_from_above(rule, form | rows).values())

    return tuple(shift for shift in shifts if shift.rows is None or is_left(shift.rows))
