"""Layers and optimizer steps of many clients at once: Triton kernels on a GPU, PyTorch elsewhere.

Every operation takes C clients at once, each with its own weights, and has a reference in plain
PyTorch (`reference`). Importing this package needs neither Triton nor a GPU. Images are
channels-last behind the client: (C, B, H, W, channels).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stratafl.core.rows import DriftKernel
from stratafl.engine.kernels.reference import REFERENCE_OPS, fused_optimizer_step


class Backend(NamedTuple):
    """Implementations of all operations for one kind of device."""

    ops: Mapping[str, Callable[..., Tensor]]
    """Layers and losses by name; the names are those of `REFERENCE_OPS`."""
    writes_gradients: frozenset[str]
    """Operations that take `gradient_buffers`, and write the gradients, divided by
    `loss_scale`, to them."""
    collects_squared_norms: bool
    """Whether these operations also append the squared norms of the gradients that they write to
    `GradientBuffers.squared_norms`."""
    optimizer_step: Callable[..., None]
    convert_filters: Callable[[Tensor, Tensor], None] | None = None
    """Copies filters between channels-first and channels-last, if convolutions need the latter."""
    load_images: Callable[..., Tensor] | None = None
    """Gathers, flips and crops the images of a step in one pass."""
    drift: DriftKernel | None = None
    """Computes (x - parent's model) / rate for all children in one pass."""


TORCH_BACKEND = Backend(REFERENCE_OPS, frozenset({"linear"}), False, fused_optimizer_step)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_available() -> bool:
    """Whether Triton is installed and can run its kernels: on a GPU of compute capability 8.0 or
    more, or by its interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return is_interpreted() or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """Fastest backend of a device. Triton kernels need CUDA and parameters in float32."""
    return triton_backend() if device.type == "cuda" and dtype == torch.float32 else TORCH_BACKEND


@functools.cache
def triton_backend() -> Backend:
    """Triton kernels, and the reference for operations without a kernel; TORCH_BACKEND, with a
    warning, if they cannot run."""
    if not triton_available():
        warnings.warn("no Triton for this GPU: torch's own operations are used", stacklevel=2)
        return TORCH_BACKEND
    from stratafl.engine.kernels.conv2d import conv2d
    from stratafl.engine.kernels.conv2d_relu_pool import conv2d_relu_pool
    from stratafl.engine.kernels.cross_entropy import cross_entropy
    from stratafl.engine.kernels.dropout import dropout
    from stratafl.engine.kernels.embedding import embedding
    from stratafl.engine.kernels.group_norm import group_norm
    from stratafl.engine.kernels.image_batches import load_images
    from stratafl.engine.kernels.layouts import convert_filters, flatten
    from stratafl.engine.kernels.linear import linear
    from stratafl.engine.kernels.lstm import lstm
    from stratafl.engine.kernels.max_pool2d import max_pool2d
    from stratafl.engine.kernels.updates import drift, fused_optimizer_step

    kernels: list[Callable[..., Tensor]] = [
        conv2d, conv2d_relu_pool, cross_entropy, dropout, embedding, flatten, group_norm, linear, lstm, max_pool2d,
    ]  # fmt: skip
    ops = {kernel.__name__: kernel for kernel in kernels}
    writing = (name for name, op in ops.items() if "gradient_buffers" in inspect.signature(op).parameters)
    return Backend(
        {**REFERENCE_OPS, **ops}, frozenset(writing), True, fused_optimizer_step, convert_filters, load_images, drift
    )
