"""Network parameters sampled for every node of a tree.

Random values are hashes of (seed, level, quantity, node), and of the number of the level's round
for quantities that vary per round. So they do not depend on the order in which they are computed:
the cost model of a stored run and a simulation that needs to know how long a node will take get the
same.

Shape suffixes: N nodes of a level, M nodes of the level above, R rounds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import torch

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, uniform
from stratafl.base.topology import Topology
from stratafl.network.specification import DEVICE, LINK, TIER, Distribution, Network

BYTES_PER_MBIT = 1e6 / 8
PARENT = tuple(name for name in TIER if name not in LINK)


@dataclass(frozen=True, eq=False)
class Quantity:
    """Quantity for all nodes of a level, with its distribution at each node."""

    name: str
    level: int
    distributions: tuple[Distribution | None, ...]
    """Distinct distributions."""
    distribution_N: np.ndarray
    """Index of each node's distribution."""

    @property
    def is_constant(self) -> bool:
        return all(distribution is None or distribution.is_constant for distribution in self.distributions)

    def sample_once(self, seed: int) -> np.ndarray:
        """Sample one value per node for the whole run; NaN where the quantity is not set."""
        u_N = uniform(seed, Stream.NETWORK, self.level, self._stream, torch.arange(len(self.distribution_N)))
        return self._values(u_N.numpy())

    def sample_per_round(self, seed: int, rounds_R: np.ndarray) -> np.ndarray:
        """Sample one value per node and round of the level; a single row if the values never
        change."""
        if self.is_constant:
            return self._values(np.full((1, len(self.distribution_N)), 0.5))
        rounds_R1 = torch.as_tensor(np.asarray(rounds_R, dtype=np.int64))[:, None]
        nodes_N = torch.arange(len(self.distribution_N))
        return self._values(uniform(seed, Stream.CLOCK, self.level, self._stream, rounds_R1, nodes_N).numpy())

    @property
    def _stream(self) -> int:
        """Random stream of the quantity, a hash of its name, so that new quantities change no
        other."""
        return zlib.crc32(self.name.encode())

    def _values(self, u: np.ndarray) -> np.ndarray:
        if len(self.distributions) == 1:
            return _quantiles(self.distributions[0], u)
        values = np.empty_like(u)
        for number, distribution in enumerate(self.distributions):
            mask_N = self.distribution_N == number
            values[..., mask_N] = _quantiles(distribution, u[..., mask_N])
        return values


def _quantiles(distribution: Distribution | None, u: np.ndarray) -> np.ndarray:
    return np.full_like(u, np.nan) if distribution is None else distribution.quantile(u)


@dataclass(frozen=True, eq=False)
class LinkParameters:
    """Sampled parameters of the links of one level."""

    up_N: np.ndarray
    """Bytes per second."""
    down_N: np.ndarray
    latency_N: np.ndarray
    jitter: Quantity
    overhead_bytes_N: np.ndarray
    overhead_s_N: np.ndarray
    up_watts_N: np.ndarray
    down_watts_N: np.ndarray
    money_up_N: np.ndarray
    """Per byte."""
    money_down_N: np.ndarray
    pipe_up_M: np.ndarray
    """Bytes per second; infinite where there is no limit."""
    pipe_down_M: np.ndarray
    merge_s_M: np.ndarray
    merge_s_per_child_M: np.ndarray
    merge_watts_M: np.ndarray
    parents_per_hour: float
    """Money per hour for all parents together."""


@dataclass(frozen=True, eq=False)
class DeviceParameters:
    """Sampled parameters of the leaves' devices."""

    step_s_N: np.ndarray
    slowdown: Quantity
    pause: Quantity
    availability_N: np.ndarray
    away: Quantity
    dropout_N: np.ndarray
    offline_chance: Quantity
    """Uniform values that decide whether a leaf is offline."""
    loss_chance: Quantity
    """Uniform values that decide how often a leaf's work is lost."""
    watts_N: np.ndarray
    per_hour: float
    """Money per hour for all leaves together."""


@dataclass(frozen=True, eq=False)
class NetworkInstance:
    """Network on a tree, with everything that is sampled once per run."""

    network: Network
    tree: Topology
    seed: int
    links: tuple[LinkParameters, ...]
    """Link parameters, root's first: entry m - 1 is edge level m's."""
    devices: DeviceParameters

    def link(self, level: int) -> LinkParameters:
        return self.links[level - 1]

    @cached_property
    def is_deterministic(self) -> bool:
        """Whether two rounds with the same nodes and messages take the same time."""
        devices = self.devices
        quantities = [link.jitter for link in self.links] + [devices.slowdown, devices.pause]
        is_always_online = bool((devices.availability_N == 1).all() and (devices.dropout_N == 0).all())
        return is_always_online and all(quantity.is_constant for quantity in quantities)


def instantiate_network(
    network: Network,
    tree: Topology,
    seed: int,
    samples_N: Sequence[int] | np.ndarray | None = None,
    flops: float | None = None,
) -> NetworkInstance:
    """Sample the parameters of a network for the nodes of a tree.

    samples_N: samples that each leaf takes in one step; flops: operations of training on one
    sample. Both are needed if a device is described by its speed rather than by the duration of a
    step.
    """
    changes = _changes(network, tree)
    links = []
    for level in range(1, tree.depth + 1):
        tier = network.tier(level, tree.depth)
        link_changes = _symmetric(changes, level) if tier.down_mbit_s == tier.up_mbit_s else changes
        child = {name: _quantity(name, level, getattr(tier, name), tree.sizes[level], link_changes) for name in LINK}
        parent = {
            name: _quantity(name, level - 1, getattr(tier, name), tree.sizes[level - 1], changes) for name in PARENT
        }
        links.append(_link_parameters(child, parent, seed))
    leaves = {name: _quantity(name, tree.depth, getattr(network.leaf, name), tree.leaves, changes) for name in DEVICE}
    return NetworkInstance(network, tree, seed, tuple(links), _device_parameters(leaves, seed, samples_N, flops))


