"""What a run costs on a network, round by round.

Shape suffix: R global rounds of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.cost.workload import RecoveredWorkload, read_workload
from stratafl.network.instance import NetworkInstance, place
from stratafl.network.replay import LevelTraffic, RoundBlock, Workload, block_size, replay_rounds, trace_round
from stratafl.network.specification import Network
from stratafl.network.timeline import Activity, NetworkTimeline, Part, RoundCosts
from stratafl.runs import StoredRun

HOUR = 3600.0
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class RunCosts:
    """Of one run on one network; every array has an entry per global round."""

    network: Network
    levels: tuple[str, ...]
    """What the edge levels are called, root's first."""
    seconds_R: np.ndarray
    parts: dict[Part, np.ndarray]
    """Seconds by what they went into; they add up to all of them."""
    joules_R: np.ndarray
    bytes: tuple[np.ndarray, ...]
    """Over the links of each edge level, both ways, with what the protocol adds; root's first."""
    money_R: np.ndarray

    def until(self, round: int) -> CumulativeCost:
        """All up to the end of a round, counted from 1."""
        return CumulativeCost(
            round=round,
            seconds=float(self.seconds_R[:round].sum()),
            joules=float(self.joules_R[:round].sum()),
            money=float(self.money_R[:round].sum()),
            bytes=tuple(float(each[:round].sum()) for each in self.bytes),
            parts={part: float(each[:round].sum()) for part, each in self.parts.items()},
        )


@dataclass(frozen=True)
class CumulativeCost:
    """A part of a run, from its beginning."""

    round: int
    seconds: float
    joules: float
    money: float
    bytes: tuple[float, ...]
    """By edge level, root's first."""
    parts: dict[Part, float]


@dataclass(frozen=True, eq=False)
class PriceableRun:
    """A stored run that is ready to be priced under any number of networks."""

    run: StoredRun
    recovered: RecoveredWorkload
    flops: float | None

    @staticmethod
    def of(run: StoredRun, flops: float | None = None) -> PriceableRun:
        """flops: of training on one sample, instead of those that are known; a run whose parents
        waited by time was timed with its own."""
        recovered = read_workload(run)
        is_bound = recovered.story.waits_by_time and recovered.flops is not None
        return PriceableRun(run, recovered, recovered.flops if is_bound or flops is None else flops)

    def on(self, network: Network) -> RunCosts:
        """What it costs there."""
        return costs(self.recovered.story, self.placed(network))

    def intervals(self, network: Network, round: int) -> list[Activity]:
        """What every node does in one global round there, counted from 1."""
        seen: list[Activity] = []
        clock = NetworkTimeline(self.placed(network), self.recovered.story.wait)
        trace_round(self.recovered.story, round - 1, clock, seen.append)
        return seen

    def placed(self, network: Network) -> NetworkInstance:
        """The network on the run's tree."""
        story = self.recovered.story
        self.recovered.check(network, self.run.name)
        try:
            return place(network, story.tree, story.seed, story.samples_N, self.flops)
        except InvalidInput as problem:
            if problem.field != "leaf.flops_per_sample":
                raise
            allowed = "must be given, in the network or as --flops: the operations of its model could not be counted"
            raise InvalidInput("leaf.flops_per_sample", None, f"{allowed} ({self.run.name})") from None


class PriceBatch:
    """Runs on networks one after another, where one that cannot be priced stops no other."""

    def __init__(self, flops: float | None = None, before: PriceBatch | None = None):
        """flops: as `PricedRun.of` takes them. before: a pricing that may have had the same runs
        and networks, whose results are taken over then."""
        self._flops = flops
        self._before = {} if before is None else before._known
        self._known: dict[int, _Known] = {}
        """By the run's object, which it holds."""
        self.done: list[tuple[PriceableRun, Network]] = []
        self.problems: dict[str, InvalidInput] = {}
        """By a line that names the run, and says what is in the way."""

    def ready(self, run: StoredRun) -> PriceableRun | None:
        """A run for any network; None where it cannot be priced anywhere."""
        known = self._known[id(run)] = self._before.get(id(run)) or _Known(
            run, _tried(PriceableRun.of, run, self._flops)
        )
        if isinstance(known.ready, InvalidInput):
            self.problems[f"{run.name} cannot be priced: {known.ready}"] = known.ready
            return None
        return known.ready

    def on(self, run: PriceableRun, network: Network) -> RunCosts | None:
        """What it costs there; None where it cannot be priced there. run: as `ready` gave it."""
        costs = self._known[id(run.run)].costs
        found = next((each for place, each in costs if place == network), None)
        if found is None:
            found = _tried(run.on, network)
            costs.append((network, found))
        if isinstance(found, InvalidInput):
            self.problems[f"{run.run.name} cannot be priced on {network.name}: {found}"] = found
            return None
        self.done.append((run, network))
        return found


