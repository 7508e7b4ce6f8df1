"""Helpers of the kernels: arithmetic modes, gradient targets, launch configurations.

Precisions: "fp32" is as exact as float32: each product is three of tf32, whose errors cancel;
"tf32"
keeps fp32 in memory and multiplies in tf32, or in scaled fp16 where what is summed over is not
contiguous in memory: tensor cores take tf32 in no other way; "fp16" and "bf16" keep activations in
16 bits too. Sums and weights are fp32 in every precision.

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

from stratafl.engine.kernels import is_interpreted
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.precision import HALF_DTYPES, Precision


def patch_interpreter() -> None:
    """Let a computed scalar bound a loop in Triton's interpreter: it is an array of one element,
    which NumPy 2.4 does not turn into an int."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, *arguments: Any) -> None:
        patch(tensor, *arguments)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if is_interpreted():
    patch_interpreter()

ACTIVATION_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, **HALF_DTYPES}
TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
TORCH = {triton_type: torch_type for torch_type, triton_type in TRITON.items()}

DOT_PRECISIONS = {"fp32": "tf32x3", "tf32": "tf32"}
"""Triton's precision of a product of fp32 operands on tensor cores."""
PEAKS = tl.constexpr(32)
"""Parts of a client's values whose largest magnitudes are found separately."""


