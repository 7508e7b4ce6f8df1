"""FedDyn's proximal term before or behind a client's clip, in every engine and on every level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from stratafl import average, clip, corrections, decay, feddyn
from stratafl.core.client_update import ClientUpdate, CorrectionFn, GradientTransform
from stratafl.core.optimizer import constant
from tests import transcriptions
from tests.deploy.trees import Deployed, simulation
from tests.engine.pairs import CLOSE, compare
from tests.flat import client_options
from tests.problems import SHAPES, LeastSquares, root
from tests.rules.test_parity import LR, ROUNDS, assert_close, problem_and_setting
from tests.slow import slow

ALPHA, NORM, DECAY = 0.7, 1.2, 0.05
RELEASED, CLIPPED = feddyn(ALPHA, pull="after_clip"), feddyn(ALPHA)
every_engine = pytest.mark.parametrize("engine", ["loop", "stacked", slow("vmap")])


@every_engine
@pytest.mark.parametrize("weighted", [slow("uniform"), "given"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_released_order_by_hand(shape: str, weighted: str, engine: str) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    expected = transcriptions.feddyn_as_released(setting, ALPHA, NORM, DECAY)
    chain = client_options(LR, clip_norm=NORM, weight_decay=DECAY)
    rules = [average()] * (setting.M - 1)
    sim = problem.simulation([*rules, RELEASED], rounds=ROUNDS, lr=chain, engine=engine)
    assert_close(root(sim.run()), expected)
    assert 0 < sim.engine.clipped_steps < ROUNDS * setting.P[0] * problem.tree.leaves
    clipped = problem.run([*rules, CLIPPED], rounds=ROUNDS, lr=chain, engine=engine)
    assert np.abs(root(clipped) - expected).max() > 1e-2


@every_engine
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "chain",
    [slow(client_options(LR)), client_options(LR, weight_decay=DECAY, momentum=0.5)],
    ids=["plain", "momentum"],
)
def test_without_a_clip_the_order_is_the_same(chain: ClientUpdate, shape: str, engine: str) -> None:
    problem, setting = problem_and_setting(shape, "given")
    one, other = (
        problem.run([rule] * setting.M, rounds=ROUNDS, lr=chain, engine=engine) for rule in (RELEASED, CLIPPED)
    )
    np.testing.assert_array_equal(root(one), root(other))


def halved(direction: Tensor, x: Tensor, correct: CorrectionFn) -> Tensor:
    """A user's transform that calls `correct`."""
    return 0.5 * correct(x, direction)


def cut(direction: np.ndarray, norm: float) -> np.ndarray:
    return direction * min(1.0, norm / np.linalg.norm(direction))


Step = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(gradient, model, parent's model) -> direction, in a first round, with zero linear terms."""
CHAINS: dict[str, tuple[tuple[GradientTransform, ...], Step]] = {
    "decay before the clip": (
        (corrections, decay(DECAY), clip(NORM)),
        lambda g, x, start: cut(g - ALPHA * start + DECAY * x, NORM) + ALPHA * x,
    ),
    "corrections behind the clip": (
        (clip(NORM), corrections),
        lambda g, x, start: cut(g, NORM) + ALPHA * (x - start),
    ),
    "two clips": (
        (corrections, clip(2 * NORM), decay(DECAY), clip(NORM), decay(DECAY)),
        lambda g, x, start: cut(cut(g - ALPHA * start, 2 * NORM) + DECAY * x, NORM) + (ALPHA + DECAY) * x,
    ),
    "a user's transform before the clip": (
        (halved, clip(NORM), decay(DECAY)),
        lambda g, x, start: cut(0.5 * (g - ALPHA * start), NORM) + (ALPHA + DECAY) * x,
    ),
    "a user's transform and no clip": (
        (halved, decay(DECAY)),
        lambda g, x, start: 0.5 * (g + ALPHA * (x - start)) + DECAY * x,
    ),
    "no corrections": (
        (clip(NORM), decay(DECAY)),
        lambda g, x, start: cut(g, NORM) + DECAY * x,
    ),
}  # fmt: skip


@every_engine
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_a_user(name: str, engine: str) -> None:
    transforms, direction = CHAINS[name]
    problem = LeastSquares(1)
    x = problem.x0
    for _ in range(5):
        x = x - LR * direction(problem.gradient(0, x), x, problem.x0)
    result = problem.run([RELEASED], periods=[5], rounds=1, lr=ClientUpdate(constant(LR), transforms), engine=engine)
    assert_close(result.models[1][0].numpy(), x)


def shrinks(x: Tensor, g: Tensor, edge) -> Tensor:
    return 0.5 * g * (1 + (x - edge.model).abs())


@pytest.mark.parametrize(
    "rules",
    [
        [RELEASED],
        [RELEASED, RELEASED, RELEASED],
        [RELEASED, "mtgc"],
        ["mtgc", "fedprox", RELEASED],
        [CLIPPED, RELEASED],
        [average()._replace(local=shrinks), RELEASED],
    ],
    ids=["depth 1", "every edge", "above", "beside fedprox", "both orders", "beside a user's local"],
)
@pytest.mark.parametrize(
    "chain",
    [
        client_options(0.2, clip_norm=0.3, weight_decay=0.01, momentum=0.5),
        ClientUpdate(constant(0.2), (halved, clip(0.3), lambda direction, x, correct: direction * x.cos())),
    ],
    ids=["usual", "own"],
)
def test_engines_agree_on_every_edge(rules: list, chain: ClientUpdate) -> None:
    assert compare(rules=rules, depth=len(rules), leaf=chain) < CLOSE


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_deployment_and_simulation_agree(depth: int) -> None:
    settings = {"leaf": client_options(0.2, clip_norm=0.3, weight_decay=0.01), "weights": "samples"}
    sim = simulation({"name": "feddyn", "alpha": ALPHA, "pull": "after_clip"}, depth, **settings)
    deployed = Deployed(sim, by_samples=True).run()
    final = sim.run().models[0][0]
    torch.testing.assert_close(deployed.model(), final, rtol=0, atol=1e-6)
    clipped = simulation({"name": "feddyn", "alpha": ALPHA}, depth, **settings).run().models[0][0]
    assert (clipped - final).abs().max() > 1e-3
