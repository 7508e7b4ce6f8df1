"""A topology file: the run's config, and where its sites are, checked before anything is made of
it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Topology
from stratafl.base.validation import check_choice, check_integer, check_number
from stratafl.deploy.protocol.bounds import MOST_SAMPLES
from stratafl.deploy.sites import address
from stratafl.deploy.sites.site import slug
from stratafl.experiment.algorithm import sync_schedule, topology_of
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.toml import read_toml
from stratafl.experiment.user_data import is_function, is_own
from stratafl.network.waiting import check_wait

PORTS = 3
"""How many ports a site may need: its SuperLink's two, and its SuperNode's inner one."""
HIGHEST_PORT = 65535
ROOM = 1.0
"""Seconds a round of a parent takes besides the wait for its children: to send, to merge and to
save."""
LONGEST_DEADLINE = 10**9


@dataclass(frozen=True)
class DeploymentTopology:
    """A topology as it is in its file, with paths from its folder."""

    path: Path
    config_path: Path
    experiment: Experiment
    base_port: int = 9400
    hosts: dict[str, str] = field(default_factory=dict)
    """The name or address under which a site's children reach it; this machine unless given."""
    bind: dict[str, str] = field(default_factory=dict)
    """The address that a site listens on; that of its host unless given."""
    data: dict[str, str] = field(default_factory=dict)
    """Where a leaf's own data is, at its own host; its part of the config's data set unless
    given."""
    samples: dict[str, int] = field(default_factory=dict)
    """How many samples a leaf has that has data of its own; what it says first unless given."""
    deadline: tuple[float | None, ...] = ()
    min_children: tuple[int, ...] = ()
    share_errors: tuple[str, ...] = ()
    """The sites whose errors are told further up with their texts, which may quote their data."""

    @staticmethod
    def load(path: Path) -> DeploymentTopology:
        values = read_toml(path)
        known = (
            "config", "base_port", "hosts", "bind", "data", "samples", "deadline", "min_children", "share_errors",
        )  # fmt: skip
        for key in values:
            if key not in known:
                raise unknown_name("topology key", key, known)
        if not isinstance(values.get("config"), str):
            raise InvalidInput("topology.config", values.get("config"), "must be the path of the run's config file")
        config_path = path.parent / values["config"]
        experiment = Experiment.from_table(read_toml(config_path))
        tree = topology_of(experiment)
        check_deployable(experiment)
        _check_folders(tree)
        inner = [name for level in tree.names[:-1] for name in level]
        hosts = _by_site(values, "hosts", inner, "must be a host's name or address")
        bind = _by_site(values, "bind", inner, "must be an address of the site's host")
        data = _by_site(values, "data", tree.names[-1], "must be a path at the leaf's host")
        highest = HIGHEST_PORT + 1 - PORTS * sum(tree.sizes)
        return DeploymentTopology(
            path=path,
            config_path=config_path,
            experiment=experiment,
            base_port=check_integer(
                "topology.base_port", values.get("base_port", 9400), at_least=1024, at_most=highest
            ),
            hosts={site: address.host(f"topology.hosts.{site}", text) for site, text in hosts.items()},
            bind={site: address.host(f"topology.bind.{site}", text, reachable=False) for site, text in bind.items()},
            data={leaf: str((path.parent / text).absolute()) for leaf, text in data.items()},
            samples=_samples(values, data),
            deadline=_deadlines(values.get("deadline", 0), sync_schedule(experiment.schedule, tree).periods),
            min_children=tuple(
                check_integer("topology.min_children", each, at_least=1)
                for each in _per_level("min_children", values.get("min_children", 1), tree.depth)
            ),
            share_errors=_sharing(values.get("share_errors", False), tree),
        )

    def as_dict(self) -> dict[str, Any]:
        """What sites are made from, as plain data: whoever goes on with them compares it."""
        return {
            "base_port": self.base_port,
            "hosts": self.hosts,
            "bind": self.bind,
            "data": self.data,
            "samples": self.samples,
            "deadline": [each or 0 for each in self.deadline],
            "min_children": list(self.min_children),
            # only where it is asked for: folders made before it could be are no other ones
            **({"share_errors": list(self.share_errors)} if self.share_errors else {}),
            "config": self.experiment.to_table(),
        }

    def host(self, site: str) -> str:
        return self.hosts.get(site, address.LOOPBACK)

    def listens(self, site: str) -> str:
        """The address of its host that a site listens on."""
        return self.bind.get(site) or address.own(self.host(site))


def _samples(values: dict[str, Any], data: Collection[str]) -> dict[str, int]:
    """A table with the number of samples of some of the leaves that have data of their own."""
    given = values.get("samples", {})
    if not isinstance(given, dict):
        raise InvalidInput("topology.samples", given, "must be a table, [samples]")
    for leaf in given:
        if leaf not in data:
            raise unknown_name("topology.samples", leaf, data)
    return {
        leaf: check_integer(f"topology.samples.{leaf}", count, at_least=1, at_most=MOST_SAMPLES)
        for leaf, count in given.items()
    }


