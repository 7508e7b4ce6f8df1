"""Linear layers of C clients, each with its own weights, with bias and ReLU.

    y = relu(x w^T + b),  x (C, B, CI),  w (C, CO, CI),  b (C, CO),  y (C, B, CO)

C clients, B samples, CI and CO input and output features. In the kernels `b`, `i` and `o` are the
indices of samples, inputs and outputs; for further names see `kernels.common`.

These products read or write each weight once and do little with it, so memory bandwidth bounds
them: weights are the operand with many rows, samples the one with few. Weights are fp32 in memory
and cast in registers. Shapes are compile-time constants: loads are wide only if the compiler sees
that rows begin at multiples of 16 bytes.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    LayerOptions,
    activation_dtype,
    cast,
    cdiv,
    dot_operands,
    exponent,
    gradient_targets,
    launch_config,
    per_client_parameter,
    reduction_operands,
    store_gradient,
    unscaled,
)
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.precision import Precision

GROUPS = 4
"""Maximum number of programs that share one block of rows of a weight gradient."""


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stride_w, stride_bias, B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BO outputs of BB samples of a client: y_OB = relu(w_OK x_BK^T + b_O)."""
    c = tl.program_id(1).to(tl.int64)
    blocks_b = tl.cdiv(B, BB)
    o = (tl.program_id(0) // blocks_b) * BO + tl.arange(0, BO)
    b = (tl.program_id(0) % blocks_b) * BB + tl.arange(0, BB)
    x_ptr += c * B * CI
    w_ptr += c * stride_w
    acc = tl.zeros((BO, BB), tl.float32)
    for first in range(0, CI, BK):
        k = first + tl.arange(0, BK)
        w_OK = tl.load(w_ptr + o[:, None] * CI + k[None, :], mask=(o < CO)[:, None] & (k < CI)[None, :], other=0.0)
        x_BK = tl.load(x_ptr + b[:, None] * CI + k[None, :], mask=(b < B)[:, None] & (k < CI)[None, :], other=0.0)
        acc = tl.dot(w_OK.to(x_BK.dtype), tl.trans(x_BK), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + c * stride_bias + o, mask=o < CO, other=0.0)[:, None]
    if RELU:
        acc = tl.where(acc <= 0.0, 0.0, acc)
    out = y_ptr + c * B * CO + b[None, :] * CO + o[:, None]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(o < CO)[:, None] & (b < B)[None, :])


@triton.jit
def _output_gradient(dy_ptr, y_ptr, b, o, B, CO, RELU: tl.constexpr):
    """Gradient before ReLU of samples b and outputs o. ReLU passes it on where y is NaN."""
    mask = (b < B)[:, None] & (o < CO)[None, :]
    offset = b[:, None] * CO + o[None, :]
    dy_BO = tl.load(dy_ptr + offset, mask=mask, other=0.0)
    if RELU:
        dy_BO = tl.where(tl.load(y_ptr + offset, mask=mask, other=0.0) <= 0.0, 0.0, dy_BO).to(dy_BO.dtype)
    return dy_BO


