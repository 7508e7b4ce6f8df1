"""Algorithm of an experiment: what its tree, method, schedule and client sections mean for a
run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratafl.base import topology
from stratafl.base.errors import InvalidInput, convert_errors
from stratafl.base.topology import Topology
from stratafl.base.validation import check_integer, check_number
from stratafl.core.client_update import ClientUpdate, GradientTransform, clip, corrections, decay, needs_sgd_path
from stratafl.core.losses import parse_loss
from stratafl.core.optimizer import AdamW, LearningRate, constant, cosine, parse_optimizer, step_decay
from stratafl.core.participation import Participation, check_participation
from stratafl.core.rule import Rule
from stratafl.core.schedule import SyncSchedule
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import augment_of, import_plugins
from stratafl.experiment.sections import Client, Cosine, Method, Schedule, StepDecay
from stratafl.federation.state import supports_late_updates
from stratafl.metrics.metrics import parse_metrics
from stratafl.metrics.objective import parse_stop_goals
from stratafl.network.specification import Network, network
from stratafl.network.waiting import WaitPolicy, check_wait
from stratafl.rules.registry import RuleLike, rules_for

DEFAULT_STEPS, DEFAULT_SYNCS = 10, 5
"""Periods unless given: local steps, and synchronisations of each level above."""


@dataclass(frozen=True, eq=False)
class Algorithm:
    """Rules, schedule and client update of a run: all that needs neither data nor model."""

    tree: Topology
    """The tree; its weights are set once the data are known."""
    rules: tuple[Rule, ...]
    schedule: SyncSchedule
    client_update: ClientUpdate
    participation: tuple[Participation, ...]
    network: Network | None
    wait: tuple[WaitPolicy, ...]
    evaluated_levels: tuple[int, ...]
    """Levels below the root whose nodes are evaluated."""

    @staticmethod
    def of(experiment: Experiment) -> Algorithm:
        """The algorithm of an experiment; raises for the first mistake."""
        import_plugins(experiment.plugins)
        tree = topology_of(experiment)
        depth, client = tree.depth, client_update(experiment)
        rules = rules_for(rule_names(experiment.method), depth)
        chosen, wait = _waiting(experiment, rules, client, tree)
        return Algorithm(
            tree=tree,
            rules=rules,
            schedule=sync_schedule(experiment.schedule, tree),
            client_update=client,
            participation=participation_of(experiment, depth),
            network=chosen,
            wait=wait,
            evaluated_levels=evaluated_levels(experiment, depth),
        )


def mistakes(experiment: Experiment) -> list[InvalidInput]:
    """Mistakes that can be told without data and model; empty if there are none."""
    found: list[InvalidInput] = []

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except InvalidInput as mistake:
            found.append(mistake)
        return None

    attempt(lambda: import_plugins(experiment.plugins))
    attempt(lambda: parse_loss(experiment.loss))
    attempt(lambda: parse_metrics(experiment.evaluation.metrics))
    attempt(lambda: parse_stop_goals(experiment.evaluation.stop_when))
    attempt(lambda: augment_of(experiment.data))
    client = attempt(lambda: client_update(experiment))
    tree = attempt(lambda: topology_of(experiment))
    if tree is None:
        return found
    attempt(lambda: sync_schedule(experiment.schedule, tree))
    attempt(lambda: participation_of(experiment, tree.depth))
    attempt(lambda: evaluated_levels(experiment, tree.depth))
    rules = attempt(lambda: rules_for(rule_names(experiment.method), tree.depth))
    if rules is not None and client is not None:
        attempt(lambda: _waiting(experiment, rules, client, tree))
    return found


def mistakes_in(tables: Mapping[str, Any]) -> tuple[Experiment | None, list[InvalidInput]]:
    """The experiment of a config's tables, and all mistakes in them.

    What is wrong by itself is left out, so that the rest can be checked, too; None if nothing can
    be made of what is left.
    """
    rest, found = copy.deepcopy(dict(tables)), list[InvalidInput]()
    for _ in range(MOST_ATTEMPTS):
        try:
            experiment = Experiment.from_table(rest)
        except InvalidInput as problem:
            wrong = getattr(problem, "mistakes", ()) or (problem,)
            found += wrong
            if not all(_without(rest, mistake) for mistake in wrong):
                break
        else:
            return experiment, found + mistakes(experiment)
    return None, found


MOST_ATTEMPTS = 5
"""Largest number of times that wrong options are left out of a config to find further mistakes."""


def _without(tables: dict[str, Any], mistake: InvalidInput) -> bool:
    """Remove the option that a mistake is about; returns whether there is one."""
    *path, name = mistake.field.partition("[")[0].split(".")
    if name.endswith(" key"):
        path, name = [*path, name.removesuffix(" key")] if name != "experiment key" else path, str(mistake.value)
    for key in path:
        if not isinstance(tables.get(key), dict):
            name = key
            break
        tables = tables[key]
    return tables.pop(name, tables) is not tables


# -- parts -----------------------------------------------------------------------------------------


def topology_of(experiment: Experiment) -> Topology:
    """The tree of an experiment, with uniform weights unless they are given with it."""
    return Topology.of(experiment.tree.shape)


def weighted(tree: Topology, weights: Any, samples: Sequence[int]) -> Topology:
    """The tree with the weights of its section; `samples` has the number of each client's."""
    if isinstance(weights, str) and weights.lower() in ("uniform", "samples"):
        weights = weights.lower()
    return tree if weights is None else tree.weighted(weights, list(samples))