def _sharing(given: Any, tree: Topology) -> tuple[str, ...]:
    """The sites that are named, or all of them."""
    names = [name for level in tree.names for name in level]
    if isinstance(given, bool):
        return tuple(names) if given else ()
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise InvalidInput("topology.share_errors", given, "must be true, false or a list of sites")
    return tuple(check_choice("topology.share_errors", each, names) for each in given)


def check_deployable(experiment: Experiment) -> None:
    """Refuse what an experiment asks for and a deployed tree would not do."""
    execution, evaluation, data = experiment.execution, experiment.evaluation, experiment.data
    if str(execution.device).partition(":")[0] != "cpu":
        wanted = 'a deployed leaf trains on its processor: must be "cpu"'
        raise InvalidInput("execution.device", execution.device, wanted)
    if execution.engine not in (None, "loop"):
        wanted = 'a deployed leaf has one client to train: must be "loop"'
        raise InvalidInput("execution.engine", execution.engine, wanted)
    if execution.precision != "fp32":
        wanted = 'a deployed leaf trains in the model\'s own: must be "fp32"'
        raise InvalidInput("execution.precision", execution.precision, wanted)
    if evaluation.drift == "ideal":
        wanted = "needs the gradients of all leaves, which stay where they are"
        raise InvalidInput("evaluation.drift", evaluation.drift, wanted)
    if evaluation.levels:
        wanted = "only the root, which has the test data, evaluates a deployed model: leave it out"
        raise InvalidInput("evaluation.levels", list(evaluation.levels), wanted)
    virtual = "is a simulation's virtual time: leave it out; a deployment's own deadlines are in its topology"
    if experiment.network is not None:
        raise InvalidInput("network", experiment.network, virtual)
    wait = check_wait(experiment.schedule.wait, topology_of(experiment).depth)
    if not all(policy.waits_for_all for policy in wait):
        raise InvalidInput("schedule.wait", experiment.schedule.wait, virtual)
    if data.test_partition is not None:
        wanted = "only the root, which has the test data, evaluates a deployed model: leave it out"
        raise InvalidInput("data.test_partition", data.test_partition, wanted)
    if data.lazy:
        raise InvalidInput("data.lazy", data.lazy, "a deployed leaf holds its samples: must be false")
    if data.scale != "none":
        wanted = "a deployed leaf takes its samples as they are: scale them in your function"
        raise InvalidInput("data.scale", data.scale, wanted)
    if is_own(str(data.source)) and not is_function(str(data.source)):
        wanted = "would have to be at every site: give a function (my_data.py:load) that gets what a site needs"
        raise InvalidInput("data.source", data.source, wanted)


def _check_folders(tree: Topology) -> None:
    """Every site has a folder of its own."""
    taken: dict[str, str] = {}
    for name in (name for level in tree.names for name in level):
        other = taken.setdefault(slug(name), name)
        if other != name:
            raise InvalidInput("tree.shape", name, f"its folder would be that of {other!r}: rename one of them")


def _deadlines(given: Any, periods: Sequence[int]) -> tuple[float | None, ...]:
    """Per edge level, root first; None to wait for ever. A single one is the leaves', from which
    the others follow."""
    depth = len(periods)
    values = [
        check_number("topology.deadline", each, at_least=0, at_most=LONGEST_DEADLINE) or None
        for each in _per_level("deadline", given, depth)
    ]
    for edge in range(depth - 2, -1, -1):
        above, below, rounds = values[edge], values[edge + 1], periods[edge]
        if not isinstance(given, list):
            values[edge] = None if below is None else enough(below, rounds)
        elif above is not None and below is None:
            wanted = f"level {edge + 2} waits for ever, and level {edge + 1} {above:g} s for it: give both or neither"
            raise InvalidInput("topology.deadline", given, wanted)
        elif above is not None and below is not None and above < enough(below, rounds):
            has, takes = f"level {edge + 1} waits {above:g} s", f"level {edge + 2} up to {rounds} x {below:g} s for it"
            raise InvalidInput("topology.deadline", given, f"{has}, {takes}: {enough(below, rounds):g} s are enough")
    return tuple(values)


def enough(below: float, rounds: int) -> float:
    """A deadline for one that waits for its children, which may wait for theirs in every one of
    these rounds."""
    return rounds * (below + ROOM)


def _per_level(name: str, given: Any, depth: int) -> list[Any]:
    """One value per edge level, root first; a single one stands for all."""
    values = given if isinstance(given, list) else [given] * depth
    if len(values) != depth:
        raise InvalidInput(f"topology.{name}", given, f"needs one number per edge level, {depth} of them")
    return values


def _by_site(values: dict[str, Any], name: str, known: Sequence[str], wanted: str) -> dict[str, str]:
    """A table with one text for some of the sites."""
    given = values.get(name, {})
    if not isinstance(given, dict):
        raise InvalidInput(f"topology.{name}", given, f"must be a table, [{name}]")
    for site, text in given.items():
        if site not in known:
            raise unknown_name(f"topology.{name}", site, known)
        if not isinstance(text, str) or not text:
            raise InvalidInput(f"topology.{name}.{site}", text, wanted)
    return given
