"""Small networks for images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.models.networks import logistic, mlp
from tests.engine.zoo.entry import Zoo, codes, reals

ZOO = Zoo()
add, net = ZOO.add, ZOO.net
IMAGE = reals(2, 8, 8)

add("our logistic regression", IMAGE, lambda: logistic((2, 8, 8), 3))
add("our perceptron", IMAGE, lambda: mlp((2, 8, 8), 3, (7, 5)))


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


@net(
    "in the frequency domain",
    IMAGE,
    lambda: {"filter": nn.Parameter(torch.randn(2, 8, 5, 2)), "out": nn.Linear(128, 3)},
)
def _(m, x):
    y = torch.fft.irfft2(torch.fft.rfft2(x) * torch.view_as_complex(m.filter), s=(8, 8))
    return m.out(y.flatten(1))


@net(
    "capsules", IMAGE, lambda: {"conv": nn.Conv2d(2, 8, 4, stride=4), "vote": nn.Parameter(torch.randn(3, 4, 4, 8) / 4)}
)
def _(m, x):
    u = m.conv(x).flatten(2).transpose(1, 2)
    votes = torch.einsum("kpij,bpj->bkpi", m.vote, u)
    logits = torch.zeros(len(x), 3, 4, 1, dtype=x.dtype, device=x.device)
    for _ in range(2):
        s = (logits.softmax(1) * votes).sum(2)
        v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
        logits = logits + (votes * v[:, :, None]).sum(-1, keepdim=True)
    return v.norm(dim=-1)
