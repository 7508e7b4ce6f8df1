"""Multinomial logistic regression."""

from __future__ import annotations

import math

from torch import nn

from stratafl.models.registry import Shape, register


@register(example=((1, 28, 28), 10))
def logistic(input_shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
