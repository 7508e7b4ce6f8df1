"""Exact counts of messages and bytes, by formula."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import ParticipationContext, Result, RoundResult, average, mtgc, scaffold
from stratafl.metrics.communication import Total
from tests.flat import simulate
from tests.problems import LeastSquares

E, H, T = 3, 2, 4
SHAPE = [2, 3, 1]
GROUPS, CLIENTS = 3, 6
SIZE = 3 * 8
"""Bytes of a model: three parameters in float64."""


def run(rules, shape=SHAPE, periods=(E, H), rounds: int = T, **settings) -> Result:
    problem = LeastSquares(shape)
    return problem.run(rules, periods=list(periods), rounds=rounds, **settings)


def models(total: Total) -> tuple[float, float, float, float]:
    """Messages up and down, then bytes up and down in units of a model."""
    up, down = total.bytes_up / SIZE, total.bytes_down / SIZE
    return total.messages_up, total.messages_down, up, down


def check(result: Result, clients: tuple, groups: tuple) -> None:
    account = result.communication
    for number in range(CLIENTS):
        assert models(account.client(number)) == clients
    for number in range(GROUPS):
        assert models(account.node(1, number)) == groups
    assert models(account.level(2)) == tuple(CLIENTS * count for count in clients)
    assert models(account.level(1)) == tuple(GROUPS * count for count in groups)
    assert models(account.level(0)) == (0, 0, 0, 0)
    assert account.bytes_per_client == SIZE * (clients[2] + clients[3])
    last = result.history[-1]
    assert last.bytes_per_client == account.bytes_per_client
    assert last.traffic == {str(level): vars(account.level(level)) for level in (1, 2)}


def test_hfedavg_sends_one_model_each_way() -> None:
    check(run("hfedavg"), (E * T, E * T, E * T, E * T), (T, T, T, T))


def test_mtgc_adds_the_group_s_correction_once_per_global_round() -> None:
    # a group learns the root's model at once, to correct with it: one more than it trained from
    check(run("mtgc"), (E * T, E * T, E * T, E * T + T - 1), (T, T + 1, T, T + 1))


def test_local_correction_costs_nothing() -> None:
    check(run("local_correction"), (E * T, E * T, E * T, E * T), (T, T, T, T))


def test_group_correction_costs_one_vector_per_global_round() -> None:
    result = run("group_correction")
    check(result, (E * T, E * T, E * T, E * T + T - 1), (T, T + 1, T, T + 1))


def test_a_restart_from_gradients_adds_one_exchange() -> None:
    result = run({"name": "mtgc", "restart": "gradient"})
    # each of the T restarts: a gradient up; in one message down, the mean gradient and the
    # correction from above
    clients = (E * T + T, E * T + T, E * T + T, E * T + 2 * T)
    # the root's edge starts from gradients only once
    groups = (T + 1, T + 2, T + 1, T + 2)
    check(result, clients, groups)


def test_rejected_gradients_were_sent() -> None:
    """They are counted as rejected updates are."""
    simulation = LeastSquares(SHAPE).simulation({"name": "mtgc", "restart": "gradient"})
    federation, sent = simulation.federation, simulation.traffic.communication.up
    federation.begin_round()
    gradient_NP = torch.ones(CLIENTS, 3, dtype=torch.float64)
    gradient_NP[0] = torch.nan
    federation.restart_from_gradients(gradient_NP)
    assert sent.messages[2].tolist() == [1] * CLIENTS


def test_kept_corrections_need_the_group_s_model_at_every_sync() -> None:
    result = run({"name": "mtgc", "restart": "keep"})
    # E group models to correct with and the model from above to start from
    check(result, (E * T, E * T + T, E * T, E * T + T + T - 1), (T, T + 1, T, T + 1))


def test_scaffold_doubles_both_directions() -> None:
    check(run("scaffold"), (E * T, E * T, 2 * E * T, 2 * E * T), (T, T, T, T))


def test_scaffold_everywhere() -> None:
    result = run([scaffold(), scaffold()])
    clients = (E * T, E * T, 2 * E * T, 2 * E * T + T - 1)
    check(result, clients, (T, T, 2 * T, 2 * T))


@pytest.mark.parametrize("rules", ["fedprox", "feddyn", "median", "momentum", "adam", "yogi"])
def test_what_costs_the_same_as_averaging(rules: str) -> None:
    check(run(rules), (E * T, E * T, E * T, E * T), (T, T, T, T))


def test_depth_1() -> None:
    averaging = run("hfedavg", 4, [5]).communication
    assert models(averaging.client(0)) == (T, T, T, T)
    corrected = run("mtgc", 4, [5]).communication
    assert models(corrected.client(0)) == (T, T + 1, T, T + 1)


def test_depth_3() -> None:
    E1, E2, rounds = 2, 3, 2
    periods = [E1, E2, 1]
    account = run("hfedavg", "2x2x2", periods, rounds).communication
    for level, meetings in {1: rounds, 2: E1 * rounds, 3: E1 * E2 * rounds}.items():
        assert models(account.level(level)) == (2**level * meetings,) * 4
    account = run("mtgc", "2x2x2", periods, rounds).communication
    meetings = E1 * E2 * rounds
    # corrections from above come with each model from above, but for the first
    relayed = E1 * rounds - 1
    assert models(account.client(0)) == (meetings, meetings, meetings, meetings + relayed)
    meetings = E1 * rounds
    assert models(account.node(2, 0)) == (meetings, meetings, meetings, meetings + rounds - 1)
    assert models(account.node(1, 0)) == (rounds, rounds + 1, rounds, rounds + 1)


@pytest.mark.parametrize("chosen", [1, 2, 0.5])
def test_who_stays_away_sends_nothing(chosen) -> None:
    result = run("hfedavg", participation=chosen, seed=3)
    per_group = [1, 2, 1] if chosen == 0.5 else [min(chosen, n) for n in SHAPE]
    participations = sum(per_group) * E * T
    account = result.communication
    assert models(account.level(2)) == (participations,) * 4
    assert len(set(account.up.messages[2].tolist())) > 1 or sum(per_group) == CLIENTS
    np.testing.assert_array_equal(account.up.messages[2], account.down.messages[2])


def test_clients_of_an_absent_group_send_nothing() -> None:
    def only_the_second(chance: ParticipationContext) -> np.ndarray:
        return np.arange(GROUPS) == 1

    account = run("hfedavg", participation=[only_the_second, None]).communication
    assert account.up.messages[1].tolist() == [0, T, 0]
    assert account.up.messages[2].tolist() == [0, 0, E * T, E * T, E * T, 0]
    assert account.down.messages[2].tolist() == [0, 0, E * T, E * T, E * T, 0]


def test_buffers_are_counted() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    P, B = 3 * 4 + 4 + 4 + 4 + 4 * 2 + 2, 4 + 4
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for rules, extra in {"hfedavg": 0, "mtgc": 1}.items():
        result = simulate(module, data, parts, "2x2", rules, periods=[2, 1], rounds=2).run()
        client = result.communication.client(3)
        assert (client.messages_up, client.messages_down) == (4, 4)
        assert client.bytes_up == 4 * 4 * (P + B)
        assert client.bytes_down == 4 * 4 * (P + B) + 4 * extra * P
        assert client.bytes == client.bytes_up + client.bytes_down


def test_the_account_grows_round_by_round() -> None:
    sim = LeastSquares(SHAPE).simulation([average(), mtgc()], periods=[E, H], rounds=3)
    records = list(sim)
    assert [record.bytes_per_client for record in records] == [SIZE * 2 * E * t for t in (1, 2, 3)]
    for level in ("1", "2"):
        counts = [list(record.traffic[level].values()) for record in records]
        assert all(one[name] < other[name] for one, other in pairwise(counts) for name in range(4))
    stored = json.loads(json.dumps(asdict(records[-1])))
    assert RoundResult.of(stored) == records[-1]
    del stored["traffic"]
    assert RoundResult.of(stored).traffic == {}, "a record of an earlier version"
