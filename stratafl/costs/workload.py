"""Workload of a stored run: its participants and messages, read from its files.

A run records its workload when it is set up. Runs of early versions do not; their rules are created
again from their config, and the size of the model follows from their records: bytes are a sum of a
number of parameters and a number of buffer values, each times a known factor. Either way the
recomputed bytes can be compared with the records of every round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.base.validation import repeated
from stratafl.core.client_update import ClientUpdate
from stratafl.core.participation import check_participation
from stratafl.core.rule import Rule
from stratafl.core.schedule import SyncSchedule
from stratafl.experiment.algorithm import client_update, rule_names, sync_schedule
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.fields import options
from stratafl.experiment.loading import import_plugins
from stratafl.experiment.sections import Client, Method, Model, Schedule
from stratafl.models.registry import build, count_parameters
from stratafl.network.messages import UNIT, MessageSizes, RecordedWorkload, message_sizes, training_flops
from stratafl.network.replay import Workload, leaf_steps, replay_rounds
from stratafl.network.specification import Network, NetworkLike, network
from stratafl.network.waiting import check_wait
from stratafl.rules.registry import rules_for
from stratafl.runs import StoredRun

OWN_NETWORK = "own"
"""Name that stands for the network of the runs themselves."""
INSPECTED_ROUNDS = 3
"""Rounds from which the sizes are computed: the first differs from the others, as no node has a
model yet."""

TOP_LEVEL = ("seed", "plugins")
"""Options outside the sections that decide a workload."""

Tables = Mapping[str, Any]
"""Tables of a stored config; a table that it does not have is empty."""


@dataclass(frozen=True, eq=False)
class RecoveredWorkload:
    """Workload of a stored run, and how well it agrees with the records."""

    workload: Workload
    parameters: int
    buffers: int
    notes: tuple[str, ...]
    flops: float | None
    """Operations of training on one sample; None if unknown."""
    own_network: Network | None = None
    """Network that the run was simulated on, or None."""

    def check(self, network: Network, name: str) -> None:
        """Reject a network on which other nodes would have been late."""
        own = self.own_network
        if self.workload.has_waiting_policy and own is not None and not network.same_parameters(own):
            reason = f"{name} waited by time on {own.name}, on which its learning depends: price it there, or run it"
            raise InvalidInput("--network", network.name, f"{reason} on this one")


def read_workload(run: StoredRun) -> RecoveredWorkload:
    """Read the workload of a stored run."""
    if not run.rounds:
        raise InvalidInput("run", run.path, "has no round yet")
    sections = {key: value for key, value in run.config.items() if isinstance(value, Mapping) or key in TOP_LEVEL}
    config = defaultdict[str, Any](dict, sections)
    tree = tree_of(run)
    schedule = _schedule(run, config, tree)
    wait = check_wait(config["schedule"].get("wait"), tree.depth)
    recorded = _recorded_workload(run, tree.depth)

    def workload_with(sizes: MessageSizes, steps_N: np.ndarray, samples_N: np.ndarray) -> Workload:
        sampling = _participation(run, config, tree.depth), _seed(run, config)
        return Workload(tree, schedule, *sampling, sizes, steps_N, samples_N, len(run.rounds), wait)

    if recorded is None:
        return _reconstructed(run, config, workload_with(MessageSizes((), 0), *_steps(run, config, schedule)))
    if recorded.messages is None:
        reason = "how large its messages are could not be found when it was set up, so what was sent is not known"
        raise InvalidInput("run", run.path, reason)
    workload = workload_with(recorded.messages, recorded.steps_N, recorded.samples_N)
    notes = [] if workload.has_waiting_policy else _traffic_differences(run, workload)
    own_network = _network_of(run) if run.clock else None
    sizes = recorded.parameters, recorded.buffers
    return RecoveredWorkload(workload, *sizes, tuple(notes), recorded.flops_per_sample, own_network)


def _recorded_workload(run: StoredRun, depth: int) -> RecordedWorkload | None:
    """Workload as recorded in run.json; None for runs of early versions."""
    try:
        clients = len(run.tree["levels"][-1]["names"])
        return RecordedWorkload.of(run.workload, depth, clients) if run.workload else None
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidInput("run", run.path, "the workload in its run.json cannot be read") from None


def _reconstructed(run: StoredRun, config: Tables, workload: Workload) -> RecoveredWorkload:
    """Reconstruct the workload of a run that did not record it. workload: without message sizes."""
    if workload.has_waiting_policy:
        raise InvalidInput(
            "run", run.path, "its parents waited by time, and its run.json does not say on which network"
        )
    rules, update = _rules(run, config, workload.tree.depth), _client_update(config, run.total)
    parameters, buffers = _model_size(run, workload, rules, update)
    workload = replace(workload, sizes=message_sizes(rules, parameters, buffers, update))
    return RecoveredWorkload(
        workload, parameters, buffers, tuple(_traffic_differences(run, workload)), flops_of(run, parameters)
    )


def shared_network(runs: Sequence[StoredRun], field: str) -> Network:
    """Network that the runs were simulated on, if it is the same for all of them."""
    networks = [_network_of(run) for run in runs if run.clock]
    is_shared = len(networks) == len(runs) and all(other.same_parameters(networks[0]) for other in networks)
    if not networks or not is_shared:
        raise InvalidInput(field, OWN_NETWORK, "is for runs in the virtual time of a network, the same for all of them")
    return networks[0]


def named_networks(names: Sequence[NetworkLike], field: str = "--network") -> list[Network | None]:
    """Networks of these names or files; None stands for the runs' own."""
    return [None if name == OWN_NETWORK else network(name, field) for name in names]


