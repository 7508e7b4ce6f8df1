"""A network laid over a tree: what every node's link and device are like in one run.

Draws are hashes of (seed, level, quantity, node), and of the round of the level where something is
drawn anew each time. So they are the same for whoever asks, in any order: for the price of a run
that is over, and for whoever has to know beforehand how long a node will take.

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
from stratafl.base.topology import Tree
from stratafl.network.distributions import Distribution
from stratafl.network.specification import DEVICE, LINK, TIER, Network

BYTES_PER_MBIT = 1e6 / 8
PARENT = tuple(name for name in TIER if name not in LINK)


@dataclass(frozen=True, eq=False)
class Quantity:
    """One quantity of all nodes of a level: which of them it is drawn from what for."""

    name: str
    level: int
    kinds: tuple[Distribution | None, ...]
    """Those that there are."""
    kind_N: np.ndarray
    """Which of them is whose."""

    @property
    def is_constant(self) -> bool:
        return all(kind is None or kind.is_constant for kind in self.kinds)

    def once(self, seed: int) -> np.ndarray:
        """One value for each node of a run; NaN where there is none."""
        u_N = uniform(seed, Stream.NETWORK, self.level, self._number, torch.arange(len(self.kind_N)))
        return self._values(u_N.numpy())

    def each(self, seed: int, rounds_R: np.ndarray) -> np.ndarray:
        """One value for each node and round of the level; a single row where they never change."""
        if self.is_constant:
            return self._values(np.full((1, len(self.kind_N)), 0.5))
        rounds_R1 = torch.as_tensor(np.asarray(rounds_R, dtype=np.int64))[:, None]
        nodes_N = torch.arange(len(self.kind_N))
        return self._values(uniform(seed, Stream.CLOCK, self.level, self._number, rounds_R1, nodes_N).numpy())

    @property
    def _number(self) -> int:
        """Of its stream, from its name: another quantity more changes nothing."""
        return zlib.crc32(self.name.encode())

    def _values(self, u: np.ndarray) -> np.ndarray:
        if len(self.kinds) == 1:
            return self._of(self.kinds[0], u)
        values = np.empty_like(u)
        for number, kind in enumerate(self.kinds):
            mine_N = self.kind_N == number
            values[..., mine_N] = self._of(kind, u[..., mine_N])
        return values

    @staticmethod
    def _of(kind: Distribution | None, u: np.ndarray) -> np.ndarray:
        return np.full_like(u, np.nan) if kind is None else kind.quantile(u)


@dataclass(frozen=True, eq=False)
class LinkParameters:
    """The edges of one level in one run, drawn."""

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
    """Money for all parents together."""


@dataclass(frozen=True, eq=False)
class DeviceParameters:
    """The leaves' in one run, drawn."""

    step_s_N: np.ndarray
    slowdown: Quantity
    pause: Quantity
    availability_N: np.ndarray
    away: Quantity
    dropout_N: np.ndarray
    chances: tuple[Quantity, Quantity]
    """What decides whether a leaf is away, and how often its work is lost."""
    watts_N: np.ndarray
    per_hour: float
    """Money for all leaves together."""


@dataclass(frozen=True, eq=False)
class NetworkInstance:
    """A network on a tree, with everything that is drawn once."""

    network: Network
    tree: Tree
    seed: int
    edges: tuple[LinkParameters, ...]
    """Root's first: entry m - 1 is edge level m's."""
    devices: DeviceParameters

    def edge(self, level: int) -> LinkParameters:
        return self.edges[level - 1]

    @cached_property
    def is_steady(self) -> bool:
        """Whether two rounds with the same nodes and messages take the same time."""
        devices = self.devices
        quantities = [each.jitter for each in self.edges] + [devices.slowdown, devices.pause]
        never = bool((devices.availability_N == 1).all() and (devices.dropout_N == 0).all())
        return never and all(each.is_constant for each in quantities)


def place(network: Network, tree: Tree, seed: int, samples_N: Sequence[int] | np.ndarray | None = None,
          flops: float | None = None) -> NetworkInstance:  # fmt: skip
    """Draw a network for the nodes of a tree.

    samples_N: how many samples each leaf takes in one step, and flops: the operations of training
    on one; needed where a device says how fast it computes rather than how long a step takes.
    """
    changes = _changes(network, tree)
    edges = []
    for level in range(1, tree.depth + 1):
        tier = network.tier(level, tree.depth)
        own = _symmetric(changes, level) if tier.down_mbit_s == tier.up_mbit_s else changes
        links = {name: _quantity(name, level, getattr(tier, name), tree.sizes[level], own) for name in LINK}
        above = {
            name: _quantity(name, level - 1, getattr(tier, name), tree.sizes[level - 1], changes) for name in PARENT
        }
        edges.append(_edges(links, above, seed))
    leaves = {name: _quantity(name, tree.depth, getattr(network.leaf, name), tree.leaves, changes) for name in DEVICE}
    return NetworkInstance(network, tree, seed, tuple(edges), _devices(leaves, seed, samples_N, flops))


