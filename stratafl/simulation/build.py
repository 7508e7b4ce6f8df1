"""Building of a simulation from an experiment: data, model, federation, engine.

The algorithm is what needs neither data nor model (`experiment.algorithm`). Data and model are
loaded (`experiment.loading`) and tried together on a few samples. On several ranks each builds the
part of the tree that it trains.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import check_device
from stratafl.base.errors import InvalidInput
from stratafl.base.rng import preserve_rng
from stratafl.base.topology import Topology
from stratafl.base.user_code import attribute_errors
from stratafl.core import flat_module, schedule
from stratafl.core.client_training import Augment, ClientTraining
from stratafl.core.client_update import check_strengths, dry_run_client_update
from stratafl.core.flat_module import FROZEN, FlatModule
from stratafl.core.losses import parse_loss
from stratafl.core.participation import expected_share
from stratafl.data.batches import steps_per_epoch
from stratafl.data.dataset import BatchKey, ClientIndex, FederatedData, LazySamples, SampleSource
from stratafl.data.inputs import NamedInputs, Pair
from stratafl.distributed.assignment import assign_clients, client_cost
from stratafl.distributed.communicator import Communicator
from stratafl.distributed.subtree import Branch
from stratafl.engine import validation
from stratafl.engine.batches import augment_for_named_inputs
from stratafl.engine.factory import drift_kernel, fallback_notes, make_default_engine, make_engine
from stratafl.engine.loop import LoopEngine
from stratafl.engine.module_profile import PROBE_SAMPLES, reproducibility_notes, sanitise_samples
from stratafl.engine.stacked import StackedEngine
from stratafl.engine.validation import ModelUnderTest
from stratafl.experiment.algorithm import Algorithm, weighted
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import load_data, model_factory
from stratafl.experiment.sections import Client
from stratafl.federation.federation import Federation
from stratafl.federation.local_parameters import ClientTrainer, LocalParameters, match_local_parameters
from stratafl.federation.sync import edge_levels
from stratafl.metrics.drift import Drift
from stratafl.metrics.metrics import parse_metrics
from stratafl.metrics.objective import Objective
from stratafl.network.instance import instantiate_network
from stratafl.network.messages import RecordedWorkload
from stratafl.network.replay import Workload
from stratafl.network.virtual_clock import VirtualClock
from stratafl.rules.checks import try_rules
from stratafl.simulation.evaluate import ClientTestData, Evaluator
from stratafl.simulation.simulation import Simulation
from stratafl.simulation.workload import measured


@attribute_errors()
def build(experiment: Experiment, ranks: Communicator | None = None, data: FederatedData | None = None) -> Simulation:
    """Build the simulation of an experiment, ready to iterate; random generators stay as they were.

    ranks: the processes that share the run. data: the experiment's data, if they are loaded
    already.
    """
    ranks = Communicator() if ranks is None else ranks
    if not isinstance(ranks, Communicator):
        raise InvalidInput("ranks", ranks, "must be those of stratafl.distributed; see docs/ranks.md")
    device = ranks.device(check_device(experiment.execution.device, "execution.device"))
    with preserve_rng():
        algorithm = Algorithm.of(experiment)
        if data is None:
            data = load_data(experiment.data, algorithm.tree, experiment.seed)
    module = model_factory(experiment.model, lambda: (data.shape, data.outputs))
    flat = flat_module.build_flat_module(module, experiment.seed)
    with preserve_rng(device):
        return _build(experiment, algorithm, data, flat, ranks, device)


def _build(
    experiment: Experiment,
    algorithm: Algorithm,
    data: FederatedData,
    flat: FlatModule,
    ranks: Communicator,
    device: torch.device,
) -> Simulation:
    assert data.clients is not None
    sizes = data.client_sizes
    tree = weighted(algorithm.tree, experiment.tree.weights, sizes)
    trial = try_model(experiment, algorithm, data, flat, device)
    part, first = _part_of_rank(experiment, algorithm, tree, sizes, ranks)
    local = LocalParameters(
        flat, match_local_parameters(flat, experiment.model.local_parameters), algorithm.client_update, device
    )
    local.check(algorithm.rules)
    x_P, b_B, local_rows = local.split_initial(trial.subject.x_P, trial.subject.b_B)
    try_rules(algorithm.rules, x_P)
    workload = run_workload(experiment, algorithm, trial.subject, trial.samples, (x_P, b_B), sizes)
    clock = _virtual_clock(experiment, algorithm, tree, workload)
    federation = Federation(
        part,
        edge_levels(
            algorithm.rules,
            seed=experiment.seed,
            participation=algorithm.participation if clock is None else clock.participation(),
            update_limit=experiment.aggregation.update_limit,
            update_factor=experiment.aggregation.update_factor,
            late=None if clock is None else clock.late_update_policies(),
        ),
        x_P,
        b_B,
        client_update=algorithm.client_update,
        local_rows=local_rows,
        drift_kernel=drift_kernel(x_P),
    )
    training = ClientTraining(
        flat=flat,
        loss=trial.subject.loss,
        samples=trial.train,
        clients=data.clients.part(first, first + part.leaves).to(device),
        client_update=algorithm.client_update,
        batch_size=batch_size(experiment),
        sampling=experiment.client.sampling,
        seed=experiment.seed,
        augment=trial.augment,
        first_client=first,
    )
    engine = _engine(experiment, algorithm, tree, training, data.clients, ranks, device)
    notes = _notes(experiment, trial.subject, engine, data)
    if ranks.is_first:
        print("".join(f"stratafl: {note}\n" for note in notes), end="", file=sys.stderr)
    return Simulation(
        experiment=experiment,
        algorithm=algorithm,
        data=data,
        federation=federation,
        trainer=ClientTrainer(engine, local),
        evaluator=Evaluator(flat=flat, objective=trial.objective, test=trial.test, client_test=trial.client_test),
        drift=_drift(federation, local, experiment.evaluation.drift, training),
        clock=clock,
        workload=workload,
        ranks=ranks,
        notes=notes,
    )


def batch_size(experiment: Experiment) -> int | None:
    """Samples per local step; None if a client takes all of its own."""
    size = experiment.client.batch_size
    return size if isinstance(size, int) else None


# -- model and data --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelTrial:
    """Model and data on the device of the run, after a trial of both on a few samples."""

    subject: ModelUnderTest
    train: SampleSource
    test: Pair | None
    client_test: ClientTestData | None
    objective: Objective
    samples: Pair
    """Some samples of one client."""
    augment: Augment | None


def try_model(
    experiment: Experiment, algorithm: Algorithm, data: FederatedData, flat: FlatModule, device: torch.device
) -> ModelTrial:
    """Move model and data to the device, and try model, loss, metrics and augmentation on a few
    samples."""
    assert data.clients is not None
    check_strengths(flat.dtype, algorithm.client_update, algorithm.rules)
    dry_run_client_update(algorithm.client_update, flat.parameters, flat.dtype, device)
    initial = flat_module.initial_rows(flat, experiment.model.initial)
    train = data.samples.to(device, flat.dtype)
    test = None if data.test is None else all_samples(data.test.samples, device, flat.dtype)
    flat.module.to(device)
    x_P, b_B = (row.to(device) for row in initial)
    client_test = _client_test(data, test, device, flat.dtype)
    subject = ModelUnderTest(flat, x_P, b_B, parse_loss(experiment.loss))
    is_default = experiment.loss is None
    accepted = validation.check_forward("data.source", subject, train.head(PROBE_SAMPLES), train.targets_N, is_default)
    if isinstance(train, LazySamples):
        train = replace(train, accepted=accepted)
    for name, pair in ("data.test", test), ("data.test_partition", None if client_test is None else client_test.pair):
        if pair is not None:
            validation.check_forward(name, subject, *pair, is_default)
    metrics = parse_metrics(experiment.evaluation.metrics)
    objective = validation.build_objective(subject, metrics, test, experiment.evaluation.stop_when)
    numbers = data.clients.largest()[:PROBE_SAMPLES].to(device)
    inputs, targets = train.batch(numbers, BatchKey(experiment.seed, 0, 0))
    samples = sanitise_samples(inputs), sanitise_samples(targets)
    augment = data.augment
    if callable(augment) and isinstance(inputs, NamedInputs):
        augment = augment_for_named_inputs(augment)
    validation.check_backward(subject, *samples, augment, experiment.seed)
    sizes = dict(zip(algorithm.tree.names[-1], data.client_sizes, strict=True))
    validation.check_single_sample_batches(subject, *samples, batch_size(experiment), experiment.client.sampling, sizes)
    return ModelTrial(subject, train, test, client_test, objective, samples, augment)


def _client_test(
    data: FederatedData, test: Pair | None, device: torch.device, dtype: torch.dtype
) -> ClientTestData | None:
    """Test data of each client on the device; not copied again if it is `test`."""
    own = data.client_test
    if own is None or own.clients is None:
        return None
    is_same = data.test is not None and own.samples is data.test.samples
    pair = test if is_same and test is not None else all_samples(own.samples, device, dtype)
    return ClientTestData(pair, own.clients.to(device))


def all_samples(samples: SampleSource, device: torch.device, dtype: torch.dtype) -> Pair:
    """Inputs and targets of all samples on a device, real numbers in the model's type."""
    samples = samples.to(device, dtype)
    return samples.head(len(samples.targets_N)), samples.targets_N


