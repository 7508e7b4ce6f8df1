"""Convolution of C clients, each with its own filters, and its gradients.

A tap is one position of a filter. C clients, B samples, H and W height and width of the image, OH
and OW of the output, CI and CO input and output channels, KH and KW height and width of a filter.
Images are channels-last. In the matrix products, M are the rows (pixels of the output), N the
columns (channels), K the axis of the sum, and R = KW * CI values of one row of a filter's taps,
which are contiguous in a channels-last image.
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
    LayerOptions,
    activation_dtype,
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
from stratafl.engine.kernels.layouts import as_channels_last, cast_scaled
from stratafl.engine.kernels.reference import GradientBuffers, Pair
from stratafl.engine.precision import Precision


class ConvGeometry(NamedTuple):
    """Sizes of a convolution, and the window of its filters: the part that overlaps the image.

    Products and gradients of the other taps are zero. Of the last 3x3 filters of ResNet-18, whose
    images are one pixel, the window is a ninth.
    """

    image: Pair
    out: Pair
    kernel: Pair
    stride: int
    padding: int
    first: int
    """First row and first column of the window. They are equal, because the kernels have one
    padding, which is reduced by it."""
    height: int
    width: int
    """Rows and columns of the window."""
    outside: bool
    """Whether some taps of the window are outside the image at some output position."""


@functools.cache
def conv_geometry(image: Pair, kernel: Pair, stride: int, padding: int) -> ConvGeometry:
    """Geometry of a convolution with filters of a size over images of a size."""
    out = tuple((size + 2 * padding - taps) // stride + 1 for size, taps in zip(image, kernel, strict=True))
    is_inside = [
        [[0 <= y * stride - padding + tap < size for y in range(outputs)] for tap in range(taps)]
        for size, outputs, taps in zip(image, out, kernel, strict=True)
    ]
    # an axis along which no output reaches the image keeps all taps
    reached = [[tap for tap, insides in enumerate(axis) if any(insides)] or [0, len(axis) - 1] for axis in is_inside]
    first = min(axis[0] for axis in reached)
    height, width = (axis[-1] + 1 - first for axis in reached)
    rows, columns = is_inside[0][first : first + height], is_inside[1][first : first + width]
    outside = not all(all(insides) for insides in rows + columns)
    return ConvGeometry(image, (out[0], out[1]), kernel, stride, padding, first, height, width, outside)


@triton.jit
def _pack(
    w_ptr, out_ptr, stride_client, stride_o, stride_h, stride_w, out_client, out_h, out_w, out_o, out_i,
    CO, CI, KW: tl.constexpr, T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Copy one tap of BLOCK_O x BLOCK_I filters of a client to a layout of other strides."""
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


