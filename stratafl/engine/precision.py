"""Precision of products: types, autocast, loss scaling, and torch's switches for tf32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from stratafl.base.rng import PROCESS_LOCK
from stratafl.core.losses import Loss

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

HALF_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_operand(x: Tensor, precision: Precision) -> Tensor:
    """Cast an operand of a product to the type that the precision needs."""
    return x.to(HALF_DTYPES[precision]) if precision in HALF_DTYPES else x


FP16_LOSS_SCALE = 4096.0
"""Factor of the loss, and so of all gradients in the backward pass, in fp16, which keeps small
gradients from vanishing."""


def effective_precision(
    precision: Precision, device: torch.device, dtype: torch.dtype, supports_half: bool
) -> Precision:
    """Precision in which products are really computed.

    Products have 16 bits only if the engine casts their operands (`supports_half`), and tf32 only
    if a GPU multiplies float32 values.
    """
    if precision in HALF_DTYPES:
        return precision if supports_half else "fp32"
    return precision if device.type == "cuda" and dtype == torch.float32 else "fp32"


class MixedPrecision:
    """Autocast for the forward pass, and loss scaling for fp16.

    Weights and their gradients keep their type. Autocast leaves float64 as it is.
    """

    def __init__(self, precision: Precision, device: torch.device, dtype: torch.dtype, cache_casts: bool = True):
        """`cache_casts`: whether a weight that is used several times is cast once, which is not
        possible under vmap."""
        self.precision = effective_precision(precision, device, dtype, supports_half=dtype == torch.float32)
        self.scale = FP16_LOSS_SCALE if self.precision == "fp16" else 1.0
        self._device, self._cache_casts = device, cache_casts

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context for the forward pass of module and loss."""
        if self.precision not in HALF_DTYPES:
            yield
            return
        try:
            with torch.autocast(self._device.type, HALF_DTYPES[self.precision], cache_enabled=self._cache_casts):
                yield
        finally:
            # the cached weights have other values in the next step
            torch.clear_autocast_cache()

    def scale_loss(self, loss: Loss) -> Loss:
        """Loss times the scale, by which `unscale_` divides the gradients."""
        if self.scale == 1.0:
            return loss
        return lambda outputs, targets: loss(outputs, targets) * self.scale

    def unscale_(self, gradients: Tensor) -> Tensor:
        """Divide gradients by the scale, in place."""
        return gradients if self.scale == 1.0 else gradients.div_(self.scale)


@contextmanager
def cudnn_disabled() -> Iterator[None]:
    """Compute without cuDNN: recurrent layers then consist of plain operations, which can be
    traced and draw dropout from torch's generator.

    `torch.backends.cudnn.flags` does not work here: it reads an older switch for tf32, and fails
    while `float32_matmul_precision` uses the newer ones.
    """
    with PROCESS_LOCK:
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = before


@contextmanager
def float32_matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute a GPU's float32 products exactly for "fp32" and in tf32 for other precisions, and
    restore the setting afterwards."""
    if device.type != "cuda":
        yield
        return
    # newer releases have one switch per library and complain about the older kind
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    layers = [getattr(convolution, name, None) for name in ("conv", "rnn")]
    newer = all(hasattr(part, "fp32_precision") for part in (matmul, *layers))
    name = "fp32_precision" if newer else "allow_tf32"
    value = ("ieee" if precision == "fp32" else "tf32") if newer else precision != "fp32"
    # one older switch is for convolutions and recurrent layers
    parts = [matmul, *(layers if newer else [convolution])]
    with PROCESS_LOCK:
        before = [getattr(part, name) for part in parts]
        try:
            for part in parts:
                setattr(part, name, value)
            yield
        finally:
            for part, setting in zip(parts, before, strict=True):
                setattr(part, name, setting)
