"""Weights and images rearranged for the convolutions.

C clients, CO/CI output and input channels, T = KH * KW taps, A/B the outer and inner channel of a packed weight.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import TORCH, TRITON, Target, cast, cdiv, power, rows, settle


@triton.jit
def _pack(
    w_ptr, out_ptr, stride_client, stride_a, stride_b, out_client, out_row, out_column, out_a,
    A, B, KW: tl.constexpr, T: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_b = tl.cdiv(B, BLOCK_B)
    a = (tl.program_id(0) // blocks_b) * BLOCK_A + tl.arange(0, BLOCK_A)[:, None, None]
    b = (tl.program_id(0) % blocks_b) * BLOCK_B + tl.arange(0, BLOCK_B)[None, :, None]
    t = tl.arange(0, BLOCK_T)[None, None, :]
    inside = (a < A) & (b < B) & (t < T)
    w = tl.load(w_ptr + c * stride_client + a * stride_a + b * stride_b + t, mask=inside, other=0.0)
    where = (t // KW) * out_row + (t % KW) * out_column + a * out_a + b
    tl.store(out_ptr + c * out_client + where, w.to(out_ptr.dtype.element_ty), mask=inside)


def pack(w_COIhw: Tensor, dtype: torch.dtype, for_input: bool = False) -> Tensor:
    """(C, KH, CO, KW * CI) for the forward product, (C, KH * KW, CI, CO) for the input gradient: the summed is inner.

    Reading and writing are coalesced only if both the taps and the inner channel lie in one block.
    """
    w, stride_client = rows(w_COIhw)
    clients, outputs, inputs, height, width = w.shape
    taps = height * width
    if for_input:
        a, b, stride_a, stride_b = inputs, outputs, taps, inputs * taps
        shape = (clients, taps, inputs, outputs)
        out_row, out_column, out_a = width * a * b, a * b, b
    else:
        a, b, stride_a, stride_b = outputs, inputs, inputs * taps, taps
        shape = (clients, height, outputs, width * inputs)
        out_row, out_column, out_a = a * width * b, b, width * b
    out = torch.empty(shape, dtype=dtype, device=w.device)
    block_t, block_b = power(taps, 1), min(64, power(b, 1))
    block_a = min(power(a, 1), max(1, 8192 // (block_t * block_b)))
    grid = (cdiv(a, block_a) * cdiv(b, block_b), clients)
    _pack[grid](
        w, out, stride_client, stride_a, stride_b, out.stride(0), out_row, out_column, out_a,
        a, b, width, taps, block_a, block_b, block_t,
    )  # fmt: skip
    return out


@triton.jit
def _unpack(
    part_ptr, dw_ptr, extra_ptr, squares_ptr, stride_client, scale, CO, CI, T: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_i = tl.cdiv(CI, BLOCK_I)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None, None]
    i = (tl.program_id(0) % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :, None]
    t = tl.arange(0, BLOCK_T)[None, None, :]
    inside = (o < CO) & (i < CI) & (t < T)
    where = (t * CI + i) * CO + o
    dw = tl.load(part_ptr + c * T * CI * CO + where, mask=inside, other=0.0) * scale
    squares = settle(dw_ptr, extra_ptr, c * stride_client + (o * CI + i) * T + t, dw, inside, EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def unpack(part_ChRO: Tensor, dw: Target, scale: float) -> None:
    """A weight gradient from the order it is computed in, (C, KH, KW * CI, CO), to the weights', times `scale`."""
    clients, outputs, inputs, height, width = dw.grad.shape
    taps = height * width
    block_t, block_o = power(taps, 1), min(64, power(outputs, 1))
    block_i = min(power(inputs, 1), max(1, 4096 // (block_t * block_o)))
    programs = cdiv(outputs, block_o) * cdiv(inputs, block_i)
    _unpack[(programs, clients)](
        part_ChRO, dw.grad, dw.extra, dw.parts(programs), dw.grad.stride(0), scale, outputs, inputs, taps,
        dw.corrected, block_o, block_i, block_t,
    )  # fmt: skip


@triton.jit
def _convert(x_ptr, out_ptr, N, DTYPE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    tl.store(out_ptr + at, cast(x, DTYPE, SCALE), mask=at < N)


def convert(x: Tensor, dtype: tl.dtype, scale: float = 1.0) -> Tensor:
    """A contiguous tensor times `scale` in the operands' type; itself if it has it."""
    if TRITON[x.dtype] == dtype:
        return x
    out = torch.empty(x.shape, dtype=TORCH[dtype], device=x.device)
    _convert[(cdiv(x.numel(), 4096),)](x, out, x.numel(), dtype, scale, 4096)
    return out
