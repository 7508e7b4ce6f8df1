"""Set-up of a run from its groups of arguments, in steps, each of which returns a value.

checked     every argument, checked by itself (see `checked`)
placed      model and data on their device, tried together on a few samples
sharded     the part of the tree that is this rank's: its federation, and what its leaves train
set_up      with the engine that trains them, the run
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import preserve_rng
from stratafl.base.topology import Tree
from stratafl.base.user_code import attribute_errors
from stratafl.core import client_update, flat_module, schedule
from stratafl.core.client_training import Augment, ClientTraining
from stratafl.core.client_update import dry_run_client_update
from stratafl.core.flat_module import FROZEN, FlatModule
from stratafl.core.losses import parse_loss
from stratafl.core.participation import expected_share
from stratafl.data.batches import steps_per_epoch
from stratafl.data.dataset import BatchKey, LazySamples, SampleSource
from stratafl.data.inputs import NamedInputs, Pair
from stratafl.distributed.assignment import assign_clients, client_cost
from stratafl.distributed.subtree import Branch
from stratafl.engine import validation
from stratafl.engine.batches import augment_for_named_inputs
from stratafl.engine.factory import drift_kernel, fallback_notes, make_default_engine, make_engine
from stratafl.engine.loop import LoopEngine
from stratafl.engine.module_profile import PROBE_SAMPLES, reproducibility_notes, sanitise_samples
from stratafl.engine.stacked import StackedEngine
from stratafl.engine.validation import ModelUnderTest
from stratafl.federation.federation import Federation
from stratafl.federation.local_parameters import ClientTrainer, LocalParameters, match_local_parameters
from stratafl.federation.sync import edge_levels
from stratafl.metrics.drift import Drift
from stratafl.metrics.metrics import parse_metrics
from stratafl.metrics.objective import Objective
from stratafl.network.messages import RecordedWorkload
from stratafl.network.replay import Workload
from stratafl.network.virtual_clock import VirtualClock
from stratafl.rules.checks import try_rules
from stratafl.rules.registry import method_label
from stratafl.simulation.checked import Checked, checked
from stratafl.simulation.evaluate import ClientTestData, Evaluator
from stratafl.simulation.groups import Evaluation, Execution, Method, Problem
from stratafl.simulation.simulation import Simulation
from stratafl.simulation.waiting import run_clock
from stratafl.simulation.workload import measured


@attribute_errors()
def set_up(problem: Problem, method: Method, evaluation: Evaluation, execution: Execution) -> Simulation:
    """Set up a run, ready to iterate; generators are as before, whatever is tried on the way."""
    with preserve_rng():
        given = checked(problem, method, evaluation, execution)
    flat = flat_module.build_flat_module(problem.model, given.seed)
    with preserve_rng(given.device):
        return _run(given, flat, problem, method)


def _run(given: Checked, flat: FlatModule, problem: Problem, method: Method) -> Simulation:
    """Build a run from checked arguments and a module."""
    here = placed(given, flat, problem)
    shard = sharded(given, here, method, problem.keep_at_home)
    engine = _engine(given, shard)
    notes = _notes(given, here, engine)
    if given.ranks.is_first:
        print("".join(f"stratafl: {note}\n" for note in notes), end="", file=sys.stderr)
    simulation = Simulation(
        federation=shard.federation,
        trainer=ClientTrainer(engine, shard.home),
        schedule=given.schedule,
        evaluator=Evaluator(
            flat=here.subject.flat, objective=here.objective, test=here.test, client_test=here.own_test
        ),
        evaluation=given.evaluation,
        drift=shard.drift,
        ranks=given.ranks,
        notes=notes,
    )
    simulation.method, simulation.clock = method_label(method.rules), shard.clock
    simulation.workload = shard.workload
    simulation.step_ratio = shard.workload.steps_N.mean() / given.schedule.periods[-1]
    return simulation


# -- placed ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placed:
    """Model and data where the run is computed."""

    subject: ModelUnderTest
    train: SampleSource
    test: Pair | None
    own_test: ClientTestData | None
    objective: Objective
    few: Pair
    """Some samples of one client."""
    augment: Augment | None


def placed(given: Checked, flat: FlatModule, problem: Problem) -> Placed:
    """Move model and data to their device, and try the model, its loss and transform on them."""
    client_update.check_strengths(flat.dtype, given.leaf, given.rules)
    dry_run_client_update(given.leaf, flat.parameters, flat.dtype, given.device)
    row = flat_module.initial_rows(flat, problem.initial)
    train = given.data.samples.to(given.device, flat.dtype)
    test = None if given.data.test is None else held(given.data.test.samples, given.device, flat.dtype)
    flat.module.to(given.device)
    x_P, b_B = (each.to(given.device) for each in row)
    own = _own_pairs(given, test, flat.dtype)
    subject = ModelUnderTest(flat, x_P, b_B, parse_loss(problem.loss))
    unnamed = problem.loss is None
    accepted = validation.check_forward("data", subject, train.head(PROBE_SAMPLES), train.targets_N, unnamed)
    if isinstance(train, LazySamples):
        train = replace(train, accepted=accepted)
    for name, pair in ("test", test), ("test_partition", None if own is None else own.pair):
        if pair is not None:
            validation.check_forward(name, subject, *pair, unnamed)
    chosen, stops = parse_metrics(given.evaluation.metrics), (given.evaluation.stop_at, given.evaluation.stop_when)
    objective = validation.build_objective(subject, chosen, test, *stops)
    inputs, targets = train.batch(given.clients.largest()[:PROBE_SAMPLES].to(given.device), BatchKey(given.seed, 0, 0))
    few = sanitise_samples(inputs), sanitise_samples(targets)
    augment = given.data.augment
    if callable(augment) and isinstance(inputs, NamedInputs):
        augment = augment_for_named_inputs(augment)
    validation.check_backward(subject, *few, augment, given.seed)
    sizes = dict(zip(given.tree.names[-1], given.samples, strict=True))
    validation.check_single_sample_batches(subject, *few, given.batch, given.sampling, sizes)
    return Placed(subject, train, test, own, objective, few, augment)


def _own_pairs(given: Checked, test: Pair | None, dtype: torch.dtype) -> ClientTestData | None:
    """Each client's own test data on the run's device; not copied again if it is `test`."""
    whole, own = given.data.test, given.data.client_test
    if own is None or own.clients is None:
        return None
    is_same = whole is not None and own.samples is whole.samples
    pair = test if is_same and test is not None else held(own.samples, given.device, dtype)
    return ClientTestData(pair, own.clients.to(given.device))


def held(samples: SampleSource, device: torch.device, dtype: torch.dtype) -> Pair:
    """Inputs and targets of all samples on a device, real numbers in the model's own type."""
    samples = samples.to(device, dtype)
    return samples.head(len(samples.targets_N)), samples.targets_N


