"""Modules with hooks, memory and other ways of calling, and losses."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.zoo.entry import Zoo, pair, reals, three

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE = reals(4)

# -- hooks, memory, other ways of calling ----------------------------------------------------------


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module[0].register_forward_hook(lambda layer, given, result: result * 2)
    module[2].register_forward_pre_hook(lambda layer, given: (given[0] + 0.1,))
    return module


def hooked_backward() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module[1].register_full_backward_hook(lambda layer, given, result: tuple(0.5 * each for each in given))
    return module


def hooked_output() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module[0].register_forward_hook(_halving)
    return module


def _halving(layer: nn.Module, given: tuple, result: Tensor) -> None:
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient / 2)


add("hooks forward", TABLE, hooked)
add("hooks backward", TABLE, hooked_backward)
add("hooks on an output", TABLE, hooked_output)


def hooked_parameter() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    module[0].weight.register_hook(lambda gradient: gradient * (torch.arange(4, device=gradient.device) > 0))
    return module


add("hooks on a parameter", TABLE, hooked_parameter)


def patched() -> nn.Module:
    """A layer whose forward was replaced, which adds nothing at first."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module[0].extra = nn.Parameter(torch.zeros(6))
    module[0].forward = types.MethodType(_with_extra, module[0])
    return module


def _with_extra(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias) + layer.extra.square()


add("layer with another forward", TABLE, patched)


class Doubled(nn.Linear):
    """A layer of the library with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Plain(nn.Linear):
    """A layer of the library under another name."""


add("heirs of a layer", TABLE, lambda: nn.Sequential(Doubled(4, 6), nn.Tanh(), Plain(6, 3)))


@net("keeps its activations", TABLE, pair)
def _(m, x):
    m.seen = m.a(x)
    return m.out(torch.tanh(m.seen))


class Reversed(torch.autograd.Function):
    """Turns gradients round."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@net("a gradient of its own", TABLE, three)
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.out(h + m.b(Reversed.apply(h)))


@net("gradient of its own output", TABLE, three)
def _(m, x):
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(m.a(z)).sum(), z, create_graph=True)
    return m.out(m.a(slope))


@net("in half of the width, as complex numbers", TABLE, pair)
def _(m, x):
    z = torch.view_as_complex(m.a(x).view(len(x), 3, 2))
    return m.out(torch.view_as_real(z * z.conj().roll(1, dims=1)).flatten(1))


@net("computed in single precision", TABLE, pair)
def _(m, x):
    return m.out(torch.tanh(m.a(x).float()).to(x.dtype))


@net("more arguments than it is given", TABLE, pair)
def _(m, x, scale=None, *, shift=0.1):
    return m.out(torch.tanh(m.a(x) + shift)) * (1 if scale is None else scale)


@net("sorted", TABLE, pair)
def _(m, x):
    return m.out(m.a(x).sort(dim=1).values.cumsum(1))


@net(
    "lists of parts",
    TABLE,
    lambda: {
        "layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]),
        "weights": nn.ParameterList([torch.ones(()) for _ in range(3)]),
        "out": nn.Linear(4, 3),
    },
)
def _(m, x):
    parts = []
    for layer, weight in zip(m.layers, m.weights, strict=True):
        x = torch.relu(layer(x)) + x
        parts.append(weight * x)
    return m.out(sum(parts))


@net("scalar weight of no axes alone", reals(3), lambda: {"w": nn.Parameter(torch.tensor(1.0))})
def _(m, x):
    return x * m.w


@net("parameter of no elements", TABLE, lambda: pair() | {"none": nn.Parameter(torch.zeros(0, 4))})
def _(m, x):
    return torch.cat([m.out(m.a(x).relu()), F.linear(x, m.none)], 1)


