"""Small networks for sequences and texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.models.networks import lstm
from tests.engine.zoo.entry import Zoo, codes, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
PLACES, TEXT = reals(5, 4), codes(9, 5)

add("our LSTM", TEXT, lambda: lstm((5,), 3, vocabulary=9, embedding=3, hidden=4))


@net("attention", PLACES, lambda: {"attend": nn.MultiheadAttention(4, 2, batch_first=True), "out": nn.Linear(4, 3)})
def _(m, x):
    return m.out(m.attend(x, x, x, need_weights=False)[0].mean(dim=1))


@net(
    "attention with weights",
    PLACES,
    lambda: {"attend": nn.MultiheadAttention(4, 2, add_bias_kv=True), "out": nn.Linear(4, 3)},
)
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
    "q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "out": nn.Linear(4, 3),
    "angle": torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1])),
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


@net(
    "language model, tied",
    TEXT,
    lambda: {"embed": nn.Embedding(9, 4), "rnn": nn.GRU(4, 4, batch_first=True)},
    targets=codes(9),
)
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
    "embed": nn.Embedding(9, 4), "convs": nn.ModuleList(nn.Conv1d(4, 2, width) for width in (2, 3)),
    "out": nn.Linear(4, 3),
})  # fmt: skip
def _(m, x):
    y = m.embed(x).transpose(1, 2)
    return m.out(torch.cat([F.relu(conv(y)).max(dim=2).values for conv in m.convs], dim=1))


@net("bag of words", TEXT, lambda: {"bag": nn.EmbeddingBag(9, 4), "out": nn.Linear(4, 3)})
def _(m, x):
    offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
    return m.out(m.bag(x.flatten(), offsets))


@net(
    "state space",
    PLACES,
    lambda: {"a": nn.Parameter(torch.rand(4)), "b": nn.Parameter(torch.randn(4)), "out": nn.Linear(4, 3)},
)
def _(m, x):
    h = torch.zeros_like(x[:, 0])
    states = []
    for u in x.unbind(1):
        h = torch.exp(-F.softplus(m.a)) * h + m.b * u
        states.append(h)
    return m.out(torch.stack(states, 1).cumsum(1)[:, -1])
