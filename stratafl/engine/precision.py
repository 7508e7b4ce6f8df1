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


def cast_operand(x: Tensor, compute: Precision) -> Tensor:
    """A product's operand in the type it is computed in."""
    return x.to(HALF_DTYPES[compute]) if compute in HALF_DTYPES else x


FP16_LOSS_SCALE = 4096.0
"""Gradients in fp16 are held this much larger, which keeps the small ones from vanishing."""


def effective_precision(precision: Precision, device: torch.device, dtype: torch.dtype, casts: bool) -> Precision:
    """What products are really computed in: only an engine that casts their operands has 16 bits,
    and only a GPU rounds float32 products to tf32."""
    if precision in HALF_DTYPES:
        return precision if casts else "fp32"
    return precision if device.type == "cuda" and dtype == torch.float32 else "fp32"


def supports_autocast(dtype: torch.dtype) -> bool:
    """Whether a module of this type can be computed in 16 bits by autocast, which leaves float64
    alone."""
    return dtype == torch.float32


def loss_scale(compute: Precision) -> float:
    """How much larger gradients are held on the way back."""
    return FP16_LOSS_SCALE if compute == "fp16" else 1.0


class MixedPrecision:
    """How torch's own operations get a gradient in this precision: 16 bits by autocast, on the way
    forward alone, as its recipe has it; weights and their gradients stay as they are."""

    def __init__(self, precision: Precision, device: torch.device, dtype: torch.dtype, keeps: bool = True):
        """`keeps`: whether a weight that is used several times is cast once, which a mapping over
        clients cannot do."""
        self.compute = effective_precision(precision, device, dtype, supports_autocast(dtype))
        self.scale = loss_scale(self.compute)
        self._device, self._keeps = device, keeps

    def forward(self) -> AbstractContextManager[None]:
        """A context for module and loss."""
        return self._autocast() if self.compute in HALF_DTYPES else nullcontext()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        try:
            with torch.autocast(self._device.type, HALF_DTYPES[self.compute], cache_enabled=self._keeps):
                yield
        finally:
            # the weights that were cast have other values in the next step
            torch.clear_autocast_cache()

    def scaled(self, loss: Loss) -> Loss:
        """The loss whose gradients are held larger; `unscaled` makes them what they are."""
        if self.scale == 1.0:
            return loss
        return lambda outputs, targets: loss(outputs, targets) * self.scale

    def unscaled(self, gradients: Tensor) -> Tensor:
        return gradients if self.scale == 1.0 else gradients.div_(self.scale)


@contextmanager
def cudnn_disabled() -> Iterator[None]:
    """Layers as several operations, not as one of the GPU's library. `torch.backends.cudnn.flags`
    also asks for a switch of the older kind, and fails while `computing` uses the newer ones."""
    with PROCESS:
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = before


@contextmanager
def float32_matmul_precision(compute: Precision, device: torch.device) -> Iterator[None]:
    """Let the GPU's float32 products be tf32 or keep them exact, and leave the setting as it
    was."""
    if device.type != "cuda":
        yield
        return
    # newer releases have one switch per library and complain about the older kind
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    layers = [getattr(convolution, name, None) for name in ("conv", "rnn")]
    newer = all(hasattr(part, "fp32_precision") for part in (matmul, *layers))
    name = "fp32_precision" if newer else "allow_tf32"
    wanted = ("ieee" if compute == "fp32" else "tf32") if newer else compute != "fp32"
    # the older switch of convolutions is that of recurrent layers, too
    parts = [matmul, *(layers if newer else [convolution])]
    with PROCESS:
        before = [getattr(part, name) for part in parts]
        try:
            for part in parts:
                setattr(part, name, wanted)
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                setattr(part, name, value)
