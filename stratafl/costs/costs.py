"""Cost of a run on a network, round by round.

Shape suffix: R global rounds of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.costs.workload import RecoveredWorkload, read_workload
from stratafl.network.instance import NetworkInstance, instantiate_network
from stratafl.network.replay import LevelTraffic, RoundBlock, Workload, block_size, replay_rounds, trace_round
from stratafl.network.specification import Network
from stratafl.network.timeline import Activity, NetworkTimeline, Part, RoundCosts
from stratafl.runs import StoredRun

HOUR = 3600.0
ResultType = TypeVar("ResultType")


@dataclass(frozen=True, eq=False)
class RunCosts:
    """Cost of one run on one network, per global round."""

    network: Network
    levels: tuple[str, ...]
    """Names of the edge levels, root's first."""
    seconds_R: np.ndarray
    parts: dict[Part, np.ndarray]
    """Seconds by activity; they add up to all seconds."""
    joules_R: np.ndarray
    bytes: tuple[np.ndarray, ...]
    """Bytes over the links of each edge level in both directions, with protocol overhead; root's
    first."""
    money_R: np.ndarray

    def up_to_round(self, round: int) -> CumulativeCost:
        """Sum the costs up to the end of a round, counted from 1."""
        return CumulativeCost(
            round=round,
            seconds=float(self.seconds_R[:round].sum()),
            joules=float(self.joules_R[:round].sum()),
            money=float(self.money_R[:round].sum()),
            bytes=tuple(float(values_R[:round].sum()) for values_R in self.bytes),
            parts={part: float(seconds_R[:round].sum()) for part, seconds_R in self.parts.items()},
        )


@dataclass(frozen=True)
class CumulativeCost:
    """Cost of a run from its beginning to the end of a round."""

    round: int
    seconds: float
    joules: float
    money: float
    bytes: tuple[float, ...]
    """Bytes by edge level, root's first."""
    parts: dict[Part, float]


@dataclass(frozen=True, eq=False)
class PriceableRun:
    """Stored run with its workload, which can be priced under any number of networks."""

    run: StoredRun
    recovered: RecoveredWorkload
    flops: float | None

    @staticmethod
    def of(run: StoredRun, flops: float | None = None) -> PriceableRun:
        """Recover the workload of a stored run.

        flops: operations of training on one sample, instead of those that are recorded; ignored for
        a run with waiting policies, whose time is computed with its own.
        """
        recovered = read_workload(run)
        is_bound = recovered.workload.has_waiting_policy and recovered.flops is not None
        return PriceableRun(run, recovered, recovered.flops if is_bound or flops is None else flops)

    def cost_on(self, network: Network) -> RunCosts:
        """Compute the costs of the run on a network."""
        return costs(self.recovered.workload, self._instantiate(network))

    def intervals(self, network: Network, round: int) -> list[Activity]:
        """Activities of all nodes in one global round on a network, counted from 1."""
        activities: list[Activity] = []
        timeline = NetworkTimeline(self._instantiate(network), self.recovered.workload.wait)
        trace_round(self.recovered.workload, round - 1, timeline, activities.append)
        return activities

    def _instantiate(self, network: Network) -> NetworkInstance:
        """Sample the network for the run's tree."""
        workload = self.recovered.workload
        self.recovered.check(network, self.run.name)
        try:
            return instantiate_network(network, workload.tree, workload.seed, workload.samples_N, self.flops)
        except InvalidInput as problem:
            if problem.field != "leaf.flops_per_sample":
                raise
            allowed = "must be given, in the network or as --flops: the operations of its model could not be counted"
            raise InvalidInput("leaf.flops_per_sample", None, f"{allowed} ({self.run.name})") from None


class PriceBatch:
    """Batch of runs and networks, in which a run that cannot be priced stops no other."""

    def __init__(self, flops: float | None = None, before: PriceBatch | None = None):
        """flops: as `PriceableRun.of` takes them. before: an earlier batch, whose results for the
        same runs and networks are reused."""
        self._flops = flops
        self._before = {} if before is None else before._entries
        self._entries: dict[int, _BatchEntry] = {}
        """Entries by the id of the run's object, which they keep alive."""
        self.done: list[tuple[PriceableRun, Network]] = []
        self.problems: dict[str, InvalidInput] = {}
        """Problems by a line that names the run and the reason."""

    def load(self, run: StoredRun) -> PriceableRun | None:
        """Load a run; None if it cannot be priced on any network."""
        entry = self._before.get(id(run)) or _BatchEntry(run, _value_or_problem(PriceableRun.of, run, self._flops))
        self._entries[id(run)] = entry
        if isinstance(entry.priceable, InvalidInput):
            self.problems[f"{run.name} cannot be priced: {entry.priceable}"] = entry.priceable
            return None
        return entry.priceable

    def cost_on(self, run: PriceableRun, network: Network) -> RunCosts | None:
        """Compute the costs of a loaded run on a network; None if it cannot be priced there."""
        costs = self._entries[id(run.run)].costs
        result = next((result for priced_network, result in costs if priced_network == network), None)
        if result is None:
            result = _value_or_problem(run.cost_on, network)
            costs.append((network, result))
        if isinstance(result, InvalidInput):
            self.problems[f"{run.run.name} cannot be priced on {network.name}: {result}"] = result
            return None
        self.done.append((run, network))
        return result