Changes = Mapping[tuple[int, str], list[tuple[np.ndarray, Distribution | None]]]
OTHER = {"step_s": "gflop_s", "gflop_s": "step_s"}
"""A device that says one of the two does not mean the other."""


def _changes(network: Network, tree: Tree) -> Changes:
    """By level and quantity, the nodes at which it is different, in the order of the tables; None
    where it is no longer meant."""
    found: dict[tuple[int, str], list[tuple[np.ndarray, Distribution | None]]] = {}
    for pattern, quantities in network.nodes:
        masks = [np.array([fnmatchcase(name, pattern) for name in names]) for names in tree.names]
        if not any(mask.any() for mask in masks):
            raise InvalidInput(f"nodes.{pattern}", pattern, "no node of the tree has this name")
        for level, mask in enumerate(masks):
            for name, distribution in quantities if mask.any() else ():
                found.setdefault((level, name), []).append((mask, distribution))
                if name in OTHER:
                    found.setdefault((level, OTHER[name]), []).append((mask, None))
    return found


def _symmetric(changes: Changes, level: int) -> Changes:
    """With the way down as the way up at nodes of a level that say nothing else of it."""
    up, down = ((level, name) for name in ("up_mbit_s", "down_mbit_s"))
    return {**changes, down: [*changes.get(up, ()), *changes.get(down, ())]}


def _quantity(name: str, level: int, usual: Distribution | None, count: int, changes: Changes) -> Quantity:
    kinds: list[Distribution | None] = [usual]
    kind_N = np.zeros(count, dtype=np.int64)
    for mask_N, distribution in changes.get((level, name), ()):
        kind_N[mask_N] = len(kinds)
        kinds.append(distribution)
    return Quantity(name, level, tuple(kinds), kind_N)


def _edges(links: Mapping[str, Quantity], above: Mapping[str, Quantity], seed: int) -> LinkParameters:
    link = {name: quantity.once(seed) for name, quantity in links.items() if name != "jitter_s"}
    parent = {name: quantity.once(seed) for name, quantity in above.items()}
    return LinkParameters(
        up_N=link["up_mbit_s"] * BYTES_PER_MBIT,
        down_N=link["down_mbit_s"] * BYTES_PER_MBIT,
        latency_N=link["latency_s"],
        jitter=links["jitter_s"],
        overhead_bytes_N=link["overhead_bytes"],
        overhead_s_N=link["overhead_s"],
        up_watts_N=link["up_watts"],
        down_watts_N=link["down_watts"],
        money_up_N=link["money_per_gb_up"] / 1e9,
        money_down_N=link["money_per_gb_down"] / 1e9,
        pipe_up_M=np.nan_to_num(parent["pipe_up_mbit_s"] * BYTES_PER_MBIT, nan=np.inf),
        pipe_down_M=np.nan_to_num(parent["pipe_down_mbit_s"] * BYTES_PER_MBIT, nan=np.inf),
        merge_s_M=parent["merge_s"],
        merge_s_per_child_M=parent["merge_s_per_child"],
        merge_watts_M=parent["merge_watts"],
        parents_per_hour=float(parent["parent_money_per_hour"].sum()),
    )


def _devices(
    leaves: Mapping[str, Quantity], seed: int, samples_N: Sequence[int] | np.ndarray | None, flops: float | None
) -> DeviceParameters:
    once = ("step_s", "gflop_s", "flops_per_sample", "availability", "dropout", "watts", "money_per_hour")
    drawn = {name: leaves[name].once(seed) for name in once}
    step_s_N = drawn["step_s"]
    if np.isnan(step_s_N).any():
        flops_N = np.nan_to_num(drawn["flops_per_sample"], nan=np.nan if flops is None else flops)
        if np.isnan(flops_N[np.isnan(step_s_N)]).any() or samples_N is None:
            allowed = "must be given: the operations of the run's model, and its batch, are not known"
            raise InvalidInput("leaf.flops_per_sample", None, allowed)
        computed_N = flops_N * np.asarray(samples_N, dtype=np.float64) / (drawn["gflop_s"] * 1e9)
        step_s_N = np.where(np.isnan(step_s_N), computed_N, step_s_N)
    chance = Distribution("uniform", (("low", 0.0), ("high", 1.0)))
    nobody_N = np.zeros(len(step_s_N), dtype=np.int64)
    level = leaves["step_s"].level
    return DeviceParameters(
        step_s_N=step_s_N,
        slowdown=leaves["slowdown"],
        pause=leaves["pause_s"],
        availability_N=drawn["availability"],
        away=leaves["away_s"],
        dropout_N=drawn["dropout"],
        chances=(Quantity("is_away", level, (chance,), nobody_N), Quantity("is_lost", level, (chance,), nobody_N)),
        watts_N=drawn["watts"],
        per_hour=float(drawn["money_per_hour"].sum()),
    )
