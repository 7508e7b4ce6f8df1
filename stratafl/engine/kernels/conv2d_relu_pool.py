"""Convolution, bias, ReLU and 2x2 max-pooling of C clients in one kernel, and its gradients.

The kernels have four accumulators, one per position in the pooling window, so that everything after
the product happens in registers. The backward pass needs the position of the largest value only:
one byte per pooled value, 0 to 3, or 4 where ReLU has made it zero.

Images with at most three channels have kernels of their own, because a row of their filters is
shorter than one step of a tensor core. Their images are padded to four channels, the fourth of
which is one: the gradient of its weight is the gradient of the bias. A group, eight neighbouring
pixels (32 values) from an even column on, holds the values for both columns of a pooling window.
One load serves both; the second column's filters are shifted by one pixel. These kernels have no
input gradient: such images are the data.

C clients, B samples, H and W height and width of the image, PH and PW of the pooled output, CI and
CO input and output channels, KH and KW height and width of a filter. In the matrix products, M are
the rows (pooled pixels), N the columns (channels), K the axis of the sum, R = KW * CI values of one
row of a filter, G = 32 values of a group. TALL and WIDE are height and width of the padded image.
`common` explains the names of all kernels, and scaled fp16.
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
    GradientTarget,
    LayerOptions,
    activation_dtype,
    cast,
    cdiv,
    dot_operands,
    exponent,
    gradient_targets,
    launch_config,
    next_power_of_two,
    per_client_parameter,
    reduction_operands,
    store_gradient,
    unscaled,
)
from stratafl.engine.kernels.conv2d import conv_geometry, input_gradient, pack, weight_gradient
from stratafl.engine.kernels.layouts import as_channels_last
from stratafl.engine.kernels.reference import GradientBuffers, Pair
from stratafl.engine.precision import Precision

GROUP = 32
"""Values of a group: eight pixels of four channels."""
PIXEL_SPLITS = 5
"""Parts of the pixels that are summed by separate programs, so that 100 clients fill a GPU."""


@triton.jit
def relu_pool(acc0, acc1, acc2, acc3, bias_N):
    """ReLU of the largest of four accumulators plus bias, and the number of that accumulator.

    The number is that of the first of equal ones, and 4 where ReLU gives zero. NaN stays NaN.
    """
    best = acc0
    argmax = tl.zeros(acc0.shape, tl.int32)
    more = (acc1 > best) | (acc1 != acc1)
    best = tl.where(more, acc1, best)
    argmax = tl.where(more, 1, argmax)
    more = (acc2 > best) | (acc2 != acc2)
    best = tl.where(more, acc2, best)
    argmax = tl.where(more, 2, argmax)
    more = (acc3 > best) | (acc3 != acc3)
    best = tl.where(more, acc3, best)
    argmax = tl.where(more, 3, argmax)
    best += bias_N[None, :]
    off = best <= 0.0
    return tl.where(off, 0.0, best), tl.where(off, 4, argmax)


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, argmax_ptr, stride_bias,
    M, H, W, PH, PW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    PAD: tl.constexpr, OUTSIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BN channels of BM pooled pixels of a client.

    One wide product has filters as its rows, and as its columns four blocks of pixels, one per
    position in the window. It reads shared memory less often than a product with pixels as rows.
    Splitting its columns afterwards moves no values between threads.
    """
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    first_m = (tl.program_id(0) // blocks_n) * BM
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pixel = tl.arange(0, 4 * BM)
    m, position = first_m + pixel % BM, pixel // BM
    sample, y, x = m // (PH * PW), (m // PW) % PH, m % PW
    top, left = y * 2 - PAD + position // 2, x * 2 - PAD + position % 2
    x_ptr += c * (M // (PH * PW)) * H * W * CI
    w_ptr += c * KH * CO * R
    start = ((sample * H + top) * W + left) * CI
    blocks_k: tl.constexpr = (R + BK - 1) // BK
    acc = tl.zeros((BN, 4 * BM), tl.float32)
    for step in range(KH * blocks_k):
        row, r = step // blocks_k, (step % blocks_k) * BK + k
        weights = (n < CO)[:, None] & (r < R)[None, :]
        w_NK = tl.load(w_ptr + (row * CO + n)[:, None] * R + r[None, :], mask=weights, other=0.0)
        mask = (m < M)[:, None] & (r < R)[None, :]
        if OUTSIDE:
            column = left[:, None] + (r // CI)[None, :]
            mask &= ((top + row >= 0) & (top + row < H))[:, None] & (column >= 0) & (column < W)
        x_MK = tl.load(x_ptr + (start + row * W * CI)[:, None] + r[None, :], mask=mask, other=0.0)
        acc = tl.dot(w_NK, tl.trans(x_MK), acc, input_precision=PRECISION)
    upper, lower = tl.split(tl.permute(tl.reshape(acc, (BN, 2, 2 * BM)), (0, 2, 1)))
    acc0, acc1 = tl.split(tl.permute(tl.reshape(upper, (BN, 2, BM)), (0, 2, 1)))
    acc2, acc3 = tl.split(tl.permute(tl.reshape(lower, (BN, 2, BM)), (0, 2, 1)))
    m = first_m + tl.arange(0, BM)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + c * stride_bias + n, mask=n < CO, other=0.0)
    best, argmax = relu_pool(tl.trans(acc0), tl.trans(acc1), tl.trans(acc2), tl.trans(acc3), bias)
    offset = c * M * CO + m[:, None] * CO + n[None, :]
    mask = (m < M)[:, None] & (n < CO)[None, :]
    tl.store(y_ptr + offset, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(argmax_ptr + offset, argmax.to(tl.uint8), mask=mask)


@triton.jit
def _unpool(dy_ptr, argmax_ptr, out_ptr, M, OH, OW, PH, PW, CO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Write the gradient before pooling and ReLU of BN channels of BM pixels of a client."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    sample, y, x = m // (OH * OW), (m // OW) % OH, m % OW
    mask = ((m < M) & (y < 2 * PH) & (x < 2 * PW))[:, None] & (n < CO)[None, :]
    pooled = c * (M // (OH * OW)) * PH * PW * CO + ((sample * PH + y // 2) * PW + x // 2)[:, None] * CO + n[None, :]
    is_largest = tl.load(argmax_ptr + pooled, mask=mask, other=4).to(tl.int32) == ((y % 2) * 2 + x % 2)[:, None]
    dy = tl.load(dy_ptr + pooled, mask=mask, other=0.0)
    out = out_ptr + c * M * CO + m[:, None] * CO + n[None, :]
    tl.store(out, tl.where(is_largest, dy, 0.0).to(dy.dtype), mask=(m < M)[:, None] & (n < CO)[None, :])


def unpool(dy_CBpqO: Tensor, argmax_CBpqO: Tensor, size: Pair) -> Tensor:
    """Gradient before pooling and ReLU: at the largest value of each window, and zero elsewhere.

    p and q are the pooled height and width, `size` is the size before pooling.
    """
    clients, batch, pooled_height, pooled_width, outputs = dy_CBpqO.shape
    out = torch.empty((clients, batch, *size, outputs), dtype=dy_CBpqO.dtype, device=dy_CBpqO.device)
    pixels = batch * size[0] * size[1]
    bn = min(64, next_power_of_two(outputs))
    _unpool[(cdiv(pixels, 4096 // bn) * cdiv(outputs, bn), clients)](
        dy_ptr=dy_CBpqO, argmax_ptr=argmax_CBpqO, out_ptr=out,
        M=pixels, OH=size[0], OW=size[1], PH=pooled_height, PW=pooled_width, CO=outputs, BM=4096 // bn, BN=bn,
    )  # fmt: skip
    return out


def has_few_channels(inputs: int, kernel_height: int, kernel_width: int) -> bool:
    """Whether the kernels for few channels support a convolution.

    Three channels and the fourth fill a pixel, and 7 columns and the shift the 8 pixels of a group.
    """
    return inputs <= 3 and kernel_height <= 5 and kernel_width <= 7


@triton.jit
def _pad_channels(
    x_ptr, out_ptr, peak_ptr, N, H, W, WIDE, TALL, PAD, CI: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK of the N pixels of a client's padded images, as operands; channel 3 is one."""
    c = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    x_ptr += c * (N // (WIDE * TALL)) * H * W * CI
    out_ptr += c * N * 4
    channel = tl.arange(0, 4)[None, :]
    x, y, sample = pixel % WIDE - PAD, (pixel // WIDE) % TALL - PAD, pixel // (WIDE * TALL)
    mask = (pixel < N) & (x >= 0) & (x < W) & (y >= 0) & (y < H) & (channel < CI)
    value = tl.load(x_ptr + ((sample * H + y) * W + x) * CI + channel, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    value = cast(value, kind, exponent(peak_ptr, c, SCALED), SCALED)
    tl.store(
        out_ptr + pixel * 4 + channel, tl.where(channel == 3, 1.0, value).to(kind), mask=(pixel < N) & (channel < 4)
    )


def pad_channels(x_CBHWI: Tensor, padding: int, pooled_width: int, precision: Precision) -> tuple[Tensor, Tensor]:
    """Padded images with four channels, (C, B, TALL, WIDE, 4), and the peaks of their values.

    TALL is H + 2 padding, and WIDE an even number at which every group is inside the image.
    """
    x = x_CBHWI.contiguous()
    clients, batch, height, width, inputs = x.shape
    wide, tall = max(width + 2 * padding, 2 * pooled_width + 6), height + 2 * padding
    wide += wide % 2
    operands = reduction_operands(precision)
    peaks = operands.peaks(x)
    out = torch.empty((clients, batch, tall, wide, 4), dtype=TORCH[operands.dtype], device=x.device)
    pixels = batch * tall * wide
    _pad_channels[(cdiv(pixels, 512), clients)](
        x_ptr=x, out_ptr=out, peak_ptr=peaks,
        N=pixels, H=height, W=width, WIDE=wide, TALL=tall, PAD=padding, CI=inputs, SCALED=operands.scaled, BLOCK=512,
    )  # fmt: skip
    return out, peaks


@triton.jit
def _pack_shifted(
    w_ptr, out_ptr, peak_ptr, stride_client, CO, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack BLOCK channels-last filters of a client for groups, once for each column of a window.

    out[row, shift, o, pixel * 4 + channel] = w[o, channel, row, pixel - shift]
    """
    c = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    group = tl.arange(0, 32)[None, :]
    by = exponent(peak_ptr, c, SCALED)
    for row in tl.static_range(KH):
        for shift in tl.static_range(2):
            kj, i = group // 4 - shift, group % 4
            mask = (o < CO) & (kj >= 0) & (kj < KW) & (i < CI)
            w = tl.load(w_ptr + c * stride_client + ((o * KH + row) * KW + kj) * CI + i, mask=mask, other=0.0)
            offset = ((c * KH + row) * 2 + shift) * CO * 32 + o * 32 + group
            w = cast(w, out_ptr.dtype.element_ty, by, SCALED)
            tl.store(out_ptr + offset, w, mask=(o < CO) & (group < 32))


@triton.jit
def _few_channels_forward(
    x_ptr, w_ptr, b_ptr, y_ptr, argmax_ptr, x_peak_ptr, w_peak_ptr, stride_bias,
    M, TALL, WIDE, PH, PW, CO: tl.constexpr, KH: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute BN channels of BM pooled pixels of a client: sum over filter rows of x_MG w_GN.

    `top` and `bottom` are the two rows of a pooling window, with both columns side by side: a
    product twice as wide reads shared memory less often.
    """
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    group = tl.arange(0, 32)
    x_ptr += c * (M // (PH * PW)) * TALL * WIDE * 4
    w_ptr += c * KH * 2 * CO * 32
    sample, y, x = m // (PH * PW), (m // PW) % PH, m % PW
    start = ((sample * TALL + 2 * y) * WIDE + 2 * x) * 4
    both = tl.arange(0, 2 * BN)
    o = (tl.program_id(0) % blocks_n) * BN + both % BN
    top = tl.zeros((BM, 2 * BN), tl.float32)
    bottom = top
    for row in range(KH):
        # a group starts at an even column and the width is even: at a multiple of 2 * 4 values
        row_start = tl.multiple_of(start + row * WIDE * 4, 8)
        upper = tl.load(x_ptr + row_start[:, None] + group[None, :], mask=(m < M)[:, None], other=0.0)
        next_row_start = tl.multiple_of(row_start + WIDE * 4, 8)
        lower = tl.load(x_ptr + next_row_start[:, None] + group[None, :], mask=(m < M)[:, None], other=0.0)
        weights = w_ptr + ((row * 2 + both // BN) * CO + o)[:, None] * 32 + group[None, :]
        w_GN = tl.trans(tl.load(weights, mask=(o < CO)[:, None], other=0.0))
        top = tl.dot(upper, w_GN, top, input_precision=PRECISION)
        bottom = tl.dot(lower, w_GN, bottom, input_precision=PRECISION)
    by = exponent(x_peak_ptr, c, SCALED) + exponent(w_peak_ptr, c, SCALED)
    top, bottom = unscaled(top, by, SCALED), unscaled(bottom, by, SCALED)
    acc0, acc1 = tl.split(tl.permute(tl.reshape(top, (BM, 2, BN)), (0, 2, 1)))
    acc2, acc3 = tl.split(tl.permute(tl.reshape(bottom, (BM, 2, BN)), (0, 2, 1)))
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + c * stride_bias + n, mask=n < CO, other=0.0)
    best, argmax = relu_pool(acc0, acc1, acc2, acc3, bias)
    offset = c * M * CO + m[:, None] * CO + n[None, :]
    mask = (m < M)[:, None] & (n < CO)[None, :]
    tl.store(y_ptr + offset, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(argmax_ptr + offset, argmax.to(tl.uint8), mask=mask)


def few_channels_forward(
    x: Tensor, x_peaks: Tensor, w: Tensor, b: Tensor | None, y: Tensor, argmax: Tensor, precision: Precision
) -> None:
    """Compute pooled values and their positions from images of `pad_channels`."""
    clients, batch, tall, wide, _ = x.shape
    outputs, inputs, kernel_height, kernel_width = w.shape[1:]
    packed = torch.empty((clients, kernel_height, 2, outputs, GROUP), dtype=x.dtype, device=x.device)
    operands = reduction_operands(precision)
    w_peaks = operands.peaks(w)
    _pack_shifted[(cdiv(outputs, 64), clients)](
        w_ptr=w, out_ptr=packed, peak_ptr=w_peaks,
        stride_client=w.stride(0),
        CO=outputs, CI=inputs, KH=kernel_height, KW=kernel_width, SCALED=operands.scaled, BLOCK=64,
    )  # fmt: skip
    pooled_height, pooled_width = y.shape[2:4]
    pixels = batch * pooled_height * pooled_width
    config = launch_config("few channels forward", precision, pixels, outputs)
    bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
    _few_channels_forward[(cdiv(pixels, config.m) * cdiv(outputs, config.n), clients)](
        x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y, argmax_ptr=argmax, x_peak_ptr=x_peaks, w_peak_ptr=w_peaks,
        stride_bias=stride_bias,
        M=pixels, TALL=tall, WIDE=wide, PH=pooled_height, PW=pooled_width, CO=outputs, KH=kernel_height,
        BIAS=b is not None, PRECISION=operands.precision, SCALED=operands.scaled, BM=config.m, BN=config.n,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@triton.jit
def _accumulate_row(
    acc, upper, lower, x_KG, u: tl.constexpr, row: tl.constexpr, KH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of filter row `row` what image row `u` of a window contributes.

    Filter row `row` is on image row `row` for the upper pixels of the window, and on the next image
    row for the lower ones.
    """
    if u == row and row < KH:
        acc = tl.dot(upper, x_KG, acc, input_precision=PRECISION)
    if u == row + 1 and row < KH:
        acc = tl.dot(lower, x_KG, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _few_channels_weight_gradient(
    x_ptr, dy_ptr, argmax_ptr, part_ptr, dy_peak_ptr,
    M, SPAN, TALL, WIDE, PH, PW, CO: tl.constexpr, KH: tl.constexpr, PRECISION: tl.constexpr,
    OPERAND: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute gradients of filters over SPAN pooled pixels, for both columns of a window.

    They are stored as part[client, split, row, shift, o, group]; `_reduce_splits` adds them up.
    """
    c = tl.program_id(1).to(tl.int64)
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    column = tl.arange(0, 2 * BN)
    shift, n = column // BN, block * BN + column % BN
    group = tl.arange(0, 32)
    x_ptr += c * (M // (PH * PW)) * TALL * WIDE * 4
    dy_ptr += c * M * CO
    argmax_ptr += c * M * CO
    acc0 = tl.zeros((2 * BN, 32), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    acc4 = acc0
    by = exponent(dy_peak_ptr, c, SCALED)
    end = tl.minimum(M, (split + 1) * SPAN)
    for first in range(split * SPAN, end, BK):
        m = first + tl.arange(0, BK)
        sample, y, x = m // (PH * PW), (m // PW) % PH, m % PW
        start = ((sample * TALL + 2 * y) * WIDE + 2 * x) * 4
        mask = (m < end)[:, None] & (n < CO)[None, :]
        argmax = tl.load(argmax_ptr + m[:, None] * CO + n[None, :], mask=mask, other=4).to(tl.int32)
        dy = cast(tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=mask, other=0.0), OPERAND, by, SCALED)
        upper = tl.trans(tl.where(argmax == shift[None, :], dy, 0.0).to(OPERAND))
        lower = tl.trans(tl.where(argmax == shift[None, :] + 2, dy, 0.0).to(OPERAND))
        for u in tl.static_range(KH + 1):
            row_start = tl.multiple_of(start + u * WIDE * 4, 8)
            x_KG = tl.load(x_ptr + row_start[:, None] + group[None, :], mask=(m < end)[:, None], other=0.0)
            acc0 = _accumulate_row(acc0, upper, lower, x_KG, u, 0, KH, PRECISION)
            acc1 = _accumulate_row(acc1, upper, lower, x_KG, u, 1, KH, PRECISION)
            acc2 = _accumulate_row(acc2, upper, lower, x_KG, u, 2, KH, PRECISION)
            acc3 = _accumulate_row(acc3, upper, lower, x_KG, u, 3, KH, PRECISION)
            acc4 = _accumulate_row(acc4, upper, lower, x_KG, u, 4, KH, PRECISION)
    out = part_ptr + (c * SPLITS + split) * (KH * 2 * CO * 32) + (shift * CO + n)[:, None] * 32 + group[None, :]
    mask = (n < CO)[:, None] & (group < 32)[None, :]
    tl.store(out, acc0, mask=mask)
    if KH > 1:
        tl.store(out + 2 * CO * 32, acc1, mask=mask)
    if KH > 2:
        tl.store(out + 4 * CO * 32, acc2, mask=mask)
    if KH > 3:
        tl.store(out + 6 * CO * 32, acc3, mask=mask)
    if KH > 4:
        tl.store(out + 8 * CO * 32, acc4, mask=mask)


@triton.jit
def _reduce_splits(
    part_ptr, dw_ptr, db_ptr, correction_w_ptr, correction_b_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr,
    stride_w, stride_b, scale,
    CO, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr, CORRECT: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add up the parts of BN output channels and one filter row, and store them channels-last.

    The parts of the second column are shifted by one pixel, 4 values. Channel 3 of the first pixel
    is the gradient of the bias.
    """
    c = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) % KH
    n = (tl.program_id(0) // KH) * BN + tl.arange(0, BN)[:, None]
    group = tl.arange(0, 32)[None, :]
    kj, i = group // 4, group % 4
    useful = (n < CO) & (kj < KW)
    total = tl.zeros((BN, 32), tl.float32)
    for split in tl.static_range(SPLITS):
        offset = part_ptr + ((c * SPLITS + split) * KH + row) * (2 * CO * 32) + n * 32 + group
        total += tl.load(offset, mask=useful, other=0.0)
        total += tl.load(offset + CO * 32 + 4, mask=useful, other=0.0)
    dy_exponent = exponent(dy_peak_ptr, c, SCALED)
    dw = unscaled(total, exponent(x_peak_ptr, c, SCALED) + dy_exponent, SCALED) * scale
    offset = c * stride_w + ((n * KH + row) * KW + kj) * CI + i
    squares = store_gradient(dw_ptr, correction_w_ptr, offset, dw, useful & (i < CI), CORRECT)
    if BIAS:
        ones = useful & (group == 3) & (row == 0)
        db = unscaled(total, dy_exponent, SCALED) * scale
        squares += store_gradient(db_ptr, correction_b_ptr, c * stride_b + n + 0 * group, db, ones, CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def few_channels_weight_gradient(
    x: Tensor, x_peaks: Tensor, dy: Tensor, argmax: Tensor, dw: GradientTarget, db: GradientTarget | None,
    options: LayerOptions,
) -> None:  # fmt: skip
    """Write the gradients of filters and bias to their targets, from the pooled gradient."""
    clients, batch, tall, wide, _ = x.shape
    pooled_height, pooled_width, outputs = dy.shape[2:]
    inputs, kernel_height, kernel_width = dw.grad.shape[2:]
    operands = reduction_operands(options.precision)
    dy_peaks = operands.peaks(dy)
    pixels = batch * pooled_height * pooled_width
    # config.m: the rows of this product are output channels
    config = launch_config("few channels weight gradient", options.precision, outputs, GROUP)
    part = torch.empty((clients, PIXEL_SPLITS, kernel_height, 2, outputs, GROUP), dtype=torch.float32, device=x.device)
    _few_channels_weight_gradient[(cdiv(outputs, config.m) * PIXEL_SPLITS, clients)](
        x_ptr=x, dy_ptr=dy, argmax_ptr=argmax, part_ptr=part, dy_peak_ptr=dy_peaks,
        M=pixels, SPAN=cdiv(cdiv(pixels, PIXEL_SPLITS), config.k) * config.k, TALL=tall, WIDE=wide,
        PH=pooled_height, PW=pooled_width, CO=outputs, KH=kernel_height,
        PRECISION=operands.precision, OPERAND=operands.dtype, SCALED=operands.scaled,
        BN=config.m, BK=config.k, SPLITS=PIXEL_SPLITS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    bias = dw if db is None else db
    programs = kernel_height * cdiv(outputs, config.m)
    _reduce_splits[(programs, clients)](
        part_ptr=part, dw_ptr=dw.grad, db_ptr=bias.grad,
        correction_w_ptr=dw.correction, correction_b_ptr=bias.correction,
        squares_ptr=dw.new_partial_squares(programs), x_peak_ptr=x_peaks, dy_peak_ptr=dy_peaks,
        stride_w=dw.grad.stride(0), stride_b=bias.grad.stride(0), scale=1 / options.loss_scale,
        CO=outputs, CI=inputs, KH=kernel_height, KW=kernel_width, BIAS=db is not None, CORRECT=dw.has_correction,
        SCALED=operands.scaled, SPLITS=PIXEL_SPLITS, BN=config.m,
        num_warps=4,
    )  # fmt: skip


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: int, options: LayerOptions) -> Tensor:
        precision = options.precision
        clients, batch, height, width, inputs = x.shape
        outputs, _, *kernel = w.shape[1:]
        geometry = conv_geometry((height, width), (kernel[0], kernel[1]), 1, padding)
        pooled_height, pooled_width = geometry.out[0] // 2, geometry.out[1] // 2
        dtype = activation_dtype(precision)
        y = torch.empty((clients, batch, pooled_height, pooled_width, outputs), dtype=dtype, device=x.device)
        argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        w = as_channels_last(w)
        packed = peaks = None
        if not ctx.needs_input_grad[0] and has_few_channels(inputs, *kernel):
            x, peaks = pad_channels(x, padding, pooled_width, precision)
            few_channels_forward(x, peaks, w, b, y, argmax, precision)
        else:
            x = x.to(dtype).contiguous()
            packed = pack(w, dtype, geometry)
            pixels, row = batch * pooled_height * pooled_width, geometry.width * inputs
            config = launch_config("pool forward", precision, pixels, outputs, row)
            bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
            _forward[(cdiv(pixels, config.m) * cdiv(outputs, config.n), clients)](
                x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y, argmax_ptr=argmax,
                stride_bias=stride_bias,
                M=pixels, H=height, W=width, PH=pooled_height, PW=pooled_width, CO=outputs, R=row, CI=inputs,
                KH=geometry.height, PAD=padding - geometry.first, OUTSIDE=geometry.outside, BIAS=b is not None,
                PRECISION=dot_operands(precision).precision, BM=config.m, BN=config.n, BK=config.k,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        ctx.save_for_backward(x, w, b, argmax, packed, peaks)
        ctx.geometry, ctx.options = geometry, options
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, b, argmax, packed, peaks = ctx.saved_tensors
        geometry, options = ctx.geometry, ctx.options
        pooled_dy = gradients[0].to(activation_dtype(options.precision)).contiguous()
        dw, db = gradient_targets(options.buffers, w, b)
        dx = None
        if packed is None:
            few_channels_weight_gradient(x, peaks, pooled_dy, argmax, dw, db, options)
        else:
            dy = unpool(pooled_dy, argmax, geometry.out)
            if ctx.needs_input_grad[0]:
                dx = input_gradient(dy, w, packed, geometry, options.precision)
            weight_gradient(x, dy, dw, db, geometry, options)
        return dx, dw.returned, db and db.returned, None, None


def conv2d_relu_pool(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None = None,
    padding: int = 0,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """2x2 max-pooling of the ReLU of a convolution of stride 1, (C, B, H', W', CO)."""
    options = LayerOptions(precision, gradient_buffers, loss_scale)
    return _ConvReluPool.apply(x_CBHWI, w_COIhw, b_CO, padding, options)
