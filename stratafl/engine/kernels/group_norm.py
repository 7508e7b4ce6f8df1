"""Group normalisation of C clients, each with its own scale and shift, and its gradients.

    y = normal * w + b, then ReLU if RELU;  normal = (x - mean) / sqrt(variance + eps)

x and y are (C, B, H, W, K), w and b are (C, K). Mean and variance are over the N = PIXELS * K / G
values of a group of channels of one sample. C clients, B samples, K channels, G groups. Kernels
work on blocks of BP pixels by BC channels; for further names see `kernels.common`.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    cdiv,
    gradient_targets,
    next_power_of_two,
    per_client_parameter,
    store_gradient,
)
from stratafl.engine.kernels.reference import GradientBuffers


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stat_ptr, stride_w, stride_b, eps, B, PIXELS, K: tl.constexpr, G: tl.constexpr,
    RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise one group of one sample, and store its mean and 1 / sqrt(variance + eps) in `stat`.

    The variance is the mean of (x - mean)^2: E[x^2] - mean^2 loses digits.
    """
    cell = tl.program_id(0).to(tl.int64)
    sample, group = cell // G, (cell % G).to(tl.int32)
    c = sample // B
    width: tl.constexpr = K // G
    channel = tl.arange(0, BC)
    base = sample * PIXELS * K + group * width
    total = tl.zeros((BP, BC), tl.float32)
    for first in range(0, PIXELS, BP):
        p = first + tl.arange(0, BP)
        mask = (p < PIXELS)[:, None] & (channel < width)[None, :]
        total += tl.load(x_ptr + base + p[:, None] * K + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(total, 1), 0) / (PIXELS * width)
    total = tl.zeros((BP, BC), tl.float32)
    for first in range(0, PIXELS, BP):
        p = first + tl.arange(0, BP)
        mask = (p < PIXELS)[:, None] & (channel < width)[None, :]
        x = tl.load(x_ptr + base + p[:, None] * K + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, x - mean, 0.0)
        total += deviation * deviation
    scale = 1.0 / tl.sqrt(tl.sum(tl.sum(total, 1), 0) / (PIXELS * width) + eps)
    tl.store(stat_ptr + cell * 2, mean)
    tl.store(stat_ptr + cell * 2 + 1, scale)
    channel_offset = group * width + channel
    w = tl.load(w_ptr + c * stride_w + channel_offset, mask=channel < width, other=0.0)
    b = tl.load(b_ptr + c * stride_b + channel_offset, mask=channel < width, other=0.0)
    for first in range(0, PIXELS, BP):
        p = first + tl.arange(0, BP)
        mask = (p < PIXELS)[:, None] & (channel < width)[None, :]
        offset = base + p[:, None] * K + channel[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * scale * w[None, :] + b[None, :]
        if RELU:
            y = tl.where(y <= 0.0, 0.0, y)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _input_gradient(
    x_ptr, y_ptr, dy_ptr, w_ptr, stat_ptr, dx_ptr, part_ptr, stride_w, B, PIXELS, K: tl.constexpr, G: tl.constexpr,
    RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one group of one sample.

    dx = (dy w - mean(dy w) - normal * mean(dy w normal)) / sqrt(variance + eps)

    `part` gets the sample's part of the gradients of w, sum of dy normal, and of b, sum of dy.
    """
    cell = tl.program_id(0).to(tl.int64)
    sample, group = cell // G, (cell % G).to(tl.int32)
    c = sample // B
    width: tl.constexpr = K // G
    channel = tl.arange(0, BC)
    base = sample * PIXELS * K + group * width
    mean, scale = tl.load(stat_ptr + cell * 2), tl.load(stat_ptr + cell * 2 + 1)
    channel_offset = group * width + channel
    w = tl.load(w_ptr + c * stride_w + channel_offset, mask=channel < width, other=0.0)
    sum_with_x = tl.zeros((BP, BC), tl.float32)
    sum_alone = tl.zeros((BP, BC), tl.float32)
    for first in range(0, PIXELS, BP):
        p = first + tl.arange(0, BP)
        mask = (p < PIXELS)[:, None] & (channel < width)[None, :]
        offset = base + p[:, None] * K + channel[None, :]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = tl.where(tl.load(y_ptr + offset, mask=mask, other=0.0) <= 0.0, 0.0, dy)
        normal = (tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        sum_with_x += dy * normal
        sum_alone += dy
    dw, db = tl.sum(sum_with_x, 0), tl.sum(sum_alone, 0)
    tl.store(part_ptr + sample * 2 * K + channel_offset, dw, mask=channel < width)
    tl.store(part_ptr + sample * 2 * K + K + channel_offset, db, mask=channel < width)
    mean_with_x, mean_alone = tl.sum(dw * w, 0) / (PIXELS * width), tl.sum(db * w, 0) / (PIXELS * width)
    for first in range(0, PIXELS, BP):
        p = first + tl.arange(0, BP)
        mask = (p < PIXELS)[:, None] & (channel < width)[None, :]
        offset = base + p[:, None] * K + channel[None, :]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = tl.where(tl.load(y_ptr + offset, mask=mask, other=0.0) <= 0.0, 0.0, dy)
        normal = (tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        dx = (dy * w[None, :] - mean_alone - normal * mean_with_x) * scale
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _parameter_gradient(
    part_ptr, dw_ptr, db_ptr, correction_w_ptr, correction_b_ptr, squares_ptr, stride_w, stride_b, scale, B, K,
    CORRECT: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add up the parts of BC channels over the samples of a client, always in the same order."""
    c = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BC + tl.arange(0, BC)
    dw = tl.zeros((BB, BC), tl.float32)
    db = tl.zeros((BB, BC), tl.float32)
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)
        mask = (b < B)[:, None] & (k < K)[None, :]
        offset = part_ptr + (c * B + b)[:, None] * 2 * K + k[None, :]
        dw += tl.load(offset, mask=mask, other=0.0)
        db += tl.load(offset + K, mask=mask, other=0.0)
    squares = store_gradient(dw_ptr, correction_w_ptr, c * stride_w + k, tl.sum(dw, 0) * scale, k < K, CORRECT)
    squares += store_gradient(db_ptr, correction_b_ptr, c * stride_b + k, tl.sum(db, 0) * scale, k < K, CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: int, w: Tensor, b: Tensor, eps: float, relu: bool, buffers: GradientBuffers | None,
        loss_scale: float,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        clients, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
        pixels = x[0, 0].numel() // channels
        y = torch.empty_like(x)
        stat = torch.empty((clients * batch * groups, 2), dtype=torch.float32, device=x.device)
        weight, stride_w = per_client_parameter(w)
        bias, stride_b = per_client_parameter(b)
        bc = next_power_of_two(channels // groups, 1)
        bp = min(next_power_of_two(pixels, 1), max(1, 4096 // bc))
        _forward[(clients * batch * groups,)](
            x_ptr=x, w_ptr=weight, b_ptr=bias, y_ptr=y, stat_ptr=stat,
            stride_w=stride_w, stride_b=stride_b, eps=eps,
            B=batch, PIXELS=pixels, K=channels, G=groups, RELU=relu, BP=bp, BC=bc,
        )  # fmt: skip
        ctx.save_for_backward(x, w, b, y, stat)
        ctx.options = groups, relu, buffers, loss_scale, bp, bc
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, b, y, stat = ctx.saved_tensors
        groups, relu, buffers, loss_scale, bp, bc = ctx.options
        dy = gradients[0].contiguous()
        clients, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
        pixels = x[0, 0].numel() // channels
        dx = torch.empty_like(x)
        part = torch.empty((clients * batch, 2, channels), dtype=torch.float32, device=x.device)
        weight, stride_w = per_client_parameter(w)
        _input_gradient[(clients * batch * groups,)](
            x_ptr=x, y_ptr=y, dy_ptr=dy, w_ptr=weight, stat_ptr=stat, dx_ptr=dx, part_ptr=part,
            stride_w=stride_w,
            B=batch, PIXELS=pixels, K=channels, G=groups, RELU=relu, BP=bp, BC=bc,
        )  # fmt: skip
        dw, db = gradient_targets(buffers, w, b)
        assert db is not None
        programs = cdiv(channels, 64)
        _parameter_gradient[(programs, clients)](
            part_ptr=part, dw_ptr=dw.grad, db_ptr=db.grad,
            correction_w_ptr=dw.correction, correction_b_ptr=db.correction,
            squares_ptr=dw.new_partial_squares(programs),
            stride_w=dw.grad.stride(0), stride_b=db.grad.stride(0), scale=1 / loss_scale,
            B=batch, K=channels, CORRECT=dw.has_correction, BB=16, BC=64,
        )  # fmt: skip
        return dx, None, dw.returned, db.returned, None, None, None, None


def group_norm(
    x_CBHWK: Tensor,
    groups: int,
    w_CK: Tensor,
    b_CK: Tensor,
    eps: float = 1e-5,
    relu: bool = False,
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Group normalisation with each client's own scale and shift, then ReLU if `relu`.

    The incoming gradient is `loss_scale` times too large; the parameters' gradients are divided by
    it.
    """
    return _GroupNorm.apply(x_CBHWK, groups, w_CK, b_CK, eps, relu, gradient_buffers, loss_scale)
