"""Who takes part in a stored run and what is sent, from its files alone.

A run notes its workload when it is set up. Runs of early versions do not; their rules are made
again from their config, and how large the model is follows from their records: bytes are a sum of
so many times the parameters and so many times the buffers, and how many times is known. Either way
the recomputed bytes can be held against the records of every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.base.validation import repeated
from stratafl.config.schema import Config, LeafConfig
from stratafl.config.setup import import_plugins, rules_of
from stratafl.core.client_update import Leaf
from stratafl.core.participation import check_participation
from stratafl.core.rule import Rule
from stratafl.core.schedule import Schedule
from stratafl.cost.legacy import flops_of
from stratafl.network.messages import UNIT, MessageSizes, RecordedWorkload, message_sizes
from stratafl.network.replay import Workload, leaf_steps, replay_rounds
from stratafl.network.specification import Network, NetworkLike, network
from stratafl.network.waiting import check_wait
from stratafl.rules.registry import rules_for
from stratafl.runs import StoredRun

OWN_NETWORK = "own"
"""What stands for the network of the runs themselves."""
LOOKED_AT = 3
"""Rounds from which the sizes follow: the first differs from the others, as nobody has a model
yet."""


@dataclass(frozen=True, eq=False)
class RecoveredWorkload:
    """A run's story, and how well it agrees with its records."""

    story: Workload
    parameters: int
    buffers: int
    notes: tuple[str, ...]
    flops: float | None
    """Operations of training on one sample; None where that is not known."""
    own: Network | None = None
    """The network in whose virtual time the run went on."""

    def check(self, network: Network, name: str) -> None:
        """Refuse a network on which other nodes would have been late."""
        if self.story.waits_by_time and self.own is not None and not network.is_like(self.own):
            told = f"{name} waited by time on {self.own.name}, on which its learning depends: price it there, or run it"
            raise InvalidInput("--network", network.name, f"{told} on this one")


def read_workload(run: StoredRun) -> RecoveredWorkload:
    """The story of a stored run."""
    if not run.rounds:
        raise InvalidInput("run", run.path, "has no round yet")
    config = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    tree = tree_of(run)
    schedule = _schedule(run, config, tree.depth)
    wait = check_wait(_table(config, "schedule").get("wait"), tree.depth)
    noted = _noted(run, config, schedule)

    def story(sizes: MessageSizes, steps_N: np.ndarray, samples_N: np.ndarray) -> Workload:
        drawn = _participation(run, config, tree.depth), _seed(run, config)
        return Workload(tree, schedule, *drawn, sizes, steps_N, samples_N, len(run.rounds), wait)

    if noted is None:
        return _reconstructed(run, config, story(MessageSizes((), 0), *_steps(run, config, schedule)))
    if noted.messages is None:
        told = "how large its messages are could not be found when it was set up, so what was sent is not known"
        raise InvalidInput("run", run.path, told)
    made = story(noted.messages, noted.steps_N, noted.samples_N)
    notes = [] if made.waits_by_time else _disagreement(run, made)
    own = _own(run) if run.clock else None
    return RecoveredWorkload(made, noted.parameters, noted.buffers, tuple(notes), noted.flops_per_sample, own)


def _noted(run: StoredRun, config: Mapping[str, Any], schedule: Schedule) -> RecordedWorkload | None:
    """The workload that a run notes; None of a run of an early version, but where it went on in
    virtual time and noted most of it with that."""
    clients = len(run.tree["levels"][-1]["names"])
    try:
        if run.workload:
            return RecordedWorkload.of(run.workload, len(schedule.periods), clients)
        if not run.clock:
            return None
        steps = dict(zip(("steps_per_sync", "samples_per_step"), _steps(run, config, schedule), strict=True))
        return RecordedWorkload.of({**run.clock, **steps}, len(schedule.periods), clients)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidInput("run", run.path, "the workload in its run.json cannot be read") from None


def _reconstructed(run: StoredRun, config: Mapping[str, Any], story: Workload) -> RecoveredWorkload:
    """The story of a run that does not note its workload. story: without the sizes of messages."""
    if story.waits_by_time:
        raise InvalidInput(
            "run", run.path, "its parents waited by time, and its run.json does not say on which network"
        )
    rules, leaf = _rules(run, config, story.tree.depth), _leaf(config, run.total)
    parameters, buffers = _model_size(run, story, rules, leaf)
    story = replace(story, sizes=message_sizes(rules, parameters, buffers, leaf))
    return RecoveredWorkload(story, parameters, buffers, tuple(_disagreement(run, story)), flops_of(run, parameters))


def shared_network(runs: Sequence[StoredRun], field: str) -> Network:
    """The network in whose virtual time runs went on, if it is one for all of them."""
    known = [_own(run) for run in runs if run.clock]
    if not known or len(known) < len(runs) or not all(each.is_like(known[0]) for each in known):
        raise InvalidInput(field, OWN_NETWORK, "is for runs in the virtual time of a network, the same for all of them")
    return known[0]


def named_networks(given: Sequence[NetworkLike], field: str = "--network") -> list[Network | None]:
    """Of these names, or files; None where the runs' own is meant."""
    return [None if each == OWN_NETWORK else network(each, field) for each in given]


def resolved(named: Sequence[Network | None], runs: Sequence[StoredRun], field: str = "--network") -> list[Network]:
    """The same, now that the runs are known; two of one name could not be told apart."""
    found = [shared_network(runs, field) if each is None else each for each in named]
    name = repeated(each.name for each in found)
    if name is not None:
        raise InvalidInput(field, name, "two networks of this name: give each once, and names of their own")
    return found


