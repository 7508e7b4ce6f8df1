"""Devices: checks, host-to-device copies and a cache of small arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, first_line_of


def to_device(
    values: np.ndarray | Sequence[int], device: str | torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy values to a device, without waiting for work that a GPU has queued."""
    tensor = torch.as_tensor(np.asarray(values), dtype=dtype)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # from ordinary memory a copy begins when the device is idle, and the host waits for it
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceCache:
    """Cache of small arrays on a device by name; unchanged arrays are not copied again."""

    def __init__(self, device: torch.device):
        self.device = device
        self._tensors: dict[tuple[object, torch.dtype | None], tuple[np.ndarray, Tensor]] = {}

    def __call__(self, name: object, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        key = name, dtype
        if key not in self._tensors or not np.array_equal(self._tensors[key][0], values):
            self._tensors[key] = values.copy(), to_device(values, self.device, dtype)
        return self._tensors[key][1]


def check_device(device: str | torch.device, field: str = "device") -> torch.device:
    """Return the device that tensors created on `device` are on, if it can hold values."""
    try:
        tensor = torch.zeros(1, device=device)
        float(tensor)
    except Exception as problem:
        reason = first_line_of(problem) or "is no device of this machine"
        if reason.startswith("Expected one of"):  # the names of twenty kinds of devices
            reason = "must be a device of torch, such as cpu, cuda or cuda:1"
        raise InvalidInput(field, device, reason) from None
    return tensor.device
