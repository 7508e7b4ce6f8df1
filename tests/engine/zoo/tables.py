"""Small networks for tables, points and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.zoo.entry import Net, Zoo, codes, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE = reals(4)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


add(
    "regression",
    TABLE,
    lambda: nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 2)),
    targets=reals(2),
    loss=squares,
)
add("regression with a loss that is a module", TABLE, lambda: nn.Linear(4, 2), targets=reals(2), loss=nn.HuberLoss())


@net(
    "tied autoencoder",
    TABLE,
    lambda: {"code": nn.Linear(4, 2), "back": nn.Parameter(torch.zeros(4))},
    targets=reals(4),
    loss=squares,
)
def _(m, x):
    return F.linear(torch.tanh(m.code(x)), m.code.weight.t(), m.back)


def _evidence(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, spread, back = outputs.split([2, 2, 4], dim=1)
    apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return (F.mse_loss(back, targets, reduction="none").sum(1) + apart).mean()


@net(
    "variational autoencoder",
    TABLE,
    lambda: {"code": nn.Linear(4, 4), "back": nn.Linear(2, 4)},
    targets=reals(4),
    loss=_evidence,
    draws=True,
)
def _(m, x):
    mean, spread = m.code(x).chunk(2, dim=1)
    z = mean + torch.exp(spread / 2) * torch.randn_like(mean)
    return torch.cat([mean, spread, m.back(z)], dim=1)


@net(
    "mixture of experts",
    TABLE,
    lambda: {"gate": nn.Linear(4, 3), "experts": nn.ModuleList(nn.Linear(4, 3) for _ in range(3))},
)
def _(m, x):
    best, which = m.gate(x).softmax(-1).topk(2, dim=-1)
    every = torch.stack([expert(x) for expert in m.experts], dim=1)
    chosen = every.gather(1, which[..., None].expand(-1, -1, 3))
    return (best[..., None] * chosen).sum(1)


@net(
    "experts that see their own samples",
    TABLE,
    lambda: {"gate": nn.Linear(4, 2), "experts": nn.ModuleList(nn.Linear(4, 3) for _ in range(2))},
)
def _(m, x):
    scores = m.gate(x).softmax(-1)
    which = scores.argmax(-1)
    y = x.new_zeros(len(x), 3)
    for number, expert in enumerate(m.experts):
        mine = (which == number).nonzero().flatten()
        y.index_add_(0, mine, expert(x[mine]) * scores[mine, number, None])
    return y


@net(
    "graph convolution",
    reals(6, 4),
    lambda: {"edges": (torch.rand(6, 6) < 0.5).float(), "a": nn.Linear(4, 4), "b": nn.Linear(4, 3)},
)
def _(m, x):
    near = m.edges / m.edges.sum(1, keepdim=True).clamp(min=1)
    return m.b(near @ F.elu(near @ m.a(x))).mean(1)


@net(
    "points",
    reals(6, 3),
    lambda: {"each": nn.Sequential(nn.Conv1d(3, 5, 1), nn.ReLU(), nn.Conv1d(5, 4, 1)), "out": nn.Linear(4, 3)},
)
def _(m, x):
    return m.out(m.each(x.transpose(2, 1)).amax(2))


@net(
    "crosses of features",
    TABLE,
    lambda: {"w": nn.ParameterList(nn.Parameter(torch.randn(4, 4) / 2) for _ in range(2)), "out": nn.Linear(4, 3)},
)
def _(m, x):
    y = x
    for w in m.w:
        y = x * (y @ w) + y
    return m.out(y)


@net("factorisation machine", codes(9, 4), lambda: {"first": nn.Embedding(9, 3), "second": nn.Embedding(9, 3 * 2)})
def _(m, x):
    v = m.second(x).view(len(x), 4, 3, 2)
    return m.first(x).sum(1) + 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)


@net("table of kinds and numbers", reals(4), lambda: {"kinds": nn.Embedding(4, 2), "out": nn.Linear(5, 3)})
def _(m, x):
    kind = x[:, 0].abs().long().clamp(max=3)
    return m.out(torch.cat([m.kinds(kind), x[:, 1:]], 1))


@net("prototypes", TABLE, lambda: {"embed": nn.Linear(4, 2), "centres": nn.Parameter(torch.randn(3, 2))})
def _(m, x):
    return -torch.cdist(m.embed(x), m.centres)


@net("cosine head", TABLE, lambda: {"embed": nn.Linear(4, 4), "w": nn.Parameter(torch.randn(3, 4))})
def _(m, x):
    return 5 * F.cosine_similarity(m.embed(x)[:, None], m.w[None], dim=-1)


@net("siamese", reals(2, 4), lambda: {"tower": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out((m.tower(x[:, 0]) - m.tower(x[:, 1])).abs())


@net("hyper-network", TABLE, lambda: {"make": nn.Linear(4, 12)})
def _(m, x):
    return torch.bmm(m.make(x).view(-1, 3, 4), x.unsqueeze(-1)).squeeze(-1)


@net("polynomials", TABLE, lambda: {"spline": nn.Parameter(torch.randn(4, 3, 3) / 3)})
def _(m, x):
    return torch.einsum("bid,iod->bo", torch.stack([x, x**2, x.sin()], dim=-1), m.spline)


@net("equilibrium", TABLE, lambda: {"w": nn.Linear(4, 4), "out": nn.Linear(4, 3)})
def _(m, x):
    z = torch.zeros_like(x)
    for _ in range(5):
        z = torch.tanh(0.3 * m.w(z) + x)
    return m.out(z)


@net("solved", TABLE, lambda: {"a": nn.Parameter(torch.randn(4, 4) / 8), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(torch.linalg.solve(torch.eye(4, dtype=x.dtype, device=x.device) + m.a, x.unsqueeze(-1)).squeeze(-1))


add("dictionary of towers", TABLE, lambda: Net(
    lambda m, x: m.towers["a"](x[:, :2]) + m.towers["b"](x[:, 2:]) * m.scales["b"],
    towers=nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}),
    scales=nn.ParameterDict({"b": nn.Parameter(torch.ones(3))}),
))  # fmt: skip