@triton.jit
def _peaks(x_ptr, peak_ptr, stride, N, BLOCK: tl.constexpr):
    """Bits of the largest finite magnitude of each part; as integers they have the same order."""
    c = tl.program_id(1).to(tl.int64)
    peak = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, N, PEAKS * BLOCK):
        offset = first + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + c * stride + offset, mask=offset < N, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        peak = tl.where((bits < 0x7F800000) & (bits > peak), bits, peak)
    tl.store(peak_ptr + c * PEAKS + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def exponent(peak_ptr, c, SCALED: tl.constexpr):
    """Exponent of the power of two by which a client's values are multiplied in a product."""
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
    """Cast to the operand type, times 2^exponent where values are scaled."""
    if SCALED:
        value = value.to(tl.float32) * two_to(exponent)
    return value.to(dtype)


@triton.jit
def unscaled(value, exponent, SCALED: tl.constexpr):
    """Divide a product by 2^exponent, the sum of its operands' exponents; in two halves, since the
    whole power may be beyond float32."""
    if SCALED:
        half = exponent >> 1
        value = value * two_to(-half) * two_to(half - exponent)
    return value


@triton.jit
def logical_right_shift(word, BITS: tl.constexpr):
    return (word >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def hash_step(state, word, golden, first, second):
    """One step of the hash in `base.rng.mix`, in the same wrapping arithmetic."""
    state = (state ^ word) + golden
    state = (state ^ logical_right_shift(state, 30)) * first
    state = (state ^ logical_right_shift(state, 27)) * second
    return state ^ logical_right_shift(state, 31)


@triton.jit
def store_gradient(grad_ptr, correction_ptr, offset, value, mask, CORRECT: tl.constexpr):
    """Store a gradient, plus the correction at the same offset if there is one. Returns the sum of
    squares of what was stored."""
    if CORRECT:
        value += tl.load(correction_ptr + offset, mask=mask, other=0.0)
    tl.store(grad_ptr + offset, value, mask=mask)
    return tl.sum(tl.where(mask, value * value, 0.0).reshape(value.numel), 0)


class GradientTarget(NamedTuple):
    """Where a kernel writes the gradient of one parameter."""

    grad: Tensor
    correction: Tensor
    """Added to the gradient; the gradient's own memory where there is none."""
    has_correction: bool
    squared_norms: list[Tensor] | None
    """Collects parts (C, n) of the squared norms of what is written, where they are asked for."""

    def new_partial_norms(self, count: int) -> Tensor:
        """New empty parts (C, count) of the squared norms, added to the list if there is one."""
        parts = torch.empty((self.grad.shape[0], count), dtype=torch.float32, device=self.grad.device)
        if self.squared_norms is not None:
            self.squared_norms.append(parts)
        return parts


class DotOperands(NamedTuple):
    """Type that the operands of a product are cast to, and Triton's precision of fp32 operands."""

    dtype: Any
    precision: str
    scaled: bool = False
    """Whether operands are multiplied by a power of two that follows from their `peaks`."""

    def peaks(self, x: Tensor) -> Tensor:
        """Largest magnitudes (C, PEAKS) from which `exponent` follows; (C, 0) where nothing is
        scaled. A client's values must be dense in memory."""
        clients, count = x.shape[0], x[0].numel()
        peaks = torch.empty((clients, PEAKS.value if self.scaled else 0), dtype=torch.int32, device=x.device)
        if self.scaled:
            _peaks[(PEAKS.value, clients)](
                x_ptr=x, peak_ptr=peaks,
                stride=x.stride(0),
                N=count, BLOCK=min(2048, next_power_of_two(count, 1)),
            )  # fmt: skip
        return peaks


def activation_dtype(precision: Precision) -> torch.dtype:
    """Type of activations in this precision."""
    if precision not in ACTIVATION_DTYPES:
        raise ValueError(f"precision must be one of {', '.join(ACTIVATION_DTYPES)}, got {precision!r}")
    return ACTIVATION_DTYPES[precision]


def dot_operands(precision: Precision) -> DotOperands:
    """Operands that lie in memory the way tensor cores read them."""
    return DotOperands(TRITON[activation_dtype(precision)], DOT_PRECISIONS.get(precision, "ieee"))


def reduction_operands(precision: Precision) -> DotOperands:
    """Operands of products that sum over pixels or samples: see the module's text on tf32."""
    return DotOperands(tl.float16, "ieee", scaled=True) if precision == "tf32" else dot_operands(precision)


def gradient_target(buffers: GradientBuffers | None, like: Tensor, bias: bool = False) -> GradientTarget:
    """Target of a parameter's gradient: the view in the buffers, or a new tensor."""
    grad = correction = None
    if buffers is not None:
        grad, correction = (buffers.bias, buffers.add_bias) if bias else (buffers.weight, buffers.add_weight)
        if grad is None:
            raise ValueError("the gradient buffers have no view for this bias")
        if correction is not None and correction.stride() != grad.stride():
            raise ValueError("corrections must lie like the gradients")
    if grad is None:
        grad = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return GradientTarget(
        grad,
        grad if correction is None else correction,
        correction is not None,
        None if buffers is None else buffers.squared_norms,
    )


def per_client_parameter(weight: Tensor) -> tuple[Tensor, int]:
    """The parameter with contiguous inner dimensions, and its stride over clients."""
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0)


def next_power_of_two(n: int, least: int = 16) -> int:
    """Smallest power of two that is not below n or `least`."""
    return max(least, 1 << (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class LaunchConfig(NamedTuple):
    """Block sizes, warps and pipeline depth of a matrix kernel.

    They were measured on an H200, and are fixed, so that a CUDA graph can be captured at any time.
    """

    m: int
    """Rows of the product: pixels, or weights where there are more weights than samples."""
    n: int
    k: int
    """Length of the sum in one step."""
    warps: int
    stages: int


LAUNCH_CONFIGS: dict[tuple[str, int], LaunchConfig] = {
    ("conv forward", 2): LaunchConfig(128, 64, 64, 4, 3),
    ("conv forward", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("conv input gradient", 2): LaunchConfig(128, 64, 64, 4, 3),
    ("conv input gradient", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("conv weight gradient", 2): LaunchConfig(64, 64, 32, 4, 4),
    ("conv weight gradient", 4): LaunchConfig(64, 64, 32, 4, 4),
    ("pool forward", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("pool forward", 4): LaunchConfig(64, 64, 16, 4, 5),
    ("few channels forward", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("few channels forward", 4): LaunchConfig(64, 64, 32, 4, 4),
    ("few channels weight gradient", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("few channels weight gradient", 4): LaunchConfig(64, 64, 32, 4, 3),
    ("linear forward", 2): LaunchConfig(128, 64, 32, 4, 3),
    ("linear forward", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("linear input gradient", 2): LaunchConfig(128, 64, 32, 4, 3),
    ("linear input gradient", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("linear weight gradient", 2): LaunchConfig(32, 64, 64, 4, 2),
    ("linear weight gradient", 4): LaunchConfig(64, 32, 64, 4, 2),
}
"""By kernel and by the bytes of a stored activation."""
FP32_CONFIG = LaunchConfig(64, 32, 32, 4, 2)
"""For fp32 as three products of tf32, which needs more registers."""


def launch_config(kernel: str, precision: Precision) -> LaunchConfig:
    """Launch configuration of a matrix kernel in this precision."""
    if precision == "fp32":
        return FP32_CONFIG
    return LAUNCH_CONFIGS[kernel, 4 if precision == "tf32" else 2]
