"""Clients that do not take part, or whose updates are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stratafl import ParticipationContext, Result
from tests.problems import LeastSquares, root, without


def test_participation_by_function() -> None:
    problem = LeastSquares("2x2")
    seen: list[tuple[int, int]] = []

    def first_only(chance: ParticipationContext) -> np.ndarray:
        seen.append((chance.level, chance.round))
        return np.array([True, False, True, True])

    result = problem.run("hfedavg", periods=[2, 2], rounds=2, participation=first_only)
    assert seen == [(2, round) for round in range(4)]
    np.testing.assert_array_equal(result.models[2][1], problem.x0)
    assert torch.equal(result.models[1][0], result.models[2][0]), "alone, its model is the mean"


@pytest.mark.parametrize("restart", ["zero", "gradient", "keep"])
def test_corrections_cancel_out_also_when_a_group_loses_a_round(restart: str) -> None:
    """Group 0 has nobody in every other group round, so it trained less than its sibling."""

    def sometimes(chance: ParticipationContext) -> np.ndarray:
        return np.array([chance.round % 2 == 0] * 2 + [True] * 2)

    problem = LeastSquares("2x2", "samples")
    rules = {"name": "mtgc", "restart": restart}
    result = problem.run(rules, periods=[3, 2], rounds=3, participation=sometimes)
    for level in (1, 2):
        total = result.tree.mean(level, result.corrections[level - 1])
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-13)
    assert result.corrections[0].abs().min() > 1e-3


def poisoned(*clients: int, rules: str | dict, **settings) -> Result:
    """A run whose clients in the list have NaN in their data."""
    problem = LeastSquares("2x2", "samples")
    for client in clients:
        problem.A[client][0, 0] = np.nan
    return problem.run(rules, periods=[2, 2], **{"rounds": 3, **settings})


METHODS = pytest.mark.parametrize(
    "rules",
    [
        "hfedavg",
        "mtgc",
        {"name": "mtgc", "restart": "keep"},
        {"name": "mtgc", "restart": "gradient"},
        "scaffold",
        "feddyn",
        "fedprox",
        "median",
        "adam",
    ],
    ids=str,
)


@METHODS
def test_a_nan_client_counts_as_absent(rules) -> None:
    result = poisoned(1, rules=rules)
    assert result.refused == {"0/1": 6}
    assert result.history[0].refused == ("0/1", "0/1")
    expected = poisoned(rules=rules, participation=without(1))
    assert expected.refused == {}
    np.testing.assert_array_equal(root(result), root(expected))
    np.testing.assert_array_equal(result.models[1], expected.models[1])
    for actual, right in zip(result.corrections, expected.corrections, strict=True):
        if right is not None:
            np.testing.assert_array_equal(actual, right)


@METHODS
def test_a_group_of_nan_clients_keeps_its_model(rules) -> None:
    result = poisoned(0, 1, rules=rules)
    assert result.refused == {"0/0": 6, "0/1": 6}
    expected = poisoned(rules=rules, participation=without(0, 1))
    np.testing.assert_array_equal(root(result), root(expected))
    assert np.isfinite(root(result)).all()
    assert result.models[1].isfinite().all()


def test_a_group_of_nan_clients_has_the_root_s_last_model() -> None:
    problem = LeastSquares("2x2")
    problem.A[0][:] = problem.A[1][:] = np.nan
    sim = problem.simulation("hfedavg", rounds=2)
    next(sim)
    np.testing.assert_array_equal(sim.result().models[1][0], problem.x0)
    last = sim.result().models[0][0]
    next(sim)
    assert torch.equal(sim.result().models[1][0], last)
    assert not torch.equal(sim.result().models[0][0], last)


def test_when_all_are_nan_nothing_moves() -> None:
    result = poisoned(0, 1, 2, 3, rules="mtgc", rounds=2)
    np.testing.assert_array_equal(root(result), LeastSquares("2x2", "samples").x0)
    assert sum(result.refused.values()) == 16


def test_a_client_that_diverges_is_refused_then_too() -> None:
    problem = LeastSquares("1x2")
    problem.A[0] *= 1e200
    result = problem.run("hfedavg", rounds=1)
    assert set(result.refused) == {"0/0"}
    assert np.isfinite(root(result)).all()
