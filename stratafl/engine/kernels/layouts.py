"""Layouts of images and filters, and casts of operands.

C clients, B samples, N values of a client, K channels, CO and CI output and input channels,
T = KH * KW taps: positions of a filter. In the rows of parameters that the kernels compute with,
one per client, filters are channels-last, (CO, KH, KW, CI); `convert_filters` copies them from and
to PyTorch's layout.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    TORCH,
    TRITON,
    DotOperands,
    cast,
    cdiv,
    exponent,
    is_channels_last,
    next_power_of_two,
)


def as_channels_last(w_COIhw: Tensor) -> Tensor:
    """Filters in channels-last layout, copied if they are not."""
    if is_channels_last(w_COIhw):
        return w_COIhw
    filters = w_COIhw if w_COIhw.stride(0) else w_COIhw[:1]  # clients share the filters of a frozen layer
    return filters.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3).expand(w_COIhw.shape)


@triton.jit
def _convert_filters(
    w_ptr, out_ptr, stride_client, out_client, stride_i, stride_t, out_i, out_t, CO, CI, T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK_O x BLOCK_I filters of a client, with all taps t, from w to out."""
    c = tl.program_id(1).to(tl.int64)
    blocks_i = tl.cdiv(CI, BLOCK_I)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None, None]
    i = (tl.program_id(0) % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :, None]
    t = tl.arange(0, BLOCK_T)[None, None, :]
    mask = (o < CO) & (i < CI) & (t < T)
    w = tl.load(w_ptr + c * stride_client + o * (CI * T) + i * stride_i + t * stride_t, mask=mask)
    tl.store(out_ptr + c * out_client + o * (CI * T) + i * out_i + t * out_t, w, mask=mask)


def convert_filters(w_COIhw: Tensor, out_COIhw: Tensor) -> None:
    """Copy filters to the other layout: from channels-last to channels-first, or back. The caller
    makes `out_COIhw` in that layout.

    A block holds all taps and many inputs, because one layout is contiguous in taps and the other
    in inputs: so both reading and writing are coalesced.
    """
    clients, outputs, inputs, height, width = w_COIhw.shape
    taps = height * width
    block_t, block_i = next_power_of_two(taps, 1), min(64, next_power_of_two(inputs, 1))
    block_o = min(next_power_of_two(outputs, 1), max(1, 4096 // (block_t * block_i)))
    channels_first, channels_last = (taps, 1), (1, inputs)
    strides = (channels_last, channels_first) if is_channels_last(w_COIhw) else (channels_first, channels_last)
    (stride_i, stride_t), (out_i, out_t) = strides
    _convert_filters[(cdiv(outputs, block_o) * cdiv(inputs, block_i), clients)](
        w_ptr=w_COIhw, out_ptr=out_COIhw,
        stride_client=w_COIhw.stride(0), out_client=out_COIhw.stride(0), stride_i=stride_i, stride_t=stride_t,
        out_i=out_i, out_t=out_t,
        CO=outputs, CI=inputs, T=taps, BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_T=block_t,
    )  # fmt: skip


@triton.jit
def _cast(x_ptr, out_ptr, peak_ptr, N, DTYPE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Cast BLOCK of the N values of a client."""
    c = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + c * N + offset, mask=offset < N, other=0.0)
    tl.store(out_ptr + c * N + offset, cast(x, DTYPE, exponent(peak_ptr, c, SCALED), SCALED), mask=offset < N)


def cast_scaled(x: Tensor, operands: DotOperands) -> tuple[Tensor, Tensor]:
    """Cast a contiguous tensor to the operands' type, scaled if they are, and return it with its
    peaks, from which the scale is computed."""
    peaks = operands.peaks(x)
    # scaled operands are fp16 copies of fp32 tensors: with equal types nothing is scaled
    if TRITON[x.dtype] == operands.dtype:
        return x, peaks
    out = torch.empty(x.shape, dtype=TORCH[operands.dtype], device=x.device)
    count = x[0].numel()
    _cast[(cdiv(count, 4096), x.shape[0])](
        x_ptr=x, out_ptr=out, peak_ptr=peaks,
        N=count, DTYPE=operands.dtype, SCALED=operands.scaled, BLOCK=4096,
    )  # fmt: skip
    return out, peaks


@triton.jit
def _transpose(x_ptr, out_ptr, A, B, BA: tl.constexpr, BB: tl.constexpr):
    """Transpose a block of one sample's matrix (A, B)."""
    sample = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BA + tl.arange(0, BA)[:, None]
    b = tl.program_id(2) * BB + tl.arange(0, BB)[None, :]
    mask = (a < A) & (b < B)
    x = tl.load(x_ptr + sample * A * B + a * B + b, mask=mask)
    tl.store(out_ptr + sample * A * B + b * A + a, x, mask=mask)


def _transposed(x: Tensor, samples: int, a: int, b: int) -> Tensor:
    """Matrices (samples, a, b) as (samples, b, a)."""
    out = torch.empty((samples, b, a), dtype=x.dtype, device=x.device)
    ba, bb = min(64, next_power_of_two(a, 1)), min(64, next_power_of_two(b, 1))
    _transpose[(samples, cdiv(a, ba), cdiv(b, bb))](x_ptr=x.contiguous(), out_ptr=out, A=a, B=b, BA=ba, BB=bb)
    return out


class _Flatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        clients, batch, height, width, channels = x.shape
        return _transposed(x, clients * batch, height * width, channels).view(clients, batch, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        clients, batch, height, width, channels = ctx.shape
        return _transposed(gradients[0], clients * batch, channels, height * width).view(ctx.shape)


def flatten(x_CBHWK: Tensor) -> Tensor:
    """Images as vectors (C, B, K * H * W), in the order of a flattened channels-first image."""
    return _Flatten.apply(x_CBHWK)
