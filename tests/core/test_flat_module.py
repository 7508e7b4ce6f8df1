"""Modules as rows, and back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput, Topology
from stratafl.core.flat_module import FlatModule
from tests.flat import simulate


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.read = nn.Linear(3, 4, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.embed(x)[:, :3])


class Counter(nn.Module):
    """A module that replaces its buffer instead of writing into it."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        return self.linear(x)


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def samples(n: int = 12) -> tuple[Tensor, Tensor]:
    maker = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=maker), torch.arange(n) % 2


def same(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("make", [norm_net, Tied, Counter, lambda: nn.Linear(3, 2)])
def test_round_trip(make) -> None:
    torch.manual_seed(0)
    module = make()
    flat = FlatModule(module)
    x_P, b_B = flat.flatten_module(module)
    assert x_P.shape == (flat.parameters,)
    assert b_B.shape == (flat.buffers,)
    assert flat.parameters == sum(p.numel() for p in module.parameters())
    assert same(flat.build(x_P, b_B), module)
    other = flat.build(x_P + 1, b_B + 2)
    torch.testing.assert_close(flat.flatten_module(other)[0], x_P + 1)
    torch.testing.assert_close(flat.flatten_module(other)[1], b_B + 2)


def test_a_built_module_owns_its_values() -> None:
    flat = FlatModule(nn.Linear(3, 2))
    x_P = torch.zeros(flat.parameters)
    built = flat.build(x_P, torch.empty(0))
    x_P += 1
    assert built.weight.abs().sum() == 0
    with torch.no_grad():
        built.weight += 5
    assert x_P.tolist() == [1] * 8


def test_rows_are_in_the_module_s_order() -> None:
    module = nn.Linear(2, 1, dtype=torch.float64)
    flat = FlatModule(module)
    x_P, _ = flat.flatten_module(module)
    assert torch.equal(x_P, torch.cat([module.weight.flatten(), module.bias]))
    views = flat.unflatten(x_P, torch.empty(0))
    views["bias"][0] = 7
    assert x_P[2] == 7


def test_tied_weights_are_one() -> None:
    module = Tied()
    flat = FlatModule(module)
    assert flat.parameters == 12
    x_P, b_B = flat.flatten_module(module)
    built = flat.build(x_P * 2, b_B)
    assert built.read.weight is built.embed.weight
    inputs = samples()[0]
    torch.testing.assert_close(flat.call(x_P * 2, b_B, inputs), built(inputs))
    torch.testing.assert_close(built(inputs), 4 * module(inputs))


def test_frozen_parameters_are_not_in_the_row() -> None:
    module = norm_net()
    module[0].requires_grad_(False)
    flat = FlatModule(module)
    assert flat.parameters == 4 + 4 + 4 * 2 + 2
    inputs, labels = samples()
    result = simulate(module, (inputs, labels), [range(6), range(6, 12)], 2, periods=[3], rounds=1).run()
    assert torch.equal(result.module[0].weight, module[0].weight)
    assert not torch.equal(result.module[3].weight, module[3].weight)
    assert not result.module[0].weight.requires_grad
    assert result.communication.client(0).bytes_up == 4 * (18 + 8)


def test_gradient_is_autograd_s() -> None:
    module = norm_net().double()
    inputs, labels = samples()
    inputs = inputs.double()
    flat = FlatModule(module)
    flat.module.train()
    x_P, b_B = flat.flatten_module(module)
    g_P = flat.gradient(x_P, b_B, inputs, labels, F.cross_entropy)
    module.train()
    F.cross_entropy(module(inputs), labels).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(g_P, expected, rtol=0, atol=1e-15)
    assert not x_P.requires_grad
    torch.testing.assert_close(b_B, flat.flatten_module(module)[1])


def test_a_replaced_buffer_is_stored() -> None:
    module = Counter()
    flat = FlatModule(module)
    flat.module.train()
    x_P, b_B = flat.flatten_module(module)
    flat.call(x_P, b_B, samples(5)[0])
    flat.call(x_P, b_B, samples(7)[0])
    assert b_B.tolist() == [12]
    assert module.seen == 0


def test_a_non_persistent_buffer_is_in_the_row() -> None:
    module = Counter(persistent=False)
    flat = FlatModule(module)
    x_P, b_B = flat.flatten_module(module)
    assert b_B.tolist() == [0]
    assert flat.build(x_P, b_B + 3).seen == 3


# -- refused models ------------------------------------------------------------------------------


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double())


