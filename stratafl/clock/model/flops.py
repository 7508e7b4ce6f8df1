"""The operations of training on one sample, counted by letting a model look at one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

BACKWARD = 3
"""Training takes so many times the operations of looking: forward, and twice that backward."""


def training_flops(look: Callable[[], object]) -> float | None:
    """With a function that lets the model look at one sample; None where nothing can be counted."""
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            look()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return float(BACKWARD * counter.get_total_flops()) or None
