"""Random trees, schedules, participation and networks, and the same case as a script of events."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stratafl.base.topology import Topology
from stratafl.core.schedule import SyncSchedule
from stratafl.network.instance import NetworkInstance, instantiate_network
from stratafl.network.messages import message_sizes
from stratafl.network.replay import RoundBlock, Workload, replay_rounds
from stratafl.network.specification import Network
from stratafl.network.timeline import NetworkTimeline
from stratafl.network.waiting import WAIT_FOR_ALL, WaitPolicy
from stratafl.rules.registry import rules_for
from tests.network.events import Link, Parent, Script


@dataclass
class Case:
    workload: Workload
    instance: NetworkInstance

    def rows(self) -> list[tuple[RoundBlock, int, int]]:
        """Block, row and repetition of every global round."""
        rows = []
        for block in replay_rounds(self.workload, NetworkTimeline(self.instance, self.workload.wait)):
            count = len(block.traffic[0].bytes_up)
            rows += [(block, row % count, row // count) for row in range(block.rounds)]
        return rows


def random_tree(draw: np.random.Generator) -> Topology:
    def below(depth: int) -> object:
        count = int(draw.integers(1, 4))
        return count if depth == 1 else [below(depth - 1) for _ in range(count)]

    return Topology.of(below(int(draw.integers(1, 4))))


def quantity(draw: np.random.Generator, typical: float) -> object:
    kinds = [
        typical,
        {"name": "uniform", "low": 0.5 * typical, "high": 2 * typical},
        {"name": "lognormal", "median": typical, "sigma": 1.0},
        {"name": "pareto", "least": typical, "alpha": 1.5},
        {"name": "normal", "mean": typical, "deviation": 0.5 * typical, "low": 0.1 * typical},
        {"name": "empirical", "values": [typical, 2 * typical, 5 * typical]},
    ]
    return kinds[int(draw.integers(len(kinds)))]


def random_network(draw: np.random.Generator) -> Network:
    def tier() -> dict:
        result = {
            "up_mbit_s": quantity(draw, 2.0), "down_mbit_s": quantity(draw, 5.0), "latency_s": quantity(draw, 0.01),
            "jitter_s": quantity(draw, 0.005), "overhead_bytes": 100, "overhead_s": quantity(draw, 0.001),
            "merge_s": quantity(draw, 0.02), "merge_s_per_child": quantity(draw, 0.01),
        }  # fmt: skip
        for way in ("pipe_up_mbit_s", "pipe_down_mbit_s"):
            if draw.random() < 0.6:
                result[way] = quantity(draw, 4.0)
        return result

    leaf = {"step_s": quantity(draw, 0.05), "slowdown": quantity(draw, 1.0), "pause_s": quantity(draw, 0.02)}
    if draw.random() < 0.5:
        leaf |= {"availability": 0.7, "away_s": quantity(draw, 0.5), "dropout": 0.2}
    return Network.of({"tier": [tier() for _ in range(int(draw.integers(1, 4)))], "leaf": leaf})


def random_case(seed: int) -> Case:
    draw = np.random.default_rng(seed)
    tree = random_tree(draw)
    methods = ("hfedavg", "mtgc", "scaffold", {"name": "mtgc", "restart": "keep"})
    rules = rules_for(methods[int(draw.integers(len(methods)))], tree.depth)
    choices = (None, 0.5, 1, 2)
    workload = Workload(
        tree=tree,
        schedule=SyncSchedule.of([int(period) for period in draw.integers(1, 4, tree.depth)], tree.depth),
        participation=tuple(choices[int(draw.integers(4))] for _ in range(tree.depth)),
        seed=int(draw.integers(1000)),
        sizes=message_sizes(rules, 10_000, 8),
        steps_N=draw.integers(1, 5, tree.leaves),
        samples_N=np.ones(tree.leaves),
        rounds=3,
    )
    return Case(workload, instantiate_network(random_network(draw), tree, workload.seed))


def waiting_case(seed: int) -> Case:
    """Random case with waiting policies; random quantities have no ties."""
    case, draw = random_case(seed), np.random.default_rng([seed, 1])
    choices = (WAIT_FOR_ALL, WaitPolicy(first=1), WaitPolicy(first=2), WaitPolicy(first=0.6))

    def policy() -> WaitPolicy:
        if draw.random() < 0.5:
            return choices[int(draw.integers(len(choices)))]
        return WaitPolicy(float(draw.lognormal(-0.5, 0.8)), (None, None, 2)[int(draw.integers(3))])

    tier = {"up_mbit_s": 2.0, "down_mbit_s": 5.0, "latency_s": {"name": "lognormal", "median": 0.01, "sigma": 1.0}}
    tier |= {"jitter_s": {"name": "pareto", "least": 0.002, "alpha": 1.2}, "merge_s": 0.01, "overhead_bytes": 50}
    tier |= {"pipe_up_mbit_s": 4.0} if draw.random() < 0.5 else {}
    leaf = {"step_s": {"name": "lognormal", "median": 0.05, "sigma": 0.8}}
    leaf |= {"slowdown": {"name": "pareto", "least": 1.0, "alpha": 1.5}}
    network = random_network(draw) if draw.random() < 0.3 else Network.of({"tier": tier, "leaf": leaf})
    wait = tuple(policy() for _ in range(case.workload.tree.depth))
    return Case(replace(case.workload, wait=wait), instantiate_network(network, case.workload.tree, case.workload.seed))


def script(case: Case, block: RoundBlock, row: int, repeated: int) -> Script:
    """Script of one global round of a case; rounds of its levels are numbered from 0."""
    tree, instance, schedule = case.workload.tree, case.instance, case.workload.schedule
    seed, depth = case.workload.seed, tree.depth
    rounds = [0, 1, *schedule.periods[:-1]]
    active, down, up, jitter = {}, {}, {}, {}
    compute, away = {}, {}
    begun = [0] * (depth + 1)
    for stage in block.stages:
        for level in range(stage.begin, depth + 1):
            number, counter = begun[level], stage.counter[level][row] + repeated * schedule.meetings[level]
            begun[level] += 1
            active[level, number] = stage.working(level)[row]
            down[level, number] = stage.downloads[level]
            for way, offset in (("down", 0), ("up", 1)):
                jitter_N = instance.link(level).jitter.sample_per_round(seed, np.array([2 * counter + offset]))[0]
                jitter |= {(level, node, number, way): float(jitter_N[node]) for node in range(tree.sizes[level])}
            down[level, number] = (stage.downloads[level].count_RN[row], stage.downloads[level].bytes_RN[row])
            if level == depth:
                compute |= {(n, number): v for n, v in enumerate(_computing(case, stage.steps_N, counter))}
                away |= {(n, number): v for n, v in enumerate(_absence(case, counter))}
        for level in range(depth, stage.end - 1, -1):
            up[level, begun[level] - 1] = stage.uploads[level].bytes_RN[row]
    wait = {
        level: (policy.deadline, policy.first)
        for level, policy in enumerate(case.workload.wait, 1)
        if not policy.waits_for_all
    }
    return Script(tree, rounds, active, down, up, _links(instance), jitter, _parents(instance), compute, away, wait)


def _links(instance: NetworkInstance) -> dict[tuple[int, int], Link]:
    return {
        (level, n): Link(e.up_N[n], e.down_N[n], e.latency_N[n], e.overhead_s_N[n], e.overhead_bytes_N[n])
        for level, e in enumerate(instance.links, 1)
        for n in range(instance.tree.sizes[level])
    }  # fmt: skip


def _parents(instance: NetworkInstance) -> dict[tuple[int, int], Parent]:
    return {
        (level - 1, n): Parent(e.pipe_up_M[n], e.pipe_down_M[n], e.merge_s_M[n], e.merge_s_per_child_M[n])
        for level, e in enumerate(instance.links, 1)
        for n in range(instance.tree.sizes[level - 1])
    }


def _computing(case: Case, steps_N: np.ndarray, counter: int) -> list[float]:
    devices, at = case.instance.devices, np.array([counter])
    pause, slow = (
        distribution.sample_per_round(case.workload.seed, at)[0] for distribution in (devices.pause, devices.slowdown)
    )
    chance = devices.loss_chance.sample_per_round(case.workload.seed, at)[0]
    seconds = []
    for leaf in range(case.workload.tree.leaves):
        tries, power = 1, devices.dropout_N[leaf]
        while chance[leaf] <= power and power > 0:
            tries, power = tries + 1, power * devices.dropout_N[leaf]
        seconds.append(pause[leaf] + tries * steps_N[leaf] * devices.step_s_N[leaf] * slow[leaf])
    return seconds


def _absence(case: Case, counter: int) -> list[float]:
    devices, at = case.instance.devices, np.array([counter])
    gone = devices.offline_chance.sample_per_round(case.workload.seed, at)[0] >= devices.availability_N
    return list(gone * devices.away.sample_per_round(case.workload.seed, at)[0])
