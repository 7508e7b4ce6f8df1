"""Model of both sides of the comparison: 0.8 million parameters."""

import itertools

from torch import nn

HIDDEN = [800, 900]


def build() -> nn.Module:
    sizes = [64, *HIDDEN]
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(sizes):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