def pack(w_COIhw: Tensor, dtype: torch.dtype, geometry: ConvGeometry, for_input: bool = False) -> Tensor:
    """Copy the window of channels-last filters to another type and layout.

    The layout is (C, KH, CO, KW * CI) for the forward product and (C, KH * KW, CI, CO) for the
    input gradient: the axis of the sum is the last.
    """
    clients, outputs, inputs = w_COIhw.shape[:3]
    first, height, width = geometry.first, geometry.height, geometry.width
    w = w_COIhw[..., first : first + height, first : first + width]
    shape, axes = (clients, height, outputs, width, inputs), (1, 3, 2, 4)
    if for_input:
        shape, axes = (clients, height, width, inputs, outputs), (1, 2, 4, 3)
    out = torch.empty(shape, dtype=dtype, device=w.device)
    block_i = min(64 if for_input else 128, next_power_of_two(inputs, 1))
    block_o = min(next_power_of_two(outputs, 1), 4096 // block_i)
    out_row, out_column, out_output, out_input = (out.stride(axis) for axis in axes)
    _pack[(height * width * cdiv(outputs, block_o) * cdiv(inputs, block_i), clients)](
        w_ptr=w, out_ptr=out,
        stride_client=w.stride(0), stride_o=w.stride(1), stride_h=w.stride(3), stride_w=w.stride(4),
        out_client=out.stride(0), out_h=out_row, out_w=out_column, out_o=out_output, out_i=out_input,
        CO=outputs, CI=inputs, KW=width, T=height * width, BLOCK_O=block_o, BLOCK_I=block_i,
    )  # fmt: skip
    return out.flatten(1, 2) if for_input else out.flatten(3)


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stride_bias,
    M, H, W, OH, OW, CO: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, OUTSIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BN channels of BM output pixels of a client.

    y_MN is the sum of x_MK w_NK^T over the rows of the filters. `sample`, `y` and `x` are the place
    of an output pixel, `top` and `left` the image pixel of its first tap. If OUTSIDE, taps may be
    outside the image.
    """
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
    """Compute gradients of BN channels of BM pixels: dx_NM = sum over taps of w_NK dy_MK^T.

    The pixels of a program have the same row, over all samples, and the same column modulo the
    stride: so they are reached by the same taps. FORWARD_PACK: w has the layout of the forward
    product.
    """
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

    # tap row `first_row + STRIDE * a` contributes to output row `q - a`, if that is in the output
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
def _one_of(part: tl.constexpr, first, second, third, fourth, fifth):
    """Select one of five tensors: Triton has no lists of tensors that a loop can assign to."""
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
    """Compute gradients of filters: dw_RN = sum over output pixels of x_RK dy_KN.

    A program computes PARTS * BR values of one row of taps `ki`, for BN output channels. The parts
    use the same load of the output's gradient.
    """
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
    # the gradient of taps outside the window is zero, and only their correction is stored
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
            r_part = r + part * BR
            mask = valid[:, None] & (r_part < R)[None, :]
            if OUTSIDE:
                column = left[:, None] + (r_part // CI)[None, :]
                mask &= (column >= 0) & (column < W)
            x_RK = tl.trans(tl.load(x_ptr + start[:, None] + r_part[None, :], mask=mask, other=0.0))
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
    """Compute gradients of BN biases of a client: db_N = sum over output pixels of dy_MN.

    This is not part of the weight gradient's loop: if a product and a sum read the same block,
    Triton 3.6 allocates one buffer too few, and copies the next block over it while products run.
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


def input_gradient(dy_CBHWO: Tensor, w: Tensor, packed: Tensor, geometry: ConvGeometry, precision: Precision) -> Tensor:
    """Gradient of the convolution's input. `packed` are the filters packed for the forward product.

    Tensor cores read 16-bit operands in either layout; fp32 operands are packed again.
    """
    forward_pack = packed.dtype.itemsize == 2
    if not forward_pack:
        packed = pack(w, packed.dtype, geometry, for_input=True)
    clients, batch, out_height, out_width, outputs = dy_CBHWO.shape
    (height, width), stride, inputs = geometry.image, geometry.stride, w.shape[2]
    dx = torch.empty((clients, batch, height, width, inputs), dtype=dy_CBHWO.dtype, device=dy_CBHWO.device)
    pixels = batch * cdiv(width, stride)
    config = launch_config("conv input gradient", precision, pixels, inputs, outputs)
    _input_gradient[(height * cdiv(pixels, config.m) * stride * cdiv(inputs, config.n), clients)](
        dy_ptr=dy_CBHWO, w_ptr=packed, dx_ptr=dx,
        B=batch, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, CI=inputs,
        KH=geometry.height, KW=geometry.width, STRIDE=stride, PAD=geometry.padding - geometry.first,
        PRECISION=dot_operands(precision).precision, FORWARD_PACK=forward_pack,
        BM=config.m, BN=config.n, BK=config.k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dx


def weight_gradient(
    x_CBHWI: Tensor, dy_CBHWO: Tensor, dw: GradientTarget, db: GradientTarget | None, geometry: ConvGeometry,
    options: LayerOptions,
) -> None:  # fmt: skip
    """Write the gradients of filters and bias to their targets; outside the window they are 0, plus
    the correction if there is one."""
    clients, batch, height, width, inputs = x_CBHWI.shape
    out_height, out_width, outputs = dy_CBHWO.shape[2:]
    kernel_height, kernel_width = geometry.kernel
    operands, scale = reduction_operands(options.precision), 1 / options.loss_scale
    (x, x_peaks), (dy, dy_peaks) = cast_scaled(x_CBHWI, operands), cast_scaled(dy_CBHWO, operands)
    row, pixels = kernel_width * inputs, batch * out_height * out_width
    config = launch_config("conv weight gradient", options.precision, row, outputs)
    blocks = cdiv(row, config.m)
    # a program has at most five accumulators
    parts = blocks if blocks <= 5 else next(p for p in (4, 5, 3, 2, 1) if blocks % p == 0)
    programs = kernel_height * cdiv(row, config.m * parts) * cdiv(outputs, config.n)
    _weight_gradient[(programs, clients)](
        x_ptr=x, dy_ptr=dy, dw_ptr=dw.grad, correction_ptr=dw.correction, squares_ptr=dw.new_partial_squares(programs),
        x_peak_ptr=x_peaks, dy_peak_ptr=dy_peaks,
        stride_client=dw.grad.stride(0), scale=scale,
        M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=kernel_height,
        FIRST=geometry.first, WINDOW_H=geometry.height, WINDOW_W=geometry.width,
        STRIDE=geometry.stride, PAD=geometry.padding,
        # not `geometry.outside`: a program's block of a row may hold taps outside the window, too
        OUTSIDE=geometry.padding > 0,
        CORRECT=dw.has_correction, PRECISION=operands.precision, SCALED=operands.scaled,
        BR=config.m, BN=config.n, BK=config.k, PARTS=parts,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if db is not None:
        programs = cdiv(outputs, config.n)
        _bias_gradient[(programs, clients)](
            dy_ptr=dy, db_ptr=db.grad, correction_ptr=db.correction, squares_ptr=db.new_partial_squares(programs),
            dy_peak_ptr=dy_peaks,
            stride_b=db.grad.stride(0), scale=scale,
            M=pixels, CO=outputs, CORRECT=db.has_correction, SCALED=operands.scaled,
            BM=min(256, next_power_of_two(pixels)), BN=config.n,
            num_warps=8,
        )  # fmt: skip


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: int, padding: int, options: LayerOptions
    ) -> Tensor:
        precision = options.precision
        x = x.to(activation_dtype(precision)).contiguous()
        clients, batch, height, width, inputs = x.shape
        outputs, _, *kernel = w.shape[1:]
        geometry = conv_geometry((height, width), (kernel[0], kernel[1]), stride, padding)
        w = as_channels_last(w)
        packed = pack(w, x.dtype, geometry)
        out_height, out_width = geometry.out
        y = torch.empty((clients, batch, out_height, out_width, outputs), dtype=x.dtype, device=x.device)
        pixels, row = batch * out_height * out_width, geometry.width * inputs
        config = launch_config("conv forward", precision, pixels, outputs, row)
        bias, stride_bias = (w, 0) if b is None else per_client_parameter(b)
        _forward[(cdiv(pixels, config.m) * cdiv(outputs, config.n), clients)](
            x_ptr=x, w_ptr=packed, b_ptr=bias, y_ptr=y,
            stride_bias=stride_bias,
            M=pixels, H=height, W=width, OH=out_height, OW=out_width, CO=outputs, R=row, CI=inputs, KH=geometry.height,
            STRIDE=stride, PAD=padding - geometry.first, OUTSIDE=geometry.outside, BIAS=b is not None,
            PRECISION=dot_operands(precision).precision, BM=config.m, BN=config.n, BK=config.k,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, packed)
        ctx.geometry, ctx.options = geometry, options
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, b, packed = ctx.saved_tensors
        dy = gradients[0].to(x.dtype).contiguous()
        geometry, options = ctx.geometry, ctx.options
        dx = input_gradient(dy, w, packed, geometry, options.precision) if ctx.needs_input_grad[0] else None
        dw, db = gradient_targets(options.buffers, w, b)
        weight_gradient(x, dy, dw, db, geometry, options)
        return dx, dw.returned, db and db.returned, None, None, None


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
    """Convolution of each client's images with its own filters, (C, B, H', W', CO)."""
    options = LayerOptions(precision, gradient_buffers, loss_scale)
    return _Conv2d.apply(x_CBHWI, w_COIhw, b_CO, stride, padding, options)
