"""From a config to what is run of it: the whole of it in one process, or what one site of a
deployed tree needs.

study            a simulation, ready to iterate
leaf_trainer     what trains one leaf, on its part of the data (`part_of`) or on data of its own,
                 and what of the model stays with it
initial_model    what the run begins with, drawn from its seed
root_of          what the root of a deployed tree begins with, and tests its models on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stratafl.base import device
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.base.user_code import attribute_errors, load_module
from stratafl.base.validation import check_integer
from stratafl.config.data import LabelCounts, augment_of, prepared
from stratafl.config.network import network
from stratafl.config.schema import Config
from stratafl.core import flat_module
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import parse_loss
from stratafl.core.schedule import Schedule
from stratafl.data import batches
from stratafl.data.dataset import BatchKey, ClientIndex, FederatedData, InMemorySamples
from stratafl.data.inputs import Pair, Shape, shape_of
from stratafl.distributed.communicator import Communicator
from stratafl.engine.loop import LoopEngine
from stratafl.engine.validation import ModelUnderTest, build_objective, check_forward
from stratafl.federation.local_parameters import ClientTrainer, LocalParameters, match_local_parameters
from stratafl.metrics.evaluation import finalize_metrics
from stratafl.metrics.metrics import parse_metrics
from stratafl.metrics.objective import Objective
from stratafl.network.messages import RecordedWorkload
from stratafl.rules.registry import RuleLike, rules_for
from stratafl.simulation.checked import checked_evaluation
from stratafl.simulation.evaluate import evaluate_model, is_evaluation_round
from stratafl.simulation.groups import Evaluation, Execution, Method, Problem
from stratafl.simulation.prepare import held, set_up
from stratafl.simulation.simulation import Simulation
from stratafl.simulation.workload import measured

CPU = torch.device("cpu")
"""Where a deployed site computes."""


# -- the whole -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Study:
    """A run ready to iterate, its data, and what its clients hold of them."""

    simulation: Simulation
    data: FederatedData
    counts: LabelCounts


def experiment(config: Config) -> Simulation:
    """The run a config describes, ready to iterate."""
    return study(config).simulation


@attribute_errors()
def study(config: Config, ranks: Communicator | None = None) -> Study:
    """The run with what its clients hold; on several ranks, the part of it that is this one's."""
    seed = check_integer("run.seed", config.run.seed)
    check_integer("run.checkpoint_every", config.run.checkpoint_every, at_least=0)
    import_plugins(config.run.plugins)
    tree = Tree.of(config.tree.shape)
    method = method_of(config, tree.depth)
    execution = _execution(config, ranks)
    data = prepared(config.data, tree, seed)
    simulation = set_up(_problem(config, tree, data), method, _evaluation(config), execution)
    return Study(simulation, data, LabelCounts.of(data))


def _problem(config: Config, tree: Tree, data: FederatedData) -> Problem:
    return Problem(
        model=network(config.model, data.shape, data.outputs),
        data=data,
        partition=None,
        tree=tree,
        weights=config.tree.weights,
        loss=config.objective.loss,
        initial=config.run.initial,
        keep_at_home=config.model.get("keep_at_home"),
    )


def method_of(config: Config, depth: int) -> Method:
    """How a config's run is trained."""
    schedule = schedule_of(config, depth)
    chain = config.leaf.chain(config.run.rounds)
    return Method(
        rules=rules_of(config),
        periods=schedule,
        leaf=chain,
        batch=config.leaf.batch or None,
        sampling=config.leaf.sampling,
        participation=config.schedule.participation,
        seed=config.run.seed,
        update_limit=config.run.update_limit,
        update_factor=config.run.update_factor,
        network=config.network,
        wait=config.schedule.wait,
    )


def _evaluation(config: Config) -> Evaluation:
    run = config.run
    return Evaluation(
        rounds=run.rounds,
        evaluate_every=run.evaluate_every,
        evaluate_levels=run.evaluate_levels,
        stop_at=run.stop_at,
        diagnose=run.diagnose,
        metrics=config.objective.metrics,
        stop_when=run.stop_when,
    )


