"""Convolution + ReLU + pool of images with at most three channels, where a tap row is shorter than
a tensor-core step.

The image is padded to four channels; the fourth is one, so its weight gradient is the bias
gradient. A group of eight neighbouring pixels (32 values) starting at an even column holds the taps
of both columns of a pool window: one load serves both, with weights shifted by one pixel for the
second. No input gradient: these are the data.

C clients, B samples, CI/CO input and output channels, M pooled pixels, D = 2 columns of the window,
G = 32 values of a group, u the image row under a window's top, E/D even and odd accumulators.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    TORCH,
    GradientTarget,
    cast,
    cdiv,
    exponent,
    next_power_of_two,
    per_client_parameter,
    reduction_operands,
    settle,
    unscaled,
)
from stratafl.engine.kernels.convolution.pool import relu_pool
from stratafl.engine.kernels.tuning import tuning

GROUP = 32
PIXEL_SPLITS = 5
"""Parts of the pixels summed apart, so that 100 clients fill a GPU."""


def is_supported(inputs: int, kernel_height: int, kernel_width: int) -> bool:
    return inputs <= 3 and kernel_height <= 5 and kernel_width <= 7


@triton.jit
def _prepare(
    x_ptr, out_ptr, peak_ptr, N, H, W, WIDE, TALL, PAD, CI: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    x_ptr += c * (N // (WIDE * TALL)) * H * W * CI
    out_ptr += c * N * 4
    channel = tl.arange(0, 4)[None, :]
    x, y, sample = pixel % WIDE - PAD, (pixel // WIDE) % TALL - PAD, pixel // (WIDE * TALL)
    inside = (pixel < N) & (x >= 0) & (x < W) & (y >= 0) & (y < H) & (channel < CI)
    value = tl.load(x_ptr + ((sample * H + y) * W + x) * CI + channel, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    value = cast(value, kind, exponent(peak_ptr, c, SCALED), SCALED)
    tl.store(
        out_ptr + pixel * 4 + channel, tl.where(channel == 3, 1.0, value).to(kind), mask=(pixel < N) & (channel < 4)
    )


def pad_channels(x_CBHWI: Tensor, padding: int, pooled_width: int, compute: str) -> tuple[Tensor, Tensor]:
    """(C, B, H + 2 padding, an even width that holds every group, 4), and the images' peaks."""
    x = x_CBHWI.contiguous()
    clients, batch, height, width, inputs = x.shape
    wide, tall = max(width + 2 * padding, 2 * pooled_width + 6), height + 2 * padding
    wide += wide % 2
    by = reduction_operands(compute)
    peaks = by.peaks(x)
    out = torch.empty((clients, batch, tall, wide, 4), dtype=TORCH[by.dtype], device=x.device)
    pixels = batch * tall * wide
    _prepare[(cdiv(pixels, 512), clients)](
        x_ptr=x, out_ptr=out, peak_ptr=peaks,
        N=pixels, H=height, W=width, WIDE=wide, TALL=tall, PAD=padding, CI=inputs, SCALED=by.scaled, BLOCK=512,
    )  # fmt: skip
    return out, peaks


