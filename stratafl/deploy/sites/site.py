"""A site's folder: everything one node needs, and nothing of another's secrets.

site.json             what the node is and whom it talks to
config.toml           the run
code/                 the user's own files that the run needs
ca.pem                the certificate all others are signed with
server.pem, .key      of its own SuperLink (root and aggregators), or of its SuperNode's inner side
node.pub, node.key    of its SuperNode (all but the root)
up.key                of the edge to its parent
inner.key             of its own processes among themselves
down/                 its children's node.pub and edge keys
state/                what it must not lose
news.json             what it knows of itself and of all sites below it
topology.json         what the folders of all sites were made from (the root)
run.json, rounds.jsonl, ...   the run, as a run folder has it (the root): see docs/runs.md
flower/, logs/        what Flower keeps; what its processes print
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.deploy.protocol.job import Job, Patience
from stratafl.deploy.sites import user_files
from stratafl.deploy.sites.address import LOOPBACK, joined
from stratafl.experiment import legacy
from stratafl.experiment.algorithm import (
    client_update,
    participation_of,
    rule_names,
    sync_schedule,
    topology_of,
    weighted,
)
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import import_plugins
from stratafl.experiment.toml import read_toml
from stratafl.rules.registry import rules_for
from stratafl.runs import format
from stratafl.runs.provenance import Provenance

HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
"""A variable of the environment that the C library reads when a process starts, and its value.
Large pieces of memory go back to the system when they are freed, so that a copy of a model always
takes new ones: in huge pages that takes a third of the time."""
TOPOLOGY = "topology.json"
DIGITS = 8
"""How many digits of a digest a folder's name has."""
FORMAT = 1
"""Of site.json, and of the topology as it is stored at the root. A field that is not known, as a
newer version's, is passed over, and one with a default may be missing; what must not be passed over
raises the number. A file without one has this one, as it was written before there were numbers."""


@dataclass(frozen=True)
class Site:
    """A site, as site.json in its folder has it."""

    name: str
    level: int
    number: int
    job: str
    children: list[str]
    listen: str
    """Where its SuperLink listens (root and aggregators): address and port; empty for a leaf."""
    public: str
    """How its children reach that."""
    parent: str
    """How it reaches its parent's SuperLink; empty for the root."""
    inner_port: int
    """The port of its SuperNode's side towards its own processes, on loopback."""
    runtime_port: int
    """The port of its SuperLink's side towards its own processes, on loopback."""
    data: str
    """Where a leaf's own data is, at its host; empty where it takes its part of the config's data
    set."""
    inputs: list[int]
    """The shape of a sample as the model takes it."""
    input_type: str
    classes: int
    parameters: int
    buffers: int
    dtype: str
    samples: list[int]
    """The samples of the leaves below it, or its own, as declared when the folder was made; 0 where
    that was not known."""
    largest: int
    """Bytes of a message of this run, at most."""
    deadline: list[float | None]
    min_children: list[int]
    names: dict[str, str]
    """The user's files as the config names them: where they are in code/."""
    files: dict[str, str]
    """SHA-256 of everything in code/."""
    share_errors: bool = False
    """Whether the texts of its errors, which may quote its data, are told further up."""
    frozen: str = ""
    """The digest of the model's parameters that are not trained, which never travel; empty where it
    has none."""

    @staticmethod
    def load(folder: Path) -> Site:
        path = folder / "site.json"
        if not path.exists():
            raise InvalidInput("site folder", folder, "no site.json in it: `stratafl deploy init` makes such folders")
        found = files.read_json(path)
        check_format(path, found)
        fields = dataclasses.fields(Site)
        missing = [each.name for each in fields if each.default is dataclasses.MISSING and each.name not in found]
        if missing:
            raise files.cannot_read(path, f"must have {', '.join(missing)}")
        return Site(**{each.name: found[each.name] for each in fields if each.name in found})

    def write(self, folder: Path) -> None:
        files.write_json(folder / "site.json", {"format": FORMAT, **dataclasses.asdict(self)})

    @property
    def addresses(self) -> list[str]:
        """Where on this machine its processes listen."""
        downward = [] if self.is_leaf else [self.listen, joined(LOOPBACK, self.runtime_port)]
        return downward + ([] if self.is_root else [joined(LOOPBACK, self.inner_port)])

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_root(self) -> bool:
        return self.level == 0


