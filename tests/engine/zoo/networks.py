"""Small networks as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import models
from tests.engine.zoo.entry import Net, Zoo, codes, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE, PLACES, IMAGE, TEXT = reals(4), reals(5, 4), reals(2, 8, 8), codes(9, 5)

add("our logistic regression", IMAGE, lambda: models.logistic((2, 8, 8), 3))
add("our perceptron", IMAGE, lambda: models.mlp((2, 8, 8), 3, (7, 5)))
add("our LSTM", TEXT, lambda: models.lstm((5,), 3, vocabulary=9, embedding=3, hidden=4))

# -- images ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, shrinking and widening where the shapes differ."""

    def __init__(self, before: int, after: int, stride: int, norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(after), norm(after)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.down is not None:
            identity = self.down(x)
        y += identity
        return self.relu(y)


def residual(norm) -> nn.Module:
    first = [nn.Conv2d(2, 4, 3, 1, 1), norm(4), nn.ReLU(inplace=True)]
    blocks = [Block(4, 4, 1, norm), Block(4, 6, 2, norm)]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


add("residual with batch norm", IMAGE, lambda: residual(nn.BatchNorm2d), pairs=True)
add("residual with group norm", IMAGE, lambda: residual(lambda width: nn.GroupNorm(2, width)))


@net("squeeze and excite", IMAGE, lambda: {
    "conv": nn.Conv2d(2, 4, 3), "less": nn.Linear(4, 2), "more": nn.Linear(2, 4), "out": nn.Linear(4, 3),
})  # fmt: skip
def _(m, x):
    y = m.conv(x)
    gate = torch.sigmoid(m.more(F.relu(m.less(y.mean(dim=(2, 3))))))
    return m.out((y * gate[:, :, None, None]).amax(dim=(2, 3)))


@net("inverted residual", IMAGE, lambda: {
    "wide": nn.Conv2d(2, 6, 1, bias=False), "deep": nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
    "narrow": nn.Conv2d(6, 2, 1, bias=False), "norm": nn.GroupNorm(1, 6), "out": nn.Linear(2, 3),
})  # fmt: skip
def _(m, x):
    y = F.relu6(m.norm(m.wide(x)), inplace=True)
    return m.out((x + m.narrow(F.hardswish(m.deep(y)))).mean((-2, -1)))


@net("densely connected", IMAGE, lambda: {
    "a": nn.Conv2d(2, 2, 3, padding=1), "b": nn.Conv2d(4, 2, 3, padding=1), "out": nn.Linear(6, 3),
})  # fmt: skip
def _(m, x):
    y = torch.cat([x, F.relu(m.a(x))], 1)
    y = torch.cat([y, F.relu(m.b(y))], 1)
    return m.out(F.adaptive_avg_pool2d(y, 1).flatten(1))


@net("inception", IMAGE, lambda: {
    "one": nn.Conv2d(2, 2, 1), "three": nn.Conv2d(2, 2, 3, padding=1), "out": nn.Linear(6 * 16, 3),
})  # fmt: skip
def _(m, x):
    parts = [m.one(x), m.three(x), F.max_pool2d(x, 3, stride=1, padding=1)]
    return m.out(F.avg_pool2d(torch.cat(parts, dim=1), 2).view(x.size(0), -1))


@net("u-net", IMAGE, lambda: {
    "down": nn.Conv2d(2, 4, 3, padding=1), "deep": nn.Conv2d(4, 4, 3, padding=1),
    "up": nn.ConvTranspose2d(4, 4, 2, stride=2), "out": nn.Conv2d(8, 3, 1),
}, targets=codes(3, 8, 8))  # fmt: skip
def _(m, x):
    skip = F.relu(m.down(x))
    y = m.up(F.relu(m.deep(F.max_pool2d(skip, 2))))
    return m.out(torch.cat([skip, y], dim=1))


@net("vision transformer", IMAGE, lambda: {
    "patches": nn.Conv2d(2, 4, 4, stride=4), "token": nn.Parameter(torch.zeros(1, 1, 4)),
    "places": nn.Parameter(torch.randn(1, 5, 4)), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 3),
    "layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True),
})  # fmt: skip
def _(m, x):
    y = m.patches(x).flatten(2).transpose(1, 2)
    y = torch.cat([m.token.expand(len(x), -1, -1), y], dim=1) + m.places
    return m.out(m.norm(m.layer(y))[:, 0])