# -- federation ------------------------------------------------------------------------------------


def run_workload(
    experiment: Experiment,
    algorithm: Algorithm,
    subject: ModelUnderTest,
    samples: Pair,
    shared: tuple[Tensor, Tensor],
    sizes: list[int],
) -> RecordedWorkload:
    """Messages and operations that decide time and traffic of the run on any network."""
    update = algorithm.client_update
    return measured(
        subject, samples[0], shared, algorithm.rules, update, algorithm.schedule, sizes, batch_size(experiment)
    )


def _virtual_clock(
    experiment: Experiment, algorithm: Algorithm, tree: Topology, workload: RecordedWorkload
) -> VirtualClock | None:
    """Virtual time of the run's network, the same on every rank; it decides which nodes are in
    time."""
    network = algorithm.network
    if network is None:
        return None
    if workload.messages is None:
        allowed = "cannot time this run: how large its messages are cannot be found with one child per parent"
        raise InvalidInput("network", network.name, allowed)
    if network.needs_flops and workload.flops_per_sample is None:
        allowed = "must be given, or leaf.step_s: the operations of this model cannot be counted"
        raise InvalidInput("network.leaf.flops_per_sample", None, allowed)
    story = Workload(
        tree=tree,
        schedule=algorithm.schedule,
        participation=algorithm.participation,
        seed=experiment.seed,
        sizes=workload.messages,
        steps_N=workload.steps_N,
        samples_N=workload.samples_N,
        rounds=experiment.rounds,
        wait=algorithm.wait,
    )
    instance = instantiate_network(network, tree, experiment.seed, workload.samples_N, workload.flops_per_sample)
    return VirtualClock(story, instance)