def _own(run: StoredRun) -> Network:
    """The network of a run in virtual time."""
    try:
        return Network.of(run.clock["network"])
    except (InvalidInput, KeyError, TypeError, ValueError):
        raise InvalidInput("run", run.path, "the clock in its run.json cannot be read") from None


def tree_of(run: StoredRun) -> Tree:
    """The tree as the run's folder has it, names and all."""
    levels = run.tree["levels"]
    try:
        names = tuple(tuple(map(str, level["names"])) for level in levels)
        parents = tuple(np.array(level["parents"], dtype=np.int64) for level in levels)
        weights = tuple(np.array(level["weights"], dtype=np.float64) for level in levels)
    except (KeyError, TypeError, ValueError):
        raise InvalidInput("run", run.path, "its tree.json cannot be read") from None
    return Tree(parents, names, weights)


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _seed(run: StoredRun, config: Mapping[str, Any]) -> int:
    seed = _table(config, "run").get("seed", 0)
    if type(seed) is not int:
        raise InvalidInput("run.seed", seed, f"must be a whole number, in {run.name}")
    return seed


def _schedule(run: StoredRun, config: Mapping[str, Any], depth: int) -> Schedule:
    given, epochs = _table(config, "schedule"), _table(config, "leaf").get("epochs")
    if given.get("periods") is not None:
        periods = list(given["periods"])
        # a run from Python notes the whole schedule, with the passes as its last entry
        return Schedule.of(periods, depth, None if len(periods) == depth else epochs)
    if given.get("steps_per_sync") is None:
        raise InvalidInput("schedule.periods", None, f"are not in the config of {run.name}")
    return Schedule.of_steps(given["steps_per_sync"], depth)


def _participation(run: StoredRun, config: Mapping[str, Any], depth: int) -> Any:
    given = _table(config, "schedule").get("participation")
    plain = None | str | float | int
    if not isinstance(given, plain) and not (isinstance(given, list) and all(isinstance(e, plain) for e in given)):
        raise InvalidInput("participation", given, f"of {run.name} is a function of its user's, and cannot be redrawn")
    return check_participation(given, depth)


def _rules(run: StoredRun, config: Mapping[str, Any], depth: int) -> tuple[Rule, ...]:
    import_plugins(_table(config, "run").get("plugins") or ())
    try:
        return rules_for(rules_of(Config(method=_table(config, "method"))), depth)
    except InvalidInput as problem:
        raise InvalidInput("run", run.path, f"its method cannot be made again: {problem}") from None


def _leaf(config: Mapping[str, Any], rounds: int) -> Leaf | None:
    """The clients' chain, as far as it decides what messages hold; None where only the run's
    program knows it."""
    given = _table(config, "leaf")
    known = {each.name for each in fields(LeafConfig)}
    try:
        return LeafConfig(**{key: value for key, value in given.items() if key in known}).chain(max(rounds, 1))
    except (InvalidInput, TypeError):
        return None


def _steps(run: StoredRun, config: Mapping[str, Any], schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Each leaf's steps between two meetings, and the samples in one of them."""
    given, leaves = _table(config, "leaf"), run.tree["levels"][-1]
    held_N = np.array(leaves.get("samples") or [0] * len(leaves["names"]), dtype=np.int64)
    return leaf_steps(held_N, given.get("batch") or None, schedule, given.get("epochs") is not None)


def _client_bytes(story: Workload, rounds: int) -> np.ndarray:
    """Bytes sent and received by all leaves, up to the end of each of the first rounds."""
    found: list[float] = []
    for chunk in replay_rounds(replace(story, rounds=rounds)):
        last = chunk.sent[-1]
        each = last.bytes_up + last.bytes_down
        found += list(np.broadcast_to(each, (chunk.rounds,)) if len(each) == 1 else each)
    return np.cumsum(found)


def _recorded(run: StoredRun, story: Workload, rounds: int) -> np.ndarray:
    return np.array([record["bytes_per_client"] for record in run.rounds[:rounds]]) * story.tree.leaves


def _model_size(run: StoredRun, story: Workload, rules: Sequence[Rule], leaf: Leaf | None) -> tuple[int, int]:
    """Parameters and buffer values of the run's model, from what it sent."""
    rounds = min(LOOKED_AT, len(run.rounds))
    told = _recorded(run, story, rounds)
    story = replace(story, sizes=message_sizes(rules, UNIT, 0, leaf))
    with_buffers = replace(story, sizes=message_sizes(rules, UNIT, UNIT, leaf))
    per_parameter = _client_bytes(story, rounds) / UNIT
    per_buffer = _client_bytes(with_buffers, rounds) / UNIT - per_parameter
    parameters, buffers = told[0] / per_parameter[0], 0.0
    if not np.allclose(told, per_parameter * parameters, rtol=1e-9):
        # buffers travel with models, and not with corrections; so two rounds tell them apart
        both = np.stack([per_parameter, per_buffer], axis=1)
        solved, _, rank, _ = np.linalg.lstsq(both, told, rcond=None)
        if rank == 2 and solved.min() > -0.5:
            parameters, buffers = solved
    return max(1, round(parameters)), max(0, round(buffers))


def _disagreement(run: StoredRun, story: Workload) -> list[str]:
    """What the records say otherwise: a node that was refused or absent was told less."""
    rounds = len(run.rounds)
    told, made = _recorded(run, story, rounds)[-1], _client_bytes(story, rounds)[-1]
    if abs(told - made) <= 1e-9 * told:
        return []
    share = 100 * (made - told) / told if told else 0.0
    return [f"{run.name}: recomputed bytes of its clients differ from its records by {share:+.2g} %"]