def rule_names(method: Method) -> RuleLike | Sequence[RuleLike]:
    """The method as a name, a table of a name and parameters, or a list of rules."""
    if method.rules is not None:
        rules: RuleLike | Sequence[RuleLike] = method.rules
        return rules
    return {"name": method.name, **method.params} if method.params else str(method.name)


def sync_schedule(section: Schedule, tree: Topology) -> SyncSchedule:
    """When each level of a tree synchronises."""
    periods, depth = section.periods, tree.depth
    if periods is None:
        periods = [DEFAULT_SYNCS] * (depth - 1) + [DEFAULT_STEPS if section.unit == "steps" else 1]
    if isinstance(periods, SyncSchedule):
        periods = periods.periods
    if isinstance(periods, Sequence) and len(periods) > depth and len(periods) == len(topology.groups_of(tree)):
        allowed = f"needs one number per edge level, {depth} of them{topology.balanced_hint(tree)}"
        raise InvalidInput("schedule.periods", periods, allowed)
    return SyncSchedule.of(periods, depth)


def client_update(experiment: Experiment) -> ClientUpdate:
    """The local update of every client."""
    section, passes = experiment.client, None
    if experiment.schedule.unit == "epochs":
        periods = experiment.schedule.periods
        last = periods[-1] if isinstance(periods, Sequence) and len(periods) else 1
        passes = check_integer("schedule.periods", last, at_least=1)
    optimizer = parse_optimizer(section.optimizer)
    if isinstance(optimizer, AdamW) and section.weight_decay > 0:
        allowed = 'AdamW has a decay of its own: client.optimizer = { name = "adamw", weight_decay = 0.01 }'
        raise InvalidInput("client.weight_decay", section.weight_decay, allowed)
    return ClientUpdate(
        learning_rate(section, experiment.rounds),
        _gradient_transforms(section),
        optimizer,
        section.optimizer_state,
        passes,
    )


def _gradient_transforms(section: Client) -> tuple[GradientTransform, ...]:
    """The transforms between gradient and optimizer."""
    if section.gradient_transforms is not None:
        return tuple(section.gradient_transforms)
    transforms: list[GradientTransform] = [corrections]
    if section.clip_norm is not None:
        transforms.append(clip(check_number("client.clip_norm", section.clip_norm, at_most=1e30)))
    if section.weight_decay > 0:
        transforms.append(decay(section.weight_decay))
    return tuple(transforms)


