"""Modules with layers that the loss does not reach."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.zoo.entry import Zoo, codes, pair, reals, three

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE, IMAGE, TEXT = reals(4), reals(2, 6, 6), codes(9, 5)


@net("layer whose result is unused", TABLE, three)
def _(m, x):
    h = F.relu(m.a(x))
    m.b(h)
    return m.out(h)


@net("layer that is never called", TABLE, three)
def _(m, x):
    return m.out(F.relu(m.a(x)))


@net(
    "unused convolution and norm",
    IMAGE,
    lambda: {"conv": nn.Conv2d(2, 3, 3), "aux": nn.Conv2d(3, 2, 1), "norm": nn.GroupNorm(1, 3), "out": nn.Linear(3, 3)},
)
def _(m, x):
    y = m.conv(x)
    m.aux(m.norm(y))
    return m.out(y.mean((2, 3)))


@net("unused embedding", TEXT, lambda: {"used": nn.Embedding(9, 3), "other": nn.Embedding(9, 3)})
def _(m, x):
    m.other(x).sum()
    return m.used(x).mean(1)


@net("part of an output unused", TABLE, lambda: {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "out": nn.Linear(3, 3)})
def _(m, x):
    used, unused = m.a(x).chunk(2, dim=1)
    torch.tanh(m.b(torch.cat([used, unused], 1)))
    return m.out(used)


@net("layer cut off by detach", TABLE, three)
def _(m, x):
    return m.out(F.relu(m.b(F.relu(m.a(x)).detach())))


@net("branch cut off by detach", TABLE, three)
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.out(h + m.b(h).detach())


@net("layer cut off by an integer cast", TABLE, lambda: {"h": nn.Linear(4, 5), "e": nn.Embedding(8, 3)})
def _(m, x):
    return m.e((torch.sigmoid(m.h(x)) * 7.99).long()).mean(1)


@net("layer cut off by a rounding", TABLE, three)
def _(m, x):
    return m.out(m.b(torch.round(3 * m.a(x))))


@net("layer cut off by argmax", TABLE, lambda: {"h": nn.Linear(4, 5), "e": nn.Embedding(5, 3), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.e(m.h(x).argmax(1)) + m.out(x)


@net("layer cut off by a comparison", TABLE, pair)
def _(m, x):
    h = m.a(x)
    return m.out((h > 0).to(h.dtype))


@net("layer multiplied by zero", TABLE, three)
def _(m, x):
    h = m.a(x)
    return m.out(F.relu(h) + 0.0 * m.b(h))


@net("layer behind a dead ReLU", TABLE, lambda: three() | {"shift": torch.tensor(100.0)})
def _(m, x):
    return m.out(F.relu(m.b(m.a(x)) - m.shift)) + m.out(m.a(x))


def zeroed(head: nn.Linear) -> nn.Linear:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@net("backbone without gradients under a head of zeros", TABLE, lambda: three() | {"out": zeroed(nn.Linear(6, 3))})
def _(m, x):
    with torch.no_grad():
        h = F.relu(m.b(F.relu(m.a(x))))
    return m.out(h)


class Features(nn.Module):
    """A backbone whose forward is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


add("decorated backbone without gradients", TABLE, lambda: nn.Sequential(Features(), nn.Linear(6, 3)))
add("head of zeros", TABLE, lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), zeroed(nn.Linear(6, 3))))


@net("gradients switched off and on", TABLE, three)
def _(m, x):
    torch.set_grad_enabled(False)
    h = m.a(x)
    torch.set_grad_enabled(True)
    return m.out(torch.tanh(m.b(h)))


@net("straight through", TABLE, pair)
def _(m, x):
    h = torch.sigmoid(m.a(x))
    return m.out(h + (h.round() - h).detach())
