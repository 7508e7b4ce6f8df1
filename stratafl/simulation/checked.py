"""Checks of every argument of a run by itself: the first of the steps of `prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from stratafl.base import topology
from stratafl.base.device import check_device
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.base.validation import check_choice, check_integer, plain
from stratafl.core import client_update
from stratafl.core.client_update import Leaf
from stratafl.core.participation import Participation, check_participation
from stratafl.core.rule import Rule
from stratafl.core.schedule import Schedule, check_levels
from stratafl.data import batches
from stratafl.data.batches import Sampling
from stratafl.data.dataset import ClientIndex, FederatedData
from stratafl.data.loading import check_class_names, is_per_client, load_dataset, load_per_client
from stratafl.data.partition import partition
from stratafl.data.partition.partition import Partition
from stratafl.distributed.communicator import Communicator
from stratafl.engine.factory import EngineName
from stratafl.engine.precision import PRECISIONS, Precision
from stratafl.metrics.drift import Diagnose
from stratafl.metrics.objective import parse_stop_goals
from stratafl.network.specification import Network
from stratafl.network.waiting import WaitPolicy
from stratafl.rules.registry import rules_for
from stratafl.simulation.evaluate import load_client_test_data
from stratafl.simulation.groups import Evaluation, Execution, Method, Problem
from stratafl.simulation.waiting import checked_waiting


@dataclass(frozen=True, eq=False)
class Checked:
    """Arguments of a run, each of them checked by itself."""

    tree: Tree
    data: FederatedData
    clients: ClientIndex
    rules: tuple[Rule, ...]
    schedule: Schedule
    leaf: Leaf
    evaluation: Evaluation
    batch: int | None
    sampling: Sampling
    seed: int
    ranks: Communicator
    device: torch.device
    participation: tuple[Participation, ...]
    network: Network | None
    wait: tuple[WaitPolicy, ...]
    engine: EngineName | None
    """None if the engine is to be chosen, on a CPU."""
    precision: Precision

    @property
    def samples(self) -> list[int]:
        """Number of samples of each client."""
        return self.clients.sizes.tolist()


def checked(problem: Problem, method: Method, evaluation: Evaluation, execution: Execution) -> Checked:
    """Check all arguments, and convert them; raises for the first that is wrong."""
    tree = Tree.of(problem.tree)
    seed = check_integer("seed", method.seed)
    data = problem.data if isinstance(problem.data, FederatedData) else _data(problem, tree, seed)
    clients = partition.check_partition(_divided(problem, data), tree, len(data.samples.targets_N))
    if problem.weights is not None:
        tree = tree.weighted(problem.weights, clients.sizes.tolist())
    rules = rules_for(method.rules, tree.depth)
    leaf = client_update.client_update_of(method.leaf)
    schedule = _schedule(method, leaf, tree)
    evaluation = checked_evaluation(evaluation, tree.depth)
    batch, sampling = batches.check_batching(method.batch, method.sampling)
    ranks = Communicator() if execution.ranks is None else execution.ranks
    if not isinstance(ranks, Communicator):
        raise InvalidInput("ranks", ranks, "must be those of stratafl.distributed; see docs/ranks.md")
    device = ranks.device(check_device(execution.device))
    participation = check_participation(method.participation, tree.depth)
    default: EngineName | None = None if device.type == "cpu" else "stacked"
    engine = default if execution.engine is None else check_choice("engine", execution.engine, get_args(EngineName))
    precision = check_choice("precision", execution.precision, PRECISIONS)
    network, wait = checked_waiting(method, rules, leaf, tree)
    return Checked(
        tree=tree,
        data=data,
        clients=clients,
        rules=rules,
        schedule=schedule,
        leaf=leaf,
        evaluation=evaluation,
        batch=batch,
        sampling=sampling,
        seed=seed,
        ranks=ranks,
        device=device,
        participation=participation,
        network=network,
        wait=wait,
        engine=engine,
        precision=precision,
    )


def _data(problem: Problem, tree: Tree, seed: int) -> FederatedData:
    """The samples to train and to test on; client by client where there is no partition."""
    lazy = problem.lazy
    if not isinstance(lazy, bool):
        raise InvalidInput("lazy", lazy, "must be True or False")
    read = load_per_client if problem.partition is None and is_per_client(problem.data) else load_dataset
    data = read("data", problem.data, columns=problem.columns, lazy=lazy, seed=seed)
    if problem.partition is None and data.clients is None:
        raise InvalidInput("partition", None, "is left out only where data is a list, one data set per client")
    test = None
    if problem.test is not None:
        read = load_per_client if is_per_client(problem.test) else load_dataset
        test = read("test", problem.test, columns=problem.columns, seed=seed)
    client_test = load_client_test_data(problem.test_partition, tree, test, problem.columns, seed)
    test = client_test if test is None else test
    parts = {"data": data, "test": test, "test_partition": client_test}
    check_class_names((name, part.declared_classes) for name, part in parts.items() if part is not None)
    return replace(data, test=test, client_test=client_test, augment=problem.augment)


def _schedule(method: Method, leaf: Leaf, tree: Tree) -> Schedule:
    """Schedule of the synchronisations; raises if the clients count other passes over data."""
    if isinstance(method.periods, Schedule):
        schedule = Schedule.of(method.periods.periods, tree.depth)
    else:
        _check_depth(method.periods, leaf, tree)
        schedule = Schedule.of(method.periods, tree.depth, leaf.epochs)
    if leaf.epochs not in (None, schedule.periods[-1]):
        raise InvalidInput("leaf.epochs", leaf.epochs, f"the schedule has {schedule.periods[-1]} between meetings")
    return schedule


def _check_depth(periods: object, leaf: Leaf, tree: Tree) -> None:
    """Refuse periods of a deeper tree whose fan-outs were read as sizes of groups."""
    given = plain(periods)
    count = len(given) + (leaf.epochs is not None) if isinstance(given, Sequence) else 0
    if count > tree.depth and count == len(topology.groups_of(tree)):
        allowed = f"needs one number per edge level, {tree.depth} of them{topology.balanced_hint(tree)}"
        raise InvalidInput("periods", given, allowed)


def _divided(problem: Problem, data: FederatedData) -> Sequence[Any] | ClientIndex:
    """Each client's sample numbers, not checked yet."""
    parts = problem.partition
    if isinstance(parts, Partition):
        if parts.angles is not None:
            raise InvalidInput("partition", "with rotation", "turns images in a config alone: rotate them yourself")
        return parts.leaves
    return (data.clients or ()) if parts is None else parts


def checked_evaluation(given: Evaluation, depth: int) -> Evaluation:
    """Check the length of a run and what is measured in it."""
    made = Evaluation(
        rounds=check_integer("rounds", given.rounds, at_least=1),
        evaluate_every=check_integer("evaluate_every", given.evaluate_every, at_least=1),
        evaluate_levels=check_levels("evaluate_levels", given.evaluate_levels, depth),
        stop_at=given.stop_at,
        diagnose=check_choice("diagnose", given.diagnose, get_args(Diagnose)),
        metrics=given.metrics,
        stop_when=given.stop_when,
    )
    parse_stop_goals(given.stop_at, given.stop_when)
    return made
