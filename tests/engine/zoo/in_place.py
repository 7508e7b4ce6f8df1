"""Modules that change their input, their weights, their buffers or what is still read, in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.zoo.entry import Net, Zoo, codes, pair, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE, IMAGE, TEXT = reals(4), reals(2, 6, 6), codes(9, 5)

# -- in place --------------------------------------------------------------------------------------


@net("input changed in place", TABLE, pair)
def _(m, x):
    x -= 1
    return m.out(torch.tanh(m.a(x)))


@net("input rectified in place", TABLE, pair)
def _(m, x):
    return m.out(torch.tanh(m.a(x.relu_())))


@net("input filled in place", TABLE, pair)
def _(m, x):
    x[:, 0] = 0.5
    x[x > 1] = 1
    return m.out(torch.tanh(m.a(x)))


@net("view of the input changed in place", IMAGE, lambda: {"out": nn.Linear(72, 3)})
def _(m, x):
    flat = x.view(len(x), -1)
    flat *= 0.5
    return m.out(x.flatten(1) + flat)


@net("codes changed in place", TEXT, lambda: {"embed": nn.Embedding(9, 3)})
def _(m, x):
    x[:, 0] = 8
    x.clamp_(min=1)
    return m.embed(x).mean(1)


add(
    "first layer in place",
    TABLE,
    lambda: nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
)
add(
    "first layer a dropout in place",
    TABLE,
    lambda: nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Linear(4, 3)),
    draws=True,
)
add(
    "first layer in place, on images",
    IMAGE,
    lambda: nn.Sequential(nn.Hardtanh(inplace=True), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)),
)


@net("alias changed in place", TABLE, lambda: pair() | {"identity": nn.Identity()})
def _(m, x):
    y = m.a(x)
    z = m.identity(y)
    z += 0.02
    return m.out(torch.tanh(y))


def gated() -> dict[str, nn.Module | nn.Parameter]:
    """With a gate that starts closed, so that what it lets through shows only at other weights."""
    return {**pair(), "identity": nn.Identity(), "gate": nn.Parameter(torch.zeros(()))}


ALIASES = {
    "identity": lambda m, y: m.identity(y),
    "view": lambda m, y: y.view(-1, 2, 3),
    "reshape": lambda m, y: torch.reshape(y, (-1, 3, 2)),
    "flatten": lambda m, y: y.flatten(1),
    "transpose": lambda m, y: y.unsqueeze(1).transpose(1, 2),
    "slice": lambda m, y: y[:, 1:4],
    "column": lambda m, y: y[:, 2],
    "ellipsis": lambda m, y: y[..., :2],
    "contiguous": lambda m, y: y.contiguous(),
    "squeeze": lambda m, y: torch.unsqueeze(y, 1).squeeze(1),
    "cast": lambda m, y: y.double() if y.dtype == torch.float64 else y,
    "detach": lambda m, y: y.detach(),
}
for _name, _alias in ALIASES.items():

    @net(f"alias by {_name}, changed behind a gate", TABLE, gated)
    def _(m, x, alias=_alias):
        y = m.a(x)
        z = alias(m, y)
        z += m.gate**2
        return m.out(torch.tanh(y))


@net(
    "product in place behind a gate",
    IMAGE,
    lambda: {"conv": nn.Conv2d(2, 3, 3), "gate": nn.Parameter(torch.zeros(())), "out": nn.Linear(3, 3)},
)
def _(m, x):
    y = m.conv(x)
    z = y.contiguous()
    z *= 1 + m.gate**2
    return m.out(torch.sigmoid(y).mean(dim=(2, 3)))


@net("input changed in place behind a gate", TABLE, gated)
def _(m, x):
    z = m.identity(x)
    z += m.gate.detach() ** 2
    return m.out(torch.tanh(m.a(x)))


@net("result in place, read before", TABLE, pair)
def _(m, x):
    y = m.a(x)
    z = y + 1
    y += 0.5
    return m.out(torch.tanh(z) + y)


@net("alias by a dropout of nothing", TABLE, lambda: pair() | {"drop": nn.Dropout(0.0).eval()})
def _(m, x):
    y = m.a(x)
    z = m.drop(y)
    z *= 1.5
    return m.out(torch.tanh(y + z))


@net("alias by contiguous", TABLE, pair)
def _(m, x):
    y = m.a(x)
    z = y.contiguous()
    z += 0.3
    return m.out(torch.sigmoid(y))


@net("view changed in place", TABLE, pair)
def _(m, x):
    y = m.a(x)
    y.view(-1, 2, 3)[:, 0] *= 2
    return m.out(torch.sigmoid(y))


@net("slice changed in place", TABLE, pair)
def _(m, x):
    y = m.a(x)
    y[:, 1:3] += 1
    y[:, 0].mul_(0.5)
    return m.out(torch.sigmoid(y))


@net("flattened view changed in place", IMAGE, lambda: {"conv": nn.Conv2d(2, 2, 3), "out": nn.Linear(32, 3)})
def _(m, x):
    y = m.conv(x)
    flat = y.flatten(1)
    flat -= 0.5
    return m.out(flat.tanh() + y.view(len(x), -1))


@net("reshaped, then changed in place", TABLE, pair)
def _(m, x):
    y = m.a(x)
    z = y.reshape(len(x), 2, 3)
    z.tanh_()
    return m.out(y)


@net("function in place on what is used again", TABLE, pair)
def _(m, x):
    y = m.a(x)
    z = F.leaky_relu(y, 0.3, inplace=True)
    return m.out(y + z)


@net("layer in place on what is used again", TABLE, lambda: pair() | {"act": nn.ReLU(inplace=True)})
def _(m, x):
    y = m.a(x)
    z = m.act(y)
    return m.out(y + 2 * z)


@net("written into zeros", TABLE, pair)
def _(m, x):
    y = x.new_zeros(len(x), 6)
    y[:, :3] = m.a(x)[:, 3:]
    y[:, 3:] = x[:, :3]
    return m.out(y)


@net("scattered", TABLE, pair)
def _(m, x):
    h = m.a(x)
    return m.out(torch.zeros_like(h).scatter_add(1, h.argsort(1), h))


@net("weight bounded in the forward pass", TABLE, pair)
def _(m, x):
    with torch.no_grad():
        m.a.weight.clamp_(-0.3, 0.3)
    return m.out(torch.tanh(m.a(x)))


@net("weight normalised through its data", TABLE, pair)
def _(m, x):
    m.out.weight.data = F.normalize(m.out.weight.data, dim=1)
    return m.out(torch.tanh(m.a(x)))


# -- buffers ---------------------------------------------------------------------------------------


@net("buffer averaged in place", TABLE, lambda: pair() | {"mean": torch.zeros(6)})
def _(m, x):
    h = m.a(x)
    if m.training:
        m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return m.out(h - m.mean)


@net("buffer replaced", TABLE, lambda: pair() | {"mean": torch.ones(6)})
def _(m, x):
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.out(h / (1 + m.mean.square()))


@net("buffer that counts", TABLE, lambda: pair() | {"step": torch.tensor(3)})
def _(m, x):
    m.step += 1
    return m.out(torch.tanh(m.a(x))) / m.step


@net(
    "buffer of infinities", TABLE, lambda: pair() | {"mask": torch.tensor([0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0])}
)
def _(m, x):
    return m.out((m.a(x) + m.mask).softmax(1))


@net("buffer of truths", TABLE, lambda: pair() | {"keep": torch.tensor([True, False, True, True, False, True])})
def _(m, x):
    return m.out(torch.where(m.keep, m.a(x), 0.1))


def passing() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module.register_buffer("scale", torch.tensor(2.0), persistent=False)
    return Net(lambda m, x: m.body(x) * m.body.scale, body=module)


add("buffer that is not kept", TABLE, passing)


@net("quantised codes", TABLE, lambda: {"a": nn.Linear(4, 2), "book": torch.randn(5, 2), "out": nn.Linear(2, 3)})
def _(m, x):
    h = m.a(x)
    near = torch.cdist(h.detach(), m.book).argmin(1)
    with torch.no_grad():
        m.book.index_add_(0, near, 0.1 * (h - m.book[near]))
    return m.out(h + (m.book[near] - h).detach())
