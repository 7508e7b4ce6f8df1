"""The virtual time of a run: a network laid over its tree, and whom parents wait for there."""

from __future__ import annotations

from collections.abc import Sequence

from stratafl.base.errors import InvalidInput
from stratafl.clock.model.flops import training_flops
from stratafl.clock.model.network import Network
from stratafl.clock.model.placed import place
from stratafl.clock.model.presets import network
from stratafl.clock.model.replay import Story
from stratafl.clock.model.run_clock import RunClock
from stratafl.clock.model.waiting import Policy, check_wait
from stratafl.core.rule import Rule
from stratafl.data.inputs import Inputs
from stratafl.engine.model_checks import Subject
from stratafl.simulation.groups import Method


def checked_waiting(method: Method, rules: Sequence[Rule]) -> tuple[Network | None, tuple[Policy, ...]]:
    """The network, if there is one, and a policy per edge level."""
    found = None if method.network is None else network(method.network, "network")
    wait = check_wait(method.wait, len(rules))
    if all(each.is_all for each in wait):
        return found, wait
    given = [each.as_plain() for each in wait]
    if found is None:
        told = "needs a network, which says how long nodes take: see docs/how-to/waiting.md"
        raise InvalidInput("wait", given, told)
    if any(rule.from_gradient is not None for rule in rules):
        told = 'must be "all" where corrections are set from gradients: everybody who takes part sends one first'
        raise InvalidInput("wait", given, told)
    return found, wait


def run_clock(chosen: Network, story: Story, subject: Subject, inputs: Inputs) -> RunClock:
    """What tells a run who is in time. inputs: some samples, for counting the model's
    operations."""
    flops = _flops(subject, inputs) if chosen.needs_flops else None
    placed = place(chosen, story.tree, story.seed, story.samples_N, flops)
    return RunClock(story, placed, subject.flat.parameters, len(subject.b_B), flops)


def _flops(subject: Subject, inputs: Inputs) -> float:
    flat, x_P, b_B, _ = subject
    flat.eval()
    counted = training_flops(lambda: flat.call(x_P, b_B.clone(), inputs[:1]))
    if counted is None:
        told = "must be given, or leaf.step_s: the operations of this model cannot be counted"
        raise InvalidInput("network.leaf.flops_per_sample", None, told)
    return counted
