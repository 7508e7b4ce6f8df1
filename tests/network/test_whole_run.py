"""Costs of trained and stored runs against an event simulation of all their rounds: seconds,
joules, bytes, money and late nodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import Topology
from stratafl.core.participation import sample_participants
from stratafl.costs.costs import CumulativeCost, PriceableRun
from stratafl.network.instance import NetworkInstance, Quantity, instantiate_network
from stratafl.network.specification import Network
from stratafl.runs import read_run
from tests.flat import simulate
from tests.network.cases import quantity, random_tree
from tests.network.whole_run import Place, Run, Spent, Terms
from tests.slow import slow_unless

STEPS, SAMPLES = 2, 4
LINK = {"latency_s": "latency_N", "overhead_s": "overhead_s_N", "overhead_bytes": "overhead_bytes_N",
        "up_watts": "up_watts_N", "down_watts": "down_watts_N"}  # fmt: skip
PARENT = {"merge_s": "merge_s_M", "merge_s_per_child": "merge_s_per_child_M", "merge_watts": "merge_watts_M"}
RATES = {"up_mbit_s": "up_N", "down_mbit_s": "down_N"}
PIPES = {"pipe_up_mbit_s": "pipe_up_M", "pipe_down_mbit_s": "pipe_down_M"}


def random_network(random: np.random.Generator) -> dict[str, Any]:
    def some(chance: float, typical: dict[str, float]) -> dict[str, Any]:
        return {key: quantity(random, value) for key, value in typical.items() if random.random() < chance}

    def tier() -> dict[str, Any]:
        watts = {"up_watts": 2.0, "down_watts": 3.0, "merge_watts": 5.0, "parent_money_per_hour": 7.0}
        times = {"latency_s": 0.02, "jitter_s": 0.01, "overhead_s": 0.01, "merge_s": 0.02, "merge_s_per_child": 0.01}
        speeds = {"down_mbit_s": 0.01, "pipe_up_mbit_s": 0.006, "pipe_down_mbit_s": 0.01}
        paid = {"overhead_bytes": 50, "money_per_gb_up": 1e4, "money_per_gb_down": 2e4}
        return {"up_mbit_s": quantity(random, 0.004), **paid, **some(0.6, watts | times | speeds)}

    leaf = {"step_s": quantity(random, 0.05), **some(0.6, {"slowdown": 1.0, "pause_s": 0.05, "money_per_hour": 3.0})}
    leaf |= {"watts": 4.0, "availability": float(random.choice([0.5, 1.0])), "away_s": quantity(random, 0.2)}
    leaf["dropout"] = float(random.choice([0.0, 0.3]))
    nodes = {"0": {"up_mbit_s": 0.003, "pause_s": 0.1}} if random.random() < 0.5 else {}
    return {"tier": [tier() for _ in range(int(random.integers(1, 3)))], "leaf": leaf, "nodes": nodes}


def random_policies(random: np.random.Generator, depth: int, kind: str) -> list[dict[str, Any]]:
    """Random policies per edge level, root first; late updates are applied only below levels that
    do so, too."""
    if kind == "all":
        return [{}] * depth
    choices = [{}, {"deadline": 0.5}, {"deadline": 0.2, "first": 2}, {"first": 1}, {"first": 0.4}]
    policies: list[dict[str, Any]] = []
    for _ in range(depth):
        policy = choices[int(random.integers(len(choices)))]
        is_stopped = any(above and "late" not in above for above in policies)
        if kind == "counts" and policy and not is_stopped and random.random() < 0.8:
            policy = {**policy, "late": "counts"}
        policies.append(policy)
    return policies


def terms_of(tree: Topology, instance: NetworkInstance, periods: list[int], rounds: int, wait: list[dict[str, Any]],
             participation: list[Any], size: int) -> Terms:  # fmt: skip
    seed, devices = instance.seed, instance.devices

    def fixed(place: Place, key: str) -> float:
        level, node = place
        if key in ("steps", "step_s", "watts"):
            return float(
                {"steps": np.full(tree.leaves, STEPS), "step_s": devices.step_s_N, "watts": devices.watts_N}[key][node]
            )
        of_link, of_parent = LINK | RATES, PARENT | PIPES
        link, name = (
            (instance.link(level), of_link[key]) if key in of_link else (instance.link(level + 1), of_parent[key])
        )
        return float(getattr(link, name)[node]) / (125_000 if key in RATES | PIPES else 1)

    def anew(place: Place, key: str, round: int) -> float:
        level, node = place

        def of(quantity: Quantity, number: int = round) -> float:
            return float(quantity.sample_per_round(seed, np.array([number]))[0, node])

        if key.startswith("jitter"):
            return of(instance.link(level).jitter, 2 * round + key.endswith("up"))
        if key == "away_s":
            return of(devices.away) * (of(devices.offline_chance) >= devices.availability_N[node])
        if key == "tries":
            return 1 + sum(of(devices.loss_chance) <= devices.dropout_N[node] ** lost for lost in range(1, 60))
        return of({"pause_s": devices.pause, "slowdown": devices.slowdown}[key])

    children: dict[Place, list[Place]] = {
        (level, n): [] for level in range(tree.depth) for n in range(tree.sizes[level])
    }
    for level in range(1, tree.depth + 1):
        for node, parent in enumerate(tree.parents[level]):
            children[level - 1, int(parent)].append((level, node))

    def drawn(parent: Place, number: int, busy: list[Place]) -> list[Place]:
        level = parent[0] + 1
        busy_N = np.isin(np.arange(tree.sizes[level]), [node for _, node in busy])
        mask_N = sample_participants(participation[level - 1], tree, level, number, seed, busy_N)
        return [child for child in children[parent] if mask_N[child[1]]]

    policies = dict(enumerate(wait, 1))
    return Terms(children, [1, *periods[:-1]], rounds, policies, drawn, fixed, anew, size)


def money_of(tree: Topology, instance: NetworkInstance, spent: Spent, sent: list[float]) -> float:
    hours = spent.ends[-1] / 3600
    money = hours * instance.devices.per_hour
    for level in range(1, tree.depth + 1):
        link, message_bytes = (
            instance.link(level),
            sent[level - 1] / (spent.sent[level, "up"] + spent.sent[level, "down"]),
        )
        money += hours * link.parents_per_hour
        money += message_bytes * (
            spent.sent[level, "up"] * link.money_up_N[0] + spent.sent[level, "down"] * link.money_down_N[0]
        )
    return float(money)


@pytest.mark.parametrize("kind", ["all", "stops", "counts"])
@pytest.mark.parametrize("block", slow_unless(lambda block: block == 0, range(4)))
def test_a_stored_run_costs_what_it_does_in_an_event_simulation(kind: str, block: int, tmp_path: Path) -> None:
    was_late = 0
    for number in range(5 * block, 5 * block + 5):
        random = np.random.default_rng([number, len(kind)])
        tree = random_tree(random)
        periods = [*(int(period) for period in random.integers(1, 4, tree.depth - 1)), STEPS]
        rounds, network = int(random.integers(1, 4)), random_network(random)
        participation = [(None, 0.5, 1, 2)[int(random.integers(4))] for _ in range(tree.depth)]
        wait = random_policies(random, tree.depth, kind)
        inputs = torch.randn(SAMPLES * tree.leaves, 3, generator=torch.Generator().manual_seed(number))
        parts = [range(SAMPLES * leaf, SAMPLES * leaf + SAMPLES) for leaf in range(tree.leaves)]
        simulation = simulate(
            lambda: nn.Linear(3, 2), (inputs, (inputs[:, 0] > 0).long()), parts, tree, ["average"] * tree.depth,
            periods=periods, rounds=rounds, batch=2, participation=participation, seed=number,
            network=network, wait=[policy or "all" for policy in wait], save=tmp_path / str(number),
        )  # fmt: skip
        history = simulation.run(progress=False).history
        instance = instantiate_network(Network.of(network), tree, number)
        spent = Run(terms_of(tree, instance, periods, rounds, wait, participation, 8 * 4)).spent
        priced = PriceableRun.of(read_run(tmp_path / str(number))).cost_on(Network.of(network))
        compare(f"case {number}", tree, instance, spent, priced.up_to_round(rounds))
        np.testing.assert_allclose([record.clock_total for record in history], spent.ends, rtol=1e-9)
        late = [sorted(tree.names[level][node] for level, node in spent.late.get(round, ())) for round in range(rounds)]
        assert [sorted(record.late) for record in history] == late
        was_late += sum(map(len, late))
    assert (was_late > 0) == (kind != "all")


def compare(case: str, tree: Topology, instance: NetworkInstance, spent: Spent, total: CumulativeCost) -> None:
    assert math.isclose(total.seconds, spent.ends[-1], rel_tol=1e-9), case
    assert math.isclose(total.joules, spent.joules, rel_tol=1e-9), case
    overhead = [float(edges.overhead_bytes_N[0]) for edges in instance.links]
    sent = [
        (8 * 4 + overhead[level - 1]) * (spent.sent[level, "up"] + spent.sent[level, "down"])
        for level in range(1, tree.depth + 1)
    ]
    np.testing.assert_allclose(total.bytes, sent, rtol=1e-12, err_msg=case)
    assert math.isclose(total.money, money_of(tree, instance, spent, sent), rel_tol=1e-9), case
