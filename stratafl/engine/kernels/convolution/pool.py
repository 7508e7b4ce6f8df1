"""The largest of some places, and which it was: of four accumulators in registers, and of the
windows of an image.

C clients, B samples, H/W image, K channels, M pixels.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import cdiv, next_power_of_two
from stratafl.engine.ops import Pair


@triton.jit
def relu_pool(acc0, acc1, acc2, acc3, bias_N):
    """The larger of the four plus bias, cut at zero, and which it was (the first of equals; 4 where
    cut; NaN stays)."""
    best = acc0
    place = tl.zeros(acc0.shape, tl.int32)
    more = (acc1 > best) | (acc1 != acc1)
    best = tl.where(more, acc1, best)
    place = tl.where(more, 1, place)
    more = (acc2 > best) | (acc2 != acc2)
    best = tl.where(more, acc2, best)
    place = tl.where(more, 2, place)
    more = (acc3 > best) | (acc3 != acc3)
    best = tl.where(more, acc3, best)
    place = tl.where(more, 3, place)
    best += bias_N[None, :]
    off = best <= 0.0
    return tl.where(off, 0.0, best), tl.where(off, 4, place)


@triton.jit
def _max(
    x_ptr, y_ptr, place_ptr, M, H, W, OH, OW, K: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (K + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, top, left = m // (OH * OW), ((m // OW) % OH) * SH - PH, (m % OW) * SW - PW
    x_ptr += c * (M // (OH * OW)) * H * W * K
    there = (m < M)[:, None] & (n < K)[None, :]
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    # where all are -inf the first counts, as in the library
    place = tl.zeros((BM, BN), tl.int32) + (tl.maximum(-top, 0) * KW + tl.maximum(-left, 0))[:, None]
    for tap in tl.static_range(KH * KW):
        y, x = top + tap // KW, left + tap % KW
        inside = there & ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
        at = ((sample * H + y) * W + x)[:, None] * K + n[None, :]
        value = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        more = (value > best) | (value != value)
        best = tl.where(more, value, best)
        place = tl.where(more, tap, place)
    out = c * M * K + m[:, None] * K + n[None, :]
    tl.store(y_ptr + out, best.to(y_ptr.dtype.element_ty), mask=there)
    tl.store(place_ptr + out, place.to(tl.uint8), mask=there)


@triton.jit
def _max_gradient(
    dy_ptr, place_ptr, dx_ptr, M, H, W, OH, OW, K: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: some pixels, each of which asks the windows it lies in whether it was their
    largest."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (K + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, y, x = m // (H * W), (m // W) % H + PH, m % W + PW
    windows = c * (M // (H * W)) * OH * OW * K
    there = (m < M)[:, None] & (n < K)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for a in tl.static_range((KH + SH - 1) // SH):
        for b in tl.static_range((KW + SW - 1) // SW):
            row, column = y // SH - a, x // SW - b
            ki, kj = y - row * SH, x - column * SW
            meets = (row >= 0) & (row < OH) & (ki < KH) & (column >= 0) & (column < OW) & (kj < KW)
            at = windows + ((sample * OH + row) * OW + column)[:, None] * K + n[None, :]
            inside = there & meets[:, None]
            mine = tl.load(place_ptr + at, mask=inside, other=255).to(tl.int32) == (ki * KW + kj)[:, None]
            total += tl.where(mine, tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    out = c * M * K + m[:, None] * K + n[None, :]
    tl.store(dx_ptr + out, total.to(dx_ptr.dtype.element_ty), mask=there)


def _grid(pixels: int, channels: int, clients: int) -> tuple[tuple[int, int], int, int]:
    bn = min(64, next_power_of_two(channels, 1))
    bm = 2048 // bn
    return (cdiv(pixels, bm) * cdiv(channels, bn), clients), bm, bn


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        x = x.contiguous()
        clients, batch, height, width, channels = x.shape
        size = [
            (length + 2 * p - k) // s + 1
            for length, k, s, p in zip((height, width), kernel, stride, padding, strict=True)
        ]
        y = torch.empty((clients, batch, *size, channels), dtype=x.dtype, device=x.device)
        place = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        pixels = batch * size[0] * size[1]
        grid, bm, bn = _grid(pixels, channels, clients)
        _max[grid](
            x_ptr=x, y_ptr=y, place_ptr=place,
            M=pixels, H=height, W=width, OH=size[0], OW=size[1], K=channels, KH=kernel[0], KW=kernel[1],
            SH=stride[0], SW=stride[1], PH=padding[0], PW=padding[1], BM=bm, BN=bn,
        )  # fmt: skip
        ctx.save_for_backward(place)
        ctx.plan = x.shape, kernel, stride, padding
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        shape, kernel, stride, padding = ctx.plan
        dy = dy_[0].contiguous()
        clients, batch, height, width, channels = shape
        dx = torch.empty(shape, dtype=dy.dtype, device=dy.device)
        grid, bm, bn = _grid(batch * height * width, channels, clients)
        pixels = batch * height * width
        _max_gradient[grid](
            dy_ptr=dy, place_ptr=place, dx_ptr=dx,
            M=pixels, H=height, W=width, OH=dy.shape[2], OW=dy.shape[3], K=channels, KH=kernel[0], KW=kernel[1],
            SH=stride[0], SW=stride[1], PH=padding[0], PW=padding[1], BM=bm, BN=bn,
        )  # fmt: skip
        return dx, None, None, None


def max_pool2d(x_CBHWK: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The largest value of each window, (C, B, H', W', K). Which it was is kept in a byte: windows
    have at most 255 places."""
    return _MaxPool.apply(x_CBHWK, kernel, stride, padding)
