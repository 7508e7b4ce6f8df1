"""Client-batched kernels: every operation takes C clients at once, each with its own weights.

Importing this package needs neither Triton nor a GPU; `available()` says whether the kernels can
run here, and the operations are imported when first named. Images are channels-last behind the
client: (C, B, H, W, channels).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

_WHERE = {
    "conv2d": "convolution.conv",
    "conv2d_relu_pool": "convolution.conv_pool",
    "linear": "linear_layer",
    "max_pool2d": "convolution.pool",
    "cross_entropy": "loss",
    "dropout": "dropout_mask",
    "group_norm": "norm",
    "embedding": "embedding_lookup",
    "drift": "drift_from_parent",
    "fetch": "augment_fetch",
    "flatten": "flatten_images",
    "recurrent": "lstm",
    "reorder": "convolution.pack",
    "update": "leaf_update",
}
__all__ = [
    "available",
    "conv2d",
    "conv2d_relu_pool",
    "cross_entropy",
    "drift",
    "dropout",
    "embedding",
    "fetch",
    "flatten",
    "group_norm",
    "linear",
    "max_pool2d",
    "recurrent",
    "reorder",
]


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available() -> bool:
    """Whether the kernels can run: Triton is installed, and there is a GPU for it or its
    interpreter is on."""
    if importlib.util.find_spec("triton") is None:
        return False
    return interpreted() or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
