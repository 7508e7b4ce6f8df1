"""Weights and images rearranged for the convolutions.

C clients, CO/CI output and input channels, T = KH * KW taps. A client's filters lie channels-last,
(CO, KH, KW, CI), in the rows the kernels compute with; `reorder` brings them there and back.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import TORCH, TRITON, DotOperands, cast, cdiv, exponent, next_power_of_two
from stratafl.engine.ops import Pair


class KernelWindow(NamedTuple):
    """A part of a kernel: so many rows and columns of it, from (first, first) on. One `first`,
    because the kernels have one padding, which is less by it."""

    first: int
    height: int
    width: int
    outside: bool
    """Whether some of them lie outside the image somewhere."""


@functools.cache
def reachable_window(image: Pair, out: Pair, kernel: Pair, stride: int, padding: int) -> KernelWindow:
    """The taps that meet the image anywhere; the others' products and gradients are zero. Of
    ResNet-18's last 3x3 kernels, whose images are one pixel, it is a ninth."""
    places = [
        [[0 <= y * stride - padding + tap < size for y in range(outputs)] for tap in range(taps)]
        for size, outputs, taps in zip(image, out, kernel, strict=True)
    ]
    met = [[tap for tap, inside in enumerate(axis) if any(inside)] or [0, len(axis) - 1] for axis in places]
    first = min(axis[0] for axis in met)
    height, width = (axis[-1] + 1 - first for axis in met)
    rows, columns = places[0][first : first + height], places[1][first : first + width]
    return KernelWindow(first, height, width, outside=not all(all(inside) for inside in rows + columns))


def is_channels_last(w_COIhw: Tensor) -> bool:
    """Whether each client's filters lie channels-last."""
    return w_COIhw[0].is_contiguous(memory_format=torch.channels_last)


def empty_channels_last(shape: torch.Size, device: torch.device) -> Tensor:
    """Empty filters of this (C, CO, CI, KH, KW) that lie channels-last."""
    clients, outputs, inputs, height, width = shape
    return torch.empty((clients, outputs, height, width, inputs), device=device).permute(0, 1, 4, 2, 3)


def as_channels_last(w_COIhw: Tensor) -> Tensor:
    """The same filters, channels-last."""
    if is_channels_last(w_COIhw):
        return w_COIhw
    own = w_COIhw if w_COIhw.stride(0) else w_COIhw[:1]  # a frozen layer's are all clients'
    return own.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3).expand(w_COIhw.shape)