def resolved(
    chosen_networks: Sequence[Network | None], runs: Sequence[StoredRun], field: str = "--network"
) -> list[Network]:
    """Replace None by the runs' own network; two networks of one name are rejected."""
    networks = [shared_network(runs, field) if chosen is None else chosen for chosen in chosen_networks]
    name = repeated(chosen.name for chosen in networks)
    if name is not None:
        raise InvalidInput(field, name, "two networks of this name: give each once, and names of their own")
    return networks


def _network_of(run: StoredRun) -> Network:
    """Network that a run was simulated on."""
    try:
        return Network.of(run.clock["network"])
    except (InvalidInput, KeyError, TypeError, ValueError):
        raise InvalidInput("run", run.path, "the clock in its run.json cannot be read") from None


def tree_of(run: StoredRun) -> Topology:
    """Tree of a stored run, with its names."""
    levels = run.tree["levels"]
    try:
        names = tuple(tuple(map(str, level["names"])) for level in levels)
        parents = tuple(np.array(level["parents"], dtype=np.int64) for level in levels)
        weights = tuple(np.array(level["weights"], dtype=np.float64) for level in levels)
    except (KeyError, TypeError, ValueError):
        raise InvalidInput("run", run.path, "its tree.json cannot be read") from None
    return Topology(parents, names, weights)


def _seed(run: StoredRun, config: Tables) -> int:
    seed = config.get("seed", 0)
    if type(seed) is not int:
        raise InvalidInput("seed", seed, f"must be a whole number, in {run.name}")
    return seed


def _schedule(run: StoredRun, config: Tables, tree: Topology) -> SyncSchedule:
    table = config["schedule"]
    try:
        return sync_schedule(Schedule(periods=table.get("periods"), unit=table.get("unit", "steps")), tree)
    except InvalidInput as problem:
        raise InvalidInput("schedule.periods", problem.value, f"{problem.allowed}, in {run.name}") from None


def _participation(run: StoredRun, config: Tables, depth: int) -> Any:
    participation = config["schedule"].get("participation")
    plain = None | str | float | int
    if not isinstance(participation, plain) and not (
        isinstance(participation, list) and all(isinstance(entry, plain) for entry in participation)
    ):
        raise InvalidInput(
            "schedule.participation", participation, f"of {run.name} is a function of its user's, and cannot be redrawn"
        )
    return check_participation(participation, depth)


def _rules(run: StoredRun, config: Tables, depth: int) -> tuple[Rule, ...]:
    import_plugins(config.get("plugins", ()))
    try:
        return rules_for(rule_names(Method(**Method.as_table(config["method"]))), depth)  # type: ignore[arg-type]
    except (InvalidInput, TypeError) as problem:
        raise InvalidInput("run", run.path, f"its method cannot be made again: {problem}") from None


def _client_update(config: Tables, rounds: int) -> ClientUpdate | None:
    """Client settings, as far as they decide the messages; None if only the run's program has
    them."""
    try:
        client = Client(**{key: value for key, value in config["client"].items() if key in options(Client)})
        unit = config["schedule"].get("unit", "steps")
        return client_update(Experiment(client=client, schedule={"unit": unit}, rounds=max(rounds, 1)))
    except (InvalidInput, TypeError):
        return None