NodeChanges = Mapping[tuple[int, str], list[tuple[np.ndarray, Distribution | None]]]
ALTERNATIVE = {"step_s": "gflop_s", "gflop_s": "step_s"}
"""Each of two alternative keys: a device described by one does not use the other."""


def _changes(network: Network, tree: Topology) -> NodeChanges:
    """Nodes whose quantities differ, by level and quantity, in the order of the tables; None where
    a quantity is no longer used."""
    changes: dict[tuple[int, str], list[tuple[np.ndarray, Distribution | None]]] = {}
    for pattern, quantities in network.nodes:
        masks = [np.array([fnmatchcase(name, pattern) for name in names]) for names in tree.names]
        if not any(mask.any() for mask in masks):
            raise InvalidInput(f"nodes.{pattern}", pattern, "no node of the tree has this name")
        for level, mask in enumerate(masks):
            for name, distribution in quantities if mask.any() else ():
                changes.setdefault((level, name), []).append((mask, distribution))
                if name in ALTERNATIVE:
                    changes.setdefault((level, ALTERNATIVE[name]), []).append((mask, None))
    return changes


def _symmetric(changes: NodeChanges, level: int) -> NodeChanges:
    """Copy the changes of the upload rate to the download rate, where nodes do not set that
    themselves."""
    up, down = ((level, name) for name in ("up_mbit_s", "down_mbit_s"))
    return {**changes, down: [*changes.get(up, ()), *changes.get(down, ())]}


def _quantity(name: str, level: int, default: Distribution | None, count: int, changes: NodeChanges) -> Quantity:
    distributions: list[Distribution | None] = [default]
    distribution_N = np.zeros(count, dtype=np.int64)
    for mask_N, distribution in changes.get((level, name), ()):
        distribution_N[mask_N] = len(distributions)
        distributions.append(distribution)
    return Quantity(name, level, tuple(distributions), distribution_N)


def _link_parameters(child: Mapping[str, Quantity], parent: Mapping[str, Quantity], seed: int) -> LinkParameters:
    link = {name: quantity.sample_once(seed) for name, quantity in child.items() if name != "jitter_s"}
    shared = {name: quantity.sample_once(seed) for name, quantity in parent.items()}
    return LinkParameters(
        up_N=link["up_mbit_s"] * BYTES_PER_MBIT,
        down_N=link["down_mbit_s"] * BYTES_PER_MBIT,
        latency_N=link["latency_s"],
        jitter=child["jitter_s"],
        overhead_bytes_N=link["overhead_bytes"],
        overhead_s_N=link["overhead_s"],
        up_watts_N=link["up_watts"],
        down_watts_N=link["down_watts"],
        money_up_N=link["money_per_gb_up"] / 1e9,
        money_down_N=link["money_per_gb_down"] / 1e9,
        pipe_up_M=np.nan_to_num(shared["pipe_up_mbit_s"] * BYTES_PER_MBIT, nan=np.inf),
        pipe_down_M=np.nan_to_num(shared["pipe_down_mbit_s"] * BYTES_PER_MBIT, nan=np.inf),
        merge_s_M=shared["merge_s"],
        merge_s_per_child_M=shared["merge_s_per_child"],
        merge_watts_M=shared["merge_watts"],
        parents_per_hour=float(shared["parent_money_per_hour"].sum()),
    )


def _device_parameters(
    leaves: Mapping[str, Quantity], seed: int, samples_N: Sequence[int] | np.ndarray | None, flops: float | None
) -> DeviceParameters:
    keys = ("step_s", "gflop_s", "flops_per_sample", "availability", "dropout", "watts", "money_per_hour")
    sampled = {name: leaves[name].sample_once(seed) for name in keys}
    step_s_N = sampled["step_s"]
    if np.isnan(step_s_N).any():
        flops_N = np.nan_to_num(sampled["flops_per_sample"], nan=np.nan if flops is None else flops)
        if np.isnan(flops_N[np.isnan(step_s_N)]).any() or samples_N is None:
            allowed = "must be given: the operations of the run's model, and its batch, are not known"
            raise InvalidInput("leaf.flops_per_sample", None, allowed)
        computed_N = flops_N * np.asarray(samples_N, dtype=np.float64) / (sampled["gflop_s"] * 1e9)
        step_s_N = np.where(np.isnan(step_s_N), computed_N, step_s_N)
    uniform_share = Distribution("uniform", (("low", 0.0), ("high", 1.0)))
    zeros_N = np.zeros(len(step_s_N), dtype=np.int64)
    level = leaves["step_s"].level
    return DeviceParameters(
        step_s_N=step_s_N,
        slowdown=leaves["slowdown"],
        pause=leaves["pause_s"],
        availability_N=sampled["availability"],
        away=leaves["away_s"],
        dropout_N=sampled["dropout"],
        offline_chance=Quantity("is_away", level, (uniform_share,), zeros_N),
        loss_chance=Quantity("is_lost", level, (uniform_share,), zeros_N),
        watts_N=sampled["watts"],
        per_hour=float(sampled["money_per_hour"].sum()),
    )
