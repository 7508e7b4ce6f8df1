"""The multi-layer perceptron of the experiments on EMNIST and Fashion-MNIST."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from stratafl.models.registry import Shape, check_sizes, register


@register(example=((1, 28, 28), 10))
def mlp(input_shape: Shape, classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Perceptron with two hidden layers of 200."""
    check_sizes("hidden", hidden)
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))