def _steps(run: StoredRun, config: Tables, schedule: SyncSchedule) -> tuple[np.ndarray, np.ndarray]:
    """Local steps of each client between two synchronisations, and samples per step."""
    leaves, batch = run.tree["levels"][-1], config["client"].get("batch_size", Client().batch_size)
    counts_N = np.array(leaves.get("samples") or [0] * len(leaves["names"]), dtype=np.int64)
    counts_epochs = config["schedule"].get("unit") == "epochs"
    return leaf_steps(counts_N, batch if isinstance(batch, int) else None, schedule, counts_epochs)


def _client_bytes(workload: Workload, rounds: int) -> np.ndarray:
    """Bytes sent and received by all leaves, up to the end of each of the first rounds."""
    byte_counts: list[float] = []
    for block in replay_rounds(replace(workload, rounds=rounds)):
        last = block.traffic[-1]
        sums = last.bytes_up + last.bytes_down
        byte_counts += list(np.broadcast_to(sums, (block.rounds,)) if len(sums) == 1 else sums)
    return np.cumsum(byte_counts)


def _recorded_bytes(run: StoredRun, workload: Workload, rounds: int) -> np.ndarray:
    return np.array([record["bytes_per_client"] for record in run.rounds[:rounds]]) * workload.tree.leaves


def _model_size(
    run: StoredRun, workload: Workload, rules: Sequence[Rule], update: ClientUpdate | None
) -> tuple[int, int]:
    """Number of parameters and buffer values of the model, from the bytes that the run sent."""
    rounds = min(INSPECTED_ROUNDS, len(run.rounds))
    recorded = _recorded_bytes(run, workload, rounds)
    workload = replace(workload, sizes=message_sizes(rules, UNIT, 0, update))
    with_buffers = replace(workload, sizes=message_sizes(rules, UNIT, UNIT, update))
    per_parameter = _client_bytes(workload, rounds) / UNIT
    per_buffer = _client_bytes(with_buffers, rounds) / UNIT - per_parameter
    parameters, buffers = recorded[0] / per_parameter[0], 0.0
    if not np.allclose(recorded, per_parameter * parameters, rtol=1e-9):
        # buffers travel with models, and not with corrections; so two rounds tell them apart
        both = np.stack([per_parameter, per_buffer], axis=1)
        solution, _, rank, _ = np.linalg.lstsq(both, recorded, rcond=None)
        if rank == 2 and solution.min() > -0.5:
            parameters, buffers = solution
    return max(1, round(parameters)), max(0, round(buffers))


def _traffic_differences(run: StoredRun, workload: Workload) -> list[str]:
    """Differences between recomputed and recorded bytes: a rejected or absent node received
    fewer."""
    rounds = len(run.rounds)
    recorded, recomputed = _recorded_bytes(run, workload, rounds)[-1], _client_bytes(workload, rounds)[-1]
    if abs(recorded - recomputed) <= 1e-9 * recorded:
        return []
    share = 100 * (recomputed - recorded) / recorded if recorded else 0.0
    return [f"{run.name}: recomputed bytes of its clients differ from its records by {share:+.2g} %"]


IMAGES_28, IMAGES_32, TEXT = (1, 28, 28), (3, 32, 32), (80,)
SHAPES: Mapping[str, tuple[int, ...]] = {
    "cifar10": IMAGES_32, "cifar100": IMAGES_32, "cinic10": IMAGES_32, "mnist": IMAGES_28, "fashion_mnist": IMAGES_28,
    "emnist_letters": IMAGES_28, "shakespeare": TEXT, "digits": (1, 8, 8), "synthetic": (60,),
}  # fmt: skip
"""Shape of one sample by data set: a stored run is priced without its data."""


def flops_of(run: StoredRun, trained: int) -> float | None:
    """Operations of training on one sample; None if the model cannot be created again, or would not
    have as many parameters as were trained."""
    data, classes = run.config.get("data"), run.tree["classes"]
    shape = SHAPES.get(str(data.get("source"))) if isinstance(data, Mapping) else None
    if shape is None or not isinstance(run.config.get("model"), Mapping):
        return None
    try:
        model = Model(**Model.as_table(run.config["model"]))  # type: ignore[arg-type]
        with torch.device("meta"):
            module = build(model.name, shape, len(classes), **model.params).eval()
            sample = torch.zeros((1, *shape), dtype=torch.long if shape == TEXT else torch.float32)
            flops = training_flops(lambda: module(sample))
    except (InvalidInput, RuntimeError, NotImplementedError, TypeError):
        return None
    parameters = count_parameters(module)
    # where nothing but models is sent, records do not tell parameters from buffers
    with_buffers = parameters + sum(b.numel() for b in module.buffers() if b.is_floating_point())
    return flops if trained in (parameters, with_buffers) else None
