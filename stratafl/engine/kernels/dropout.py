"""Dropout by the clients' own random streams in one pass.

No mask is stored: the backward pass draws the same numbers again. C clients, B samples, K channels.
The number of a value in its stream is that of the layout (B, K, pixels) that the module sees, also
where images are channels-last.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.base.rng import MIXING, Stream, stream_prefix
from stratafl.engine.kernels import reference
from stratafl.engine.kernels.common import cdiv, hash_step
from stratafl.engine.random_streams import RandomSource, bernoulli_threshold

BLOCK = 1024


@triton.jit
def _dropout(
    x_ptr, y_ptr, client_ptr, step_ptr, step_stride, start, draw, threshold, scale, golden, first, second, count,
    K: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Drop BLOCK of the `count` values of a client. Two values share one 64-bit random word.

    start, golden, first, second: state and constants of the hash, see `base.rng.mix`.
    draw: number of the draw within the step. step_stride: 1 if clients have steps of their own.
    """
    row = tl.program_id(1).to(tl.int64)
    state = hash_step(start, tl.load(client_ptr + row), golden, first, second)
    state = hash_step(state, tl.load(step_ptr + row * step_stride), golden, first, second)
    state = hash_step(state, draw, golden, first, second)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    pixel = offset // K % PIXELS
    index = (offset // (K * PIXELS) * K + offset % K) * PIXELS + pixel
    word = hash_step(state, index // 2, golden, first, second)
    half = tl.where(index % 2 == 0, word, word >> 32).to(tl.int32)
    x = tl.load(x_ptr + row * count + offset, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.where(half <= threshold, scale, 0.0)
    tl.store(y_ptr + row * count + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


class DropoutDraw(NamedTuple):
    """Random numbers that decide which values are kept, and the layout of the values."""

    client_C: Tensor
    step: Tensor
    """Scalar, or one number per client."""
    key: int
    """State of the hash for the run's seed."""
    draw: int
    """Number of the draw within the step."""
    threshold: int
    """Largest random int32 for which a value is kept."""
    scale: float
    channels: int
    pixels: int


def _dropped(x: Tensor, draw: DropoutDraw) -> Tensor:
    """x with dropped values set to zero, and the others multiplied by the scale."""
    y, count = torch.empty_like(x), x[0].numel()
    golden, first, second = MIXING
    _dropout[(cdiv(count, BLOCK), len(x))](
        x_ptr=x, y_ptr=y, client_ptr=draw.client_C, step_ptr=draw.step,
        step_stride=draw.step.dim(), start=draw.key, draw=draw.draw, threshold=draw.threshold, scale=draw.scale,
        golden=golden, first=first, second=second, count=count,
        K=draw.channels, PIXELS=draw.pixels, BLOCK=BLOCK,
    )  # fmt: skip
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: DropoutDraw) -> Tensor:
        ctx.draw = draw
        return _dropped(x.contiguous(), draw)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _dropped(gradients[0].contiguous(), ctx.draw), None


def dropout(x: Tensor, p: float, source: RandomSource, last: bool = False) -> Tensor:
    """Dropout by each client's own random stream. `last`: x are channels-last images."""
    if p == 1 or x.numel() == 0:
        return reference.dropout(x, p, source, last)
    stream = source.stream
    client_C = torch.as_tensor(stream.client, device=x.device)
    step = torch.as_tensor(stream.step, dtype=torch.long, device=x.device)
    channels, pixels = (x.shape[-1], x.shape[2:-1].numel()) if last else (1, 1)
    key, scale = stream_prefix(stream.seed, Stream.MODULE), 1 / (1 - p)
    draw = DropoutDraw(client_C, step, key, source.number(), bernoulli_threshold(1 - p), scale, channels, pixels)
    return _Dropout.apply(x, draw)  # type: ignore[no-any-return, no-untyped-call]
