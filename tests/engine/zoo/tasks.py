"""Networks with the losses they are trained by: several inputs by name, several outputs, losses of
one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.engine.zoo.calling import Reversed
from tests.engine.zoo.entry import Zoo, codes, fields, frozen, pair, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
TABLE = reals(4)


def perceptron(inputs: int = 4, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def padded(count: int, random: Generator) -> Tensor:
    """Which of five places hold nothing."""
    return torch.arange(5)[None] >= torch.randint(2, 6, (count, 1), generator=random)


# -- images and series -----------------------------------------------------------------------------


def _with_holes(count: int, random: Generator) -> Tensor:
    labels = torch.randint(3, (count, 8, 8), generator=random)
    return torch.where(torch.rand(count, 8, 8, generator=random) < 0.2, 255, labels)


@net(
    "segmentation",
    reals(2, 8, 8),
    lambda: {
        "down": nn.Conv2d(2, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4), "deep": nn.Conv2d(4, 6, 3, padding=1),
        "up": nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), "out": nn.Conv2d(8, 3, 1),
        "drop": nn.Dropout2d(0.2),
    },
    targets=_with_holes, loss=lambda o, t: F.cross_entropy(o, t, ignore_index=255), draws=True,
)  # fmt: skip
def _(m, x):
    wide = F.silu(m.norm(m.down(x)), inplace=True)
    return m.out(torch.cat([wide, m.up(m.drop(m.deep(F.max_pool2d(wide, 2))))], 1))


@net(
    "waves",
    reals(1, 10),
    lambda: {
        "enter": nn.Conv1d(1, 4, 1), "gates": nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=d) for d in (1, 2, 4)),
        "out": nn.Conv1d(4, 9, 1),
    },
    targets=codes(9, 10),
)  # fmt: skip
def _(m, x):
    h, skipped = m.enter(x), 0
    for depth, gates in enumerate(m.gates):
        new, gate = gates(F.pad(h, (2**depth, 0))).chunk(2, 1)
        skipped, h = skipped + torch.tanh(new) * torch.sigmoid(gate), h + new
    return m.out(F.relu(skipped))


@net(
    "windows that shift",
    reals(2, 4, 4),
    lambda: {
        "enter": nn.Conv2d(2, 8, 1), "inner": nn.Linear(8, 24), "bias": nn.Parameter(torch.randn(5, 2)),
        "where": torch.arange(16).view(4, 4) % 5, "out": nn.Linear(8, 3),
    },
)  # fmt: skip
def _(m, x):
    x = m.enter(x).permute(0, 2, 3, 1)
    batch, height, width, channels = x.shape
    y = torch.roll(x, (-1, -1), (1, 2)).view(batch, height // 2, 2, width // 2, 2, channels)
    q, k, v = (
        m.inner(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
    )
    y = ((q @ k.mT / 2 + m.bias[m.where].permute(2, 0, 1)).softmax(-1) @ v).transpose(1, 2)
    y = y.reshape(batch, height // 2, width // 2, 2, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
    return m.out((x + torch.roll(y, (1, 1), (1, 2))).mean((1, 2)))


@net(
    "operator on frequencies",
    reals(3, 8),
    lambda: {"re": nn.Parameter(torch.randn(3, 3, 3) / 3), "im": nn.Parameter(torch.randn(3, 3, 3) / 3)},
    targets=reals(3, 8), loss=F.mse_loss,
)  # fmt: skip
def _(m, x):
    given = torch.fft.rfft(x)
    kept = torch.zeros_like(given)
    kept[:, :, :3] = torch.einsum("bix,iox->box", given[:, :, :3], torch.complex(m.re, m.im))
    return F.gelu(torch.fft.irfft(kept, n=8) + x)


@net(
    "state space by a convolution",
    reals(4, 10),
    lambda: {"rate": nn.Parameter(torch.rand(4, 3)), "c": nn.Parameter(torch.randn(4, 3, 2)), "out": nn.Linear(4, 3)},
)
def _(m, x):
    places = torch.arange(10, device=x.device)
    decay = torch.exp((-torch.exp(m.rate) + 1j * m.rate)[..., None] * places)
    kernel = torch.einsum("hn,hnl->hl", torch.view_as_complex(m.c), decay).real
    y = torch.fft.irfft(torch.fft.rfft(x, n=20) * torch.fft.rfft(kernel, n=20), n=20)[..., :10]
    return m.out(F.gelu(y).mean(-1))


@net(
    "selective scan",
    reals(7, 4),
    lambda: {
        "step": nn.Linear(4, 4),
        "b": nn.Linear(4, 2),
        "a": nn.Parameter(torch.rand(4, 2)),
        "out": nn.Linear(4, 3),
    },
)
def _(m, x):
    step = F.softplus(m.step(x))[..., None]
    keep, new = torch.exp(-step * m.a.exp()), step * m.b(x)[:, :, None] * x[..., None]
    state = x.new_zeros(len(x), 4, 2)
    for place in range(x.shape[1]):
        state = keep[:, place] * state + new[:, place]
    return m.out(state.sum(-1))


@net("spectra of a series", reals(32), lambda: {"enter": nn.Linear(32, 32), "out": nn.Linear(45, 3)})
def _(m, x):
    window = torch.hann_window(8, dtype=x.dtype, device=x.device)
    return m.out(torch.stft(m.enter(x), 8, 4, window=window, return_complex=True).abs().flatten(1))


# -- graphs, texts ---------------------------------------------------------------------------------

GRAPH = fields(x=reals(5, 4), edges=codes(5, 2, 7))


@net("graph by neighbours", fields(x=reals(5, 4), linked=codes(2, 5, 5)), pair)
def _(m, x, linked):
    near = (linked + linked.mT > 0).to(x.dtype) + torch.eye(5, dtype=x.dtype, device=x.device)
    return m.out(F.relu(m.a(near @ x / near.sum(-1, keepdim=True)))).mean(1)


@net("graph by edges", GRAPH, pair)
def _(m, x, edges):
    h, (source, target) = m.a(x), edges.unbind(1)
    sent = h.gather(1, source[..., None].expand(-1, -1, 6))
    return m.out(torch.zeros_like(h).scatter_reduce(1, target[..., None].expand(-1, -1, 6), sent, "amax")).mean(1)


@net(
    "graph by edges that all share", reals(5, 4), lambda: pair() | {"edges": torch.tensor([[0, 1, 2, 4], [1, 2, 0, 2]])}
)
def _(m, x):
    source, target = m.edges
    return m.out(x.new_zeros(len(x), 5, 6).index_add(1, target, m.a(x)[:, source])).sum(1)


@net("graphs of a batch in a row", GRAPH, pair)
def _(m, x, edges):
    first = 5 * torch.arange(len(x), device=x.device)[:, None]
    source, target = ((each + first).flatten() for each in edges.unbind(1))
    h = m.a(x).flatten(0, 1)
    heard = torch.zeros_like(h).index_add_(0, target, h.index_select(0, source), alpha=0.5)
    return m.out((h + heard).view(len(x), 5, 6).mean(1))


@net("decoder with masks", fields(source=codes(9, 5), target=codes(9, 4)), lambda: {
    "embed": nn.Embedding(9, 8, padding_idx=0), "out": nn.Linear(8, 9),
    "body": nn.Transformer(8, 2, 1, 1, 8, 0.1, batch_first=True),
}, targets=codes(9, 4), draws=True)  # fmt: skip
def _(m, source, target):
    like = m.out.weight
    ahead = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=like.dtype, device=like.device)
    empty = (source == 0) & (torch.arange(5, device=source.device) > 0)
    y = m.body(m.embed(source), m.embed(target), tgt_mask=ahead, src_key_padding_mask=empty)
    return m.out(y).transpose(1, 2)


@net("attention to what is there", fields(x=reals(5, 8), empty=padded), lambda: {
    "body": nn.MultiheadAttention(8, 2, bias=False, add_zero_attn=True), "out": nn.Linear(8, 3),
})  # fmt: skip
def _(m, x, empty):
    y, weights = m.body(*[x.transpose(0, 1)] * 3, key_padding_mask=empty, average_attn_weights=False)
    return m.out(y.mean(0)) + weights.square().sum((1, 2, 3))[:, None]


@net("few keys, slopes and windows", codes(9, 7), lambda: {
    "embed": nn.Embedding(9, 8), "q": nn.Linear(8, 8), "kv": nn.Linear(8, 4), "norm": nn.RMSNorm(2),
    "drop": nn.Dropout(0.1),
}, targets=codes(9, 7), draws=True,
    loss=lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten(), ignore_index=0))  # fmt: skip
def _(m, x):
    h = m.embed(x)
    q = m.norm(m.q(h).view(len(x), 7, 4, 2)).transpose(1, 2)
    k, v = (
        each.repeat_interleave(2, 1)
        for each in m.kv(h).view(len(x), 7, 2, 2, 1).expand(-1, -1, -1, -1, 2).permute(2, 0, 3, 1, 4)
    )
    places = torch.arange(7, device=h.device)
    back = places[:, None] - places
    slopes = 2.0 ** -torch.arange(1, 5).to(h)[:, None, None]
    scores = (q @ k.mT - slopes * back).masked_fill((back < 0) | (back > 2), float("-inf"))
    return (h + (m.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)) @ m.embed.weight.T


@net("LSTM from given states", fields(x=reals(5, 3), h=reals(1, 2), c=reals(1, 4)), lambda: {
    "rnn": nn.LSTM(3, 4, proj_size=2, batch_first=True), "out": nn.Linear(2, 3),
})  # fmt: skip
def _(m, x, h, c):
    return m.out(m.rnn(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))[0][:, -1])


def _aligned(outputs: Tensor, targets: Tensor) -> Tensor:
    batch, places, _ = outputs.shape
    # on the targets' device: PyTorch 2.11 demands that on a GPU, later releases take both
    lengths = (torch.full((batch,), length, device=targets.device) for length in (places, 3))
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets + 1, *lengths)


add("loss of alignments", reals(8, 4), lambda: nn.Linear(4, 6), targets=codes(5, 3), loss=_aligned)
add("embedding bag with a padding code", codes(9, 4), lambda: nn.EmbeddingBag(9, 3, mode="mean", padding_idx=0))


@net(
    "embedding bag with weights", fields(x=codes(9, 4), w=reals(4)), lambda: {"bag": nn.EmbeddingBag(9, 3, mode="sum")}
)
def _(m, x, w):
    return m.bag(x, per_sample_weights=w)


# -- several outputs, losses of one's own ----------------------------------------------------------


def _bounded(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs["x"], targets) + (outputs["mean"] ** 2 + outputs["spread"].exp()).mean()


VARIATIONAL = {"targets": TABLE, "loss": _bounded, "draws": True}


@net(
    "variational, with its own loss",
    TABLE,
    lambda: {"enter": nn.Linear(4, 6), "leave": nn.Linear(3, 4)},
    **VARIATIONAL,
)
def _(m, x):
    mean, spread = m.enter(x).chunk(2, 1)
    return {"x": m.leave(torch.distributions.Normal(mean, spread.exp()).rsample()), "mean": mean, "spread": spread}


def _two_views(outputs: Any, targets: Tensor) -> Tensor:
    views = F.normalize(torch.cat(outputs), dim=1)
    near = (views @ views.T).masked_fill(torch.eye(len(views), dtype=torch.bool, device=views.device), float("-inf"))
    return F.cross_entropy(near, torch.arange(len(views), device=views.device).roll(len(targets)))


@net("contrast of two noisy views", TABLE, lambda: {"body": perceptron()}, loss=_two_views, draws=True)
def _(m, x):
    return m.body(x + 0.1 * torch.randn_like(x)), m.body(x * (torch.rand_like(x) > 0.2))


def _distilled(outputs: Any, targets: Tensor) -> Tensor:
    own, theirs = ((each / 2).log_softmax(1) for each in outputs)
    return F.cross_entropy(outputs[0], targets) + F.kl_div(own, theirs, reduction="batchmean", log_target=True)


@net("distilled", TABLE, lambda: {"body": perceptron(), "teacher": frozen(perceptron())}, loss=_distilled)
def _(m, x):
    with torch.no_grad():
        theirs = m.teacher(x)
    return m.body(x), theirs


@net(
    "gradients turned round for a second head",
    TABLE,
    lambda: pair() | {"other": nn.Linear(6, 2)},
    loss=lambda o, t: F.cross_entropy(o[0], t) + F.cross_entropy(o[1], (t > 0).long()),
)
def _(m, x):
    h = m.a(x).relu()
    return m.out(h), m.other(Reversed.apply(h))


@net(
    "denoiser",
    TABLE,
    lambda: {"body": perceptron(6, 4), "time": nn.Embedding(5, 2), "kept": torch.linspace(0.9, 0.1, 5)},
    loss=lambda o, t: F.mse_loss(*o),
    draws=True,
)
def _(m, x):
    when, noise = torch.randint(0, 5, (len(x),), device=x.device), torch.randn_like(x)
    share = m.kept[when][:, None]
    return m.body(torch.cat([share.sqrt() * x + (1 - share).sqrt() * noise, m.time(when)], 1)), noise


@net(
    "penalty beside the scores",
    TABLE,
    lambda: {"mean": nn.Parameter(torch.randn(3, 4)), "spread": nn.Parameter(torch.zeros(3, 4))},
    loss=lambda o, t: F.cross_entropy(o[0], t) + 0.01 * o[1],
    draws=True,
)
def _(m, x):
    weight = m.mean + F.softplus(m.spread) * torch.randn_like(m.mean)
    return F.linear(x, weight), m.mean.square().sum() - m.spread.sum()


def _nested(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    more = sum(each.square().mean() for each in outputs["more"])
    return F.cross_entropy(outputs["logits"], targets) + more / outputs["count"]


@net("outputs within outputs", TABLE, pair, loss=_nested)
def _(m, x):
    h = m.a(x)
    return {"logits": m.out(h.relu()), "more": [h, h.mean()], "count": 2, "cache": object(), "none": None}


def _mixed(outputs: Tensor, targets: Tensor) -> Tensor:
    share, order = torch.rand(()), torch.randperm(len(targets))
    return share * F.cross_entropy(outputs, targets) + (1 - share) * F.cross_entropy(outputs, targets[order])


add("loss that draws", TABLE, lambda: nn.Sequential(nn.Dropout(0.2), perceptron()), loss=_mixed, draws=True)


@net("loss within the module", fields(x=TABLE, labels=codes(3)), lambda: {"body": perceptron()}, loss=lambda o, t: o[0])
def _(m, x, labels):
    scores = m.body(x)
    squares = F.mse_loss(scores.softmax(1), F.one_hot(labels, 3).to(scores.dtype))
    some = F.nll_loss(scores.log_softmax(1), labels, ignore_index=0, reduction="sum")
    return squares + F.cross_entropy(scores, labels) + some, scores