@triton.jit
def _pack(
    w_ptr, out_ptr, peak_ptr, stride_client, CO, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, shift, o, pixel * 4 + channel] = w[o, channel, row, pixel - shift]; w lies
    channels-last."""
    c = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    group = tl.arange(0, 32)[None, :]
    by = exponent(peak_ptr, c, SCALED)
    for row in tl.static_range(KH):
        for shift in tl.static_range(2):
            kj, i = group // 4 - shift, group % 4
            inside = (o < CO) & (kj >= 0) & (kj < KW) & (i < CI)
            w = tl.load(w_ptr + c * stride_client + ((o * KH + row) * KW + kj) * CI + i, mask=inside, other=0.0)
            where = ((c * KH + row) * 2 + shift) * CO * 32 + o * 32 + group
            w = cast(w, out_ptr.dtype.element_ty, by, SCALED)
            tl.store(out_ptr + where, w, mask=(o < CO) & (group < 32))


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, place_ptr, x_peak_ptr, w_peak_ptr, stride_bias,
    M, TALL, WIDE, PH, PW, CO: tl.constexpr, KH: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    group = tl.arange(0, 32)
    x_ptr += c * (M // (PH * PW)) * TALL * WIDE * 4
    w_ptr += c * KH * 2 * CO * 32
    sample, y, x = m // (PH * PW), (m // PW) % PH, m % PW
    start = ((sample * TALL + 2 * y) * WIDE + 2 * x) * 4
    # Both columns' weights side by side: a product twice as wide takes fewer reads of shared
    # memory.
    both = tl.arange(0, 2 * BN)
    o = (tl.program_id(0) % blocks_n) * BN + both % BN
    top = tl.zeros((BM, 2 * BN), tl.float32)
    bottom = top
    for row in range(KH):
        # Two pixels of four channels: a group starts at an even column of an even width.
        here = tl.multiple_of(start + row * WIDE * 4, 8)
        upper = tl.load(x_ptr + here[:, None] + group[None, :], mask=(m < M)[:, None], other=0.0)
        under = tl.multiple_of(here + WIDE * 4, 8)
        lower = tl.load(x_ptr + under[:, None] + group[None, :], mask=(m < M)[:, None], other=0.0)
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
    best, place = relu_pool(acc0, acc1, acc2, acc3, bias)
    where = c * M * CO + m[:, None] * CO + n[None, :]
    inside = (m < M)[:, None] & (n < CO)[None, :]
    tl.store(y_ptr + where, best.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(place_ptr + where, place.to(tl.uint8), mask=inside)


def forward(x: Tensor, x_peaks: Tensor, w: Tensor, b: Tensor | None, y: Tensor, place: Tensor, compute: str) -> None:
    """From prepared images to pooled values and places."""
    clients, batch, tall, wide, _ = x.shape
    outputs, inputs, kernel_height, kernel_width = w.shape[1:]
    packed = torch.empty((clients, kernel_height, 2, outputs, GROUP), dtype=x.dtype, device=x.device)
    by = reduction_operands(compute)
    w_peaks = by.peaks(w)
    _pack[(cdiv(outputs, 64), clients)](
        w_ptr=w, out_ptr=packed, peak_ptr=w_peaks,
        stride_client=w.stride(0),
        CO=outputs, CI=inputs, KH=kernel_height, KW=kernel_width, SCALED=by.scaled, BLOCK=64,
    )  # fmt: skip
    pooled_height, pooled_width = y.shape[2:4]
    pixels = batch * pooled_height * pooled_width
    t = tuning("few channels forward", compute)
    bm, bn = min(t.m, next_power_of_two(pixels)), min(t.n, next_power_of_two(outputs))
    bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
    _forward[(cdiv(pixels, bm) * cdiv(outputs, bn), clients)](
        x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y, place_ptr=place, x_peak_ptr=x_peaks, w_peak_ptr=w_peaks,
        stride_bias=stride_bias,
        M=pixels, TALL=tall, WIDE=wide, PH=pooled_height, PW=pooled_width, CO=outputs, KH=kernel_height,
        BIAS=b is not None, PRECISION=by.precision, SCALED=by.scaled, BM=bm, BN=bn,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


@triton.jit
def _accumulate_row(acc, upper, lower, x_KG, u: tl.constexpr, row: tl.constexpr, PRECISION: tl.constexpr):
    """Add what row `u` of the image below a window gives to row `row` of the filters: this row
    meets it from the window's upper half, or one further down from its lower half."""
    if u == row:
        acc = tl.dot(upper, x_KG, acc, input_precision=PRECISION)
    if u == row + 1:
        acc = tl.dot(lower, x_KG, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, place_ptr, part_ptr, dy_peak_ptr,
    M, SPAN, TALL, WIDE, PH, PW, CO: tl.constexpr, KH: tl.constexpr, PRECISION: tl.constexpr,
    OPERAND: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """part[client, split, row, shift, o, group]: SPAN pixels' sum, both columns of the window side
    by side."""
    c = tl.program_id(1).to(tl.int64)
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    column = tl.arange(0, 2 * BN)
    shift, n = column // BN, block * BN + column % BN
    group = tl.arange(0, 32)
    x_ptr += c * (M // (PH * PW)) * TALL * WIDE * 4
    dy_ptr += c * M * CO
    place_ptr += c * M * CO
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
        inside = (m < end)[:, None] & (n < CO)[None, :]
        place = tl.load(place_ptr + m[:, None] * CO + n[None, :], mask=inside, other=4).to(tl.int32)
        dy = cast(tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=inside, other=0.0), OPERAND, by, SCALED)
        upper = tl.trans(tl.where(place == shift[None, :], dy, 0.0).to(OPERAND))
        lower = tl.trans(tl.where(place == shift[None, :] + 2, dy, 0.0).to(OPERAND))
        for u in tl.static_range(KH + 1):
            here = tl.multiple_of(start + u * WIDE * 4, 8)
            x_KG = tl.load(x_ptr + here[:, None] + group[None, :], mask=(m < end)[:, None], other=0.0)
            acc0 = _accumulate_row(acc0, upper, lower, x_KG, u, 0, PRECISION)
            if KH > 1:
                acc1 = _accumulate_row(acc1, upper, lower, x_KG, u, 1, PRECISION)
            if KH > 2:
                acc2 = _accumulate_row(acc2, upper, lower, x_KG, u, 2, PRECISION)
            if KH > 3:
                acc3 = _accumulate_row(acc3, upper, lower, x_KG, u, 3, PRECISION)
            if KH > 4:
                acc4 = _accumulate_row(acc4, upper, lower, x_KG, u, 4, PRECISION)
    out = part_ptr + (c * SPLITS + split) * (KH * 2 * CO * 32) + (shift * CO + n)[:, None] * 32 + group[None, :]
    inside = (n < CO)[:, None] & (group < 32)[None, :]
    tl.store(out, acc0, mask=inside)
    if KH > 1:
        tl.store(out + 2 * CO * 32, acc1, mask=inside)
    if KH > 2:
        tl.store(out + 4 * CO * 32, acc2, mask=inside)
    if KH > 3:
        tl.store(out + 6 * CO * 32, acc3, mask=inside)
    if KH > 4:
        tl.store(out + 8 * CO * 32, acc4, mask=inside)


@triton.jit
def _reduce_splits(
    part_ptr, dw_ptr, db_ptr, extra_w_ptr, extra_b_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr, stride_w, stride_b,
    scale, CO, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr, EXTRA: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the splits and the two shifted columns, and put them where the weights are."""
    c = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) % KH
    n = (tl.program_id(0) // KH) * BN + tl.arange(0, BN)[:, None]
    group = tl.arange(0, 32)[None, :]
    kj, i = group // 4, group % 4
    useful = (n < CO) & (kj < KW)
    total = tl.zeros((BN, 32), tl.float32)
    for split in tl.static_range(SPLITS):
        here = part_ptr + ((c * SPLITS + split) * KH + row) * (2 * CO * 32) + n * 32 + group
        total += tl.load(here, mask=useful, other=0.0)
        total += tl.load(here + CO * 32 + 4, mask=useful, other=0.0)
    dy_exponent = exponent(dy_peak_ptr, c, SCALED)
    dw = unscaled(total, exponent(x_peak_ptr, c, SCALED) + dy_exponent, SCALED) * scale
    at = c * stride_w + ((n * KH + row) * KW + kj) * CI + i
    squares = settle(dw_ptr, extra_w_ptr, at, dw, useful & (i < CI), EXTRA)
    if BIAS:
        ones = useful & (group == 3) & (row == 0)
        db = unscaled(total, dy_exponent, SCALED) * scale
        squares += settle(db_ptr, extra_b_ptr, c * stride_b + n + 0 * group, db, ones, EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def weight_gradient(
    x: Tensor,
    x_peaks: Tensor,
    dy: Tensor,
    place: Tensor,
    dw: GradientTarget,
    db: GradientTarget | None,
    compute: str,
    scale: float,
) -> None:
    """Write the gradients of weights and bias, times `scale`, from the pooled gradient."""
    clients, batch, tall, wide, _ = x.shape
    pooled_height, pooled_width, outputs = dy.shape[2:]
    inputs, kernel_height, kernel_width = dw.grad.shape[2:]
    by = reduction_operands(compute)
    dy_peaks = by.peaks(dy)
    pixels = batch * pooled_height * pooled_width
    t = tuning("few channels weight gradient", compute)
    bn, bk = min(t.m, next_power_of_two(outputs)), t.k
    part = torch.empty((clients, PIXEL_SPLITS, kernel_height, 2, outputs, GROUP), dtype=torch.float32, device=x.device)
    span = cdiv(cdiv(pixels, PIXEL_SPLITS), bk) * bk
    _weight_gradient[(cdiv(outputs, bn) * PIXEL_SPLITS, clients)](
        x_ptr=x, dy_ptr=dy, place_ptr=place, part_ptr=part, dy_peak_ptr=dy_peaks,
        M=pixels, SPAN=span, TALL=tall, WIDE=wide, PH=pooled_height, PW=pooled_width, CO=outputs, KH=kernel_height,
        PRECISION=by.precision, OPERAND=by.dtype, SCALED=by.scaled, BN=bn, BK=bk, SPLITS=PIXEL_SPLITS,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    bias = dw if db is None else db
    programs = kernel_height * cdiv(outputs, bn)
    _reduce_splits[(programs, clients)](
        part_ptr=part, dw_ptr=dw.grad, db_ptr=bias.grad, extra_w_ptr=dw.extra, extra_b_ptr=bias.extra,
        squares_ptr=dw.parts(programs), x_peak_ptr=x_peaks, dy_peak_ptr=dy_peaks,
        stride_w=dw.grad.stride(0), stride_b=bias.grad.stride(0), scale=scale,
        CO=outputs, CI=inputs, KH=kernel_height, KW=kernel_width, BIAS=db is not None, EXTRA=dw.corrected,
        SCALED=by.scaled, SPLITS=PIXEL_SPLITS, BN=bn,
        num_warps=4,
    )  # fmt: skip