def _execution(config: Config, ranks: Communicator | None) -> Execution:
    run = config.run
    return Execution(device.check_device(run.device, "run.device"), run.engine, run.precision, ranks)


# -- one leaf --------------------------------------------------------------------------------------


@attribute_errors()
def part_of(config: Config, leaf: int) -> tuple[Pair, int]:
    """A leaf's part of the config's data set, by its number, and how many numbers its model
    gives."""
    seed = check_integer("run.seed", config.run.seed)
    data = prepared(config.data, Tree.of(config.tree.shape), seed)
    assert data.clients is not None
    return data.samples.batch(data.clients[leaf], BatchKey(seed, leaf, 0)), data.outputs


@attribute_errors()
def leaf_trainer(config: Config, leaf: int, data: Pair, outputs: int) -> ClientTrainer:
    """What trains one leaf of the tree, by its number, on these samples alone; it draws as it would
    in a simulation.

    The model's values come with the work, but for those that stay.
    """
    import_plugins(config.run.plugins)
    start = initial_model(config, shape_of(data[0]), outputs)
    supply = InMemorySamples(*data).to(CPU, start.flat.dtype)
    subject = _subject(config, start)
    check_forward("data", subject, supply.inputs_N, supply.targets_N, config.objective.loss is None)
    batch, sampling = batches.check_batching(config.leaf.batch or None, config.leaf.sampling)
    samples, chain = len(supply.targets_N), config.leaf.chain(config.run.rounds)
    training = ClientTraining(
        flat=start.flat,
        loss=subject.loss,
        samples=supply,
        clients=ClientIndex(torch.arange(samples), np.array([0] * (leaf + 1) + [samples])),
        client_update=chain,
        batch_size=batch,
        sampling=sampling,
        seed=check_integer("run.seed", config.run.seed),
        augment=augment_of(config.data),
    )
    home = _home(config, start.flat)
    return ClientTrainer(LoopEngine(training), home, home.split_initial(start.x_P, start.b_B)[2])


def _home(config: Config, flat: FlatModule) -> LocalParameters:
    """What stays with the leaves, where each computes for itself."""
    names = match_local_parameters(flat, config.model.get("keep_at_home"))
    return LocalParameters(flat, names, config.leaf.chain(config.run.rounds), CPU)


def _subject(config: Config, start: InitialModel) -> ModelUnderTest:
    """The model a run begins with, and the config's loss."""
    return ModelUnderTest(start.flat, start.x_P, start.b_B, parse_loss(config.objective.loss))


# -- the model, and the root -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InitialModel:
    """What a run begins with: a module, and its values as a row."""

    flat: FlatModule
    x_P: Tensor
    b_B: Tensor


def initial_model(config: Config, shape: Shape, outputs: int) -> InitialModel:
    """Drawn from the run's seed or read from a file, so the same wherever it is asked for."""
    flat = flat_module.build_flat_module(
        network(config.model, shape, outputs), check_integer("run.seed", config.run.seed)
    )
    return InitialModel(flat, *flat_module.initial_rows(flat, config.run.initial))


@dataclass(frozen=True, eq=False)
class RootSetup:
    """What the root of a deployed tree needs to know of a run, besides its messages."""

    tree: Tree
    start: InitialModel
    test: Pair | None
    evaluation: Evaluation
    objective: Objective
    counts: LabelCounts
    home: LocalParameters
    workload: RecordedWorkload

    @property
    def shared(self) -> tuple[Tensor, Tensor]:
        """What the run begins with of what is sent: a row of parameters and one of buffers."""
        return self.home.split_initial(self.start.x_P, self.start.b_B)[:2]

    def whole(self, x_S: Tensor, b_S: Tensor) -> tuple[Tensor, Tensor]:
        """A model with what stays with the leaves as it was at first, which is all that a root
        has of it."""
        return self.home.with_initial_local(x_S, b_S, self.home.split_initial(self.start.x_P, self.start.b_B)[2])

    @attribute_errors()
    def metrics(self, round: int, x_S: Tensor, b_S: Tensor) -> dict[str, float]:
        """A model on the test data; empty where the round, counted from 1, is not one to
        evaluate."""
        if self.test is None or not is_evaluation_round(round, self.evaluation.evaluate_every, self.evaluation.rounds):
            return {}
        x_P, b_B = self.whole(x_S, b_S)
        return finalize_metrics(
            [evaluate_model(self.start.flat, self.objective, self.test, x_P, b_B)], self.objective.metrics
        )