@net("mixer", IMAGE, lambda: {
    "patches": nn.Conv2d(2, 4, 4, stride=4), "tokens": nn.Linear(4, 4), "channels": nn.Linear(4, 4),
    "norm1": nn.LayerNorm(4), "norm2": nn.LayerNorm(4), "out": nn.Linear(4, 3),
})  # fmt: skip
def _(m, x):
    y = m.patches(x).flatten(2).permute(0, 2, 1)
    y = y + m.tokens(m.norm1(y).transpose(1, 2)).transpose(1, 2)
    y = y + F.gelu(m.channels(m.norm2(y)))
    return m.out(y.mean(dim=1))


@net("convnext block", IMAGE, lambda: {
    "deep": nn.Conv2d(2, 2, 7, padding=3, groups=2), "norm": nn.LayerNorm(2), "wide": nn.Linear(2, 8),
    "narrow": nn.Linear(8, 2), "gamma": nn.Parameter(1e-6 * torch.ones(2)), "out": nn.Linear(2, 3),
})  # fmt: skip
def _(m, x):
    y = m.norm(m.deep(x).permute(0, 2, 3, 1))
    y = (m.gamma * m.narrow(F.gelu(m.wide(y)))).permute(0, 3, 1, 2)
    return m.out((x + y).mean([2, 3]))


@net("spatial transformer", IMAGE, lambda: {"where": nn.Linear(128, 6), "out": nn.Linear(128, 3)})
def _(m, x):
    theta = m.where(x.flatten(1)).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return m.out(F.grid_sample(x, grid, align_corners=False).flatten(1))


@net("interpolated", IMAGE, lambda: {"conv": nn.Conv2d(2, 3, 3)}, targets=codes(3, 8, 8))
def _(m, x):
    return F.interpolate(m.conv(x), size=x.shape[-2:], mode="bilinear", align_corners=True)


@net("in the frequency domain", IMAGE, lambda: {"filter": nn.Parameter(torch.randn(2, 8, 5, 2)), "out": nn.Linear(128, 3)})
def _(m, x):
    y = torch.fft.irfft2(torch.fft.rfft2(x) * torch.view_as_complex(m.filter), s=(8, 8))
    return m.out(y.flatten(1))


@net("capsules", IMAGE, lambda: {"conv": nn.Conv2d(2, 8, 4, stride=4), "vote": nn.Parameter(torch.randn(3, 4, 4, 8) / 4)})
def _(m, x):
    u = m.conv(x).flatten(2).transpose(1, 2)
    votes = torch.einsum("kpij,bpj->bkpi", m.vote, u)
    logits = torch.zeros(len(x), 3, 4, 1, dtype=x.dtype, device=x.device)
    for _ in range(2):
        s = (logits.softmax(1) * votes).sum(2)
        v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
        logits = logits + (votes * v[:, :, None]).sum(-1, keepdim=True)
    return v.norm(dim=-1)


# -- sequences -------------------------------------------------------------------------------------------------------


