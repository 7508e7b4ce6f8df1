"""The convolutional network of the experiments on CIFAR-10 and CINIC-10."""

from __future__ import annotations

from torch import nn

from stratafl.models.registry import Shape, image_shape, register


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
    return ((size - 4) // 2 - 4) // 2
