"""Captured programs give every client the outputs and gradients of its own module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.core.flat_module import FlatModule
from stratafl.engine import kernels
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.padding import can_pad
from stratafl.engine.compiler.program import BatchedProgram
from stratafl.engine.compiler.recurrent_rules import rnn_rule
from stratafl.engine.compiler.values import Context, PerClient
from stratafl.engine.gradients import CompiledGradients, GradientTask
from stratafl.models.networks import lstm, resnet18_gn
from tests.engine.selected import select


class Computed(nn.Module):
    """A module whose forward pass is a function of itself and its input."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rows_of(flat: FlatModule, clients: int) -> tuple[Tensor, Tensor]:
    x_P, b_Z = flat.flatten_module(flat.module)
    random = torch.Generator().manual_seed(3)
    x_CP = x_P + 0.3 * torch.randn(clients, len(x_P), generator=random, dtype=x_P.dtype)
    return x_CP, b_Z.repeat(clients, 1)


def difference(module: nn.Module, inputs_CB: Tensor) -> float:
    """Largest difference of outputs or gradients between a program and the clients' own modules."""
    torch.manual_seed(0)
    flat = FlatModule(module.double().train())
    program = BatchedProgram(flat, inputs_CB[0], backend=kernels.TORCH_BACKEND)
    x_CP, b_CZ = rows_of(flat, len(inputs_CB))
    named = {name: view.detach().requires_grad_() for name, view in flat.unflatten(x_CP, b_CZ).items()}
    outputs_CB = program(named, {}, inputs_CB, None)
    weights = [named[name] for name in flat.names]
    parts = torch.autograd.grad(outputs_CB.cos().sum(), weights, allow_unused=True, materialize_grads=True)
    worst = 0.0
    for client, inputs_B in enumerate(inputs_CB):
        x_P, b_Z = x_CP[client], b_CZ[client]
        expected_B = flat.call(x_P, b_Z, inputs_B)
        g_P = flat.gradient(x_P, b_Z, inputs_B, inputs_B, lambda outputs, _: outputs.cos().sum())
        got_P = torch.cat([part[client].flatten() for part in parts])
        off = (expected_B - outputs_CB[client]).detach()
        worst = max(worst, float(off.abs().max()), float((g_P - got_P).abs().max()))
    return worst


