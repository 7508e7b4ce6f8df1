"""What the kernels share: arithmetic modes, where weight gradients go, small helpers.

Modes: "fp32" is as exact as float32: each product is three of tf32, whose errors cancel; "tf32"
keeps fp32 in memory and multiplies in tf32, or in scaled fp16 where what is summed over is not
contiguous in memory: tensor cores take tf32 in no other way; "fp16" and "bf16" keep activations in
16 bits too. Sums and weights are fp32 in every mode.

Scaled fp16: fp16 has tf32's mantissa but a small range, so a client's values are multiplied by a
power of two that brings the largest finite one to 2^14 .. 2^15, and the product is divided by it
again. Values down to 2^-29 of the largest keep their whole mantissa. The power depends on nothing
but the client's own values. Nothing is clamped: what is infinite or no number stays so.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels import interpreted
from stratafl.engine.ops import Sink
from stratafl.engine.precision import HALF_DTYPES

if interpreted():
    from stratafl.engine.kernels.triton_patch import patch_interpreter

    patch_interpreter()

ACTIVATION_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, **HALF_DTYPES}
TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
TORCH = {triton_type: torch_type for torch_type, triton_type in TRITON.items()}

PRECISIONS = {"fp32": "tf32x3", "tf32": "tf32"}
"""What products of fp32 operands on tensor cores are computed in."""
PEAKS = tl.constexpr(32)
"""Parts of a client's values of which each has a largest one."""


@triton.jit
def _peaks(x_ptr, peak_ptr, stride, N, BLOCK: tl.constexpr):
    """The bits of each part's largest finite magnitude: as integers they are in the same order."""
    c = tl.program_id(1).to(tl.int64)
    peak = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, N, PEAKS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + c * stride + at, mask=at < N, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        peak = tl.where((bits < 0x7F800000) & (bits > peak), bits, peak)
    tl.store(peak_ptr + c * PEAKS + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def exponent(peak_ptr, c, SCALED: tl.constexpr):
    """The power of two by which a client's values are multiplied in a product."""
    value = 0
    if SCALED:
        peak = tl.max(tl.load(peak_ptr + c * PEAKS + tl.arange(0, PEAKS)), 0)
        # a factor of 2^127 and more has no reciprocal among normal numbers
        value = tl.minimum(14 + 127 - (peak >> 23), 126)
    return value


@triton.jit
def two_to(exponent):
    """2^exponent, of -126 to 127, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cast(value, dtype: tl.constexpr, exponent, SCALED: tl.constexpr):
    """To the operand type, times 2^exponent where values are scaled."""
    if SCALED:
        value = value.to(tl.float32) * two_to(exponent)
    return value.to(dtype)


@triton.jit
def unscaled(value, exponent, SCALED: tl.constexpr):
    """A product divided by 2^exponent, the sum of its operands'; in two halves, since the whole may
    be beyond float32."""
    if SCALED:
        half = exponent >> 1
        value = value * two_to(-half) * two_to(half - exponent)
    return value


@triton.jit
def logical_right_shift(word, BITS: tl.constexpr):
    return (word >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def hash_step(state, word, golden, first, second):
    """One link of the chain in `streams`, in the same wrapping arithmetic."""
    state = (state ^ word) + golden
    state = (state ^ logical_right_shift(state, 30)) * first
    state = (state ^ logical_right_shift(state, 27)) * second
    return state ^ logical_right_shift(state, 31)


@triton.jit
def settle(grad_ptr, extra_ptr, at, value, inside, EXTRA: tl.constexpr):
    """Store a gradient, plus the correction at the same place of its matrix if there is one; its
    sum of squares."""
    if EXTRA:
        value += tl.load(extra_ptr + at, mask=inside, other=0.0)
    tl.store(grad_ptr + at, value, mask=inside)
    return tl.sum(tl.where(inside, value * value, 0.0).reshape(value.numel), 0)


class GradientTarget(NamedTuple):
    """Where one parameter's gradient is written, resolved: the gradient, the correction (itself if
    none), squares."""

    grad: Tensor
    extra: Tensor
    corrected: bool
    sums: list[Tensor] | None

    def parts(self, count: int) -> Tensor:
        """A new (C, count) of sums of squares, known to the sink if it asked."""
        part = torch.empty((self.grad.shape[0], count), dtype=torch.float32, device=self.grad.device)
        if self.sums is not None:
            self.sums.append(part)
        return part


class DotOperands(NamedTuple):
    """How a product is done: the type its operands are cast to, and the precision of fp32
    operands."""

    dtype: Any
    precision: str
    scaled: bool = False
    """Whether operands are multiplied by powers of two, by their `peaks`."""

    def peaks(self, x: Tensor) -> Tensor:
        """What `exponent` takes of these operands, (C, PEAKS), or nothing where none is scaled. A
        client's values must be dense in memory."""
        clients, count = x.shape[0], x[0].numel()
        peaks = torch.empty((clients, PEAKS.value if self.scaled else 0), dtype=torch.int32, device=x.device)
        if self.scaled:
            _peaks[(PEAKS.value, clients)](
                x_ptr=x, peak_ptr=peaks,
                stride=x.stride(0),
                N=count, BLOCK=min(2048, next_power_of_two(count, 1)),
            )  # fmt: skip
        return peaks


def activation_dtype(compute: str) -> torch.dtype:
    """The type of activations in this mode."""
    if compute not in ACTIVATION_DTYPES:
        raise ValueError(f"compute must be one of {', '.join(ACTIVATION_DTYPES)}, got {compute!r}")
    return ACTIVATION_DTYPES[compute]


def dot_operands(compute: str) -> DotOperands:
    """Products whose operands lie the way tensor cores want them."""
    return DotOperands(TRITON[activation_dtype(compute)], PRECISIONS.get(compute, "ieee"))


def reduction_operands(compute: str) -> DotOperands:
    """Products that sum over pixels: see the module's text on tf32."""
    return DotOperands(tl.float16, "ieee", scaled=True) if compute == "tf32" else dot_operands(compute)


def target(sink: Sink | None, like: Tensor, bias: bool = False) -> GradientTarget:
    """Where a parameter's gradient goes: the sink's view, or a new tensor."""
    grad = correction = None
    if sink is not None:
        grad, correction = (sink.b, sink.correction_b) if bias else (sink.w, sink.correction_w)
        if grad is None:
            raise ValueError("the sink has no view for this bias")
        if correction is not None and correction.stride() != grad.stride():
            raise ValueError("corrections must lie like the gradients")
    if grad is None:
        grad = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return GradientTarget(
        grad, grad if correction is None else correction, correction is not None, sink and sink.squares
    )


def per_client_parameter(weight: Tensor) -> tuple[Tensor, int]:
    """A per-client parameter whose inner dimensions are contiguous, and its stride over clients."""
    inner = weight[0]
    if not inner.is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0)


def next_power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
