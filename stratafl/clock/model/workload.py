"""What of a run decides its time and traffic on any network, besides its tree, schedule and seed.

It is recorded in the run's folder when the run is set up, so the run is priced afterwards without
its model, its data and the code of its rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from stratafl.clock.model.sizes import MessageSizes

BACKWARD = 3
"""Training takes so many times the operations of looking: forward, and twice that backward."""


@dataclass(frozen=True, eq=False)
class Workload:
    """What a run's clients compute, and how large its messages are."""

    parameters: int
    """Values of the model that are trained, with those that never leave a client."""
    buffers: int
    flops_per_sample: float | None
    """Operations of training on one sample; None where they cannot be counted."""
    messages: MessageSizes | None
    """None where the rules could not be tried."""
    steps_N: np.ndarray
    """Local steps of each client between two synchronisations."""
    samples_N: np.ndarray
    """Samples that each client takes in one step."""

    def as_plain(self) -> dict[str, Any]:
        """As JSON has it: a list with one number where that is the same for all clients."""
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "flops_per_sample": self.flops_per_sample,
            "messages": None if self.messages is None else asdict(self.messages),
            "steps_per_sync": _shortened(self.steps_N),
            "samples_per_step": _shortened(self.samples_N),
        }

    @staticmethod
    def of(values: Mapping[str, Any], depth: int, clients: int) -> Workload:
        """From what `as_plain` made of it; raises KeyError, TypeError or ValueError where it is not
        that of a tree with so many edge levels and clients."""
        messages, flops = values["messages"], values["flops_per_sample"]
        sizes = None if messages is None else MessageSizes.of(messages)
        if sizes is not None and len(sizes.levels) != depth:
            raise ValueError("messages of another tree")
        if flops is not None and not 0 < float(flops) < math.inf:
            raise ValueError("no number of operations")
        return Workload(
            parameters=int(values["parameters"]),
            buffers=int(values["buffers"]),
            flops_per_sample=None if flops is None else float(flops),
            messages=sizes,
            steps_N=_each(values["steps_per_sync"], clients),
            samples_N=_each(values["samples_per_step"], clients),
        )


def training_flops(look: Callable[[], object]) -> float | None:
    """Operations of training on one sample, with a function that lets the model look at one; None
    where nothing can be counted."""
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            look()
    except Exception:
        # whatever a model cannot bear about being watched is no reason not to train it
        return None
    return float(BACKWARD * counter.get_total_flops()) or None


def _shortened(values_N: np.ndarray) -> list[int]:
    return values_N[: 1 if (values_N == values_N[0]).all() else None].tolist()


def _each(values: list[int], clients: int) -> np.ndarray:
    if len(values) not in (1, clients):
        raise ValueError("clients of another tree")
    if min(values) < 0:
        raise ValueError("less than nothing")
    return np.broadcast_to(np.array(values, dtype=np.int64), (clients,)).copy()