@net("attention", PLACES, lambda: {"attend": nn.MultiheadAttention(4, 2, batch_first=True), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(m.attend(x, x, x, need_weights=False)[0].mean(dim=1))


@net("attention with weights", PLACES, lambda: {"attend": nn.MultiheadAttention(4, 2, add_bias_kv=True), "out": nn.Linear(4, 3)})
def _(m, x):
    y, weights = m.attend(*[x.transpose(0, 1)] * 3)
    return m.out(y[-1]) * weights.mean()


@net("causal attention", TEXT, lambda: {
    "embed": nn.Embedding(9, 4), "places": nn.Embedding(5, 4), "qkv": nn.Linear(4, 12), "out": nn.Linear(4, 3),
    "mask": torch.full((5, 5), -torch.inf).triu(1),
})  # fmt: skip
def _(m, x):
    y = m.embed(x) + m.places(torch.arange(x.shape[1], device=x.device))
    q, k, v = m.qkv(y).chunk(3, dim=-1)
    return m.out(((q @ k.transpose(-2, -1) / 2 + m.mask).softmax(dim=-1) @ v)[:, -1])


@net("causal attention by a table of ones", PLACES, lambda: {
    "key": nn.Linear(4, 4, bias=False), "query": nn.Linear(4, 4, bias=False), "out": nn.Linear(4, 3),
    "tril": torch.tril(torch.ones(5, 5)),
})  # fmt: skip
def _(m, x):
    weights = m.query(x) @ m.key(x).transpose(-2, -1) * 4**-0.5
    weights = weights.masked_fill(m.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
    return m.out((F.softmax(weights, dim=-1) @ x).mean(1))


@net("scaled dot products", PLACES, lambda: {"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 3)})
def _(m, x):
    q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in m.qkv(x).split(4, dim=-1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y.transpose(1, 2).flatten(2).sum(1))


@net("attention with rotations", PLACES, lambda: {
    "q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "out": nn.Linear(4, 3), "angle": torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1])),
})  # fmt: skip
def _(m, x):
    def turned(y: Tensor) -> Tensor:
        even, odd = y[..., 0::2], y[..., 1::2]
        sin, cos = m.angle.sin(), m.angle.cos()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    return m.out(((turned(m.q(x)) @ turned(m.k(x)).mT).softmax(-1) @ x)[:, 0])


@net("encoder with a padding mask", TEXT, lambda: {
    "embed": nn.Embedding(9, 4, padding_idx=0), "out": nn.Linear(4, 3),
    "layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
})  # fmt: skip
def _(m, x):
    empty = (x == 0) & (torch.arange(5, device=x.device) > 0)
    y = m.layer(m.embed(x), src_key_padding_mask=empty)
    return m.out(y.masked_fill(empty[..., None], 0).sum(1) / (~empty).sum(1, keepdim=True))


@net("encoder and decoder", PLACES, lambda: {
    "both": nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True), "out": nn.Linear(4, 3),
})  # fmt: skip
def _(m, x):
    return m.out(m.both(x, x.flip(1))[:, -1])


@net("language model, tied", TEXT, lambda: {"embed": nn.Embedding(9, 4), "rnn": nn.GRU(4, 4, batch_first=True)}, targets=codes(9))
def _(m, x):
    return F.linear(m.rnn(m.embed(x))[0][:, -1], m.embed.weight)


@net("cells", PLACES, lambda: {"cell": nn.LSTMCell(4, 3), "gru": nn.GRUCell(3, 3), "rnn": nn.RNNCell(3, 3)})
def _(m, x):
    h = c = g = x.new_zeros(len(x), 3)
    for step in range(x.shape[1]):
        h, c = m.cell(x[:, step], (h, c))
        g = m.gru(h, g)
    return m.rnn(g, h)


@net("recurrent over time first", PLACES, lambda: {"rnn": nn.LSTM(4, 3), "start": nn.Parameter(torch.zeros(1, 1, 3))})
def _(m, x):
    start = m.start.expand(-1, len(x), -1).contiguous()
    return m.rnn(x.transpose(0, 1), (start, torch.zeros_like(start)))[1][0][-1]


@net("packed sequences", PLACES, lambda: {"rnn": nn.GRU(4, 3, batch_first=True)})
def _(m, x):
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.rnn(packed)[1][-1]


@net("text convolution", TEXT, lambda: {
    "embed": nn.Embedding(9, 4), "convs": nn.ModuleList(nn.Conv1d(4, 2, width) for width in (2, 3)), "out": nn.Linear(4, 3),
})  # fmt: skip
def _(m, x):
    y = m.embed(x).transpose(1, 2)
    return m.out(torch.cat([F.relu(conv(y)).max(dim=2).values for conv in m.convs], dim=1))


@net("bag of words", TEXT, lambda: {"bag": nn.EmbeddingBag(9, 4), "out": nn.Linear(4, 3)})
def _(m, x):
    offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
    return m.out(m.bag(x.flatten(), offsets))


@net("state space", PLACES, lambda: {"a": nn.Parameter(torch.rand(4)), "b": nn.Parameter(torch.randn(4)), "out": nn.Linear(4, 3)})
def _(m, x):
    h = torch.zeros_like(x[:, 0])
    states = []
    for u in x.unbind(1):
        h = torch.exp(-F.softplus(m.a)) * h + m.b * u
        states.append(h)
    return m.out(torch.stack(states, 1).cumsum(1)[:, -1])


# -- others ----------------------------------------------------------------------------------------------------------


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


add("regression", TABLE, lambda: nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 2)), targets=reals(2), loss=squares)
add("regression with a loss that is a module", TABLE, lambda: nn.Linear(4, 2), targets=reals(2), loss=nn.HuberLoss())


@net("tied autoencoder", TABLE, lambda: {"code": nn.Linear(4, 2), "back": nn.Parameter(torch.zeros(4))}, targets=reals(4), loss=squares)
def _(m, x):
    return F.linear(torch.tanh(m.code(x)), m.code.weight.t(), m.back)


def _evidence(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, spread, back = outputs.split([2, 2, 4], dim=1)
    apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return (F.mse_loss(back, targets, reduction="none").sum(1) + apart).mean()


@net("variational autoencoder", TABLE, lambda: {"code": nn.Linear(4, 4), "back": nn.Linear(2, 4)}, targets=reals(4), loss=_evidence, draws=True)
def _(m, x):
    mean, spread = m.code(x).chunk(2, dim=1)
    z = mean + torch.exp(spread / 2) * torch.randn_like(mean)
    return torch.cat([mean, spread, m.back(z)], dim=1)


@net("mixture of experts", TABLE, lambda: {"gate": nn.Linear(4, 3), "experts": nn.ModuleList(nn.Linear(4, 3) for _ in range(3))})
def _(m, x):
    best, which = m.gate(x).softmax(-1).topk(2, dim=-1)
    every = torch.stack([expert(x) for expert in m.experts], dim=1)
    chosen = every.gather(1, which[..., None].expand(-1, -1, 3))
    return (best[..., None] * chosen).sum(1)


@net("experts that see their own samples", TABLE, lambda: {"gate": nn.Linear(4, 2), "experts": nn.ModuleList(nn.Linear(4, 3) for _ in range(2))})
def _(m, x):
    scores = m.gate(x).softmax(-1)
    which = scores.argmax(-1)
    y = x.new_zeros(len(x), 3)
    for number, expert in enumerate(m.experts):
        mine = (which == number).nonzero().flatten()
        y.index_add_(0, mine, expert(x[mine]) * scores[mine, number, None])
    return y


@net("graph convolution", reals(6, 4), lambda: {"edges": (torch.rand(6, 6) < 0.5).float(), "a": nn.Linear(4, 4), "b": nn.Linear(4, 3)})
def _(m, x):
    near = m.edges / m.edges.sum(1, keepdim=True).clamp(min=1)
    return m.b(near @ F.elu(near @ m.a(x))).mean(1)


@net("points", reals(6, 3), lambda: {"each": nn.Sequential(nn.Conv1d(3, 5, 1), nn.ReLU(), nn.Conv1d(5, 4, 1)), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(m.each(x.transpose(2, 1)).amax(2))


@net("crosses of features", TABLE, lambda: {"w": nn.ParameterList(nn.Parameter(torch.randn(4, 4) / 2) for _ in range(2)), "out": nn.Linear(4, 3)})
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
