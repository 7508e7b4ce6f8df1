"""The virtual time of a run: a network laid over its tree, and whom parents wait for there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.core.client_update import Leaf, needs_sgd_path
from stratafl.core.rule import Rule
from stratafl.federation.state import supports_late_updates
from stratafl.network.instance import instantiate_network
from stratafl.network.replay import Workload
from stratafl.network.specification import Network, network
from stratafl.network.virtual_clock import VirtualClock
from stratafl.network.waiting import WaitPolicy, check_wait
from stratafl.simulation.groups import Method


def checked_waiting(
    method: Method, rules: Sequence[Rule], leaf: Leaf, tree: Tree
) -> tuple[Network | None, tuple[WaitPolicy, ...]]:
    """The network, if there is one, and a policy per edge level."""
    found = None if method.network is None else network(method.network, "network")
    wait = check_wait(method.wait, len(rules))
    if all(each.waits_for_all for each in wait):
        return found, wait
    given = [each.to_plain() for each in wait]
    if found is None:
        told = "needs a network, which says how long nodes take: see docs/how-to/waiting.md"
        raise InvalidInput("wait", given, told)
    if any(rule.from_gradient is not None for rule in rules):
        told = 'must be "all" where corrections are set from gradients: everybody who takes part sends one first'
        raise InvalidInput("wait", given, told)
    _check_late(wait, given, rules, leaf, tree)
    return found, wait


def _check_late(wait: Sequence[WaitPolicy], given: list[Any], rules: Sequence[Rule], leaf: Leaf, tree: Tree) -> None:
    """Refuse late updates that count, where rules or levels do not support them."""
    for level, (policy, rule) in enumerate(zip(wait, rules, strict=True), 1):
        if not policy.applies_late_updates:
            continue
        if any(not above.waits_for_all and not above.applies_late_updates for above in wait[: level - 1]):
            told = (
                "late work counts only below levels that wait for all or where it counts, too: a node that is stopped"
            )
            raise InvalidInput("wait", given, f"{told} would take its children's with it")
        if not supports_late_updates(rule):
            told = "keeps something at each child that work which counts later would make wrong"
            raise InvalidInput("wait", policy.to_plain(), f"the rule of edge level {level} {told}")
        children_M = tree.children(level - 1)
        if rule.down is not None and (policy.required_updates(children_M)[children_M > 1] < 2).any():
            told = "learns from a meeting of two children at least: wait for two, or take scaffold"
            raise InvalidInput("wait", policy.to_plain(), f"the rule of edge level {level} {told}")
    if any(policy.applies_late_updates for policy in wait) and needs_sgd_path(leaf, rules):
        told = "late work counts with corrections only where leaf.optimiser is SGD that is restarted"
        raise InvalidInput("wait", given, told)


def run_clock(chosen: Network, workload: Workload, flops: float | None) -> VirtualClock:
    """Virtual clock that decides which nodes of a run are in time. flops: operations of training on
    one sample; None if they cannot be counted."""
    if chosen.needs_flops and flops is None:
        told = "must be given, or leaf.step_s: the operations of this model cannot be counted"
        raise InvalidInput("network.leaf.flops_per_sample", None, told)
    return VirtualClock(workload, instantiate_network(chosen, workload.tree, workload.seed, workload.samples_N, flops))
