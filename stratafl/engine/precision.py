"""Precision of the products: types, autocast, tf32 switches, loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor

from stratafl.base.rng import PROCESS
from stratafl.core.losses import Loss

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

HALF_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_operand(x: Tensor, precision: Precision) -> Tensor:
    """Cast an operand to the product's dtype."""
    return x.to(HALF_DTYPES[precision]) if precision in HALF_DTYPES else x


FP16_LOSS_SCALE = 4096.0
"""Factor of the loss in fp16, which keeps small gradients from vanishing."""


def effective_precision(
    precision: Precision, device: torch.device, dtype: torch.dtype, supports_half: bool
) -> Precision:
    """The precision in which products are really computed.

    Only an engine that casts their operands has 16 bits, and only a GPU rounds float32 products to
    tf32.
    """
    if precision in HALF_DTYPES:
        return precision if supports_half else "fp32"
    return precision if device.type == "cuda" and dtype == torch.float32 else "fp32"


def supports_autocast(dtype: torch.dtype) -> bool:
    """Whether autocast computes a module of this type in 16 bits; it leaves float64 as it is."""
    return dtype == torch.float32


def loss_scale(precision: Precision) -> float:
    """Factor of the loss, and so of the gradients in the backward pass."""
    return FP16_LOSS_SCALE if precision == "fp16" else 1.0


class MixedPrecision:
    """Autocast for the forward pass and loss scaling for fp16.

    Weights and their gradients keep their type.
    """

    def __init__(self, precision: Precision, device: torch.device, dtype: torch.dtype, cache_casts: bool = True):
        """`cache_casts`: whether a weight that is used several times is cast once, which is not
        possible under vmap."""
        self.precision = effective_precision(precision, device, dtype, supports_autocast(dtype))
        self.scale = loss_scale(self.precision)
        self._device, self._cache_casts = device, cache_casts

    def autocast(self) -> AbstractContextManager[None]:
        """Context for the forward pass of module and loss."""
        return self._autocast() if self.precision in HALF_DTYPES else nullcontext()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        try:
            with torch.autocast(self._device.type, HALF_DTYPES[self.precision], cache_enabled=self._cache_casts):
                yield
        finally:
            # the cached weights have other values in the next step
            torch.clear_autocast_cache()

    def scale_loss(self, loss: Loss) -> Loss:
        """The loss times the scale; `unscale_` divides its gradients by it."""
        if self.scale == 1.0:
            return loss
        return lambda outputs, targets: loss(outputs, targets) * self.scale

    def unscale_(self, gradients: Tensor) -> Tensor:
        """Divide gradients by the scale, in place."""
        return gradients if self.scale == 1.0 else gradients.div_(self.scale)


@contextmanager
def cudnn_disabled() -> Iterator[None]:
    """Compute without cuDNN, so that layers are several operations.

    `torch.backends.cudnn.flags` also reads a switch of the older kind, and fails while
    `float32_matmul_precision` uses the newer ones.
    """
    with PROCESS:
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = before


@contextmanager
def float32_matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute a GPU's float32 products in tf32 or exactly, and restore the setting afterwards."""
    if device.type != "cuda":
        yield
        return
    # newer releases have one switch per library and complain about the older kind
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    layers = [getattr(convolution, name, None) for name in ("conv", "rnn")]
    newer = all(hasattr(part, "fp32_precision") for part in (matmul, *layers))
    name = "fp32_precision" if newer else "allow_tf32"
    value = ("ieee" if precision == "fp32" else "tf32") if newer else precision != "fp32"
    # the older switch of convolutions is that of recurrent layers, too
    parts = [matmul, *(layers if newer else [convolution])]
    with PROCESS:
        before = [getattr(part, name) for part in parts]
        try:
            for part in parts:
                setattr(part, name, value)
            yield
        finally:
            for part, earlier in zip(parts, before, strict=True):
                setattr(part, name, earlier)
