"""Largest value of each window of an image, and which it was.

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
from stratafl.engine.kernels.reference import Pair


@triton.jit
def _max(
    x_ptr, y_ptr, argmax_ptr, M, H, W, OH, OW, K: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (K + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, top, left = m // (OH * OW), ((m // OW) % OH) * SH - PH, (m % OW) * SW - PW
    x_ptr += c * (M // (OH * OW)) * H * W * K
    valid = (m < M)[:, None] & (n < K)[None, :]
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    # where all are -inf the first counts, as in torch
    argmax = tl.zeros((BM, BN), tl.int32) + (tl.maximum(-top, 0) * KW + tl.maximum(-left, 0))[:, None]
    for tap in tl.static_range(KH * KW):
        y, x = top + tap // KW, left + tap % KW
        mask = valid & ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
        offset = ((sample * H + y) * W + x)[:, None] * K + n[None, :]
        value = tl.load(x_ptr + offset, mask=mask, other=float("-inf")).to(tl.float32)
        more = (value > best) | (value != value)
        best = tl.where(more, value, best)
        argmax = tl.where(more, tap, argmax)
    out = c * M * K + m[:, None] * K + n[None, :]
    tl.store(y_ptr + out, best.to(y_ptr.dtype.element_ty), mask=valid)
    tl.store(argmax_ptr + out, argmax.to(tl.uint8), mask=valid)


@triton.jit
def _max_gradient(
    dy_ptr, argmax_ptr, dx_ptr, M, H, W, OH, OW, K: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: some pixels, each of which sums the gradients of the windows whose largest value
    it was."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (K + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, y, x = m // (H * W), (m // W) % H + PH, m % W + PW
    windows = c * (M // (H * W)) * OH * OW * K
    valid = (m < M)[:, None] & (n < K)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for a in tl.static_range((KH + SH - 1) // SH):
        for b in tl.static_range((KW + SW - 1) // SW):
            row, column = y // SH - a, x // SW - b
            ki, kj = y - row * SH, x - column * SW
            meets = (row >= 0) & (row < OH) & (ki < KH) & (column >= 0) & (column < OW) & (kj < KW)
            offset = windows + ((sample * OH + row) * OW + column)[:, None] * K + n[None, :]
            mask = valid & meets[:, None]
            is_largest = tl.load(argmax_ptr + offset, mask=mask, other=255).to(tl.int32) == (ki * KW + kj)[:, None]
            total += tl.where(is_largest, tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32), 0.0)
    out = c * M * K + m[:, None] * K + n[None, :]
    tl.store(dx_ptr + out, total.to(dx_ptr.dtype.element_ty), mask=valid)


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
        argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        pixels = batch * size[0] * size[1]
        grid, bm, bn = _grid(pixels, channels, clients)
        _max[grid](
            x_ptr=x, y_ptr=y, argmax_ptr=argmax,
            M=pixels, H=height, W=width, OH=size[0], OW=size[1], K=channels, KH=kernel[0], KW=kernel[1],
            SH=stride[0], SW=stride[1], PH=padding[0], PW=padding[1], BM=bm, BN=bn,
        )  # fmt: skip
        ctx.save_for_backward(argmax)
        ctx.plan = x.shape, kernel, stride, padding
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        (argmax,) = ctx.saved_tensors
        shape, kernel, stride, padding = ctx.plan
        dy = dy_[0].contiguous()
        clients, batch, height, width, channels = shape
        dx = torch.empty(shape, dtype=dy.dtype, device=dy.device)
        grid, bm, bn = _grid(batch * height * width, channels, clients)
        pixels = batch * height * width
        _max_gradient[grid](
            dy_ptr=dy, argmax_ptr=argmax, dx_ptr=dx,
            M=pixels, H=height, W=width, OH=dy.shape[2], OW=dy.shape[3], K=channels, KH=kernel[0], KW=kernel[1],
            SH=stride[0], SW=stride[1], PH=padding[0], PW=padding[1], BM=bm, BN=bn,
        )  # fmt: skip
        return dx, None, None, None


def max_pool2d(x_CBHWK: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Largest value of each window, (C, B, H', W', K).

    Which it was is kept in a byte, so windows have at most 255 pixels.
    """
    return _MaxPool.apply(x_CBHWK, kernel, stride, padding)
