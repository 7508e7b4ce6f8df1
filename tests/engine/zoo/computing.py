"""Modules that compute in ways of their own: buffers moved by hand, matrices taken apart, caches,
layers left out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.zoo.entry import Zoo, fields, pair, reals

ZOO = Zoo()
net = ZOO.net
TABLE = reals(4)


@net("average of a weight in a buffer", TABLE, lambda: {"body": nn.Linear(4, 3), "slow": torch.randn(3, 4)})
def _(m, x):
    with torch.no_grad():
        m.slow.mul_(0.9).add_(m.body.weight, alpha=0.1)
    return m.body(x) + F.linear(x, m.slow).detach()


@net("rounded by what was seen", TABLE, lambda: pair() | {"top": torch.tensor(1.0)})
def _(m, x):
    h = m.a(x)
    m.top = torch.maximum(0.9 * m.top, h.detach().abs().max())
    return m.out(h + ((h / m.top * 127).round() * m.top / 127 - h).detach())


@net("matrices taken apart", reals(3, 3), lambda: {"w": nn.Parameter(torch.randn(3, 3)), "out": nn.Linear(16, 3)})
def _(m, x):
    square = x @ x.mT + m.w @ m.w.T + 3 * torch.eye(3).to(x)
    lower = torch.linalg.cholesky(square)
    parts = [
        torch.linalg.eigvalsh(square),
        torch.linalg.qr(square)[1].flatten(1),
        torch.linalg.slogdet(square)[1][:, None],
    ]
    parts += [torch.linalg.solve_triangular(lower, m.w[:, :1].expand(len(x), 3, 1), upper=False)[..., 0]]
    return m.out(torch.cat(parts, 1)) + torch.linalg.norm(m.w) + torch.linalg.matrix_norm(square)[:, None]


@net(
    "layers left out with probability zero",
    TABLE,
    lambda: {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), "out": nn.Linear(4, 3)},
    draws=True,
)
def _(m, x):
    for layer in m.layers:
        if torch.rand([]) < 0.0:
            continue
        x = x + layer(x)
    return m.out(x)


@net("cache that is empty at first", TABLE, pair)
def _(m, x):
    kept = x.new_empty(0)
    for part in m.a(x).chunk(2, 1):
        kept = torch.cat([kept, part], dim=-1)
    return m.out(kept)


@net(
    "written into what is alike for all", TABLE, lambda: {"w": nn.Parameter(torch.randn(2, 6)), "out": nn.Linear(4, 3)}
)
def _(m, x):
    upper = torch.triu_indices(4, 4, 1)
    turn = torch.eye(4).to(x).repeat(2, 1, 1)
    turn[:, upper[0], upper[1]] = m.w
    return m.out(x @ turn[0] @ turn[1])


@net("product of two inputs", fields(a=TABLE, b=reals(5)), lambda: {"body": nn.Bilinear(4, 5, 3)})
def _(m, a, b):
    return m.body(a, b)


@net("slices by their places", TABLE, pair)
def _(m, x):
    h = m.a(x)
    own, shared = h.detach().argsort(1)[0, :2], torch.tensor([1, 3], device=x.device)
    h = h.index_copy(1, own, 2 * h[:, :2]).index_fill(1, shared, 0.5).index_copy(-1, shared, h[:, 4:])
    return m.out(h + h.unfold(1, 2, 1).mean(-1).sum(1, keepdim=True))