# -- sharded ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sharded:
    """Part of the tree on this rank."""

    federation: Federation
    home: LocalParameters
    drift: Drift | None
    training: ClientTraining
    workload: RecordedWorkload
    clock: VirtualClock | None


def sharded(given: Checked, here: Placed, method: Method, keep_at_home: object = None) -> Sharded:
    """Build this rank's part of the tree: its federation, what measures drift, and the training of
    its clients."""
    tree, first = _part(given)
    flat, x_P, b_B, loss = here.subject
    home = LocalParameters(flat, match_local_parameters(flat, keep_at_home), given.leaf, given.device)
    home.check(given.rules)
    x_P, b_B, kept = home.split_initial(x_P, b_B)
    try_rules(given.rules, x_P)
    sharing = (x_P, b_B), given.rules, given.leaf, given.schedule, given.samples, given.batch
    workload = measured(here.subject, here.few[0], *sharing)
    clock = _clock(given, workload)
    participation = given.participation if clock is None else clock.participation()
    edges = edge_levels(
        given.rules,
        seed=given.seed,
        participation=participation,
        update_limit=method.update_limit,
        update_factor=method.update_factor,
        late=None if clock is None else clock.late_update_policies(),
    )
    federation = Federation(
        tree, edges, x_P, b_B, client_update=given.leaf, local_rows=kept, drift_kernel=drift_kernel(x_P)
    )
    training = ClientTraining(
        flat=flat,
        loss=loss,
        samples=here.train,
        clients=given.clients.part(first, first + tree.leaves).to(given.device),
        client_update=given.leaf,
        batch_size=given.batch,
        sampling=given.sampling,
        seed=given.seed,
        augment=here.augment,
        first_client=first,
    )
    drift = _drift(federation, home, given.evaluation.diagnose, training)
    return Sharded(federation, home, drift, training, workload, clock)


