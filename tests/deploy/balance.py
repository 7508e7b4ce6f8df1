"""What MTGC, SCAFFOLD and FedDyn rest on, at every family of a deployed tree: under the weights
that children have now, the corrections of all of them, absent ones too, sum to zero, and a parent's
memory is the mean of its children's states.

A child's state is what it will have when it next begins: what it is still to be told belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from stratafl.core.rule import Rows
from stratafl.deploy.protocol.downward import Below, Downward
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.node import NodeState, has_lost
from stratafl.deploy.protocol.upward import Above, Upward

SUMS, MEANS = ("z",), ("c", "h")
"""Names of the states that sum to zero, and of those that a memory is the mean of."""
ROUNDING = 2e-5


def state_of(job: Job, level: int, number: int, kept: NodeState | None, down: Downward) -> Rows | None:
    """A child's state at its next round; None where it lost it, and its parent does not know."""
    name = job.tree.names[level][number]
    bundle, above = down.bundles([name], None)[name], Above() if kept is None or kept.above is None else kept.above
    assert bundle.begin is not None
    is_other = down.child(name).born not in (None, above.born)
    if is_other or has_lost(bundle.begin, kept or NodeState()):
        return None
    up = Upward(job, level, number, replace(above))
    if bundle.answer is not None:
        up.answer(bundle.answer)
    up.begin(bundle.begin)
    return up.now.state


def imbalance(job: Job, level: int, number: int, below: Below, kept: Mapping[str, NodeState]) -> float:
    """By how much a family misses it, beside the largest of its states; 0 where a state was lost
    and its parent does not know yet."""
    rule, down = job.rules[level], Downward(job, level, number, below)
    numbers = job.children(level, number)
    states = [state_of(job, level + 1, child, kept.get(job.tree.names[level + 1][child]), down) for child in numbers]
    if any(state is None for state in states):
        return 0.0
    held = [name for name in states[0] or {} if name in SUMS + MEANS]
    assert rule.reweigh is None or held == list(states[0] or {})
    weights_K = down._weights(np.array([child.samples for child in below.children]))
    worst = 0.0
    for name in held:
        rows_KP = torch.cat([state[name] for state in states if state is not None]).double()
        mean_P = torch.as_tensor(weights_K, dtype=torch.float64) @ rows_KP
        if name in MEANS and weights_K.any():
            mean_P = mean_P - below.memory[name][0]
        worst = max(worst, float(mean_P.abs().max() / rows_KP.abs().max().clamp(min=1.0)))
    return worst


def assert_balanced(job: Job, level: int, number: int, below: Below, kept: Mapping[str, NodeState]) -> None:
    found = imbalance(job, level, number, below, kept)
    assert found <= ROUNDING, f"{job.tree.names[level][number]} and its children are out by {found:g}"
