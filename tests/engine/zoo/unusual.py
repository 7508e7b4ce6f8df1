"""Modules that do what a fast engine may get wrong: cut, share, freeze, look at values, change things in place."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.engine.zoo.entry import Net, Zoo, codes, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE, IMAGE, TEXT = reals(4), reals(2, 6, 6), codes(9, 5)


def pair() -> dict[str, nn.Module]:
    return {"a": nn.Linear(4, 6), "out": nn.Linear(6, 3)}


def three() -> dict[str, nn.Module]:
    return {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "out": nn.Linear(6, 3)}


# -- what the loss does not reach ------------------------------------------------------------------------------------


@net("layer whose result is unused", TABLE, three)
def _(m, x):
    h = F.relu(m.a(x))
    m.b(h)
    return m.out(h)


@net("layer that is never called", TABLE, three)
def _(m, x):
    return m.out(F.relu(m.a(x)))


@net("unused convolution and norm", IMAGE, lambda: {"conv": nn.Conv2d(2, 3, 3), "aux": nn.Conv2d(3, 2, 1), "norm": nn.GroupNorm(1, 3), "out": nn.Linear(3, 3)})
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


# -- frozen, evaluating, tied, shared --------------------------------------------------------------------------------


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


add("frozen first layer", TABLE, lambda: nn.Sequential(frozen(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)))
add("frozen middle layer", TABLE, lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), frozen(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)))
add("frozen convolution and norm", IMAGE, lambda: nn.Sequential(frozen(nn.Conv2d(2, 3, 3)), nn.GroupNorm(1, 3), frozen(nn.GroupNorm(3, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)))
add("frozen embedding", TEXT, lambda: nn.Sequential(nn.Embedding.from_pretrained(torch.randn(9, 4)), nn.Flatten(), nn.Linear(20, 3)))
add("frozen recurrent", reals(5, 4), lambda: Net(lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=frozen(nn.GRU(4, 3, batch_first=True)), out=nn.Linear(3, 3)))


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


add("frozen weight, trained bias", TABLE, half_frozen)
add("given in evaluation mode", TABLE, lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval(), draws=True)
add("given in evaluation mode, with batch norm", TABLE, lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval(), pairs=True)


def partly_evaluating() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
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


@net("convolution used in a loop", IMAGE, lambda: {"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.GroupNorm(1, 2), "out": nn.Linear(2, 3)})
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

# -- parameters of one's own -----------------------------------------------------------------------------------------


@net("scale and shift", TABLE, lambda: {"scale": nn.Parameter(torch.ones(4)), "shift": nn.Parameter(torch.zeros(())), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(x * m.scale + m.shift)


@net("scalar temperature", TABLE, lambda: {"out": nn.Linear(4, 3), "log": nn.Parameter(torch.tensor(0.5))})
def _(m, x):
    return m.out(x) / m.log.exp()


@net("functions of parameters", IMAGE, lambda: {"w": nn.Parameter(torch.randn(3, 2, 3, 3) / 3), "b": nn.Parameter(torch.zeros(3)), "v": nn.Parameter(torch.randn(3, 3))})
def _(m, x):
    return F.linear(F.conv2d(x, m.w, m.b, stride=2).flatten(2).mean(-1), m.v)


@net("sums by letters", TABLE, lambda: {"core": nn.Parameter(torch.randn(4, 2, 2) / 2), "w": nn.Parameter(torch.randn(2, 2, 3))})
def _(m, x):
    return torch.einsum("bpq,pqo->bo", torch.tanh(torch.einsum("bi,ipq->bpq", x, m.core)), m.w)


@net("low rank beside a frozen weight", TABLE, lambda: {"base": frozen(nn.Linear(4, 3)), "down": nn.Parameter(torch.randn(2, 4)), "up": nn.Parameter(torch.zeros(3, 2))})
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


# -- in place --------------------------------------------------------------------------------------------------------


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


add("first layer in place", TABLE, lambda: nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)))
add("first layer a dropout in place", TABLE, lambda: nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Linear(4, 3)), draws=True)
add("first layer in place, on images", IMAGE, lambda: nn.Sequential(nn.Hardtanh(inplace=True), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)))


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


@net("product in place behind a gate", IMAGE, lambda: {"conv": nn.Conv2d(2, 3, 3), "gate": nn.Parameter(torch.zeros(())), "out": nn.Linear(3, 3)})
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


# -- buffers ---------------------------------------------------------------------------------------------------------


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


@net("buffer of infinities", TABLE, lambda: pair() | {"mask": torch.tensor([0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0])})
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


# -- recomputed ------------------------------------------------------------------------------------------------------

for _reentrant in (False, True):

    @net(f"recomputed, {'re-entrant' if _reentrant else 'not re-entrant'}", TABLE, three)
    def _(m, x, reentrant=_reentrant):
        h = m.a(x)
        return m.out(checkpoint(lambda h: torch.tanh(m.b(h)), h, use_reentrant=reentrant))

    @net(f"recomputed with dropout, {'re-entrant' if _reentrant else 'not re-entrant'}", TABLE, three, draws=True)
    def _(m, x, reentrant=_reentrant):
        h = m.a(x)
        return m.out(checkpoint(lambda h: F.dropout(m.b(h).tanh(), 0.5), h, use_reentrant=reentrant))


@net("recomputed in parts", TABLE, lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), "out": nn.Linear(6, 3)})
def _(m, x):
    return m.out(checkpoint_sequential(m.body, 2, x, use_reentrant=False))


@net("recomputed as a whole", TABLE, lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))})
def _(m, x):
    return checkpoint(m.body, x, use_reentrant=False)


@net("recomputed with batch norm", TABLE, lambda: {"body": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), "out": nn.Linear(6, 3)}, pairs=True)
def _(m, x):
    return m.out(checkpoint(m.body, x, use_reentrant=False))


# -- values decide ---------------------------------------------------------------------------------------------------


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


# -- random numbers --------------------------------------------------------------------------------------------------


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


# -- hooks, memory, other ways of calling ----------------------------------------------------------------------------


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


@net("lists of parts", TABLE, lambda: {"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), "weights": nn.ParameterList([torch.ones(()) for _ in range(3)]), "out": nn.Linear(4, 3)})
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


# -- losses ----------------------------------------------------------------------------------------------------------


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


def _detaching(outputs: Tensor, targets: Tensor) -> Tensor:
    sure = outputs.softmax(1).amax(1).detach()
    return (sure * F.cross_entropy(outputs, targets, reduction="none")).mean()


LOSSES = {
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "weighted by class": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 3.0]).to(o)),
    "summed": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "focal": lambda o, t: ((1 - F.softmax(o, 1).gather(1, t[:, None])) ** 2 * F.cross_entropy(o, t, reduction="none")[:, None]).mean(),
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
add("loss of shares of classes", TABLE, perceptron, targets=lambda n, random: torch.rand(n, 3, generator=random, dtype=torch.float64).softmax(1))
add("loss of several labels", TABLE, perceptron, targets=lambda n, random: torch.randint(2, (n, 3), generator=random).double(), loss=F.binary_cross_entropy_with_logits)