@attribute_errors()
def root_of(config: Config) -> RootSetup:
    """The root's, as a simulation of the whole would have it."""
    import_plugins(config.run.plugins)
    tree = Tree.of(config.tree.shape)
    data = prepared(config.data, tree, check_integer("run.seed", config.run.seed))
    counts = LabelCounts.of(data)
    start = initial_model(config, data.shape, data.outputs)
    if config.tree.weights is not None:
        tree = tree.weighted(config.tree.weights, data.client_sizes)
    test = None if data.test is None else held(data.test.samples, CPU, start.flat.dtype)
    evaluation = checked_evaluation(_evaluation(config), tree.depth)
    subject = _subject(config, start)
    if test is not None:
        check_forward("test", subject, *test, config.objective.loss is None)
    chosen = parse_metrics(evaluation.metrics)
    objective = build_objective(subject, chosen, test, evaluation.stop_at, evaluation.stop_when)
    home = _home(config, start.flat)
    workload = _workload(config, tree, data, subject, home)
    return RootSetup(tree, start, test, evaluation, objective, counts, home, workload)


def _workload(
    config: Config, tree: Tree, data: FederatedData, subject: ModelUnderTest, home: LocalParameters
) -> RecordedWorkload:
    """The workload of leaves that have their parts of the config's data."""
    return measured(
        subject,
        data.samples.to(CPU, subject.flat.dtype).head(1),
        home.split_initial(subject.x_P, subject.b_B)[:2],
        rules_for(rules_of(config), tree.depth),
        config.leaf.chain(config.run.rounds),
        schedule_of(config, tree.depth),
        data.client_sizes,
        config.leaf.batch or None,
    )


# -- parts of a config -----------------------------------------------------------------------------


def import_plugins(paths: Sequence[str]) -> None:
    """Run the user's own files, which register rules."""
    for path in paths:
        if not isinstance(path, str):
            raise InvalidInput("run.plugins", path, "must be paths of Python files")
        load_module("run.plugins", Path(path))


def schedule_of(config: Config, depth: int) -> Schedule:
    """When levels meet, by either of the ways to say it."""
    given = config.schedule
    if (given.periods is None) == (given.steps_per_sync is None):
        raise InvalidInput("schedule.periods", given.periods, "give either periods or steps_per_sync, a list per level")
    for name in ("periods", "steps_per_sync"):
        value = getattr(given, name)
        if value is not None and not isinstance(value, list | tuple):
            raise InvalidInput(f"schedule.{name}", value, "must be a list, one number per edge level")
    if given.periods is not None:
        return Schedule.of(given.periods, depth, config.leaf.epochs)
    if config.leaf.epochs is not None:
        raise InvalidInput("leaf.epochs", config.leaf.epochs, "goes with schedule.periods, not with steps_per_sync")
    return Schedule.of_steps(given.steps_per_sync, depth)


def rules_of(config: Config) -> RuleLike | Sequence[RuleLike]:
    """One rule for all edge levels, or one for each."""
    if "rules" not in config.method:
        return config.method
    if len(config.method) > 1:
        raise InvalidInput("method", dict(config.method), "give either a name or rules, not both")
    rules = config.method["rules"]
    if not isinstance(rules, list | tuple):
        raise InvalidInput("method.rules", rules, "must be a list, one rule per edge level")
    return rules
