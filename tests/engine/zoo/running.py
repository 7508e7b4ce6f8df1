"""Modules whose run is not the same each time: recomputed, decided by values, random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.engine.zoo.entry import Zoo, pair, reals, three

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE = reals(4)

# -- recomputed ------------------------------------------------------------------------------------

for _reentrant in (False, True):

    @net(f"recomputed, {'re-entrant' if _reentrant else 'not re-entrant'}", TABLE, three)
    def _(m, x, reentrant=_reentrant):
        h = m.a(x)
        return m.out(checkpoint(lambda h: torch.tanh(m.b(h)), h, use_reentrant=reentrant))

    @net(f"recomputed with dropout, {'re-entrant' if _reentrant else 'not re-entrant'}", TABLE, three, draws=True)
    def _(m, x, reentrant=_reentrant):
        h = m.a(x)
        return m.out(checkpoint(lambda h: F.dropout(m.b(h).tanh(), 0.5), h, use_reentrant=reentrant))


@net(
    "recomputed in parts",
    TABLE,
    lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), "out": nn.Linear(6, 3)},
)
def _(m, x):
    return m.out(checkpoint_sequential(m.body, 2, x, use_reentrant=False))


@net("recomputed as a whole", TABLE, lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))})
def _(m, x):
    return checkpoint(m.body, x, use_reentrant=False)


@net(
    "recomputed with batch norm",
    TABLE,
    lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), "out": nn.Linear(6, 3)},
    pairs=True,
)
def _(m, x):
    return m.out(checkpoint(m.body, x, use_reentrant=False))


# -- values decide ---------------------------------------------------------------------------------


@net("decided by a value", TABLE, three)
def _(m, x):
    h = m.a(x)
    return m.out(m.b(h) if h.sum() > 0 else torch.tanh(h))


@net("decided by a weight", TABLE, three)
def _(m, x):
    h = m.a(x)
    return m.out(m.b(h) if float(m.a.weight[0, 0].detach()) > 0 else torch.tanh(h))


@net("decided by the batch's length", TABLE, pair)
def _(m, x):
    return m.out(m.a(x) if len(x) > 2 else torch.tanh(m.a(x)))


@net("decided by training", TABLE, pair)
def _(m, x):
    return m.out(torch.tanh(m.a(x)) if m.training else m.a(x))


@net("decided for each sample", TABLE, three)
def _(m, x):
    h = m.a(x)
    return m.out(torch.where(h.sum(1, keepdim=True) > 0, m.b(h), h))


@net("as often as the data say", TABLE, three)
def _(m, x):
    h = m.a(x)
    for _ in range(int(x.abs().sum()) % 3):
        h = torch.tanh(m.b(h))
    return m.out(h)


@net("early exit", TABLE, three)
def _(m, x):
    h = F.relu(m.a(x))
    for _ in range(3):
        if h.norm() < 2:
            break
        h = 0.5 * m.b(h).tanh()
    return m.out(h)


# -- random numbers --------------------------------------------------------------------------------


@net("stochastic depth", TABLE, three, draws=True)
def _(m, x):
    h = m.a(x)
    for _ in range(3):
        if torch.rand((), device=x.device) < 0.5:
            h = h + torch.tanh(m.b(h))
    return m.out(h)


@net("paths dropped for each sample", TABLE, three, draws=True)
def _(m, x):
    h = m.a(x)
    keep = torch.bernoulli(torch.full((len(x), 1), 0.5, dtype=x.dtype, device=x.device))
    return m.out(h + keep / 0.5 * torch.tanh(m.b(h)))


@net("Gumbel softmax", TABLE, pair, draws=True)
def _(m, x):
    return m.out(F.gumbel_softmax(m.a(x), tau=0.7, hard=True))


@net("noise added", TABLE, pair, draws=True)
def _(m, x):
    return m.out(torch.tanh(m.a(x + 0.1 * torch.randn_like(x))))


@net("noisy weights", TABLE, pair, draws=True)
def _(m, x):
    return m.out(F.linear(x, m.a.weight + 0.1 * torch.randn_like(m.a.weight), m.a.bias).relu())


@net("functional dropout whatever the mode", TABLE, pair, draws=True)
def _(m, x):
    return m.out(F.dropout(m.a(x), 0.5))


@net("samples shuffled", TABLE, pair, draws=True)
def _(m, x):
    h = m.a(x)
    return m.out(torch.tanh(h + 0.3 * h[torch.randperm(len(h), device=x.device)]))