@net("arithmetic", TABLE, lambda: {**pair(), "w": nn.Parameter(torch.rand(6) + 0.5)})
def _(m, x):
    y = torch.add(m.a(x), m.w, alpha=2)
    y = torch.maximum(1 - y, 2.0 ** (0.3 * y)) + y.abs().sqrt() / torch.exp(y).clamp(0.5, 2)
    return m.out(y.sub(m.w, alpha=0.5) - torch.pow(m.w, 2) * y.sigmoid())


@net("softmax of another type", TABLE, pair)
def _(m, x):
    return m.out(F.softmax(m.a(x), dim=-1, dtype=torch.float32).to(x.dtype))


@net("parts of parameters", TABLE, lambda: {"w": nn.Parameter(torch.randn(3, 6, 4) / 3), "out": nn.Linear(6, 3)})
def _(m, x):
    y = F.linear(x, m.w[0]) + x @ m.w[-1].T + m.w[:, :, 0].sum(0) + m.w[1:, 0, None].mean()
    return m.out(y[:, [0, 2, 1, 3, 5, 4]].tanh())


@net("computed from a buffer alone", TABLE, lambda: {**pair(), "scale": torch.linspace(1, 2, 6)})
def _(m, x):
    return m.out(torch.tanh(m.a(x) * (m.scale / m.scale.sum())))


@net("computed from a parameter alone", TABLE, lambda: {**pair(), "scale": nn.Parameter(torch.linspace(1, 2, 6))})
def _(m, x):
    return m.out(torch.tanh(m.a(x) * (m.scale / m.scale.mean(0))))


@net("tensor that is no buffer", TABLE, pair)
def _(m, x):
    return m.out(m.a(x) * torch.linspace(1, 2, 6, dtype=x.dtype, device=x.device))


@net("maximum kept in a buffer", TABLE, lambda: {**pair(), "top": torch.tensor(1.8)})
def _(m, x):
    m.top.copy_(torch.maximum(m.top, x.detach().abs().max()))
    return m.out(m.a(x).tanh() / m.top)


# -- losses ----------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _some_ignored(count: int, random: torch.Generator) -> Tensor:
    labels = torch.randint(3, (count,), generator=random)
    return torch.where(torch.arange(count) % 4 == 1, -100, labels)


def _looking(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * (2.0 if targets[0].item() == 0 else 1.0)


def _changing(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs -= 0.5
    return (outputs * F.one_hot(targets, 3)).square().sum() / len(targets)


def _focal(outputs: Tensor, targets: Tensor) -> Tensor:
    sure = F.softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return ((1 - sure) ** 2 * F.cross_entropy(outputs, targets, reduction="none")).mean()


def _detaching(outputs: Tensor, targets: Tensor) -> Tensor:
    sure = outputs.softmax(1).amax(1).detach()
    return (sure * F.cross_entropy(outputs, targets, reduction="none")).mean()


LOSSES = {
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "weighted by class": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 3.0]).to(o)),
    "summed": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "focal": _focal,
    "of shape one": lambda o, t: F.cross_entropy(o, t).reshape(1, 1),
    "of margins": F.multi_margin_loss,
    "with pairs of samples": lambda o, t: F.cross_entropy(o, t) + torch.cdist(o, o).square().mean(),
    "that looks at values": _looking,
    "that changes the outputs": _changing,
    "that detaches": _detaching,
    "a module": nn.CrossEntropyLoss(),
}  # fmt: skip
for _name, _loss in LOSSES.items():
    add(f"loss {_name}", TABLE, perceptron, loss=_loss)
add("loss with ignored labels", TABLE, perceptron, targets=_some_ignored, pairs=True)
add(
    "loss of shares of classes",
    TABLE,
    perceptron,
    targets=lambda n, random: torch.rand(n, 3, generator=random, dtype=torch.float64).softmax(1),
)
add(
    "loss of several labels",
    TABLE,
    perceptron,
    targets=lambda n, random: torch.randint(2, (n, 3), generator=random).double(),
    loss=F.binary_cross_entropy_with_logits,
)
