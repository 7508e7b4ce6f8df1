"""A small run with user code, and the error it ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import InvalidInput, Rule, UserCodeError, average
from tests.flat import simulate

INPUTS, TARGETS = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 2


def run(rule: Rule | str = "hfedavg", model: Callable[[], nn.Module] | None = None, **more: Any):
    """A small run, ready to iterate."""
    depth = more.pop("depth", 2)
    return simulate(
        model or (lambda: nn.Linear(4, 2)),
        more.pop("data", (INPUTS, TARGETS)),
        [np.arange(k * 4, k * 4 + 4) for k in range(4)],
        {1: 4, 2: "2x2", 3: [[1, 1], [1, 1]]}[depth],
        [average()] * (depth - 1) + [rule] if isinstance(rule, Rule) else rule,
        periods=[2] * depth,
        rounds=3,
        batch=2,
        **{"test": (INPUTS, TARGETS), **more},
    )


def complaint_of(call: Callable[[], object]) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, InvalidInput), "whoever catches complaints catches these"
    return caught.value
