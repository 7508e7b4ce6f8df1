"""Modules with frozen, evaluating, tied and shared layers, and with parameters of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.zoo.entry import Net, Zoo, codes, frozen, pair, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE, IMAGE, TEXT = reals(4), reals(2, 6, 6), codes(9, 5)

# -- frozen, evaluating, tied, shared --------------------------------------------------------------


add("frozen first layer", TABLE, lambda: nn.Sequential(frozen(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)))
add(
    "frozen middle layer",
    TABLE,
    lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), frozen(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)),
)
add(
    "frozen convolution and norm",
    IMAGE,
    lambda: nn.Sequential(
        frozen(nn.Conv2d(2, 3, 3)),
        nn.GroupNorm(1, 3),
        frozen(nn.GroupNorm(3, 3)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    ),
)
add(
    "frozen embedding",
    TEXT,
    lambda: nn.Sequential(nn.Embedding.from_pretrained(torch.randn(9, 4)), nn.Flatten(), nn.Linear(20, 3)),
)
add(
    "frozen recurrent",
    reals(5, 4),
    lambda: Net(
        lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=frozen(nn.GRU(4, 3, batch_first=True)), out=nn.Linear(3, 3)
    ),
)


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


add("frozen weight, trained bias", TABLE, half_frozen)
add(
    "given in evaluation mode",
    TABLE,
    lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval(),
    draws=True,
)
add(
    "given in evaluation mode, with batch norm",
    TABLE,
    lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval(),
    pairs=True,
)


def partly_evaluating() -> nn.Module:
    module = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )
    module[1].eval()
    module[2].eval()
    return module


add("one norm evaluating, one training", TABLE, partly_evaluating, pairs=True)


def frozen_backbone() -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(frozen(body.eval()), nn.Linear(6, 3))


add("frozen backbone that evaluates", TABLE, frozen_backbone)


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), nn.Linear(4, 3))


add("tied weights", TABLE, tied)


def tied_and_turned() -> nn.Module:
    embed, out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    out.weight = embed.weight
    return Net(lambda m, x: m.out(torch.tanh(m.embed(x)).mean(1)), embed=embed, out=out)


add("embedding tied to the output", TEXT, tied_and_turned, targets=codes(9))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Tanh(), layer, nn.Linear(4, 3))


add("layer used three times", TABLE, shared)


@net(
    "convolution used in a loop",
    IMAGE,
    lambda: {"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.GroupNorm(1, 2), "out": nn.Linear(2, 3)},
)
def _(m, x):
    for _ in range(3):
        x = x + F.relu(m.norm(m.conv(x)))
    return m.out(x.mean((2, 3)))


@net("two names for one layer", TABLE, lambda: dict.fromkeys(("a", "b"), nn.Linear(4, 4)) | {"out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(m.a(x).relu() + m.b(x.flip(1)))


@net("weight used by function and by layer", TABLE, pair)
def _(m, x):
    return m.out(m.a(x).tanh()) + F.linear(x, m.a.weight[:3])


def shared_batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 6), norm, nn.Linear(6, 3))


add("batch norm used twice", TABLE, shared_batch_norm, pairs=True)


# -- parameters of one's own -----------------------------------------------------------------------


@net(
    "scale and shift",
    TABLE,
    lambda: {"scale": nn.Parameter(torch.ones(4)), "shift": nn.Parameter(torch.zeros(())), "out": nn.Linear(4, 3)},
)
def _(m, x):
    return m.out(x * m.scale + m.shift)


@net("scalar temperature", TABLE, lambda: {"out": nn.Linear(4, 3), "log": nn.Parameter(torch.tensor(0.5))})
def _(m, x):
    return m.out(x) / m.log.exp()


@net(
    "functions of parameters",
    IMAGE,
    lambda: {
        "w": nn.Parameter(torch.randn(3, 2, 3, 3) / 3),
        "b": nn.Parameter(torch.zeros(3)),
        "v": nn.Parameter(torch.randn(3, 3)),
    },
)
def _(m, x):
    return F.linear(F.conv2d(x, m.w, m.b, stride=2).flatten(2).mean(-1), m.v)


@net(
    "sums by letters",
    TABLE,
    lambda: {"core": nn.Parameter(torch.randn(4, 2, 2) / 2), "w": nn.Parameter(torch.randn(2, 2, 3))},
)
def _(m, x):
    return torch.einsum("bpq,pqo->bo", torch.tanh(torch.einsum("bi,ipq->bpq", x, m.core)), m.w)


@net(
    "low rank beside a frozen weight",
    TABLE,
    lambda: {
        "base": frozen(nn.Linear(4, 3)),
        "down": nn.Parameter(torch.randn(2, 4)),
        "up": nn.Parameter(torch.zeros(3, 2)),
    },
)
def _(m, x):
    return m.base(x) + x @ m.down.T @ m.up.T


@net("weight that is masked", TABLE, lambda: pair() | {"mask": (torch.arange(24).view(6, 4) % 3 > 0).float()})
def _(m, x):
    return m.out(F.relu(F.linear(x, m.a.weight * m.mask, m.a.bias)))


@net("standardised filters", IMAGE, lambda: {"conv": nn.Conv2d(2, 3, 3), "out": nn.Linear(3, 3)})
def _(m, x):
    w = m.conv.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return m.out(F.conv2d(x, w, m.conv.bias).mean((2, 3)))


@net("penalty in the output", TABLE, pair)
def _(m, x):
    return m.out(F.relu(m.a(x))) * (1 + 0.1 * sum(p.square().sum() for p in m.parameters()))


@net("output that sees every sample", TABLE, pair)
def _(m, x):
    h = m.a(x)
    return m.out((h - h.mean(0)) / (h.std(0, correction=0) + 0.1))


@net("attention between samples", TABLE, pair)
def _(m, x):
    h = m.a(x)
    return m.out((h @ h.T).softmax(1) @ h)


@net("samples turned round", TABLE, pair)
def _(m, x):
    h = m.a(x)
    return m.out(torch.tanh(h + 0.5 * h.flip(0)))


@net("scaled by the batch's length", TABLE, pair)
def _(m, x):
    return m.out(m.a(x).relu()) / x.shape[0]