@dataclass(frozen=True, eq=False)
class _BatchEntry:
    """Results for one run, or the reason why there are none."""

    run: StoredRun
    priceable: PriceableRun | InvalidInput
    costs: list[tuple[Network, RunCosts | InvalidInput]] = field(default_factory=list)


def _value_or_problem(function: Callable[..., ResultType], *arguments: Any) -> ResultType | InvalidInput:
    try:
        return function(*arguments)
    except InvalidInput as problem:
        return problem


def costs(workload: Workload, instance: NetworkInstance) -> RunCosts:
    """Compute the costs of a workload on a network."""
    timeline, network, depth = NetworkTimeline(instance, workload.wait), instance.network, workload.tree.depth
    round_costs: list[tuple[int, RoundCosts]] = []
    traffic: list[tuple[LevelTraffic, ...]] = []
    for block in replay_rounds(workload, timeline):
        round_costs += list(_block_costs(timeline, workload, block))
        traffic.append(
            tuple(
                LevelTraffic(*(_expand(values, block.rounds) for values in vars(level).values()))
                for level in block.traffic
            )
        )
    seconds_R = _concatenate([(count, part.seconds) for count, part in round_costs])
    names = dict.fromkeys(name for _, part in round_costs for name in part.parts)
    levels = [
        LevelTraffic(
            *(np.concatenate(values) for values in zip(*(vars(block[m]).values() for block in traffic), strict=True))
        )
        for m in range(depth)
    ]
    return RunCosts(
        network=network,
        levels=tuple(network.level_name(level, depth) for level in range(1, depth + 1)),
        seconds_R=seconds_R,
        parts={
            name: _concatenate([(count, part.parts.get(name, np.zeros(1))) for count, part in round_costs])
            for name in names
        },
        joules_R=_concatenate([(count, part.joules) for count, part in round_costs]),
        bytes=tuple(
            _link_bytes(instance, level, sent, up=True) + _link_bytes(instance, level, sent, up=False)
            for level, sent in enumerate(levels, 1)
        ),
        money_R=_money(instance, levels, seconds_R),
    )


def _block_costs(timeline: NetworkTimeline, workload: Workload, block: RoundBlock) -> Iterator[tuple[int, RoundCosts]]:
    """Costs of a block's rounds, each with the number of rounds that it is for."""
    rows = len(block.traffic[0].bytes_up)
    if block.costs:
        yield from ((1, costs) for costs in block.costs)
    elif rows == block.rounds:
        yield rows, timeline.round_costs(block.stages, rows)
    elif timeline.instance.is_deterministic:
        yield block.rounds, timeline.round_costs(block.stages, 1)
    else:
        size = block_size(workload)
        for first in range(0, block.rounds, size):
            rounds = range(first, min(first + size, block.rounds))
            yield len(rounds), timeline.round_costs(block.repeated(workload.schedule, rounds), len(rounds))


def _expand(values: np.ndarray, rounds: int) -> np.ndarray:
    return values if len(values) == rounds else np.broadcast_to(values, (rounds,))


def _concatenate(parts: list[tuple[int, np.ndarray]]) -> np.ndarray:
    return np.concatenate([_expand(values, count) for count, values in parts])


def _link_bytes(instance: NetworkInstance, level: int, sent: LevelTraffic, up: bool) -> np.ndarray:
    """Bytes over a level's links.

    Messages are counted per level, so an overhead that differs between nodes is averaged.
    """
    overhead = instance.link(level).overhead_bytes_N.mean()
    return sent.bytes_up + overhead * sent.messages_up if up else sent.bytes_down + overhead * sent.messages_down


def _money(instance: NetworkInstance, levels: list[LevelTraffic], seconds_R: np.ndarray) -> np.ndarray:
    """Money for the traffic, and for the duration of the nodes."""
    money_R = seconds_R / HOUR * (instance.devices.per_hour + sum(link.parents_per_hour for link in instance.links))
    for level, sent in enumerate(levels, 1):
        link = instance.link(level)
        money_R = money_R + link.money_up_N.mean() * _link_bytes(instance, level, sent, up=True)
        money_R = money_R + link.money_down_N.mean() * _link_bytes(instance, level, sent, up=False)
    return money_R