@triton.jit
def _input_gradient(
    dy_ptr, y_ptr, w_ptr, dx_ptr, dy_peak_ptr, w_peak_ptr, stride_w,
    B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr,
    BI: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BI inputs of BB samples of a client: dx_BI = dy_BK w_KI."""
    c = tl.program_id(1).to(tl.int64)
    blocks_b = tl.cdiv(B, BB)
    i = (tl.program_id(0) // blocks_b) * BI + tl.arange(0, BI)
    b = (tl.program_id(0) % blocks_b) * BB + tl.arange(0, BB)
    dy_ptr += c * B * CO
    y_ptr += c * B * CO
    w_ptr += c * stride_w
    dy_exponent, w_exponent = exponent(dy_peak_ptr, c, SCALED), exponent(w_peak_ptr, c, SCALED)
    acc = tl.zeros((BB, BI), tl.float32)
    for first in range(0, CO, BK):
        k = first + tl.arange(0, BK)
        dy_BK = _output_gradient(dy_ptr, y_ptr, b, k, B, CO, RELU)
        w_KI = tl.load(w_ptr + k[:, None] * CI + i[None, :], mask=(k < CO)[:, None] & (i < CI)[None, :], other=0.0)
        dy_BK = cast(dy_BK, OPERAND, dy_exponent, SCALED)
        acc = tl.dot(dy_BK, cast(w_KI, OPERAND, w_exponent, SCALED), acc, input_precision=PRECISION)
    acc = unscaled(acc, dy_exponent + w_exponent, SCALED)
    out = dx_ptr + c * B * CI + b[:, None] * CI + i[None, :]
    tl.store(out, acc.to(dx_ptr.dtype.element_ty), mask=(b < B)[:, None] & (i < CI)[None, :])


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, y_ptr, dw_ptr, db_ptr, correction_w_ptr, correction_b_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr,
    stride_w, stride_b, scale, B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr,
    CORRECT: tl.constexpr, GROUPS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Compute gradients of weights, dw_OI = dy_KO^T x_KI, and of biases, the sums of dy_KO over k.

    A program computes BO rows of the weights, and of them every GROUPS-th block of BI columns. If
    the batch is ONE block, the gradient of the outputs is loaded once for all columns.
    Stored are the gradients times `scale`, plus the correction, and the sum of squares of what a
    program stored.
    """
    c = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    o = (tl.program_id(0) // GROUPS) * BO + tl.arange(0, BO)
    k = tl.arange(0, BK)
    x_ptr += c * B * CI
    dy_ptr += c * B * CO
    y_ptr += c * B * CO
    x_exponent, dy_exponent = exponent(x_peak_ptr, c, SCALED), exponent(dy_peak_ptr, c, SCALED)
    if ONE:
        dy_OK = tl.trans(cast(_output_gradient(dy_ptr, y_ptr, k, o, B, CO, RELU), OPERAND, dy_exponent, SCALED))
    squares_OI = tl.zeros((BO, BI), tl.float32)
    for first_i in range(group * BI, CI, GROUPS * BI):
        i = first_i + tl.arange(0, BI)
        offset = c * stride_w + o[:, None] * CI + i[None, :]
        weights_mask = (o < CO)[:, None] & (i < CI)[None, :]
        # loaded before the product, because corrections are most of what the kernel reads
        correction = 0.0
        if CORRECT:
            correction = tl.load(correction_w_ptr + offset, mask=weights_mask, other=0.0)
        acc = tl.zeros((BO, BI), tl.float32)
        if ONE:
            x_KI = tl.load(x_ptr + k[:, None] * CI + i[None, :], mask=(k < B)[:, None] & (i < CI)[None, :], other=0.0)
            acc = tl.dot(dy_OK, cast(x_KI, OPERAND, x_exponent, SCALED), acc, input_precision=PRECISION)
        else:
            for first in range(0, B, BK):
                b = first + k
                dy_KO = cast(_output_gradient(dy_ptr, y_ptr, b, o, B, CO, RELU), OPERAND, dy_exponent, SCALED)
                mask = (b < B)[:, None] & (i < CI)[None, :]
                x_KI = tl.load(x_ptr + b[:, None] * CI + i[None, :], mask=mask, other=0.0)
                x_KI = cast(x_KI, OPERAND, x_exponent, SCALED)
                acc = tl.dot(tl.trans(dy_KO), x_KI, acc, input_precision=PRECISION)
        dw = unscaled(acc, x_exponent + dy_exponent, SCALED) * scale + correction
        tl.store(dw_ptr + offset, dw, mask=weights_mask)
        squares_OI += tl.where(weights_mask, dw * dw, 0.0)
    squares = tl.sum(tl.sum(squares_OI, 1), 0)
    if BIAS:  # noqa: SIM102
        if group == 0:
            summed = tl.zeros((BO,), tl.float32)
            for first in range(0, B, BK):
                summed += tl.sum(_output_gradient(dy_ptr, y_ptr, first + k, o, B, CO, RELU).to(tl.float32), 0)
            squares += store_gradient(db_ptr, correction_b_ptr, c * stride_b + o, summed * scale, o < CO, CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


class _TritonLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, relu: bool, options: LayerOptions) -> Tensor:
        x = x.to(activation_dtype(options.precision)).contiguous()
        clients, batch, inputs = x.shape
        outputs = w.shape[1]
        y = torch.empty((clients, batch, outputs), dtype=x.dtype, device=x.device)
        weight, stride_w = per_client_parameter(w)
        bias, stride_bias = (weight, 0) if b is None else per_client_parameter(b)
        config = launch_config("linear forward", options.precision, outputs, batch, inputs)
        _forward[(cdiv(outputs, config.m) * cdiv(batch, config.n), clients)](
            x_ptr=x, w_ptr=weight, b_ptr=bias, y_ptr=y,
            stride_w=stride_w, stride_bias=stride_bias,
            B=batch, CO=outputs, CI=inputs, RELU=relu, BIAS=b is not None,
            PRECISION=dot_operands(options.precision).precision, BO=config.m, BB=config.n, BK=config.k,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, y)
        ctx.relu, ctx.options = relu, options
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, b, y = ctx.saved_tensors
        relu, (precision, buffers, loss_scale) = ctx.relu, ctx.options
        dy = gradients[0].to(x.dtype).contiguous()
        clients, batch, inputs = x.shape
        outputs = w.shape[1]
        operands = reduction_operands(precision)
        dy_peaks = operands.peaks(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            weight, stride_w = per_client_parameter(w)
            config = launch_config("linear input gradient", precision, inputs, batch, outputs)
            _input_gradient[(cdiv(inputs, config.m) * cdiv(batch, config.n), clients)](
                dy_ptr=dy, y_ptr=y, w_ptr=weight, dx_ptr=dx, dy_peak_ptr=dy_peaks, w_peak_ptr=operands.peaks(weight),
                stride_w=stride_w,
                B=batch, CO=outputs, CI=inputs, RELU=relu, PRECISION=operands.precision, OPERAND=operands.dtype,
                SCALED=operands.scaled, BI=config.m, BB=config.n, BK=config.k,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        dw, db = gradient_targets(buffers, w, b)
        bias = dw if db is None else db
        config = launch_config("linear weight gradient", precision, outputs, inputs, batch)
        groups = min(GROUPS, cdiv(inputs, config.n))
        programs = cdiv(outputs, config.m) * groups
        _weight_gradient[(programs, clients)](
            x_ptr=x, dy_ptr=dy, y_ptr=y, dw_ptr=dw.grad, db_ptr=bias.grad,
            correction_w_ptr=dw.correction, correction_b_ptr=bias.correction,
            squares_ptr=dw.new_partial_squares(programs), x_peak_ptr=operands.peaks(x), dy_peak_ptr=dy_peaks,
            stride_w=dw.grad.stride(0), stride_b=bias.grad.stride(0), scale=1 / loss_scale,
            B=batch, CO=outputs, CI=inputs, RELU=relu, BIAS=b is not None, PRECISION=operands.precision,
            OPERAND=operands.dtype, SCALED=operands.scaled, CORRECT=dw.has_correction, GROUPS=groups,
            BO=config.m, BI=config.n, BK=config.k, ONE=batch <= config.k,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return dx, dw.returned, db and db.returned, None, None


def linear(
    x_CBI: Tensor,
    w_COI: Tensor,
    b_CO: Tensor | None = None,
    relu: bool = False,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """x @ w^T + b of each client, then ReLU if `relu`: (C, B, CO)."""
    return _TritonLinear.apply(x_CBI, w_COI, b_CO, relu, LayerOptions(precision, gradient_buffers, loss_scale))