@triton.jit
def _pack(
    w_ptr, out_ptr, stride_client, stride_o, stride_h, stride_w, out_client, out_h, out_w, out_o, out_i,
    CO, CI, KW: tl.constexpr, T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    tap, block = tl.program_id(0) % T, tl.program_id(0) // T
    blocks_i = tl.cdiv(CI, BLOCK_I)
    o = (block // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]
    i = (block % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    inside = (o < CO) & (i < CI)
    row, column = tap // KW, tap % KW
    w = tl.load(w_ptr + c * stride_client + row * stride_h + column * stride_w + o * stride_o + i, mask=inside)
    where = row * out_h + column * out_w + o * out_o + i * out_i
    tl.store(out_ptr + c * out_client + where, w.to(out_ptr.dtype.element_ty), mask=inside)


def pack(w_COIhw: Tensor, dtype: torch.dtype, taps: KernelWindow, for_input: bool = False) -> Tensor:
    """These taps of filters that lie channels-last, in another type: (C, KH, CO, KW * CI) for the
    forward product, (C, KH * KW, CI, CO) for the input gradient, where what is summed is inner."""
    clients, outputs, inputs = w_COIhw.shape[:3]
    there = slice(taps.first, taps.first + taps.height), slice(taps.first, taps.first + taps.width)
    w = w_COIhw[(..., *there)]
    shape = (clients, taps.height, outputs, taps.width, inputs)
    axes = (0, 1, 3, 2, 4)
    if for_input:
        shape, axes = (clients, taps.height, taps.width, inputs, outputs), (0, 1, 2, 4, 3)
    out = torch.empty(shape, dtype=dtype, device=w.device)
    block_i = min(64 if for_input else 128, next_power_of_two(inputs, 1))
    block_o = min(next_power_of_two(outputs, 1), 4096 // block_i)
    count = taps.height * taps.width
    grid = (count * cdiv(outputs, block_o) * cdiv(inputs, block_i), clients)
    _, out_row, out_column, out_output, out_input = (out.stride(axis) for axis in axes)
    _pack[grid](
        w_ptr=w, out_ptr=out,
        stride_client=w.stride(0), stride_o=w.stride(1), stride_h=w.stride(3), stride_w=w.stride(4),
        out_client=out.stride(0), out_h=out_row, out_w=out_column, out_o=out_output, out_i=out_input,
        CO=outputs, CI=inputs, KW=taps.width, T=count, BLOCK_O=block_o, BLOCK_I=block_i,
    )  # fmt: skip
    return out.flatten(1, 2) if for_input else out.flatten(3)


@triton.jit
def _reorder(
    w_ptr, out_ptr, stride_client, out_client, stride_i, stride_t, out_i, out_t, CO, CI, T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_i = tl.cdiv(CI, BLOCK_I)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None, None]
    i = (tl.program_id(0) % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :, None]
    t = tl.arange(0, BLOCK_T)[None, None, :]
    inside = (o < CO) & (i < CI) & (t < T)
    w = tl.load(w_ptr + c * stride_client + o * (CI * T) + i * stride_i + t * stride_t, mask=inside)
    tl.store(out_ptr + c * out_client + o * (CI * T) + i * out_i + t * out_t, w, mask=inside)


def reorder(w_COIhw: Tensor, out_COIhw: Tensor) -> None:
    """Copy filters to where they lie in the other order: channels-last to as the module has them,
    or back.

    Reading and writing are coalesced only if both the taps and the inputs lie in one block.
    """
    clients, outputs, inputs, height, width = w_COIhw.shape
    taps = height * width
    block_t, block_i = next_power_of_two(taps, 1), min(64, next_power_of_two(inputs, 1))
    block_o = min(next_power_of_two(outputs, 1), max(1, 4096 // (block_t * block_i)))
    channels_first, channels_last = (taps, 1), (1, inputs)
    is_last = is_channels_last(w_COIhw)
    (stride_i, stride_t), (out_i, out_t) = (
        (channels_last, channels_first) if is_last else (channels_first, channels_last)
    )
    _reorder[(cdiv(outputs, block_o) * cdiv(inputs, block_i), clients)](
        w_ptr=w_COIhw, out_ptr=out_COIhw,
        stride_client=w_COIhw.stride(0), out_client=out_COIhw.stride(0), stride_i=stride_i, stride_t=stride_t,
        out_i=out_i, out_t=out_t,
        CO=outputs, CI=inputs, T=taps, BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_T=block_t,
    )  # fmt: skip


@triton.jit
def _convert(x_ptr, out_ptr, peak_ptr, N, DTYPE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + c * N + at, mask=at < N, other=0.0)
    tl.store(out_ptr + c * N + at, cast(x, DTYPE, exponent(peak_ptr, c, SCALED), SCALED), mask=at < N)


def cast_scaled(x: Tensor, by: DotOperands) -> tuple[Tensor, Tensor]:
    """A contiguous tensor as the operand of a product, itself if it is one; and its peaks."""
    peaks = by.peaks(x)
    if TRITON[x.dtype] == by.dtype:
        return x, peaks
    out = torch.empty(x.shape, dtype=TORCH[by.dtype], device=x.device)
    count = x[0].numel()
    _convert[(cdiv(count, 4096), x.shape[0])](
        x_ptr=x, out_ptr=out, peak_ptr=peaks,
        N=count, DTYPE=by.dtype, SCALED=by.scaled, BLOCK=4096,
    )  # fmt: skip
    return out, peaks