def _clock(given: Checked, workload: RecordedWorkload) -> VirtualClock | None:
    """The virtual time of the run's network, the same on every rank."""
    if given.network is None:
        return None
    if workload.messages is None:
        told = "cannot time this run: how large its messages are cannot be found with one child per parent"
        raise InvalidInput("network", given.network.name, told)
    story = Workload(
        tree=given.tree,
        schedule=given.schedule,
        participation=given.participation,
        seed=given.seed,
        sizes=workload.messages,
        steps_N=workload.steps_N,
        samples_N=workload.samples_N,
        rounds=given.evaluation.rounds,
        wait=given.wait,
    )
    return run_clock(given.network, story, workload.flops_per_sample)


def _part(given: Checked) -> tuple[Tree, int]:
    """The nodes that are on this rank, and the number of their first leaf."""
    tree, ranks = given.tree, given.ranks
    if ranks.count == 1:
        return tree, 0
    work_N = client_cost(given.samples, given.batch, given.sampling) * expected_share(given.participation, tree)
    if given.leaf.epochs is not None:
        work_N = work_N * [steps_per_epoch(size, given.batch) for size in given.samples]
    cuts = assign_clients(tree, work_N, given.schedule.meetings, ranks.count)
    return Branch.of_rank(tree, cuts, ranks), int(cuts[ranks.rank])


def _drift(federation: Federation, home: LocalParameters, diagnose: str, training: ClientTraining) -> Drift | None:
    """Measurement of drift at every synchronisation, or None; for "ideal" it compares corrections
    with ideal ones, from gradients on all of a client's data."""
    if diagnose == "none":
        return None
    if diagnose == "drift":
        return Drift(federation.tree)
    whole_data = ClientTrainer(LoopEngine(replace(training, batch_size=None, augment=None)), home)

    def gradients(level: int, x_MP: Tensor) -> Tensor:
        return whole_data.gradients(federation.gradient_request(level, x_MP))

    return Drift(federation.tree, gradients)


# -- the engine ------------------------------------------------------------------------------------


def _engine(given: Checked, shard: Sharded) -> LoopEngine | StackedEngine:
    name = given.engine
    if name == "loop":
        return make_engine(name, shard.training, precision=given.precision)
    clients, passes = float(expected_share(given.participation, given.tree).sum()), given.leaf.epochs is not None
    too_many = schedule.check_drawn(given.schedule, clients, max(given.samples), given.batch, passes)
    if name is None or (name == "auto" and given.device.type == "cpu"):
        whole = (
            shard.training if given.ranks.count == 1 else replace(shard.training, clients=given.clients, first_client=0)
        )
        return make_default_engine(shard.training, whole, 0 if too_many else clients, given.precision)
    if too_many:
        raise InvalidInput("periods", list(given.schedule.periods), too_many)
    return make_engine(name, shard.training, precision=given.precision)


def _notes(given: Checked, here: Placed, engine: LoopEngine | StackedEngine) -> list[str]:
    """Notes for the user on how this run is computed; a model that writes to frozen parameters is
    refused."""
    profile = engine.profile
    if FROZEN in profile.mutates:
        told = "writes to parameters that are not trained, which clients share: make buffers of them, which each has"
        raise InvalidInput("model", here.subject.kind, told)
    read = [*given.data.warnings, *(given.data.test.warnings if given.data.test is not None else ())]
    return fallback_notes(engine, given.engine, given.precision) + reproducibility_notes(profile) + read
