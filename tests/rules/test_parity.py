"""Parity of every method with a transcription of its equations: float64, full batches, to 1e-12."""

from __future__ import annotations

import numpy as np
import pytest

from stratafl import average, feddyn, fedprox, mtgc, place, scaffold
from stratafl.core.schedule import SyncSchedule
from tests import transcriptions
from tests.problems import PERIODS, SHAPES, LeastSquares, random_weights, root
from tests.slow import slow
from tests.transcriptions import Setting

LR, ROUNDS = 0.05, 4
CASES = pytest.mark.parametrize(
    ("shape", "weighted"),
    [
        (shape, weighted) if weighted == "given" else slow(shape, weighted)
        for shape in SHAPES
        for weighted in ("uniform", "samples", "given")
    ],
)
RESTARTS = pytest.mark.parametrize("restart", ["zero", "gradient", "keep"])


def problem_and_setting(shape: str, weighted: str) -> tuple[LeastSquares, Setting]:
    weights = random_weights(SHAPES[shape]) if weighted == "given" else weighted
    problem = LeastSquares(SHAPES[shape], weights)
    tree = problem.tree
    node: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): ()}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    weight = {}
    number = {}
    for level in range(1, tree.depth + 1):
        for i, parent in enumerate(tree.parents[level]):
            above = node[level - 1, int(parent)]
            siblings = children.setdefault(above, [])
            node[level, i] = (*above, len(siblings))
            siblings.append(node[level, i])
            weight[node[level, i]] = tree.weights[level][i]
            number[node[level, i]] = i
    setting = Setting(
        children=children,
        weight=weight,
        gradient=lambda leaf, x: problem.gradient(number[leaf], x),
        P=list(SyncSchedule.of(PERIODS[tree.depth], tree.depth).steps),
        lr=LR,
        x0=problem.x0,
        rounds=ROUNDS,
    )
    return problem, setting


def assert_close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def check_correction(problem, setting, rules, restart, corrected) -> None:
    x, nu, before = transcriptions.mtgc(setting, restart, corrected)
    result = problem.run(rules, rounds=ROUNDS, lr=LR)
    assert_close(root(result), x)
    for m in range(1, setting.M + 1):
        nodes = setting.level(m)
        assert_close(result.models[m].numpy(), np.stack([before[n] for n in nodes]))
        correction = result.corrections[m - 1]
        if m in corrected:
            assert_close(correction.numpy(), np.stack([nu[n] for n in nodes]))
        else:
            assert correction is None
    assert not np.allclose(x, setting.x0)


@CASES
@RESTARTS
def test_mtgc(shape: str, weighted: str, restart: str) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    rules = place({"name": "mtgc", "restart": restart}, setting.M)
    check_correction(problem, setting, rules, restart, set(range(1, setting.M + 1)))


@CASES
@RESTARTS
def test_local_correction(shape: str, weighted: str, restart: str) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    rules = place({"name": "local_correction", "restart": restart}, setting.M)
    check_correction(problem, setting, rules, restart, {setting.M})


@CASES
@RESTARTS
def test_group_correction(shape: str, weighted: str, restart: str) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    rules = place({"name": "group_correction", "restart": restart}, setting.M)
    check_correction(problem, setting, rules, restart, set(range(1, setting.M)))


@pytest.mark.parametrize("shape", ["depth 2", "depth 2, unequal"])
@RESTARTS
def test_algorithm_1_line_by_line(shape: str, restart: str) -> None:
    problem, setting = problem_and_setting(shape, "given")
    x, z, y = transcriptions.algorithm_1(setting, restart)
    result = problem.run([mtgc(restart), mtgc(restart)], rounds=ROUNDS, lr=LR)
    assert_close(root(result), x)
    assert_close(result.corrections[0].numpy(), np.stack([y[j] for j in setting.level(1)]))
    if restart == "keep":
        assert_close(result.corrections[1].numpy(), np.stack([z[i] for i in setting.level(2)]))


@CASES
@pytest.mark.parametrize(
    ("rule", "transcription"),
    [
        (average(), transcriptions.hfedavg),
        (fedprox(mu=0.3), lambda s: transcriptions.fedprox(s, mu=0.3)),
        (feddyn(alpha=0.7), lambda s: transcriptions.feddyn(s, alpha=0.7)),
        (scaffold(), transcriptions.scaffold),
    ],
    ids=["hfedavg", "fedprox", "feddyn", "scaffold"],
)
def test_methods_inside_groups(shape: str, weighted: str, rule, transcription) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    rules = [average()] * (setting.M - 1) + [rule]
    expected = transcription(setting)
    assert_close(root(problem.run(rules, rounds=ROUNDS, lr=LR)), expected)
    assert np.linalg.norm(expected - setting.x0) > 1e-3