def mixed_buffers() -> nn.Module:
    module = nn.Linear(3, 2)
    module.register_buffer("offset", torch.zeros(2, dtype=torch.float64))
    return module


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (Empty, "no trainable parameters"),
        (lambda: nn.Linear(3, 2).requires_grad_(False), "no trainable parameters"),
        (lambda: nn.LazyLinear(2), "lazy"),
        (mixed, "one floating type"),
        (mixed_buffers, "one floating type"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "one floating type"),
    ],
    ids=["none", "all frozen", "lazy", "mixed", "mixed buffers", "complex"],
)
def test_models_that_cannot_be_a_row(make, fragment: str) -> None:
    with pytest.raises(InvalidInput, match=fragment) as caught:
        FlatModule(make())
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("initial", "field", "fragment"),
    [
        ({}, "model.initial", "lacks 'weight'"),
        ({"weight": torch.zeros(2, 3)}, "model.initial", "lacks 'bias'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "model.initial.weight", r"\(2, 3\)"),
        ({"weight": torch.zeros(6), "bias": torch.zeros(2)}, "model.initial.weight", r"\(2, 3\)"),
    ],
)
def test_initial_values_that_do_not_fit(initial: dict, field: str, fragment: str) -> None:
    with pytest.raises(InvalidInput, match=fragment) as caught:
        simulate(nn.Linear(3, 2), samples(), [range(12)], 1, periods=[1], rounds=1, initial=initial)
    assert caught.value.field == field


# -- through a run --------------------------------------------------------------------------------


def trained_alone(module: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> nn.Module:
    module = copy.deepcopy(module).train()
    sgd = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(steps):
        sgd.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        sgd.step()
    return module


PARTS = [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]]


def norm_run(module: nn.Module, rules: str = "hfedavg", rounds: int = 1, **settings):
    tree = Topology.of([2, 1])
    return simulate(
        module,
        samples(),
        PARTS,
        tree,
        rules,
        periods=[1, 3],
        rounds=rounds,
        batch=None,
        weights="samples",
        **settings,
    ).run()


def test_running_statistics_are_averaged() -> None:
    module = norm_net().double()
    inputs, labels = samples()
    alone = [trained_alone(module, inputs[p].double(), labels[p], 3) for p in PARTS]
    result = norm_run(module)
    for name in ("running_mean", "running_var"):
        client = np.stack([getattr(m[1], name).numpy() for m in alone])
        group = np.stack([(3 * client[0] + 5 * client[1]) / 8, client[2]])
        expected = (8 * group[0] + 4 * group[1]) / 12
        np.testing.assert_allclose(getattr(result.module[1], name), expected, rtol=1e-12)
    for i, client in enumerate(alone):
        client_model = result.model_of(result.tree.names[2][i])
        torch.testing.assert_close(client_model[1].running_var, client[1].running_var, rtol=1e-12, atol=0)
        torch.testing.assert_close(client_model[3].weight, client[3].weight, rtol=1e-12, atol=1e-14)


def test_integer_buffers_stay_as_they_were() -> None:
    module = norm_net()
    module[1].num_batches_tracked.fill_(7)
    result = norm_run(module)
    assert int(result.module[1].num_batches_tracked) == 7
    assert int(result.model_of("0/1")[1].num_batches_tracked) == 7


def test_clients_do_not_see_each_other_through_integer_buffers() -> None:
    """Cumulative batch norm uses its counter, which must not count other clients' steps."""
    module = norm_net().double()
    module[1].momentum = None
    inputs, labels = samples()
    last = trained_alone(module, inputs[PARTS[2]].double(), labels[PARTS[2]], 1)
    tree = Topology.of([2, 1])
    result = simulate(module, samples(), PARTS, tree, "hfedavg", periods=[1, 1], rounds=1, batch=None).run()
    client_model = result.model_of("1/0")
    torch.testing.assert_close(client_model[1].running_mean, last[1].running_mean)


@pytest.mark.parametrize("rules", ["hfedavg", "mtgc"])
def test_the_user_s_module_is_never_touched(rules: str) -> None:
    module = norm_net().eval()
    before = copy.deepcopy(module)
    result = norm_run(module, rules, test=samples())
    assert same(module, before)
    assert not any(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert not same(result.module, before)
    with torch.no_grad():
        result.module[0].weight.zero_()
    assert same(module, before)


def test_initial_values_replace_the_module_s() -> None:
    start = norm_net()
    other = norm_net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        other[1].running_mean.fill_(3)
    result = norm_run(start, initial=other.state_dict())
    expected = norm_run(other)
    assert torch.equal(result.models[0], expected.models[0])
    assert torch.equal(result.buffers[0], expected.buffers[0])


def test_initial_values_of_frozen_parameters_count_too() -> None:
    start, other = norm_net(), norm_net()
    for module in (start, other):
        module[0].requires_grad_(False)
    other[0].weight.mul_(0.5)
    result = norm_run(start, initial=other.state_dict())
    assert torch.equal(result.module[0].weight, other[0].weight)