def learning_rate(section: Client, rounds: int) -> LearningRate:
    """The learning rate as a function of the global round, counted from 0."""
    lr, schedule = section.lr, section.lr_schedule
    if isinstance(schedule, Cosine):
        return cosine(lr, rounds if schedule.rounds is None else schedule.rounds, schedule.floor)
    if isinstance(schedule, StepDecay):
        return step_decay(lr, schedule.every, schedule.factor)
    if isinstance(schedule, str):
        return constant(lr)
    with convert_errors("client.lr_schedule", getattr(schedule, "__name__", schedule)):
        check_number("client.lr_schedule", schedule(0), at_least=0)

    @functools.wraps(schedule, updated=())
    def rate(round: int) -> float:
        return lr * schedule(round)

    return rate


def participation_of(experiment: Experiment, depth: int) -> tuple[Participation, ...]:
    """Which children take part, per edge level, root first."""
    return check_participation(experiment.schedule.participation, depth)


def evaluated_levels(experiment: Experiment, depth: int) -> tuple[int, ...]:
    """Levels below the root whose nodes are evaluated, as numbers."""
    levels = [depth if level == "clients" else level for level in experiment.evaluation.levels]
    return tuple(check_integer("evaluation.levels", level, at_least=1, at_most=depth) for level in levels)


def _waiting(
    experiment: Experiment, rules: Sequence[Rule], update: ClientUpdate, tree: Topology
) -> tuple[Network | None, tuple[WaitPolicy, ...]]:
    """The network, if there is one, and whom aggregators wait for, per edge level."""
    chosen = None if experiment.network is None else network(experiment.network, "network")
    wait = check_wait(experiment.schedule.wait, len(rules))
    if all(policy.waits_for_all for policy in wait):
        return chosen, wait
    policies = [policy.to_plain() for policy in wait]
    if chosen is None:
        allowed = "needs a network, which says how long nodes take: see docs/how-to/waiting.md"
        raise InvalidInput("schedule.wait", policies, allowed)
    if any(rule.from_gradient is not None for rule in rules):
        allowed = 'must be "all" where corrections are set from gradients: everybody who takes part sends one first'
        raise InvalidInput("schedule.wait", policies, allowed)
    _check_late(wait, policies, rules, update, tree)
    return chosen, wait


def _check_late(
    wait: Sequence[WaitPolicy], policies: list[Any], rules: Sequence[Rule], update: ClientUpdate, tree: Topology
) -> None:
    """Reject late updates that are applied, where rules or levels do not support them."""
    for level, (policy, rule) in enumerate(zip(wait, rules, strict=True), 1):
        if not policy.applies_late_updates:
            continue
        if any(not above.waits_for_all and not above.applies_late_updates for above in wait[: level - 1]):
            allowed = "late work counts only below levels that wait for all or where it counts, too: a node that is"
            raise InvalidInput("schedule.wait", policies, f"{allowed} stopped would take its children's with it")
        if not supports_late_updates(rule):
            allowed = "keeps something at each child that work which counts later would make wrong"
            raise InvalidInput("schedule.wait", policy.to_plain(), f"the rule of edge level {level} {allowed}")
        children_M = tree.children(level - 1)
        if rule.down is not None and (policy.required_updates(children_M)[children_M > 1] < 2).any():
            allowed = "learns from a meeting of two children at least: wait for two, or take scaffold"
            raise InvalidInput("schedule.wait", policy.to_plain(), f"the rule of edge level {level} {allowed}")
    if any(policy.applies_late_updates for policy in wait) and needs_sgd_path(update, rules):
        allowed = "late work counts with corrections only where client.optimizer is SGD whose state is reset"
        raise InvalidInput("schedule.wait", policies, allowed)