IMAGES = torch.randn(3, 2, 4, 8, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
VECTORS = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

IMAGE_LAYERS = {
    "strided": nn.Conv2d(4, 3, 3, stride=2, padding=1),
    "oblong": nn.Conv2d(4, 3, (1, 3), stride=(2, 1), padding=(0, 1)),
    "grouped": nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False),
    "same": nn.Conv2d(4, 3, 3, padding="same"),
    "valid": nn.Conv2d(4, 3, 3, padding="valid"),
    "fused": nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    "not fused": nn.Sequential(nn.Conv2d(4, 3, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, stride=1)),
    "overlapping pool": nn.Sequential(nn.Conv2d(4, 3, 3), nn.MaxPool2d(3, stride=2, padding=1)),
    "average pool": nn.Sequential(nn.Conv2d(4, 3, 3), nn.AvgPool2d(2), nn.GELU()),
    "adaptive pool": nn.Sequential(nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(6, 2)),
    "order of flatten": nn.Sequential(nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(90, 2)),
    "flatten the input": nn.Sequential(nn.Flatten(), nn.Linear(224, 2)),
    "group norm": nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.SiLU()),
    "plain group norm": nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Conv2d(4, 1, 1)),
    "layer norm": nn.Sequential(nn.Conv2d(4, 2, 3), nn.LayerNorm((2, 6, 5))),
    "channels joined": Computed(lambda m, x: torch.cat([m.a(x), x], dim=1), a=nn.Conv2d(4, 2, 1)),
    "scaled by channel": Computed(lambda m, x: m.a(x) * m.weight[:, None, None], a=nn.Conv2d(4, 6, 1)),
    "functional pool": Computed(lambda m, x: F.avg_pool2d(F.relu(m.a(x)), 2), a=nn.Conv2d(4, 6, 3)),
    "attention": Computed(
        lambda m, x: (lambda t: torch.softmax(t @ t.transpose(1, 2), dim=-1) @ t)(m.a(x).flatten(2)),
        a=nn.Conv2d(4, 2, 3),
    ),
}
VECTOR_LAYERS = {
    "linear": nn.Linear(6, 2),
    "rectified": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)),
    "shared layer": Computed(lambda m, x: m.a(torch.relu(m.a(x))), a=nn.Linear(6, 6)),
    "residual": Computed(lambda m, x: x + m.a(x).tanh(), a=nn.Linear(6, 6)),
    "own parameter": Computed(lambda m, x: x * m.weight + m.weight.exp()),
    "functional linear": Computed(lambda m, x: F.linear(x, m.a.weight, m.weight), a=nn.Linear(6, 6)),
    "matrix product": Computed(lambda m, x: x @ m.a.weight, a=nn.Linear(4, 6)),
    "views": Computed(lambda m, x: m.a(x.view(x.shape[0], 2, 3)).reshape(-1, 4), a=nn.Linear(3, 2)),
    "mean": Computed(lambda m, x: m.a(x).mean(-1, keepdim=True) - m.a(x), a=nn.Linear(6, 6)),
    "log softmax": nn.Sequential(nn.Linear(6, 4), nn.LogSoftmax(dim=1)),
    "softmax by method": Computed(lambda m, x: (x * m.weight).softmax(dim=1)),
    "item": Computed(lambda m, x: m.a(x)[:, 1:3] * 2.0, a=nn.Linear(6, 4)),
    "one feature": Computed(lambda m, x: m.a(x).squeeze(-1).unsqueeze(1), a=nn.Linear(6, 1)),
    "constant": Computed(lambda m, x: x * m.weight + torch.tensor([1.0] * 6, dtype=torch.float64)),
    "layer norm": nn.Sequential(nn.LayerNorm(6, bias=False), nn.Linear(6, 2)),
    "no dropout": nn.Sequential(nn.Dropout(0.0), nn.Identity(), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_images(name: str) -> None:
    assert difference(IMAGE_LAYERS[name], IMAGES) < 1e-12


@pytest.mark.parametrize("name", VECTOR_LAYERS)
def test_vectors(name: str) -> None:
    assert difference(VECTOR_LAYERS[name], VECTORS) < 1e-12


def test_sequences() -> None:
    codes = torch.randint(9, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    assert difference(lstm((5,), 9, embedding=3, hidden=4), codes) < 1e-12
    assert difference(nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(15, 2)), codes) < 1e-12


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}, {"num_layers": 2}], ids=str)
def test_cpu_lstm_gives_each_clients_gradient(threads: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    modules: list[Any] = [nn.LSTM(4, 5, batch_first=True, **options) for _ in range(3)]
    module = modules[0]
    states = module.num_layers * (1 + module.bidirectional)
    values = [torch.randn(3, 2, 6, 4), *torch.randn(2, 3, states, 2, 5)]
    values += [torch.stack(clients) for clients in zip(*(module.parameters() for module in modules), strict=True)]
    values = [value.detach().requires_grad_() for value in values]
    settings = module.bias, module.num_layers, 0.0, True, module.bidirectional, True
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, h, c, *weights = map(PerClient, values)
        results = rnn_rule(Context(3, None), torch.ops.aten.lstm.input, x, [h, c], weights, *settings)
        gradients = torch.autograd.grad(sum(result.tensor.cos().sum() for result in results), values)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    expected = []
    for client, module in enumerate(modules):
        inputs = [value[client].detach().requires_grad_() for value in values[:3]]
        outputs, state = module(inputs[0], tuple(inputs[1:]))
        loss = sum(result.cos().sum() for result in (outputs, *state))
        expected.append(torch.autograd.grad(loss, [*inputs, *module.parameters()]))
    for gradient, parts in zip(gradients, zip(*expected, strict=True), strict=True):
        assert torch.allclose(gradient, torch.stack(parts), rtol=1e-5, atol=1e-6)


def test_resnet() -> None:
    """A single client and float32, since the model is large."""
    torch.manual_seed(0)
    flat = FlatModule(resnet18_gn((3, 8, 8), 5))
    inputs, targets = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    stacked = CompiledGradients(GradientTask(flat, F.cross_entropy, inputs, targets, class_indices=True))
    x_P, b_Z = flat.flatten_module(flat.module)
    batch = ClientBatches(inputs[None], targets[None], torch.ones(1, 2, dtype=torch.bool), torch.tensor([2]).numpy())
    got_P = stacked(x_P[None], b_Z[None], batch)[0]
    expected_P = flat.gradient(x_P, b_Z, inputs, targets, F.cross_entropy)
    assert float((got_P - expected_P).norm() / expected_P.norm()) < 1e-4


MIXING = {
    "mean over samples": lambda m, x: x - x.mean(dim=0) * m.weight,
    "mean of all": lambda m, x: m.weight * x.mean(),
    "softmax over samples": lambda m, x: (x * m.weight).softmax(dim=0),
    "samples against samples": lambda m, x: (x * m.weight) @ x.transpose(0, 1),
    "a chosen sample": lambda m, x: x * m.weight + x[0],
    "the batch's length": lambda m, x: x * m.weight / x.shape[0],
    "rows that are not samples": lambda m, x: (x * m.weight).view(-1, 3),
    "another axis for the batch": lambda m, x: (x * m.weight).unsqueeze(0),
    "joined samples": lambda m, x: torch.cat([x * m.weight, x], dim=0),
    "sorted": lambda m, x: (x * m.weight).sort(dim=0).values,
    "features as a batch": lambda m, x: x.view(x.shape[0], 2, 3) * m.weight.view(2, 3) + x.mean(dim=1)[:, None],
}


@pytest.mark.parametrize("name", MIXING)
def test_batches_are_not_padded_if_samples_mix(name: str) -> None:
    mask_CB = torch.ones(len(VECTORS), VECTORS.shape[1], dtype=torch.bool)
    batch = ClientBatches(VECTORS, VECTORS, mask_CB, np.full(len(VECTORS), VECTORS.shape[1]))
    assert not can_pad(FlatModule(Computed(MIXING[name]).double()), batch)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), "stacked"),
        (nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 2)), "stacked"),
        (Computed(lambda m, x: x * m.weight * torch.rand(6)), "stacked"),
        (
            Computed(lambda m, x: x * m.weight * np.random.rand()),
            "loop: the module or loss draws random numbers by NumPy",
        ),
        (nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 2)), "stacked"),
        (Computed(lambda m, x: x * m.weight if x.sum() > 0 else -x * m.weight), "loop: what it does depends on values"),
        (
            Computed(lambda m, x: m.weight * torch.cumulative_trapezoid(x, dim=1)[:, :1]),
            "stacked",
        ),
        (nn.Sequential(nn.Linear(6, 2)), "stacked"),
    ],
)
def test_how_names_the_reason(module: nn.Module, reason: str) -> None:
    flat = FlatModule(module)
    inputs, targets = VECTORS[0].float(), torch.tensor([0, 1, 1, 0, 1])
    state = torch.get_rng_state()
    _, how = select(flat, F.cross_entropy, inputs, targets)
    assert how.startswith(reason) and ("mapped" in how) == ("mapped" in reason)
    assert torch.equal(torch.get_rng_state(), state), "the trial leaves the generator unchanged"


def test_forward_hooks_are_captured() -> None:
    layer = nn.Linear(6, 2)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    _, how = select(FlatModule(layer), F.cross_entropy, VECTORS[0].float(), torch.tensor([0, 1, 1, 0, 1]))
    assert how == "stacked"


def test_the_users_module_is_unchanged() -> None:
    module = Computed(lambda m, x: x * m.weight + torch.tensor([1.0] * 6))
    flat = FlatModule(module)
    before = set(vars(flat.module))
    BatchedProgram(flat, VECTORS[0].float())
    assert set(vars(flat.module)) == before


class Narrow(nn.Module):
    """A module that computes a part in single precision, as norms of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).float()
        return self.out((y * (1 + y.square().mean(dim=1, keepdim=True))).double()).float()


def test_a_module_partly_in_single_precision_is_stacked() -> None:
    torch.manual_seed(0)
    _, how = select(FlatModule(Narrow().double()), F.cross_entropy, VECTORS[0], torch.tensor([0, 1, 1, 0, 1]))
    assert how == "stacked"
