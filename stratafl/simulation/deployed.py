"""What one site of a deployed tree needs of an experiment.

leaf_trainer     what trains one client, on its part of the data (`part_of`) or on data of its own
initial_model    the model that the run begins with, drawn from its seed
root_of          what the root begins with, and evaluates its models on
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stratafl.base.topology import Topology
from stratafl.base.user_code import attribute_errors
from stratafl.core import flat_module
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import parse_loss
from stratafl.data.dataset import BatchKey, ClientIndex, InMemorySamples
from stratafl.data.inputs import Pair, Shape, shape_of
from stratafl.engine.loop import LoopEngine
from stratafl.engine.validation import ModelUnderTest, build_objective, check_forward
from stratafl.experiment.algorithm import Algorithm, client_update, topology_of, weighted
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import LabelCounts, augment_of, import_plugins, load_data, model_factory
from stratafl.federation.local_parameters import ClientTrainer, LocalParameters, match_local_parameters
from stratafl.metrics.evaluation import finalize_metrics
from stratafl.metrics.metrics import parse_metrics
from stratafl.metrics.objective import Objective
from stratafl.network.messages import RecordedWorkload
from stratafl.simulation.build import all_samples, batch_size, run_workload
from stratafl.simulation.evaluate import evaluate_model, is_evaluation_round

CPU = torch.device("cpu")
"""Device of a deployed site."""


# -- one leaf --------------------------------------------------------------------------------------


@attribute_errors()
def part_of(experiment: Experiment, leaf: int) -> tuple[Pair, int]:
    """A client's part of the experiment's data, by its number, and the number of its model's
    outputs."""
    data = load_data(experiment.data, topology_of(experiment), experiment.seed)
    assert data.clients is not None
    return data.samples.batch(data.clients[leaf], BatchKey(experiment.seed, leaf, 0)), data.outputs


@attribute_errors()
def leaf_trainer(experiment: Experiment, leaf: int, data: Pair, outputs: int) -> ClientTrainer:
    """What trains one leaf of the tree, by its number, on these samples alone; it draws as it would
    in a simulation.

    The model's values come with the work, but for those that stay.
    """
    import_plugins(experiment.plugins)
    start = initial_model(experiment, shape_of(data[0]), outputs)
    supply = InMemorySamples(*data).to(CPU, start.flat.dtype)
    subject = _subject(experiment, start)
    check_forward("data.source", subject, supply.inputs_N, supply.targets_N, experiment.loss is None)
    samples = len(supply.targets_N)
    training = ClientTraining(
        flat=start.flat,
        loss=subject.loss,
        samples=supply,
        clients=ClientIndex(torch.arange(samples), np.array([0] * (leaf + 1) + [samples])),
        client_update=client_update(experiment),
        batch_size=batch_size(experiment),
        sampling=experiment.client.sampling,
        seed=experiment.seed,
        augment=augment_of(experiment.data),
    )
    home = _home(experiment, start.flat)
    return ClientTrainer(LoopEngine(training), home, home.split_initial(start.x_P, start.b_B)[2])


def _home(experiment: Experiment, flat: FlatModule) -> LocalParameters:
    """What stays with the leaves, where each computes for itself."""
    names = match_local_parameters(flat, experiment.model.local_parameters)
    return LocalParameters(flat, names, client_update(experiment), CPU)


def _subject(experiment: Experiment, start: InitialModel) -> ModelUnderTest:
    """The model a run begins with, and the experiment's loss."""
    return ModelUnderTest(start.flat, start.x_P, start.b_B, parse_loss(experiment.loss))


# -- the model, and the root -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InitialModel:
    """What a run begins with: a module, and its values as a row."""

    flat: FlatModule
    x_P: Tensor
    b_B: Tensor


def initial_model(experiment: Experiment, shape: Shape, outputs: int) -> InitialModel:
    """Drawn from the run's seed or read from a file, so the same wherever it is asked for."""
    module = model_factory(experiment.model, lambda: (shape, outputs))
    flat = flat_module.build_flat_module(module, experiment.seed)
    return InitialModel(flat, *flat_module.initial_rows(flat, experiment.model.initial))


@dataclass(frozen=True, eq=False)
class RootSetup:
    """What the root of a deployed tree needs to know of a run, besides its messages."""

    tree: Topology
    start: InitialModel
    test: Pair | None
    experiment: Experiment
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
        every = self.experiment.evaluation.every
        if self.test is None or not is_evaluation_round(round, every, self.experiment.rounds):
            return {}
        x_P, b_B = self.whole(x_S, b_S)
        return finalize_metrics(
            [evaluate_model(self.start.flat, self.objective, self.test, x_P, b_B)], self.objective.metrics
        )


@attribute_errors()
def root_of(experiment: Experiment) -> RootSetup:
    """The root's part, as a simulation of the whole tree would have it."""
    algorithm = Algorithm.of(experiment)
    data = load_data(experiment.data, algorithm.tree, experiment.seed)
    start = initial_model(experiment, data.shape, data.outputs)
    tree = weighted(algorithm.tree, experiment.tree.weights, data.client_sizes)
    test = None if data.test is None else all_samples(data.test.samples, CPU, start.flat.dtype)
    subject = _subject(experiment, start)
    if test is not None:
        check_forward("data.test", subject, *test, experiment.loss is None)
    metrics = parse_metrics(experiment.evaluation.metrics)
    objective = build_objective(subject, metrics, test, experiment.evaluation.stop_when)
    home = _home(experiment, start.flat)
    few = data.samples.to(CPU, start.flat.dtype).head(1), data.samples.targets_N[:1]
    shared = home.split_initial(start.x_P, start.b_B)[:2]
    workload = run_workload(experiment, algorithm, subject, few, shared, data.client_sizes)
    return RootSetup(tree, start, test, experiment, objective, LabelCounts.of(data), home, workload)