@dataclass(frozen=True, eq=False)
class _Known:
    """Results for one run, or why there is none."""

    run: StoredRun
    ready: PriceableRun | InvalidInput
    costs: list[tuple[Network, RunCosts | InvalidInput]] = field(default_factory=list)


def _tried(function: Callable[..., Result], *arguments: Any) -> Result | InvalidInput:
    try:
        return function(*arguments)
    except InvalidInput as problem:
        return problem


def costs(story: Workload, placed: NetworkInstance) -> RunCosts:
    """What a run with this story costs on a network."""
    clock, network, depth = NetworkTimeline(placed, story.wait), placed.network, story.tree.depth
    spent: list[tuple[int, RoundCosts]] = []
    sent: list[tuple[LevelTraffic, ...]] = []
    for chunk in replay_rounds(story, clock):
        spent += list(_spent(clock, story, chunk))
        sent.append(
            tuple(LevelTraffic(*(_long(each, chunk.rounds) for each in vars(level).values())) for level in chunk.sent)
        )
    seconds_R = _joined([(count, each.seconds) for count, each in spent])
    names = dict.fromkeys(part for _, each in spent for part in each.parts)
    parts = {part: _joined([(count, each.parts.get(part, np.zeros(1))) for count, each in spent]) for part in names}
    levels = [
        LevelTraffic(*(np.concatenate(each) for each in zip(*(vars(s[m]).values() for s in sent), strict=True)))
        for m in range(depth)
    ]
    return RunCosts(
        network=network,
        levels=tuple(network.title(level, depth) for level in range(1, depth + 1)),
        seconds_R=seconds_R,
        parts=parts,
        joules_R=_joined([(count, each.joules) for count, each in spent]),
        bytes=tuple(
            _wire(placed, level, each, up=True) + _wire(placed, level, each, up=False)
            for level, each in enumerate(levels, 1)
        ),
        money_R=_money(placed, levels, seconds_R),
    )


def _spent(clock: NetworkTimeline, story: Workload, chunk: RoundBlock) -> Iterator[tuple[int, RoundCosts]]:
    """Of a chunk's rounds, with how many rounds each is for."""
    rows = len(chunk.sent[0].bytes_up)
    if chunk.spent:
        yield from ((1, each) for each in chunk.spent)
    elif rows == chunk.rounds:
        yield rows, clock.spent(chunk.stages, rows)
    elif clock.placed.is_steady:
        yield chunk.rounds, clock.spent(chunk.stages, 1)
    else:
        size = block_size(story)
        for first in range(0, chunk.rounds, size):
            some = range(first, min(first + size, chunk.rounds))
            yield len(some), clock.spent(chunk.many(story.schedule, some), len(some))


def _long(values: np.ndarray, rounds: int) -> np.ndarray:
    return values if len(values) == rounds else np.broadcast_to(values, (rounds,))


def _joined(parts: list[tuple[int, np.ndarray]]) -> np.ndarray:
    return np.concatenate([_long(values, count) for count, values in parts])


def _wire(placed: NetworkInstance, level: int, sent: LevelTraffic, up: bool) -> np.ndarray:
    """Bytes over a level's links; messages are counted for the level, so an overhead that differs
    from node to node counts with its mean."""
    overhead = placed.edge(level).overhead_bytes_N.mean()
    return sent.bytes_up + overhead * sent.messages_up if up else sent.bytes_down + overhead * sent.messages_down


def _money(placed: NetworkInstance, levels: list[LevelTraffic], seconds_R: np.ndarray) -> np.ndarray:
    """For what goes over the links, and for as long as the nodes are there."""
    money_R = seconds_R / HOUR * (placed.devices.per_hour + sum(each.parents_per_hour for each in placed.edges))
    for level, sent in enumerate(levels, 1):
        edges = placed.edge(level)
        money_R = money_R + edges.money_up_N.mean() * _wire(placed, level, sent, up=True)
        money_R = money_R + edges.money_down_N.mean() * _wire(placed, level, sent, up=False)
    return money_R
