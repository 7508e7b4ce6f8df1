"""Roofline of a training step: its operations and bytes, and the device's peak rates.

Peak rates are measured with a large matrix product and a large copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.torch_baselines import TrainingJob
from stratafl.engine.precision import HALF_DTYPES, Precision, float32_matmul_precision
from stratafl.models.registry import count_parameters


@dataclass(frozen=True)
class Rates:
    """Measured peak rates of a device."""

    operations: dict[str, float]
    """Operations per second in a matrix product, by precision."""
    bytes: float
    """Bytes per second that a copy reads and writes."""


def measure_peaks(precisions: Sequence[Precision], device: torch.device) -> Rates:
    """Measure the peak rates of a device."""
    return Rates({kind: _operations_rate(kind, device) for kind in precisions}, _bytes_rate(device))


def count_step(job: TrainingJob, precisions: Sequence[Precision]) -> tuple[float, dict[str, float]]:
    """Count the operations and, by precision, the bytes of one client's step.

    Operations are those of the products in the forward and backward pass. The bytes are a lower
    bound: weights are read twice and their gradients written; the update reads gradient, correction
    and weight and writes the weight; each layer's output and its gradient are written and read.
    """
    index_B = job.partition[0][: job.batch]
    activations = 0

    def count(layer: nn.Module, inputs: object, output: object) -> None:
        nonlocal activations
        activations += output.numel() if isinstance(output, Tensor) else 0

    layers = [layer for layer in job.module.modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(job.module(job.inputs[index_B]), job.targets[index_B]).backward()
    for hook in hooks:
        hook.remove()
    job.module.zero_grad(set_to_none=True)
    rows = 7 * 4 * count_parameters(job.module) + job.batch * job.inputs[0].nbytes
    return float(counter.get_total_flops()), {
        kind: float(rows + 4 * activations * (2 if kind in HALF_DTYPES else 4)) for kind in precisions
    }


def _operations_rate(precision: Precision, device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 1024
    dtype = HALF_DTYPES.get(precision, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    with float32_matmul_precision(precision, device):
        return 2.0 * size**3 / _best(lambda: a @ b, device)


def _bytes_rate(device: torch.device) -> float:
    source = torch.randn((1 << 28) if device.type == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    work()
    best = math.inf
    for _ in range(times):
        began = synchronised_time(device)
        work()
        best = min(best, synchronised_time(device) - began)
    return best


def synchronised_time(device: torch.device) -> float:
    """Wall-clock time after synchronising the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
