"""The library's layers, each with a linear one on all it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.engine.zoo.entry import Sampler, Zoo, codes, reals

ZOO = Zoo()
TABLE, PLACES, SERIES, IMAGE, VOLUME = reals(4), reals(5, 4), reals(4, 8), reals(4, 6, 6), reals(4, 4, 4, 4)
TEXT = codes(9, 5)


class First(nn.Module):
    """The first of the things that a layer gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def headed(inputs: Sampler, *layers: nn.Module) -> nn.Sequential:
    """Layers, and a linear one on all they give."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        sample = inputs(2, torch.Generator())
        width = copy.deepcopy(body).double()(sample).shape[1]
    return nn.Sequential(*body, nn.Linear(width, 3))


def add(name: str, inputs: Sampler, *layers: Callable[[], nn.Module], **more: Any) -> None:
    ZOO.add(name, inputs, lambda: headed(inputs, *(layer() for layer in layers)), **more)


# -- dense -----------------------------------------------------------------------------------------

ZOO.add("linear", TABLE, lambda: nn.Linear(4, 3))
add("perceptron", TABLE, lambda: nn.Linear(4, 6), nn.Tanh)
add("no bias", TABLE, lambda: nn.Linear(4, 5, bias=False), nn.ReLU)
add("linear on many places", PLACES, lambda: nn.Linear(4, 2), nn.ReLU)
add("lazy layers that have run", TABLE, lambda: _run_once(nn.LazyLinear(5)), nn.ReLU)
add("embedding", TEXT, lambda: nn.Embedding(9, 4))
add("embedding with a padding code", TEXT, lambda: nn.Embedding(9, 4, padding_idx=0))
add("embedding of bounded norm", TEXT, lambda: nn.Embedding(9, 4, max_norm=1.0))
add("embedding scaled by frequency", TEXT, lambda: nn.Embedding(9, 4, scale_grad_by_freq=True))
add("embedding with sparse gradients", TEXT, lambda: nn.Embedding(9, 4, sparse=True))
for _mode in ("sum", "mean", "max"):
    add(f"embedding bag, {_mode}", TEXT, lambda mode=_mode: nn.EmbeddingBag(9, 4, mode=mode))


def _run_once(layer: nn.Module) -> nn.Module:
    layer(torch.zeros(2, 4))
    return layer


# -- convolutions ----------------------------------------------------------------------------------

for _name, _make in {
    "plain": lambda: nn.Conv2d(4, 3, 3),
    "with stride and padding": lambda: nn.Conv2d(4, 3, 3, stride=2, padding=1),
    "uneven": lambda: nn.Conv2d(4, 3, (3, 2), stride=(1, 2), padding=(1, 0)),
    "padded to the same": lambda: nn.Conv2d(4, 3, 3, padding="same"),
    "padded to the same, unevenly": lambda: nn.Conv2d(4, 3, 4, padding="same"),
    "dilated": lambda: nn.Conv2d(4, 3, 2, dilation=2, bias=False),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "circular": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
    "reflecting": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
    "depthwise separable": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Conv2d(4, 3, 1)),
}.items():
    add(f"convolution, {_name}", IMAGE, _make, nn.ReLU, lambda: nn.AvgPool2d(2))
add("convolution of series", SERIES, lambda: nn.Conv1d(4, 3, 3, padding=1), nn.ReLU)
add("convolution of series, replicating", SERIES, lambda: nn.Conv1d(4, 3, 3, padding=2, padding_mode="replicate"))
add("convolution of series, transposed", SERIES, lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), nn.Tanh)
add("convolution of volumes", VOLUME, lambda: nn.Conv3d(4, 3, 2), nn.ReLU)
add("convolution of volumes, transposed", VOLUME, lambda: nn.ConvTranspose3d(4, 2, 2), nn.ReLU)
add("convolution, ReLU, halved", IMAGE, lambda: nn.Conv2d(4, 3, 3), nn.ReLU, lambda: nn.MaxPool2d(2))

# -- pools and shapes ------------------------------------------------------------------------------

for _name, _make in {
    "max": lambda: nn.MaxPool2d(2),
    "max, overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "max, dilated, rounded up": lambda: nn.MaxPool2d(2, stride=2, dilation=2, ceil_mode=True),
    "mean": lambda: nn.AvgPool2d(2, padding=1, count_include_pad=False),
    "power": lambda: nn.LPPool2d(2, 2),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d(2),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d((2, 3)),
    "pixels shuffled": lambda: nn.PixelShuffle(2),
    "pixels unshuffled": lambda: nn.PixelUnshuffle(2),
    "channels shuffled": lambda: nn.ChannelShuffle(2),
    "upsampled": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "enlarged": lambda: nn.Upsample(scale_factor=2),
    "padded by reflection": lambda: nn.ReflectionPad2d(1),
    "padded by zeros": lambda: nn.ZeroPad2d((1, 0, 2, 1)),
    "unfolded": lambda: nn.Unfold(2, stride=2),
    "unfolded and folded": lambda: nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((6, 6), 3, padding=1)),
}.items():
    add(f"image, {_name}", IMAGE, lambda: nn.Conv2d(4, 4, 1), _make)
for _name, _make in {
    "max": lambda: nn.MaxPool1d(2),
    "mean": lambda: nn.AvgPool1d(2),
    "adaptive": lambda: nn.AdaptiveMaxPool1d(3),
}.items():
    add(f"series, {_name}", SERIES, lambda: nn.Conv1d(4, 4, 1), _make)
add("volume, max", VOLUME, lambda: nn.Conv3d(4, 2, 1), lambda: nn.MaxPool3d(2), lambda: nn.AdaptiveAvgPool3d(2))
add("image, fractional max", IMAGE, lambda: nn.Conv2d(4, 4, 1), lambda: nn.FractionalMaxPool2d(2, 3), draws=True)

# -- norms -----------------------------------------------------------------------------------------

for _name, _make in {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch, without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch, without weights": lambda: nn.BatchNorm2d(4, affine=False, momentum=0.3),
    "group": lambda: nn.GroupNorm(2, 4),
    "group, without weights": lambda: nn.GroupNorm(2, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "instance, with all": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm((4, 6, 6)),
    "layer, without weights": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "root mean square": lambda: nn.RMSNorm(6),
    "local response": lambda: nn.LocalResponseNorm(2),
}.items():
    pairs = _name.startswith("batch")
    add(f"norm, {_name}", IMAGE, lambda: nn.Conv2d(4, 4, 3, padding=1), _make, nn.ReLU, pairs=pairs)
add("norm, batch of a table", TABLE, lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), nn.ReLU, pairs=True)
add("norm, group of a table", TABLE, lambda: nn.Linear(4, 6), lambda: nn.GroupNorm(3, 6), nn.ReLU)
add("norm, batch of series", SERIES, lambda: nn.Conv1d(4, 4, 3), lambda: nn.BatchNorm1d(4), pairs=True)
add("norm, batch of volumes", VOLUME, lambda: nn.Conv3d(4, 2, 2), lambda: nn.BatchNorm3d(2), pairs=True)
add("norm, batch, evaluating", IMAGE, lambda: nn.Conv2d(4, 4, 1), lambda: nn.BatchNorm2d(4).eval(), nn.ReLU)

# -- activations and randomness --------------------------------------------------------------------

for _kind in (
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanhshrink,
):  # fmt: skip
    add(f"activation {_kind.__name__}", TABLE, lambda: nn.Linear(4, 6), _kind)
for _name, _make in {
    "softmax": lambda: nn.Softmax(dim=1),
    "log-softmax": lambda: nn.LogSoftmax(dim=-1),
    "softmin": lambda: nn.Softmin(dim=1),
    "softmax over channels": lambda: nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Softmax2d()),
    "threshold": lambda: nn.Threshold(0.1, -0.3),
    "slopes for each channel": lambda: nn.PReLU(6),
}.items():
    add(f"activation {_name}", TABLE, lambda: nn.Linear(4, 6), _make)
for _kind in (nn.CELU, nn.ELU, nn.Hardtanh, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU):
    add(f"in place, {_kind.__name__}", TABLE, lambda: nn.Linear(4, 6), lambda kind=_kind: kind(inplace=True))
add("dropout", TABLE, lambda: nn.Dropout(0.3), lambda: nn.Linear(4, 6), nn.ReLU, lambda: nn.Dropout(0.5), draws=True)
add("dropout of nothing", TABLE, lambda: nn.Linear(4, 6), lambda: nn.Dropout(0.0))
add("dropout, evaluating", TABLE, lambda: nn.Linear(4, 6), lambda: nn.Dropout(0.5).eval())
add("dropout of channels", IMAGE, lambda: nn.Conv2d(4, 3, 3), lambda: nn.Dropout2d(0.4), draws=True)
add("dropout, alpha", TABLE, lambda: nn.Linear(4, 6), nn.SELU, lambda: nn.AlphaDropout(0.2), draws=True)
add("randomised ReLU", TABLE, lambda: nn.Linear(4, 6), nn.RReLU, draws=True)

# -- recurrent and attention -----------------------------------------------------------------------

for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    add(f"recurrent {_kind.__name__}", PLACES, lambda kind=_kind: First(kind(4, 3, batch_first=True)))
    add(
        f"recurrent {_kind.__name__}, both ways, two layers", PLACES,
        lambda kind=_kind: First(kind(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
    )  # fmt: skip
add("recurrent, projected", PLACES, lambda: First(nn.LSTM(4, 5, proj_size=2, batch_first=True)))
add("recurrent, without bias", PLACES, lambda: First(nn.GRU(4, 3, bias=False, batch_first=True)))
add(
    "recurrent with dropout", PLACES, lambda: First(nn.LSTM(4, 3, num_layers=2, dropout=0.4, batch_first=True)),
    draws=True,
)  # fmt: skip
add("encoder layer", PLACES, lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
add(
    "encoder", PLACES, lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True, norm_first=True), 2,
        enable_nested_tensor=False,
    ),
)  # fmt: skip
add("encoder layer with dropout", PLACES, lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), draws=True)

# -- weights made of other weights -----------------------------------------------------------------

add("weight norm", TABLE, lambda: parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh)
add("weight norm of filters", IMAGE, lambda: parametrizations.weight_norm(nn.Conv2d(4, 3, 3)), nn.ReLU)
add("spectral norm", TABLE, lambda: parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh)
add("orthogonal", TABLE, lambda: parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh)
