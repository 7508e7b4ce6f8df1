"""Linear layers of C clients, each with its own weights, with bias and ReLU; fp32 weights are cast
in registers.

These products read or write each weight once and do little with it, so they are bound by memory:
weights are the operand with many rows, the batch the one with few. Shapes are compiled in: loads
are wide only where the compiler sees that rows begin at multiples of 16 bytes. C clients, B
samples, CI/CO input and output features.
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
    cast,
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
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.precision import Precision

GROUPS = 4
"""Programs that share a block of rows of a weight gradient."""


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stride_w, stride_bias, B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
def _input_gradient(
    dy_ptr, y_ptr, w_ptr, dx_ptr, dy_peak_ptr, w_peak_ptr, stride_w,
    B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr,
    BI: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
        mask = (b < B)[:, None] & (k < CO)[None, :]
        offset = b[:, None] * CO + k[None, :]
        dy_BK = tl.load(dy_ptr + offset, mask=mask, other=0.0)
        if RELU:
            dy_BK = tl.where(tl.load(y_ptr + offset, mask=mask, other=0.0) <= 0.0, 0.0, dy_BK).to(dy_BK.dtype)
        w_KI = tl.load(w_ptr + k[:, None] * CI + i[None, :], mask=(k < CO)[:, None] & (i < CI)[None, :], other=0.0)
        dy_BK = cast(dy_BK, OPERAND, dy_exponent, SCALED)
        acc = tl.dot(dy_BK, cast(w_KI, OPERAND, w_exponent, SCALED), acc, input_precision=PRECISION)
    acc = unscaled(acc, dy_exponent + w_exponent, SCALED)
    out = dx_ptr + c * B * CI + b[:, None] * CI + i[None, :]
    tl.store(out, acc.to(dx_ptr.dtype.element_ty), mask=(b < B)[:, None] & (i < CI)[None, :])


@triton.jit
def _output_gradient(dy_ptr, y_ptr, k, o, B, CO, RELU: tl.constexpr):
    """Rows k and columns o of the gradient before ReLU. An output that is NaN lets it through."""
    mask = (k < B)[:, None] & (o < CO)[None, :]
    offset = k[:, None] * CO + o[None, :]
    dy_KO = tl.load(dy_ptr + offset, mask=mask, other=0.0)
    if RELU:
        dy_KO = tl.where(tl.load(y_ptr + offset, mask=mask, other=0.0) <= 0.0, 0.0, dy_KO).to(dy_KO.dtype)
    return dy_KO


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, y_ptr, dw_ptr, db_ptr, correction_w_ptr, correction_b_ptr, squares_ptr, x_peak_ptr, dy_peak_ptr,
    stride_w, stride_b, scale, B: tl.constexpr, CO: tl.constexpr, CI: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr,
    CORRECT: tl.constexpr, GROUPS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """One program: some rows of the weights, every GROUPS-th block of columns; a batch that fits is
    loaded once."""
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
        # corrections are most of what is read, so they are loaded before the product
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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, relu: bool, precision: Precision,
        buffers: GradientBuffers | None,
        loss_scale: float,
    ) -> Tensor:  # fmt: skip
        x = x.to(activation_dtype(precision)).contiguous()
        clients, batch, inputs = x.shape
        outputs = w.shape[1]
        y = torch.empty((clients, batch, outputs), dtype=x.dtype, device=x.device)
        weight, stride_w = per_client_parameter(w)
        bias, stride_bias = (weight, 0) if b is None else per_client_parameter(b)
        config = launch_config("linear forward", precision)
        bo, bb, bk = (
            min(config.m, next_power_of_two(outputs)),
            min(config.n, next_power_of_two(batch)),
            min(config.k, next_power_of_two(inputs)),
        )
        _forward[(cdiv(outputs, bo) * cdiv(batch, bb), clients)](
            x_ptr=x, w_ptr=weight, b_ptr=bias, y_ptr=y,
            stride_w=stride_w, stride_bias=stride_bias,
            B=batch, CO=outputs, CI=inputs, RELU=relu, BIAS=b is not None,
            PRECISION=dot_operands(precision).precision, BO=bo, BB=bb, BK=bk,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, y)
        ctx.plan = relu, precision, buffers, loss_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        x, w, b, y = ctx.saved_tensors
        relu, precision, buffers, loss_scale = ctx.plan
        dy = dy_[0].to(x.dtype).contiguous()
        clients, batch, inputs = x.shape
        outputs = w.shape[1]
        operands = reduction_operands(precision)
        dy_peaks = operands.peaks(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            weight, stride_w = per_client_parameter(w)
            config = launch_config("linear input gradient", precision)
            bi, bb, bk = (
                min(config.m, next_power_of_two(inputs)),
                min(config.n, next_power_of_two(batch)),
                min(config.k, next_power_of_two(outputs)),
            )
            _input_gradient[(cdiv(inputs, bi) * cdiv(batch, bb), clients)](
                dy_ptr=dy, y_ptr=y, w_ptr=weight, dx_ptr=dx, dy_peak_ptr=dy_peaks, w_peak_ptr=operands.peaks(weight),
                stride_w=stride_w,
                B=batch, CO=outputs, CI=inputs, RELU=relu, PRECISION=operands.precision, OPERAND=operands.dtype,
                SCALED=operands.scaled, BI=bi, BB=bb, BK=bk,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        dw = gradient_target(buffers, w)
        db = dw if b is None else gradient_target(buffers, b, bias=True)
        config = launch_config("linear weight gradient", precision)
        bo, bi, bk = (
            min(config.m, next_power_of_two(outputs)),
            min(config.n, next_power_of_two(inputs)),
            min(config.k, next_power_of_two(batch)),
        )
        groups = min(GROUPS, cdiv(inputs, bi))
        programs = cdiv(outputs, bo) * groups
        _weight_gradient[(programs, clients)](
            x_ptr=x, dy_ptr=dy, y_ptr=y, dw_ptr=dw.grad, db_ptr=db.grad, correction_w_ptr=dw.correction,
            correction_b_ptr=db.correction,
            squares_ptr=dw.new_partial_norms(programs), x_peak_ptr=operands.peaks(x), dy_peak_ptr=dy_peaks,
            stride_w=dw.grad.stride(0), stride_b=db.grad.stride(0), scale=1 / loss_scale,
            B=batch, CO=outputs, CI=inputs, RELU=relu, BIAS=b is not None, PRECISION=operands.precision,
            OPERAND=operands.dtype,
            SCALED=operands.scaled, CORRECT=dw.has_correction, GROUPS=groups, BO=bo, BI=bi, BK=bk, ONE=batch <= bk,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return (
            dx,
            *((None, None) if buffers else (dw.grad, None if b is None else db.grad)),
            None,
            None,
            None,
            None,
        )


def linear(
    x_CBI: Tensor,
    w_COI: Tensor,
    b_CO: Tensor | None = None,
    relu: bool = False,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """x @ w^T + b of each client, (C, B, CO), then ReLU if asked.

    Gradients of activations arrive times `loss_scale`; those of parameters are divided by it and
    written to `gradient_buffers`.
    """
    return _Linear.apply(x_CBI, w_COI, b_CO, relu, precision, gradient_buffers, loss_scale)
