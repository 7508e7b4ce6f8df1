"""Convolution of C clients, each with its own weights: forward, input gradient, weight and bias
gradient.

A tap is one position of a filter. C clients, B samples, H/W image, CI/CO input and output channels,
h/w of a filter, M rows of a product (pixels), R = one row of a filter's taps (w * CI values,
contiguous in a channels-last image), K the axis of the sum.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    GradientTarget,
    activation_dtype,
    cdiv,
    dot_operands,
    exponent,
    gradient_target,
    launch_config,
    next_power_of_two,
    per_client_parameter,
    reduction_operands,
    store_gradient,
    unscaled,
)
from stratafl.engine.kernels.layouts import as_channels_last, cast_scaled, empty_channels_last, is_channels_last
from stratafl.engine.kernels.reference import GradientBuffers, Pair
from stratafl.engine.precision import Precision


class KernelWindow(NamedTuple):
    """A part of a filter: `height` rows and `width` columns from (first, first) on.

    There is one `first`, because the kernels have one padding, which is less by it.
    """

    first: int
    height: int
    width: int
    outside: bool
    """Whether some of these taps lie outside the image at some output position."""


@functools.cache
def reachable_window(image: Pair, out: Pair, kernel: Pair, stride: int, padding: int) -> KernelWindow:
    """Part of a filter that overlaps the image at any output position.

    Products and gradients of the other taps are zero. Of ResNet-18's last 3x3 filters, whose images
    are one pixel, it is a ninth.
    """
    is_inside = [
        [[0 <= y * stride - padding + tap < size for y in range(outputs)] for tap in range(taps)]
        for size, outputs, taps in zip(image, out, kernel, strict=True)
    ]
    reached = [[tap for tap, insides in enumerate(axis) if any(insides)] or [0, len(axis) - 1] for axis in is_inside]
    first = min(axis[0] for axis in reached)
    height, width = (axis[-1] + 1 - first for axis in reached)
    rows, columns = is_inside[0][first : first + height], is_inside[1][first : first + width]
    return KernelWindow(first, height, width, outside=not all(all(insides) for insides in rows + columns))


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
    mask = (o < CO) & (i < CI)
    row, column = tap // KW, tap % KW
    w = tl.load(w_ptr + c * stride_client + row * stride_h + column * stride_w + o * stride_o + i, mask=mask)
    offset = row * out_h + column * out_w + o * out_o + i * out_i
    tl.store(out_ptr + c * out_client + offset, w.to(out_ptr.dtype.element_ty), mask=mask)


def pack(w_COIhw: Tensor, dtype: torch.dtype, window: KernelWindow, for_input: bool = False) -> Tensor:
    """Copy a window of channels-last filters to another type and layout.

    The layout is (C, KH, CO, KW * CI) for the forward product and (C, KH * KW, CI, CO) for the
    input gradient: the axis of the sum is the last.
    """
    clients, outputs, inputs = w_COIhw.shape[:3]
    rows_and_columns = (
        slice(window.first, window.first + window.height),
        slice(window.first, window.first + window.width),
    )
    w = w_COIhw[(..., *rows_and_columns)]
    shape = (clients, window.height, outputs, window.width, inputs)
    axes = (0, 1, 3, 2, 4)
    if for_input:
        shape, axes = (clients, window.height, window.width, inputs, outputs), (0, 1, 2, 4, 3)
    out = torch.empty(shape, dtype=dtype, device=w.device)
    block_i = min(64 if for_input else 128, next_power_of_two(inputs, 1))
    block_o = min(next_power_of_two(outputs, 1), 4096 // block_i)
    count = window.height * window.width
    grid = (count * cdiv(outputs, block_o) * cdiv(inputs, block_i), clients)
    _, out_row, out_column, out_output, out_input = (out.stride(axis) for axis in axes)
    _pack[grid](
        w_ptr=w, out_ptr=out,
        stride_client=w.stride(0), stride_o=w.stride(1), stride_h=w.stride(3), stride_w=w.stride(4),
        out_client=out.stride(0), out_h=out_row, out_w=out_column, out_o=out_output, out_i=out_input,
        CO=outputs, CI=inputs, KW=window.width, T=count, BLOCK_O=block_o, BLOCK_I=block_i,
    )  # fmt: skip
    return out.flatten(1, 2) if for_input else out.flatten(3)


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stride_bias,
    M, H, W, OH, OW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, OUTSIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    m = (tl.program_id(0) // blocks_n) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    sample, y, x = m // (OH * OW), (m // OW) % OH, m % OW
    top, left = y * STRIDE - PAD, x * STRIDE - PAD
    x_ptr += c * (M // (OH * OW)) * H * W * CI
    w_ptr += c * KH * CO * R
    start = ((sample * H + top) * W + left) * CI
    blocks_k: tl.constexpr = (R + BK - 1) // BK
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(KH * blocks_k):
        row, r = step // blocks_k, (step % blocks_k) * BK + k
        mask = (m < M)[:, None] & (r < R)[None, :]
        if OUTSIDE:
            column = left[:, None] + (r // CI)[None, :]
            mask &= (top + row >= 0)[:, None] & (top + row < H)[:, None] & (column >= 0) & (column < W)
        x_MK = tl.load(x_ptr + (start + row * W * CI)[:, None] + r[None, :], mask=mask, other=0.0)
        w_NK = tl.load(
            w_ptr + (row * CO + n)[:, None] * R + r[None, :], mask=(n < CO)[:, None] & (r < R)[None, :], other=0.0
        )
        acc = tl.dot(x_MK, tl.trans(w_NK), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + c * stride_bias + n, mask=n < CO, other=0.0)[None, :]
    out = y_ptr + c * M * CO + m[:, None] * CO + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < CO)[None, :])


@triton.jit
def _input_gradient(
    dy_ptr, w_ptr, dx_ptr,
    B, H, W, OH, OW, CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, FORWARD_PACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: one image row, and of its pixels those that the same taps reach (x modulo the
    stride)."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CI + BN - 1) // BN
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    rest = tl.program_id(0) // blocks_n
    phase, rest = rest % STRIDE, rest // STRIDE
    columns = tl.cdiv(W, STRIDE)
    blocks_m = tl.cdiv(B * columns, BM)
    m, y = (rest % blocks_m) * BM + tl.arange(0, BM), rest // blocks_m
    k = tl.arange(0, BK)
    sample, t = m // columns, m % columns
    x = phase + t * STRIDE
    valid = (sample < B) & (x < W)

    # tap row `first_row + STRIDE * a` contributes to output row `q - a`; only rows within the
    # output
    # are visited
    q, first_row = (y + PAD) // STRIDE, (y + PAD) % STRIDE
    a_from = tl.maximum(0, q - (OH - 1))
    a_to = tl.minimum(q + 1, (KH - first_row + STRIDE - 1) // STRIDE)
    across, first_column = (phase + PAD) // STRIDE, (phase + PAD) % STRIDE
    taps = (KW - first_column + STRIDE - 1) // STRIDE
    blocks_k: tl.constexpr = (CO + BK - 1) // BK
    dy_ptr += c * B * OH * OW * CO
    w_ptr += c * KH * KW * CI * CO
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(tl.maximum(a_to - a_from, 0) * taps * blocks_k):
        o, tap = (step % blocks_k) * BK + k, step // blocks_k
        a, b = a_from + tap // taps, tap % taps
        column = across - b + t
        mask = (valid & (column >= 0) & (column < OW))[:, None] & (o < CO)[None, :]
        pixel = (sample * OH + q - a) * OW + column
        dy_MK = tl.load(dy_ptr + pixel[:, None] * CO + o[None, :], mask=mask, other=0.0)
        ki, kj = first_row + STRIDE * a, first_column + STRIDE * b
        if FORWARD_PACK:
            offset = ((ki * CO + o)[:, None] * KW + kj) * CI + n[None, :]
            w_NK = tl.trans(tl.load(w_ptr + offset, mask=(o < CO)[:, None] & (n < CI)[None, :], other=0.0))
        else:
            offset = ((ki * KW + kj) * CI + n)[:, None] * CO + o[None, :]
            w_NK = tl.load(w_ptr + offset, mask=(n < CI)[:, None] & (o < CO)[None, :], other=0.0)
        acc = tl.dot(w_NK, tl.trans(dy_MK), acc, input_precision=PRECISION)
    out = dx_ptr + c * B * H * W * CI + ((sample * H + y) * W + x)[:, None] * CI + n[None, :]
    tl.store(out, tl.trans(acc).to(dx_ptr.dtype.element_ty), mask=valid[:, None] & (n < CI)[None, :])


@triton.jit
def _image_columns(
    x_ptr, start, left, valid, r, W, R: tl.constexpr, CI: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Values `r` of a row of taps for each output pixel, (values, pixels)."""
    mask = valid[:, None] & (r < R)[None, :]
    if OUTSIDE:
        column = left[:, None] + (r // CI)[None, :]
        mask &= (column >= 0) & (column < W)
    return tl.trans(tl.load(x_ptr + start[:, None] + r[None, :], mask=mask, other=0.0))


@triton.jit
def _one_of(part: tl.constexpr, first, second, third, fourth, fifth):
    """Select a tensor by number: Triton has no lists of tensors that a loop could add to."""
    if part == 0:
        value = first
    elif part == 1:
        value = second
    elif part == 2:
        value = third
    elif part == 3:
        value = fourth
    else:
        value = fifth
    return value


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, dw_ptr, correction_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr, stride_client, scale,
    M, H, W, OH, OW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    FIRST: tl.constexpr, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    OUTSIDE: tl.constexpr, CORRECT: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: PARTS * BR values of one row of taps, which share every load of the output's
    gradient."""
    c = tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (CO + BN - 1) // BN
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    rest = tl.program_id(0) // blocks_n
    blocks_r: tl.constexpr = (R + BR * PARTS - 1) // (BR * PARTS)
    ki, first_r = rest // blocks_r, (rest % blocks_r) * BR * PARTS
    r = first_r + tl.arange(0, BR)
    k = tl.arange(0, BK)
    x_ptr += c * (M // (OH * OW)) * H * W * CI
    dy_ptr += c * M * CO
    acc0 = tl.zeros((BR, BN), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    acc4 = acc0
    # taps that never overlap the image have their correction only
    reached = (ki >= FIRST) & (ki < FIRST + WINDOW_H)
    reached &= (first_r < (FIRST + WINDOW_W) * CI) & (first_r + BR * PARTS > FIRST * CI)
    for first in range(0, tl.where(reached, M, 0), BK):
        m = first + k
        sample, y, x = m // (OH * OW), (m // OW) % OH, m % OW
        top, left = y * STRIDE - PAD + ki, x * STRIDE - PAD
        dy_KN = tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=(m < M)[:, None] & (n < CO)[None, :], other=0.0)
        start = ((sample * H + top) * W + left) * CI
        valid = m < M
        if OUTSIDE:
            valid &= (top >= 0) & (top < H)
        for part in tl.static_range(PARTS):
            x_RK = _image_columns(x_ptr, start, left, valid, r + part * BR, W, R, CI, OUTSIDE)
            if part == 0:
                acc0 = tl.dot(x_RK, dy_KN, acc0, input_precision=PRECISION)
            elif part == 1:
                acc1 = tl.dot(x_RK, dy_KN, acc1, input_precision=PRECISION)
            elif part == 2:
                acc2 = tl.dot(x_RK, dy_KN, acc2, input_precision=PRECISION)
            elif part == 3:
                acc3 = tl.dot(x_RK, dy_KN, acc3, input_precision=PRECISION)
            else:
                acc4 = tl.dot(x_RK, dy_KN, acc4, input_precision=PRECISION)
    by = exponent(x_peak_ptr, c, SCALED) + exponent(dy_peak_ptr, c, SCALED)
    squares = 0.0
    for part in tl.static_range(PARTS):
        acc = _one_of(part, acc0, acc1, acc2, acc3, acc4)
        r_part = r + part * BR
        offset = c * stride_client + (n * KH + ki)[None, :] * R + r_part[:, None]
        mask = (r_part < R)[:, None] & (n < CO)[None, :]
        squares += store_gradient(dw_ptr, correction_ptr, offset, unscaled(acc, by, SCALED) * scale, mask, CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


@triton.jit
def _bias_gradient(
    dy_ptr, db_ptr, correction_ptr, squares_ptr, dy_peak_ptr, stride_b, scale, M, CO, CORRECT: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum over the pixels.

    It is not part of the weight gradient's loop: where a product and a sum read the same block,
    Triton 3.6 allocates one buffer too few, and copies the next block over it while products still
    run.
    """
    c = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dy_ptr += c * M * CO
    summed = tl.zeros((BM, BN), tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        summed += tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=(m < M)[:, None] & (n < CO)[None, :], other=0.0)
    total = unscaled(tl.sum(summed, 0), exponent(dy_peak_ptr, c, SCALED), SCALED) * scale
    squares = store_gradient(db_ptr, correction_ptr, c * stride_b + n, total, n < CO, CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def packed_for_both(dtype: torch.dtype) -> bool:
    """Whether the input gradient takes weights packed for the forward product: tensor cores read
    16-bit operands in both layouts."""
    return dtype.itemsize == 2


def out_size(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def input_gradient(
    dy_CBHWO: Tensor, packed: Tensor, size: tuple[int, int], window: KernelWindow, stride: int, padding: int,
    precision: Precision,
) -> Tensor:  # fmt: skip
    """Gradient of the convolution's input, of height and width `size`; `packed` are the window's
    weights."""
    clients, batch, out_height, out_width, outputs = dy_CBHWO.shape
    forward_pack = packed_for_both(packed.dtype)
    inputs = packed.shape[3] // window.width if forward_pack else packed.shape[2]
    height, width = size
    dx = torch.empty((clients, batch, height, width, inputs), dtype=dy_CBHWO.dtype, device=dy_CBHWO.device)
    pixels = batch * cdiv(width, stride)
    config = launch_config("conv input gradient", precision)
    bm, bn, bk = (
        min(config.m, next_power_of_two(pixels)),
        min(config.n, next_power_of_two(inputs)),
        min(config.k, next_power_of_two(outputs)),
    )
    grid = (height * cdiv(pixels, bm) * stride * cdiv(inputs, bn), clients)
    _input_gradient[grid](
        dy_ptr=dy_CBHWO, w_ptr=packed, dx_ptr=dx,
        B=batch, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, CI=inputs, KH=window.height,
        KW=window.width, STRIDE=stride, PAD=padding - window.first, PRECISION=dot_operands(precision).precision,
        FORWARD_PACK=forward_pack, BM=bm, BN=bn, BK=bk,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dx


def weight_gradient(
    x_CBHWI: Tensor, dy_CBHWO: Tensor, dw: GradientTarget, db: GradientTarget | None, window: KernelWindow, stride: int,
    padding: int, precision: Precision, scale: float,
) -> None:  # fmt: skip
    """Write the gradients of weights and bias, times `scale`, to their targets; taps outside the
    window have none."""
    clients, batch, height, width, inputs = x_CBHWI.shape
    out_height, out_width, outputs = dy_CBHWO.shape[2:]
    kernel_height, kernel_width = dw.grad.shape[3:]
    operands = reduction_operands(precision)
    (x, x_peaks), (dy, dy_peaks) = cast_scaled(x_CBHWI, operands), cast_scaled(dy_CBHWO, operands)
    row = kernel_width * inputs
    config = launch_config("conv weight gradient", precision)
    br, bn = min(config.m, next_power_of_two(row)), min(config.n, next_power_of_two(outputs))
    blocks = cdiv(row, br)
    parts = blocks if blocks <= 5 else next(p for p in (4, 5, 3, 2, 1) if blocks % p == 0)
    programs = kernel_height * cdiv(row, br * parts) * cdiv(outputs, bn)
    pixels = batch * out_height * out_width
    # not `window.outside`: a program's block of a row may also hold taps that never overlap the
    # image
    outside = padding > 0
    _weight_gradient[(programs, clients)](
        x_ptr=x, dy_ptr=dy, dw_ptr=dw.grad, correction_ptr=dw.correction, squares_ptr=dw.new_partial_norms(programs),
        x_peak_ptr=x_peaks,
        dy_peak_ptr=dy_peaks,
        stride_client=dw.grad.stride(0), scale=scale,
        M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=kernel_height,
        FIRST=window.first, WINDOW_H=window.height, WINDOW_W=window.width, STRIDE=stride, PAD=padding, OUTSIDE=outside,
        CORRECT=dw.has_correction, PRECISION=operands.precision, SCALED=operands.scaled, BR=br, BN=bn, BK=config.k,
        PARTS=parts,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if db is not None:
        bm, programs = min(256, next_power_of_two(pixels)), cdiv(outputs, bn)
        _bias_gradient[(programs, clients)](
            dy_ptr=dy, db_ptr=db.grad, correction_ptr=db.correction, squares_ptr=db.new_partial_norms(programs),
            dy_peak_ptr=dy_peaks,
            stride_b=db.grad.stride(0), scale=scale,
            M=pixels, CO=outputs, CORRECT=db.has_correction, SCALED=operands.scaled, BM=bm, BN=bn,
            num_warps=8,
        )  # fmt: skip


def filter_target(buffers: GradientBuffers | None, w_COIhw: Tensor) -> GradientTarget:
    """Target of the gradient of channels-last filters, which is channels-last, too."""
    if buffers is None:
        grad = empty_channels_last(w_COIhw.shape, w_COIhw.device)
        return GradientTarget(grad, grad, False, None)
    target = gradient_target(buffers, w_COIhw)
    if not is_channels_last(target.grad):
        raise ValueError("a convolution's gradients must lie channels-last")
    return target


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: int, padding: int, precision: Precision,
        buffers: GradientBuffers | None,
        loss_scale: float,
    ) -> Tensor:  # fmt: skip
        x = x.to(activation_dtype(precision)).contiguous()
        clients, batch, height, width, inputs = x.shape
        outputs, _, kernel_height, kernel_width = w.shape[1:]
        out_height, out_width = (
            out_size(height, kernel_height, stride, padding),
            out_size(width, kernel_width, stride, padding),
        )
        w = as_channels_last(w)
        window = reachable_window(
            (height, width), (out_height, out_width), (kernel_height, kernel_width), stride, padding
        )
        packed = pack(w, x.dtype, window)
        y = torch.empty((clients, batch, out_height, out_width, outputs), dtype=x.dtype, device=x.device)
        pixels, row = batch * out_height * out_width, window.width * inputs
        config = launch_config("conv forward", precision)
        bm, bn, bk = (
            min(config.m, next_power_of_two(pixels)),
            min(config.n, next_power_of_two(outputs)),
            min(config.k, next_power_of_two(row)),
        )
        bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
        _forward[(cdiv(pixels, bm) * cdiv(outputs, bn), clients)](
            x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y,
            stride_bias=stride_bias,
            M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=window.height,
            STRIDE=stride, PAD=padding - window.first, OUTSIDE=window.outside, BIAS=b is not None,
            PRECISION=dot_operands(precision).precision, BM=bm, BN=bn, BK=bk,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, packed)
        ctx.plan = window, stride, padding, precision, buffers, loss_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        x, w, b, packed = ctx.saved_tensors
        window, stride, padding, precision, buffers, loss_scale = ctx.plan
        dy = dy_[0].to(x.dtype).contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            packed = packed if packed_for_both(x.dtype) else pack(w, x.dtype, window, for_input=True)
            dx = input_gradient(dy, packed, x.shape[2:4], window, stride, padding, precision)
        dw = filter_target(buffers, w)
        db = None if b is None else gradient_target(buffers, b, bias=True)
        weight_gradient(x, dy, dw, db, window, stride, padding, precision, 1 / loss_scale)
        return dx, *((None, None) if buffers else (dw.grad, db and db.grad)), None, None, None, None, None


def conv2d(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Each client's images convolved with its own weights, (C, B, H', W', CO).

    Gradients of activations arrive times `loss_scale`; those of parameters are divided by it, and
    go to `gradient_buffers`, where filters lie channels-last.
    """
    return _Conv2d.apply(x_CBHWI, w_COIhw, b_CO, stride, padding, precision, gradient_buffers, loss_scale)