def _part_of_rank(
    experiment: Experiment, algorithm: Algorithm, tree: Topology, sizes: list[int], ranks: Communicator
) -> tuple[Topology, int]:
    """The nodes of this rank, and the number of their first client."""
    if ranks.count == 1:
        return tree, 0
    batch = batch_size(experiment)
    work_N = client_cost(sizes, batch, experiment.client.sampling) * expected_share(algorithm.participation, tree)
    if algorithm.client_update.epochs is not None:
        work_N = work_N * [steps_per_epoch(size, batch) for size in sizes]
    cuts = assign_clients(tree, work_N, algorithm.schedule.meetings, ranks.count)
    return Branch.of_rank(tree, cuts, ranks), int(cuts[ranks.rank])


def _drift(federation: Federation, local: LocalParameters, drift: str, training: ClientTraining) -> Drift | None:
    """Measurement of drift at every synchronisation, or None; for "ideal" it compares corrections
    with ideal ones, from gradients on all of a client's data."""
    if drift == "none":
        return None
    if drift == "drift":
        return Drift(federation.tree)
    full_batches = ClientTrainer(LoopEngine(replace(training, batch_size=None, augment=None)), local)

    def gradients(level: int, x_MP: Tensor) -> Tensor:
        return full_batches.gradients(federation.gradient_request(level, x_MP))

    return Drift(federation.tree, gradients)


# -- engine ----------------------------------------------------------------------------------------


def _engine(
    experiment: Experiment,
    algorithm: Algorithm,
    tree: Topology,
    training: ClientTraining,
    clients: ClientIndex,
    ranks: Communicator,
    device: torch.device,
) -> LoopEngine | StackedEngine:
    precision, name = experiment.execution.precision, experiment.execution.engine
    if name is None and device.type != "cpu":
        name = "stacked"
    if name == "loop":
        return make_engine(name, training, precision=precision)
    present = float(expected_share(algorithm.participation, tree).sum())
    counts_epochs = algorithm.client_update.epochs is not None
    largest = int(clients.sizes.max())
    too_many = schedule.check_drawn(algorithm.schedule, present, largest, training.batch_size, counts_epochs)
    if name is None or (name == "auto" and device.type == "cpu"):
        everything = training if ranks.count == 1 else replace(training, clients=clients, first_client=0)
        return make_default_engine(training, everything, 0 if too_many else present, precision)
    if too_many:
        raise InvalidInput("schedule.periods", list(algorithm.schedule.periods), too_many)
    return make_engine(name, training, precision=precision)


def _notes(
    experiment: Experiment, subject: ModelUnderTest, engine: LoopEngine | StackedEngine, data: FederatedData
) -> list[str]:
    """Notes for the user on how this run is computed; a model that writes to frozen parameters is
    rejected."""
    profile = engine.profile
    if FROZEN in profile.mutates:
        allowed = "writes to parameters that are not trained, which clients share: make buffers of them, which each has"
        raise InvalidInput("model", subject.kind, allowed)
    execution = experiment.execution
    warnings = [*data.warnings, *(data.test.warnings if data.test is not None else ())]
    warnings += _large_batch_notes(experiment.client, np.array(data.client_sizes))
    return fallback_notes(engine, execution.engine, execution.precision) + reproducibility_notes(profile) + warnings


def _large_batch_notes(client: Client, sizes: np.ndarray) -> list[str]:
    """Note on clients that have fewer samples than the batch that was asked for."""
    size, default = client.batch_size, Client.option("batch_size").default()
    if not isinstance(size, int) or size == default or not (sizes < size).any():
        return []
    held = sizes[sizes < size]
    numbers = f"{held.min()}" if held.min() == held.max() else f"{held.min()} to {held.max()}"
    have = f"{len(held)} of {len(sizes)} clients have fewer samples ({numbers})"
    return [f"client.batch_size = {size}: {have}, and use all of them in every step"]
