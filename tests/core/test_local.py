"""A client's step: order of transforms, momentum, learning rates, corrections that divide by
them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import clip, corrections, decay, mtgc
from stratafl.core.client_update import GradientTransform
from stratafl.core.optimizer import constant, cosine, step_decay
from tests.flat import client_options, simulate, update_of
from tests.problems import LeastSquares, half_squares, root


def directed(transforms: tuple[GradientTransform, ...], g: Tensor, x: Tensor, added: Tensor) -> list[list[float]]:
    for transform in transforms:
        g = transform(g, x, lambda model, direction: direction + added)
    return g.tolist()


def test_corrections_come_before_the_clip_and_decay_after_it() -> None:
    g, x = torch.tensor([[3.0, 0.0]]), torch.tensor([[10.0, 20.0]])
    added = torch.tensor([[0.0, 4.0]])
    chain = client_options(0.1, clip_norm=1.0, weight_decay=0.5)
    # (3, 4) has length 5: clipped to (0.6, 0.8), then half of the model on top
    assert directed(update_of(chain).transforms, g, x, added) == [pytest.approx([5.6, 10.8])]


def test_users_can_change_the_order_of_stages() -> None:
    g, x = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    added = torch.tensor([[1.0, 1.0]])
    assert directed((clip(1.0), corrections), g, x, added) == [pytest.approx([2, 1])]
    assert directed((decay(1.0), clip(1.0)), g, x, added) == [pytest.approx([0.6, 0.8])]


def test_clip_treats_rows_independently() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, 2.0]])
    clipped = clip(2.0)(rows, rows, lambda x, d: d)
    expected = torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [0.0, 2.0]])
    torch.testing.assert_close(clipped, expected)


def test_the_chain_has_requested_stages_only() -> None:
    assert update_of(client_options(0.1)).transforms == (corrections,)
    assert update_of(client_options(0.1, clip_norm=2)).transforms == (corrections, clip(2))
    assert update_of(client_options(0.1, weight_decay=0.1)).transforms == (corrections, decay(0.1))


# -- momentum -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "clip_norm"),
    [(0.0, 0.0, None), (0.9, 0.0, None), (0.9, 0.1, None), (0.5, 0.1, 0.3)],
)
def test_a_client_alone_is_torch_sgd(momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    problem = LeastSquares(1)
    inputs, targets = problem.data
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(problem.x0))
    for _ in range(2):
        # a model from the parent resets the momentum
        sgd = torch.optim.SGD(module.parameters(), 0.05, momentum, weight_decay=weight_decay)
        for _ in range(6):
            sgd.zero_grad()
            half_squares(module(inputs), targets).backward()
            if clip_norm is not None:
                length = module.weight.grad.norm()
                module.weight.grad *= min(1.0, clip_norm / float(length))
            sgd.step()
    chain = client_options(0.05, clip_norm=clip_norm, weight_decay=weight_decay, momentum=momentum)
    result = problem.run("hfedavg", periods=[6], rounds=2, lr=chain)
    np.testing.assert_allclose(root(result), module.weight.detach()[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_lr_sum_is_the_displacement_by_unit_gradients(momentum: float, steps: int) -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    chain = client_options(step_decay(0.2, every=1, factor=0.5), momentum=momentum)
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    data = torch.ones(1, 1), torch.ones(1, 1)
    sim = simulate(module, data, [[0]], 1, "hfedavg", periods=[steps], rounds=2, leaf=chain, loss=total)
    before = module.weight.item()
    for round in range(2):
        next(sim)
        after = sim.result().models[0].item()
        assert before - after == pytest.approx(update_of(chain).lr_sum(round, steps), rel=1e-12)
        before = after
    assert update_of(chain).lr_sum(0, 0) == 0
    assert update_of(client_options(0.1)).lr_sum(0, 5) == pytest.approx(0.5)


def test_mtgc_with_momentum_reaches_the_minimiser() -> None:
    problem = LeastSquares([2, 1], "samples", dim=2)
    chain = client_options(0.08, momentum=0.9)
    result = problem.run([mtgc("keep")] * 2, periods=[2, 3], rounds=50, lr=chain)
    np.testing.assert_allclose(root(result), problem.minimiser(), rtol=0, atol=1e-8)
    averaged = problem.run("hfedavg", periods=[2, 3], rounds=30, lr=chain)
    assert np.abs(root(averaged) - problem.minimiser()).max() > 1e-2


# -- learning rates -------------------------------------------------------------------------------


def test_learning_rate_schedules() -> None:
    assert [constant(0.3)(round) for round in (0, 5)] == [0.3, 0.3]
    steps = step_decay(1.0, every=2, factor=0.1)
    assert [steps(round) for round in range(5)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    wave = cosine(1.0, rounds=10, floor=0.2)
    assert [wave(0), wave(5), wave(10), wave(99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    falling = [wave(round) for round in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert cosine(0.5, rounds=4)(4) == pytest.approx(0, abs=1e-16)


def test_the_learning_rate_of_each_round_is_recorded() -> None:
    problem = LeastSquares(2)
    sim = problem.simulation("hfedavg", rounds=3, lr=client_options(step_decay(0.1, every=1, factor=0.5)))
    assert [record.lr for record in sim] == pytest.approx([0.1, 0.05, 0.025])


def test_leaf_takes_a_function_of_the_round() -> None:
    chain = client_options(lambda round: 0.1 / (1 + round))
    assert update_of(chain).lr_sum(4, 3) == pytest.approx(0.06)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_corrections_divide_by_the_rates_that_were_used(momentum: float) -> None:
    """MTGC by hand with a learning rate that changes between rounds, corrections kept."""
    problem = LeastSquares([2, 1])
    E, H, rounds = 3, 2, 3
    groups = [[0, 1], [2]]
    rates = [0.05 * 0.5**t for t in range(rounds)]
    # displacement of H steps with unit gradients: sum over steps of 1 + m + ... + m^h
    unit = sum(math.fsum(momentum**k for k in range(h + 1)) for h in range(H))
    x = problem.x0
    z, y = np.zeros((3, 3)), np.zeros((2, 3))
    for lr in rates:
        at = [x, x]
        for _ in range(E):
            for j, members in enumerate(groups):
                ends = {}
                for i in members:
                    local, velocity = at[j], 0.0
                    for _ in range(H):
                        direction = problem.gradient(i, local) + z[i] + y[j]
                        velocity = momentum * velocity + direction
                        local = local - lr * velocity
                    ends[i] = local
                at[j] = np.mean(list(ends.values()), axis=0)
                for i in members:
                    z[i] += (ends[i] - at[j]) / (lr * unit)
        x = (at[0] + at[1]) / 2
        for j in range(2):
            y[j] += (at[j] - x) / (lr * unit * E)
    chain = client_options(step_decay(0.05, every=1, factor=0.5), momentum=momentum)
    result = problem.run([mtgc("keep")] * 2, periods=[E, H], rounds=rounds, lr=chain)
    np.testing.assert_allclose(root(result), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.corrections[0], y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.corrections[1], z, rtol=0, atol=1e-12)
