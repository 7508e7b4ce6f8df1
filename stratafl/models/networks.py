"""Models of the paper's experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from stratafl.base.errors import InvalidInput
from stratafl.models.registry import Shape, check_sizes, image_shape, register


@register(example=((1, 28, 28), 10))
def logistic(input_shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


@register(example=((1, 28, 28), 10))
def mlp(input_shape: Shape, classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Perceptron with two hidden layers of 200."""
    check_sizes("hidden", hidden)
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


@register(example=((3, 32, 32), 10))
def cnn(input_shape: Shape, classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64 channels with pooling, then 384 and 192 units."""
    channels, height, width = image_shape("cnn", input_shape, least=16)
    flat = 64 * _after_two_convolutions(height) * _after_two_convolutions(width)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def _after_two_convolutions(size: int) -> int:
    """Height or width of an image after the convolutions and pooling of `cnn`."""
    return ((size - 4) // 2 - 4) // 2


class NextCharacter(nn.Module):
    """Model that predicts the character after a sequence: embedding, LSTM, linear layer."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, codes_BT: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(codes_BT.long()))[0][:, -1])


@register(example=((80,), 80))
def lstm(
    input_shape: Shape,
    classes: int,
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 100,
    layers: int = 2,
) -> nn.Module:
    """Two-layer LSTM that predicts the next character."""
    if len(input_shape) != 1:
        raise InvalidInput("input_shape", tuple(input_shape), "lstm takes sequences: (length,)")
    vocabulary = classes if vocabulary is None else vocabulary
    check_sizes("vocabulary, embedding, hidden, layers", (vocabulary, embedding, hidden, layers))
    return NextCharacter(vocabulary, embedding, hidden, layers, classes)


class Block(nn.Module):
    """Residual block of two 3x3 convolutions with group normalisation."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.GroupNorm(groups, channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


@register(example=((3, 32, 32), 100))
def resnet18_gn(input_shape: Shape, classes: int, groups: int = 2) -> nn.Module:
    """ResNet-18 with group normalisation and the ImageNet stem."""
    channels, _, _ = image_shape("resnet18_gn", input_shape, least=8)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or 64 % groups:
        raise InvalidInput("groups", groups, "must be a divisor of 64")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        nn.GroupNorm(groups, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inputs, outputs, stride, groups), Block(outputs, outputs, 1, groups)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
