"""Convolution, bias, ReLU and 2x2 max-pool of C clients in one kernel, and its gradients.

Four accumulators, one per place in the pool's window, so that everything after the product happens
in registers. What backward needs is the winner's place (0 to 3, or 4 where ReLU cut it off), one
byte per pooled value.

C clients, B samples, H/W image, CI/CO input and output channels, h/w taps, p/q pooled height and
width, M rows of a product (pooled pixels), R = one tap row of weights (w * CI values, contiguous in
a channels-last image).
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    activation_dtype,
    cdiv,
    dot_operands,
    next_power_of_two,
    per_client_parameter,
    target,
)
from stratafl.engine.kernels.convolution import conv_few_channels
from stratafl.engine.kernels.convolution.conv import (
    filter_target,
    input_gradient,
    out_size,
    packed_for_both,
    weight_gradient,
)
from stratafl.engine.kernels.convolution.pack import as_channels_last, pack, reachable_window
from stratafl.engine.kernels.convolution.pool import relu_pool
from stratafl.engine.kernels.tuning import tuning
from stratafl.engine.ops import Sink


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, place_ptr, stride_bias,
    M, H, W, PH, PW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    PAD: tl.constexpr, OUTSIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The four places of a window are blocks of columns of one wide product, the weights its rows:
    that reads shared memory less than pixels as rows would. Splitting the columns afterwards moves
    nothing between threads."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    first_m = (tl.program_id(0) // blocks_n) * BM
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pixel = tl.arange(0, 4 * BM)
    m, place = first_m + pixel % BM, pixel // BM
    sample, y, x = m // (PH * PW), (m // PW) % PH, m % PW
    top, left = y * 2 - PAD + place // 2, x * 2 - PAD + place % 2
    x_ptr += c * (M // (PH * PW)) * H * W * CI
    w_ptr += c * KH * CO * R
    start = ((sample * H + top) * W + left) * CI
    blocks_k: tl.constexpr = (R + BK - 1) // BK
    acc = tl.zeros((BN, 4 * BM), tl.float32)
    for step in range(KH * blocks_k):
        row, r = step // blocks_k, (step % blocks_k) * BK + k
        weights = (n < CO)[:, None] & (r < R)[None, :]
        w_NK = tl.load(w_ptr + (row * CO + n)[:, None] * R + r[None, :], mask=weights, other=0.0)
        inside = (m < M)[:, None] & (r < R)[None, :]
        if OUTSIDE:
            column = left[:, None] + (r // CI)[None, :]
            inside &= ((top + row >= 0) & (top + row < H))[:, None] & (column >= 0) & (column < W)
        x_MK = tl.load(x_ptr + (start + row * W * CI)[:, None] + r[None, :], mask=inside, other=0.0)
        acc = tl.dot(w_NK, tl.trans(x_MK), acc, input_precision=PRECISION)
    upper, lower = tl.split(tl.permute(tl.reshape(acc, (BN, 2, 2 * BM)), (0, 2, 1)))
    acc0, acc1 = tl.split(tl.permute(tl.reshape(upper, (BN, 2, BM)), (0, 2, 1)))
    acc2, acc3 = tl.split(tl.permute(tl.reshape(lower, (BN, 2, BM)), (0, 2, 1)))
    m = first_m + tl.arange(0, BM)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + c * stride_bias + n, mask=n < CO, other=0.0)
    best, place = relu_pool(tl.trans(acc0), tl.trans(acc1), tl.trans(acc2), tl.trans(acc3), bias)
    where = c * M * CO + m[:, None] * CO + n[None, :]
    inside = (m < M)[:, None] & (n < CO)[None, :]
    tl.store(y_ptr + where, best.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(place_ptr + where, place.to(tl.uint8), mask=inside)


@triton.jit
def _unpool(dy_ptr, place_ptr, out_ptr, M, OH, OW, PH, PW, CO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, y, x = m // (OH * OW), (m // OW) % OH, m % OW
    inside = ((m < M) & (y < 2 * PH) & (x < 2 * PW))[:, None] & (n < CO)[None, :]
    pooled = c * (M // (OH * OW)) * PH * PW * CO + ((sample * PH + y // 2) * PW + x // 2)[:, None] * CO + n[None, :]
    mine = tl.load(place_ptr + pooled, mask=inside, other=4).to(tl.int32) == ((y % 2) * 2 + x % 2)[:, None]
    dy = tl.load(dy_ptr + pooled, mask=inside, other=0.0)
    out = out_ptr + c * M * CO + m[:, None] * CO + n[None, :]
    tl.store(out, tl.where(mine, dy, 0.0).to(dy.dtype), mask=(m < M)[:, None] & (n < CO)[None, :])


def unpool(dy_CBpqO: Tensor, place_CBpqO: Tensor, size: tuple[int, int]) -> Tensor:
    """The gradient before pool and ReLU: each value at its winner's place, zero elsewhere."""
    clients, batch, pooled_height, pooled_width, outputs = dy_CBpqO.shape
    out = torch.empty((clients, batch, *size, outputs), dtype=dy_CBpqO.dtype, device=dy_CBpqO.device)
    pixels = batch * size[0] * size[1]
    bn = min(64, next_power_of_two(outputs))
    bm = 4096 // bn
    _unpool[(cdiv(pixels, bm) * cdiv(outputs, bn), clients)](
        dy_ptr=dy_CBpqO, place_ptr=place_CBpqO, out_ptr=out,
        M=pixels, OH=size[0], OW=size[1], PH=pooled_height, PW=pooled_width, CO=outputs, BM=bm, BN=bn,
    )  # fmt: skip
    return out


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: int, compute: str, sink: Sink | None,
        grad_scale: float,
    ) -> Tensor:  # fmt: skip
        clients, batch, height, width, inputs = x.shape
        outputs, _, kernel_height, kernel_width = w.shape[1:]
        size = out_size(height, kernel_height, 1, padding), out_size(width, kernel_width, 1, padding)
        pooled = size[0] // 2, size[1] // 2
        dtype = activation_dtype(compute)
        y = torch.empty((clients, batch, *pooled, outputs), dtype=dtype, device=x.device)
        place = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        w = as_channels_last(w)
        taps = reachable_window((height, width), size, (kernel_height, kernel_width), 1, padding)
        has_few_channels = not ctx.needs_input_grad[0] and conv_few_channels.is_supported(
            inputs, kernel_height, kernel_width
        )
        packed = peaks = None
        if has_few_channels:
            x, peaks = conv_few_channels.pad_channels(x, padding, pooled[1], compute)
            conv_few_channels.forward(x, peaks, w, b, y, place, compute)
        else:
            x = x.to(dtype).contiguous()
            packed = pack(w, dtype, taps)
            pixels, row = batch * pooled[0] * pooled[1], taps.width * inputs
            t = tuning("pool forward", compute)
            bm, bn, bk = (
                min(t.m, next_power_of_two(pixels)),
                min(t.n, next_power_of_two(outputs)),
                min(t.k, next_power_of_two(row)),
            )
            bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
            _forward[(cdiv(pixels, bm) * cdiv(outputs, bn), clients)](
                x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y, place_ptr=place,
                stride_bias=stride_bias,
                M=pixels, H=height, W=width, PH=pooled[0], PW=pooled[1], CO=outputs, R=row, CI=inputs,
                KH=taps.height, PAD=padding - taps.first, OUTSIDE=taps.outside, BIAS=b is not None,
                PRECISION=dot_operands(compute).precision, BM=bm, BN=bn, BK=bk,
                num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip
        ctx.save_for_backward(x, w, b, place, packed, peaks)
        ctx.plan = (height, width), size, taps, padding, compute, sink, grad_scale, has_few_channels
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        x, w, b, place, packed, peaks = ctx.saved_tensors
        image, size, taps, padding, compute, sink, grad_scale, has_few_channels = ctx.plan
        dy = dy_[0].to(activation_dtype(compute)).contiguous()
        dw = filter_target(sink, w)
        db = None if b is None else target(sink, b, bias=True)
        dx = None
        if has_few_channels:
            conv_few_channels.weight_gradient(x, peaks, dy, place, dw, db, compute, 1 / grad_scale)
        else:
            dense = unpool(dy, place, size)
            if ctx.needs_input_grad[0]:
                packed = packed if packed_for_both(x.dtype) else pack(w, x.dtype, taps, for_input=True)
                dx = input_gradient(dense, packed, image, taps, 1, padding, compute)
            weight_gradient(x, dense, dw, db, taps, 1, padding, compute, 1 / grad_scale)
        return dx, *((None, None) if sink else (dw.grad, db and db.grad)), None, None, None, None


def conv2d_relu_pool(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None = None,
    padding: int = 0,
    compute: str = "fp32",
    sink: Sink | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """max_pool2d(relu(conv2d(x)), 2) of each client, (C, B, H', W', CO).

    Gradients of activations arrive times `grad_scale`; those of parameters are divided by it, and
    go to `sink`.
    """
    return _ConvReluPool.apply(x_CBHWI, w_COIhw, b_CO, padding, compute, sink, grad_scale)
