"""Max-pooling of C clients, and its gradient. The backward pass needs one byte per window: the
position of its largest value.

C clients, B samples, H and W height and width of the image, OH and OW of the output, K channels, M
pixels of what a kernel computes. KH and KW size, SH and SW stride, PH and PW padding of the
windows. Kernels work on blocks of BM pixels by BN channels.
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
    """Compute the largest values of BM windows of a client, and their positions."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (K + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, top, left = m // (OH * OW), ((m // OW) % OH) * SH - PH, (m % OW) * SW - PW
    x_ptr += c * (M // (OH * OW)) * H * W * K
    valid = (m < M)[:, None] & (n < K)[None, :]
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    # if all values are -inf, the position is that of the first one inside the image, as in torch
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
    """Compute the gradients of BM pixels of a client.

    The gradient of a pixel is the sum of the gradients of the windows whose largest value it is.
    """
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


def _launch(
    kernel: Any, image_shape: torch.Size, out_shape: torch.Size, pixels: int, windows: tuple[Pair, ...],
    **pointers: Tensor,
) -> None:  # fmt: skip
    """Launch a kernel that computes `pixels` pixels of each client, for windows (size, stride,
    padding)."""
    clients, _, height, width, channels = image_shape
    kernel_size, stride, padding = windows
    bn = min(64, next_power_of_two(channels, 1))
    bm = 2048 // bn
    kernel[(cdiv(pixels, bm) * cdiv(channels, bn), clients)](
        **pointers, M=pixels, H=height, W=width, OH=out_shape[2], OW=out_shape[3], K=channels,
        KH=kernel_size[0], KW=kernel_size[1], SH=stride[0], SW=stride[1], PH=padding[0], PW=padding[1], BM=bm, BN=bn,
    )  # fmt: skip


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *windows: Pair) -> Tensor:
        x = x.contiguous()
        clients, batch, *image, channels = x.shape
        lengths = zip(image, *windows, strict=True)
        size = [(length + 2 * padding - kernel) // stride + 1 for length, kernel, stride, padding in lengths]
        y = torch.empty((clients, batch, *size, channels), dtype=x.dtype, device=x.device)
        argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        _launch(_max, x.shape, y.shape, y.shape[1:-1].numel(), windows, x_ptr=x, y_ptr=y, argmax_ptr=argmax)
        ctx.save_for_backward(argmax)
        ctx.image_shape, ctx.windows = x.shape, windows
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (argmax,) = ctx.saved_tensors
        shape, dy = ctx.image_shape, gradients[0].contiguous()
        dx = torch.empty(shape, dtype=dy.dtype, device=dy.device)
        pointers = {"dy_ptr": dy, "argmax_ptr": argmax, "dx_ptr": dx}
        _launch(_max_gradient, shape, dy.shape, shape[1:-1].numel(), ctx.windows, **pointers)
        return dx, None, None, None


def max_pool2d(x_CBHWK: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Max-pooling, (C, B, H', W', K), for windows of at most 255 pixels."""
    return _MaxPool.apply(x_CBHWK, kernel, stride, padding)