def check_format(path: Path, found: object) -> None:
    """Refuse a file of a format that this version cannot read."""
    if not isinstance(found, dict):
        raise files.cannot_read(path, "not a table")
    number = found.get("format", FORMAT)
    if number != FORMAT or type(number) is not int:
        wanted = f"it has format {number!r}, and this version of stratafl reads {FORMAT}: use the one that wrote it"
        raise files.cannot_read(path, wanted)


def stored_topology(folder: Path) -> Provenance:
    """What the folders of all sites were made from, as the root has it."""
    path = folder / TOPOLOGY
    found = files.read_json(path)
    check_format(path, found)
    return Provenance.read(path, found)


def slug(name: str) -> str:
    """A site's name as one of a file; where that does not tell it from every other name, a digest
    of it does."""
    plain = name.replace("_", "__").replace("/", "_")
    made = format.slug(plain)
    if made == plain and "_/" not in name and "/_" not in name:
        return made
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
    return f"{made[: format.MAX_NAME_LENGTH - DIGITS - 1]}-{digest}"


def tree_of(experiment: Experiment) -> Topology:
    """The tree of an experiment; where children count by their samples, these are told later."""
    tree = topology_of(experiment)
    return tree if weighs_by_samples(experiment) else weighted(tree, experiment.tree.weights, ())


def weighs_by_samples(experiment: Experiment) -> bool:
    """Whether children count by the number of their samples."""
    weights = experiment.tree.weights
    return isinstance(weights, str) and weights.lower() == "samples"


def subtrees(folder: Path, site: Site) -> dict[str, frozenset[str]]:
    """Each child with all sites below it, by this site's own config."""
    try:
        tree = tree_of(stored_experiment(folder))
        return {child: tree.subtree(*tree.find(child)) for child in site.children}
    except InvalidInput:  # the node will say so; a child can still speak for itself
        return {child: frozenset({child}) for child in site.children}


def stored_experiment(folder: Path) -> Experiment:
    """The run as it was told to all sites, its files named as they were."""
    return Experiment.from_table(legacy.current(read_toml(folder / "config.toml")))


def experiment_of(site: Site, folder: Path) -> Experiment:
    """The run, with the user's files as they are in the site's folder."""
    where = {name: str(folder.absolute() / user_files.CODE / place) for name, place in site.names.items()}
    return user_files.renamed(stored_experiment(folder), where)


def job_of(site: Site, experiment: Experiment) -> Job:
    """The job of a site, as its own copy of the config has it."""
    import_plugins(experiment.plugins)
    tree = tree_of(experiment)
    if tree.find(site.name) != (site.level, site.number):
        raise InvalidInput("site", site.name, "is not where it was in the tree of its config")
    return Job(
        name=site.job,
        tree=tree,
        rules=rules_for(rule_names(experiment.method), tree.depth),
        schedule=sync_schedule(experiment.schedule, tree),
        participation=participation_of(experiment, tree.depth),
        seed=experiment.seed,
        rounds=experiment.rounds,
        parameters=site.parameters,
        buffers=site.buffers,
        dtype=getattr(torch, site.dtype),
        by_samples=weighs_by_samples(experiment),
        patience=tuple(
            Patience(deadline, least) for deadline, least in zip(site.deadline, site.min_children, strict=True)
        ),
        update_limit=experiment.aggregation.update_limit,
        update_factor=experiment.aggregation.update_factor,
        leaf=client_update(experiment),
        samples=_placed(tree, site),
    )


def _placed(tree: Topology, site: Site) -> tuple[int, ...]:
    """What a site knows of leaves' samples, among all leaves."""
    samples = np.zeros(tree.leaves, dtype=np.int64)
    samples[tree.ancestors(site.level) == site.number] = site.samples
    return tuple(samples.tolist())
