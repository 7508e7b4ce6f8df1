"""The networks that people bring most, small: each with and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.zoo.entry import Net, Sampler, Zoo, codes, reals

ZOO = Zoo()
IMAGE, TEXT, PLACES = reals(2, 8, 8), codes(9, 6), reals(5, 4)


class CausalBlock(nn.Module):
    """As character models are written: one product for queries, keys and values, and shapes by
    Python's arithmetic."""

    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.heads, self.p = heads, p
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.size()
        parts = self.inner(self.before(x)).split(width, dim=2)
        q, k, v = (part.view(batch, places, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.outer(y.transpose(1, 2).contiguous().view(batch, places, width)))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.after(x)))))


class CharacterGPT(nn.Module):
    def __init__(self, p: float, width: int = 8):
        super().__init__()
        self.token, self.place, self.drop = nn.Embedding(9, width), nn.Embedding(6, width), nn.Dropout(p)
        self.blocks = nn.ModuleList(CausalBlock(width, 2, p) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 9, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.token(x) + self.place(torch.arange(0, x.size(1), device=x.device)))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).transpose(1, 2)


class Rotated(nn.Module):
    """Positions by rotation, gates in the wide layer, norms without a mean: as LLaMA."""

    def __init__(self, p: float, width: int = 8, heads: int = 2):
        super().__init__()
        self.embed, self.heads, self.drop = nn.Embedding(9, width), heads, nn.Dropout(p)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 12, bias=False) for _ in range(2))
        self.down, self.out = nn.Linear(12, width, bias=False), nn.Linear(width, 3)
        angles = torch.outer(torch.arange(6.0), 1 / 10 ** torch.arange(0, width // heads // 2, dtype=torch.float32))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        batch, places, width = h.shape
        y = self.norms[0](h)
        q = self.q(y).view(batch, places, self.heads, -1).transpose(1, 2)
        k, v = self.kv(y).view(batch, places, 2, 1, -1).permute(2, 0, 3, 1, 4)
        k, v = (each.expand(batch, self.heads, places, width // self.heads) for each in (k, v))
        scores = self.turned(q) @ self.turned(k).mT / (width // self.heads) ** 0.5
        ahead = torch.full((places, places), float("-inf"), dtype=h.dtype, device=h.device).triu(1)
        y = (self.drop((scores + ahead).softmax(-1)) @ v).transpose(1, 2).reshape(batch, places, width)
        h = h + self.o(y)
        y = self.norms[1](h)
        h = h + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.out(self.norms[2](h)[:, -1])


class Patches(nn.Module):
    """A vision transformer: patches by a convolution, a token for the class, and an encoder."""

    def __init__(self, p: float, width: int = 8):
        super().__init__()
        self.patch = nn.Conv2d(2, width, 4, stride=4)
        self.label, self.place = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, p, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.label.expand(len(y), -1, -1), y], dim=1) + self.place
        return self.out(self.encoder(y)[:, 0])


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them that is sometimes all there is."""

    def __init__(self, inputs: int, outputs: int, stride: int, p: float):
        super().__init__()
        self.a, self.b = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.norm_a, self.norm_b, self.p = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), p
        self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)), inplace=True)))
        if self.p and self.training:  # stochastic depth, a sample at a time
            y = y * y.new_empty(len(y), 1, 1, 1).bernoulli_(1 - self.p).div_(1 - self.p)
        return F.relu(y + self.around(x))


def residual(p: float) -> nn.Module:
    body = nn.Sequential(Block(2, 3, 1, p), Block(3, 4, 2, p))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def inverted(p: float) -> nn.Module:
    """Wide, then each channel alone, then narrow: as MobileNetV2."""
    wide, alone = nn.Conv2d(2, 6, 1, bias=False), nn.Conv2d(6, 6, 3, 2, 1, groups=6, bias=False)
    layers = [wide, nn.BatchNorm2d(6), nn.ReLU6(inplace=True), alone, nn.BatchNorm2d(6), nn.ReLU6(inplace=True)]
    narrow = [nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *narrow, nn.Dropout(p), nn.Linear(4, 3))


def convolutional(p: float) -> nn.Module:
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(p), nn.Flatten(), nn.Linear(27, 6)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(p), nn.Linear(6, 3))


def encoder(p: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, p, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(9, 8), body, nn.Flatten(), nn.Linear(48, 3))


def recurrent(kind: Callable[..., nn.RNNBase], **settings: object) -> Callable[[float], nn.Module]:
    def build(p: float) -> nn.Module:
        layer = kind(4, 3, num_layers=2, dropout=p, batch_first=True, **settings)
        width = 3 * (1 + layer.bidirectional) if not layer.proj_size else layer.proj_size
        return Net(lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=layer, out=nn.Linear(width, 3))

    return build


def words(p: float) -> nn.Module:
    """Sums by letters, weights used twice, and attention written out."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.drop(m.embed(x))
        weights = torch.einsum("bik,bjk->bij", h, h @ m.turn).softmax(-1)
        return torch.einsum("bij,bjk,vk->bv", weights, h, m.embed.weight)

    return Net(forward, embed=nn.Embedding(9, 4), turn=nn.Parameter(torch.randn(4, 4)), drop=nn.Dropout(p))


for _p in (0.0, 0.3):

    def _add(name: str, inputs: Sampler, build: Callable[[float], nn.Module], p: float = _p, **more: Any) -> None:
        ZOO.add(f"{name}, dropping" if p else name, inputs, lambda: build(p), draws=bool(p), **more)

    _add("GPT of characters", TEXT, CharacterGPT, targets=codes(9, 6))
    _add("rotated attention", TEXT, Rotated)
    _add("patches of images", IMAGE, Patches)
    _add("residual of batch norms", IMAGE, residual, pairs=True)
    _add("inverted residual of batch norms", IMAGE, inverted, pairs=True)
    _add("convolutional net", IMAGE, convolutional)
    _add("encoder of texts", TEXT, encoder)
    _add("LSTM of two layers", PLACES, recurrent(nn.LSTM))
    _add("LSTM in both directions", PLACES, recurrent(nn.LSTM, bidirectional=True))
    _add("LSTM that projects", PLACES, recurrent(nn.LSTM, proj_size=2))
    _add("GRU of two layers", PLACES, recurrent(nn.GRU, bias=False))
    _add("GRU in both directions", PLACES, recurrent(nn.GRU, bidirectional=True))
    _add("RNN of two layers", PLACES, recurrent(nn.RNN, nonlinearity="relu"))
    _add("words by letters", TEXT, words, targets=codes(9))
