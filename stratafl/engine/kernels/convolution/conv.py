"""Convolution of C clients, each with its own weights: forward, input gradient, weight and bias
gradient.

C clients, B samples, H/W image, CI/CO input and output channels, h/w taps, M rows of a product
(pixels), R = one tap row of weights (w * CI values, contiguous in a channels-last image), K what is
summed over.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

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
    next_power_of_two,
    per_client_parameter,
    reduction_operands,
    settle,
    target,
    unscaled,
)
from stratafl.engine.kernels.convolution.pack import (
    KernelWindow,
    as_channels_last,
    cast_scaled,
    empty_channels_last,
    is_channels_last,
    pack,
    reachable_window,
)
from stratafl.engine.kernels.tuning import tuning
from stratafl.engine.ops import Sink


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
        inside = (m < M)[:, None] & (r < R)[None, :]
        if OUTSIDE:
            column = left[:, None] + (r // CI)[None, :]
            inside &= (top + row >= 0)[:, None] & (top + row < H)[:, None] & (column >= 0) & (column < W)
        x_MK = tl.load(x_ptr + (start + row * W * CI)[:, None] + r[None, :], mask=inside, other=0.0)
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
    """One program: one image row, and of its pixels those that meet the same taps (x modulo the
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
    there = (sample < B) & (x < W)

    # Tap row `first_row + STRIDE * a` met output row `q - a`; only reachable rows are visited.
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
        inside = (there & (column >= 0) & (column < OW))[:, None] & (o < CO)[None, :]
        pixel = (sample * OH + q - a) * OW + column
        dy_MK = tl.load(dy_ptr + pixel[:, None] * CO + o[None, :], mask=inside, other=0.0)
        ki, kj = first_row + STRIDE * a, first_column + STRIDE * b
        if FORWARD_PACK:
            where = ((ki * CO + o)[:, None] * KW + kj) * CI + n[None, :]
            w_NK = tl.trans(tl.load(w_ptr + where, mask=(o < CO)[:, None] & (n < CI)[None, :], other=0.0))
        else:
            where = ((ki * KW + kj) * CI + n)[:, None] * CO + o[None, :]
            w_NK = tl.load(w_ptr + where, mask=(n < CI)[:, None] & (o < CO)[None, :], other=0.0)
        acc = tl.dot(w_NK, tl.trans(dy_MK), acc, input_precision=PRECISION)
    out = dx_ptr + c * B * H * W * CI + ((sample * H + y) * W + x)[:, None] * CI + n[None, :]
    tl.store(out, tl.trans(acc).to(dx_ptr.dtype.element_ty), mask=there[:, None] & (n < CI)[None, :])


@triton.jit
def _image_columns(
    x_ptr, start, left, there, r, W, R: tl.constexpr, CI: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Values `r` of a tap row, for each pixel of the output that starts there: (values, pixels)."""
    inside = there[:, None] & (r < R)[None, :]
    if OUTSIDE:
        column = left[:, None] + (r // CI)[None, :]
        inside &= (column >= 0) & (column < W)
    return tl.trans(tl.load(x_ptr + start[:, None] + r[None, :], mask=inside, other=0.0))


@triton.jit
def _one_of(part: tl.constexpr, first, second, third, fourth, fifth):
    """Triton has no lists of tensors that a loop could add to: they are variables with a number."""
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
    x_ptr, dy_ptr, dw_ptr, extra_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr, stride_client, scale,
    M, H, W, OH, OW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    FIRST: tl.constexpr, MET_H: tl.constexpr, MET_W: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    OUTSIDE: tl.constexpr, EXTRA: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: PARTS * BR values of one tap row, which share every load of the output's
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
    # taps that never meet the image have their correction only
    met = (ki >= FIRST) & (ki < FIRST + MET_H) & (first_r < (FIRST + MET_W) * CI) & (first_r + BR * PARTS > FIRST * CI)
    for first in range(0, tl.where(met, M, 0), BK):
        m = first + k
        sample, y, x = m // (OH * OW), (m // OW) % OH, m % OW
        top, left = y * STRIDE - PAD + ki, x * STRIDE - PAD
        dy_KN = tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=(m < M)[:, None] & (n < CO)[None, :], other=0.0)
        start = ((sample * H + top) * W + left) * CI
        there = m < M
        if OUTSIDE:
            there &= (top >= 0) & (top < H)
        for part in tl.static_range(PARTS):
            x_RK = _image_columns(x_ptr, start, left, there, r + part * BR, W, R, CI, OUTSIDE)
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
        at = c * stride_client + (n * KH + ki)[None, :] * R + r_part[:, None]
        inside = (r_part < R)[:, None] & (n < CO)[None, :]
        squares += settle(dw_ptr, extra_ptr, at, unscaled(acc, by, SCALED) * scale, inside, EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


@triton.jit
def _bias_gradient(
    dy_ptr, db_ptr, extra_ptr, squares_ptr, dy_peak_ptr, stride_b, scale, M, CO, EXTRA: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Not in the weight gradient's loop: what a product and a sum both read, Triton 3.6 gives one
    buffer too few, and copies the next block over it while products still run."""
    c = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dy_ptr += c * M * CO
    summed = tl.zeros((BM, BN), tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        summed += tl.load(dy_ptr + m[:, None] * CO + n[None, :], mask=(m < M)[:, None] & (n < CO)[None, :], other=0.0)
    total = unscaled(tl.sum(summed, 0), exponent(dy_peak_ptr, c, SCALED), SCALED) * scale
    squares = settle(db_ptr, extra_ptr, c * stride_b + n, total, n < CO, EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def packed_for_both(dtype: torch.dtype) -> bool:
    """Whether the input gradient takes weights packed for forward: tensor cores read 16-bit
    operands either way."""
    return dtype.itemsize == 2


def out_size(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def input_gradient(
    dy_CBHWO: Tensor, packed: Tensor, size: tuple[int, int], taps: KernelWindow, stride: int, padding: int,
    compute: str,
) -> Tensor:  # fmt: skip
    """The gradient of the convolution's input, of height and width `size`; `packed` are these taps'
    weights."""
    clients, batch, out_height, out_width, outputs = dy_CBHWO.shape
    forward_pack = packed_for_both(packed.dtype)
    inputs = packed.shape[3] // taps.width if forward_pack else packed.shape[2]
    height, width = size
    dx = torch.empty((clients, batch, height, width, inputs), dtype=dy_CBHWO.dtype, device=dy_CBHWO.device)
    pixels = batch * cdiv(width, stride)
    t = tuning("conv input gradient", compute)
    bm, bn, bk = (
        min(t.m, next_power_of_two(pixels)),
        min(t.n, next_power_of_two(inputs)),
        min(t.k, next_power_of_two(outputs)),
    )
    grid = (height * cdiv(pixels, bm) * stride * cdiv(inputs, bn), clients)
    _input_gradient[grid](
        dy_ptr=dy_CBHWO, w_ptr=packed, dx_ptr=dx,
        B=batch, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, CI=inputs, KH=taps.height,
        KW=taps.width, STRIDE=stride, PAD=padding - taps.first, PRECISION=dot_operands(compute).precision,
        FORWARD_PACK=forward_pack, BM=bm, BN=bn, BK=bk,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return dx


def weight_gradient(
    x_CBHWI: Tensor, dy_CBHWO: Tensor, dw: GradientTarget, db: GradientTarget | None, taps: KernelWindow, stride: int,
    padding: int, compute: str, scale: float,
) -> None:  # fmt: skip
    """Write the gradients of weights and bias, times `scale`, to these targets; other taps than
    these have none."""
    clients, batch, height, width, inputs = x_CBHWI.shape
    out_height, out_width, outputs = dy_CBHWO.shape[2:]
    kernel_height, kernel_width = dw.grad.shape[3:]
    by = reduction_operands(compute)
    (x, x_peaks), (dy, dy_peaks) = cast_scaled(x_CBHWI, by), cast_scaled(dy_CBHWO, by)
    row = kernel_width * inputs
    t = tuning("conv weight gradient", compute)
    br, bn = min(t.m, next_power_of_two(row)), min(t.n, next_power_of_two(outputs))
    blocks = cdiv(row, br)
    parts = blocks if blocks <= 5 else next(p for p in (4, 5, 3, 2, 1) if blocks % p == 0)
    programs = kernel_height * cdiv(row, br * parts) * cdiv(outputs, bn)
    pixels = batch * out_height * out_width
    # not `taps.outside`: a program's block of a tap row may also hold taps that never meet the
    # image
    outside = padding > 0
    _weight_gradient[(programs, clients)](
        x_ptr=x, dy_ptr=dy, dw_ptr=dw.grad, extra_ptr=dw.extra, squares_ptr=dw.parts(programs), x_peak_ptr=x_peaks,
        dy_peak_ptr=dy_peaks,
        stride_client=dw.grad.stride(0), scale=scale,
        M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=kernel_height,
        FIRST=taps.first, MET_H=taps.height, MET_W=taps.width, STRIDE=stride, PAD=padding, OUTSIDE=outside,
        EXTRA=dw.corrected, PRECISION=by.precision, SCALED=by.scaled, BR=br, BN=bn, BK=t.k, PARTS=parts,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if db is not None:
        bm, programs = min(256, next_power_of_two(pixels)), cdiv(outputs, bn)
        _bias_gradient[(programs, clients)](
            dy_ptr=dy, db_ptr=db.grad, extra_ptr=db.extra, squares_ptr=db.parts(programs), dy_peak_ptr=dy_peaks,
            stride_b=db.grad.stride(0), scale=scale,
            M=pixels, CO=outputs, EXTRA=db.corrected, SCALED=by.scaled, BM=bm, BN=bn,
            num_warps=8,
        )  # fmt: skip


def filter_target(sink: Sink | None, w_COIhw: Tensor) -> GradientTarget:
    """Where the gradient of filters that lie channels-last goes: there it lies so too."""
    if sink is None:
        grad = empty_channels_last(w_COIhw.shape, w_COIhw.device)
        return GradientTarget(grad, grad, False, None)
    found = target(sink, w_COIhw)
    if not is_channels_last(found.grad):
        raise ValueError("a convolution's gradients must lie channels-last")
    return found


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: int, padding: int, compute: str, sink: Sink | None,
        grad_scale: float,
    ) -> Tensor:  # fmt: skip
        x = x.to(activation_dtype(compute)).contiguous()
        clients, batch, height, width, inputs = x.shape
        outputs, _, kernel_height, kernel_width = w.shape[1:]
        out_height, out_width = (
            out_size(height, kernel_height, stride, padding),
            out_size(width, kernel_width, stride, padding),
        )
        w = as_channels_last(w)
        taps = reachable_window(
            (height, width), (out_height, out_width), (kernel_height, kernel_width), stride, padding
        )
        packed = pack(w, x.dtype, taps)
        y = torch.empty((clients, batch, out_height, out_width, outputs), dtype=x.dtype, device=x.device)
        pixels, row = batch * out_height * out_width, taps.width * inputs
        t = tuning("conv forward", compute)
        bm, bn, bk = (
            min(t.m, next_power_of_two(pixels)),
            min(t.n, next_power_of_two(outputs)),
            min(t.k, next_power_of_two(row)),
        )
        bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
        _forward[(cdiv(pixels, bm) * cdiv(outputs, bn), clients)](
            x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y,
            stride_bias=stride_bias,
            M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=taps.height,
            STRIDE=stride, PAD=padding - taps.first, OUTSIDE=taps.outside, BIAS=b is not None,
            PRECISION=dot_operands(compute).precision, BM=bm, BN=bn, BK=bk,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, packed)
        ctx.plan = taps, stride, padding, compute, sink, grad_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        x, w, b, packed = ctx.saved_tensors
        taps, stride, padding, compute, sink, grad_scale = ctx.plan
        dy = dy_[0].to(x.dtype).contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            packed = packed if packed_for_both(x.dtype) else pack(w, x.dtype, taps, for_input=True)
            dx = input_gradient(dy, packed, x.shape[2:4], taps, stride, padding, compute)
        dw = filter_target(sink, w)
        db = None if b is None else target(sink, b, bias=True)
        weight_gradient(x, dy, dw, db, taps, stride, padding, compute, 1 / grad_scale)
        return dx, *((None, None) if sink else (dw.grad, db and db.grad)), None, None, None, None, None


def conv2d(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    compute: str = "fp32",
    sink: Sink | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Each client's images convolved with its own weights, (C, B, H', W', CO).

    Gradients of activations arrive times `grad_scale`; those of parameters are divided by it, and
    go to `sink`, where filters lie channels-last.
    """
    return _Conv2d.apply(x_CBHWI, w_COIhw, b_CO, stride, padding, compute, sink, grad_scale)
