"""Parts shared by the Triton kernels: arithmetic modes, gradient targets, launch configurations.

Precisions. "fp32" is as exact as float32: each product is computed as three tf32 products whose
errors cancel. "tf32" keeps fp32 in memory and multiplies in tf32; where the axis that is summed
over is not contiguous in memory, it multiplies in scaled fp16 instead, since tensor cores cannot
read tf32 operands in that layout. "fp16" and "bf16" also keep activations in 16 bits. Sums and
weights are fp32 in every precision.

Scaled fp16. fp16 has the mantissa of tf32 but a smaller range. So the values of a client are
multiplied by a power of two that brings the largest finite one to 2^14 .. 2^15, and the product is
divided by the same power. Values down to 2^-29 of the largest keep their full mantissa. The power
depends on the client's own values only. Nothing is clamped: infinite values and NaN stay.

Names in all kernels. A kernel that is launched over clients has the client as its last program
number. `c` is the client, `*_ptr` the first element of a tensor, `stride_*` a number of elements
between two clients, `B*` in capitals (BM, BN, BK) the block sizes, `first` the start of a block,
`acc` the fp32 accumulator of a product, `d*` a gradient. `correction_ptr` is added to a gradient if
`CORRECT`, `scale` is 1 / loss scale, `squares_ptr` takes each program's sum of squares of what it
stored, and `*_peak_ptr` are largest magnitudes (see `exponent`), used if `SCALED`.
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
    """Make Triton's interpreter accept a computed scalar as the bound of a loop.

    Such a scalar is an array of one element, which NumPy 2.4 does not convert to an int.
    """
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
"""Triton's `input_precision` of products of fp32 operands on tensor cores."""
PEAKS = tl.constexpr(32)
"""Parts of a client's values, each of which has its own largest magnitude."""


@triton.jit
def _peaks(x_ptr, peak_ptr, stride, N, BLOCK: tl.constexpr):
    """Store the bits of the largest finite magnitude of each part, (C, PEAKS).

    Compared as integers, the bits of positive floats have the order of the floats.
    """
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
    """Exponent of the power of two by which client c's values are multiplied in a product."""
    value = 0
    if SCALED:
        peak = tl.max(tl.load(peak_ptr + c * PEAKS + tl.arange(0, PEAKS)), 0)
        # the reciprocal of 2^127 and above is not a normal number
        value = tl.minimum(14 + 127 - (peak >> 23), 126)
    return value


@triton.jit
def two_to(exponent):
    """Exact 2^exponent, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cast(value, dtype: tl.constexpr, exponent, SCALED: tl.constexpr):
    """Cast to the operand type, after multiplication by 2^exponent if SCALED."""
    if SCALED:
        value = value.to(tl.float32) * two_to(exponent)
    return value.to(dtype)


@triton.jit
def unscaled(value, exponent, SCALED: tl.constexpr):
    """Divide a product by 2^exponent, the sum of its operands' exponents, if SCALED.

    The division has two steps, since the full power may be beyond the range of float32.
    """
    if SCALED:
        half = exponent >> 1
        value = value * two_to(-half) * two_to(half - exponent)
    return value


@triton.jit
def logical_right_shift(word, BITS: tl.constexpr):
    """Right shift of a signed 64-bit integer that fills with zeros."""
    return (word >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def hash_step(state, word, golden, first, second):
    """Mix one word into the state of the hash of `base.rng.mix`, bit by bit the same."""
    state = (state ^ word) + golden
    state = (state ^ logical_right_shift(state, 30)) * first
    state = (state ^ logical_right_shift(state, 27)) * second
    return state ^ logical_right_shift(state, 31)


@triton.jit
def store_gradient(grad_ptr, correction_ptr, offset, value, mask, CORRECT: tl.constexpr):
    """Store a gradient, plus the correction at the same offset if CORRECT.

    Returns the sum of squares of the stored values.
    """
    if CORRECT:
        value += tl.load(correction_ptr + offset, mask=mask, other=0.0)
    tl.store(grad_ptr + offset, value, mask=mask)
    return tl.sum(tl.where(mask, value * value, 0.0).reshape(value.numel), 0)


class LayerOptions(NamedTuple):
    """Options of the layers with parameters.

    The gradients of activations are `loss_scale` times too large; those of parameters are divided
    by it, and written to the buffers or returned to autograd.
    """

    precision: Precision
    buffers: GradientBuffers | None
    loss_scale: float


class GradientTarget(NamedTuple):
    """Memory that a kernel writes the gradient of one parameter to."""

    grad: Tensor
    correction: Tensor
    """Added to the gradient; the gradient's own memory if there is none."""
    has_correction: bool
    squared_norms: list[Tensor] | None
    """List that collects parts (C, n) of the squared norms of what is written, or None."""
    returned: Tensor | None
    """Gradient for autograd; None if it is in the engine's buffers."""

    def new_partial_squares(self, count: int) -> Tensor:
        """New empty parts (C, count) of the squared norms, appended to the list if there is one."""
        parts = torch.empty((self.grad.shape[0], count), dtype=torch.float32, device=self.grad.device)
        if self.squared_norms is not None:
            self.squared_norms.append(parts)
        return parts


class DotOperands(NamedTuple):
    """Operands of a product on tensor cores: their type, and how fp32 operands are multiplied."""

    dtype: Any
    precision: str
    """Triton's `input_precision`."""
    scaled: bool = False
    """Whether operands are multiplied by a power of two, computed from their `peaks`."""

    def peaks(self, x: Tensor) -> Tensor:
        """Largest magnitudes (C, PEAKS) that `exponent` reads; (C, 0) if operands are not scaled.

        The values of a client must be contiguous in memory.
        """
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
    """Type of activations in a precision."""
    if precision not in ACTIVATION_DTYPES:
        raise ValueError(f"precision must be one of {', '.join(ACTIVATION_DTYPES)}, got {precision!r}")
    return ACTIVATION_DTYPES[precision]


def dot_operands(precision: Precision) -> DotOperands:
    """Operands whose axis of the sum is contiguous in memory, as tensor cores read them."""
    return DotOperands(TRITON[activation_dtype(precision)], DOT_PRECISIONS.get(precision, "ieee"))


def reduction_operands(precision: Precision) -> DotOperands:
    """Operands of products that sum over pixels or samples: scaled fp16 in place of tf32."""
    return DotOperands(tl.float16, "ieee", scaled=True) if precision == "tf32" else dot_operands(precision)


def gradient_targets(
    buffers: GradientBuffers | None, weight: Tensor, bias: Tensor | None = None
) -> tuple[GradientTarget, GradientTarget | None]:
    """Targets of the gradients of weight and bias: views of the buffers, or new tensors.

    Gradients of filters, (C, CO, CI, KH, KW), are channels-last in both cases.
    """
    if buffers is None:
        return _new_target(weight), None if bias is None else _new_target(bias)
    if weight.dim() == 5 and not is_channels_last(buffers.weight):
        raise ValueError("a convolution's gradients must lie channels-last")
    dw = _buffered_target(buffers.weight, buffers.add_weight, buffers.squared_norms)
    if bias is None:
        return dw, None
    if buffers.bias is None:
        raise ValueError("the gradient buffers have no view for this bias")
    return dw, _buffered_target(buffers.bias, buffers.add_bias, buffers.squared_norms)


def _new_target(parameter: Tensor) -> GradientTarget:
    if parameter.dim() == 5:
        clients, outputs, inputs, height, width = parameter.shape
        shape = clients, outputs, height, width, inputs
        grad = torch.empty(shape, device=parameter.device).permute(0, 1, 4, 2, 3)
    else:
        grad = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    return GradientTarget(grad, grad, False, None, grad)


def _buffered_target(grad: Tensor, correction: Tensor | None, squared_norms: list[Tensor] | None) -> GradientTarget:
    if correction is None:
        return GradientTarget(grad, grad, False, squared_norms, None)
    if correction.stride() != grad.stride():
        raise ValueError("corrections must lie like the gradients")
    return GradientTarget(grad, correction, True, squared_norms, None)


def is_channels_last(w_COIhw: Tensor) -> bool:
    """Whether the filters of each client are channels-last."""
    return w_COIhw[0].is_contiguous(memory_format=torch.channels_last)


def per_client_parameter(weight: Tensor) -> tuple[Tensor, int]:
    """Parameter that is contiguous within a client, and its stride over clients."""
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0)


def next_power_of_two(n: int, least: int = 16) -> int:
    """Smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class LaunchConfig(NamedTuple):
    """Block sizes, warps and pipeline depth of a kernel that computes a matrix product.

    The values were measured on an H200. They are fixed, not tuned while a run goes on, so that a
    CUDA graph can be captured at any time.
    """

    m: int
    """Rows of the product: pixels, or weights if there are more weights than samples."""
    n: int
    k: int
    """Axis of the sum."""
    warps: int
    stages: int


LAUNCH_CONFIGS: dict[str, tuple[LaunchConfig, LaunchConfig]] = {
    "conv forward": (LaunchConfig(128, 64, 64, 4, 3), LaunchConfig(128, 64, 32, 4, 3)),
    "conv input gradient": (LaunchConfig(128, 64, 64, 4, 3), LaunchConfig(128, 64, 32, 4, 3)),
    "conv weight gradient": (LaunchConfig(64, 64, 32, 4, 4), LaunchConfig(64, 64, 32, 4, 4)),
    "pool forward": (LaunchConfig(64, 64, 32, 4, 3), LaunchConfig(64, 64, 16, 4, 5)),
    "few channels forward": (LaunchConfig(64, 64, 32, 4, 3), LaunchConfig(64, 64, 32, 4, 4)),
    "few channels weight gradient": (LaunchConfig(64, 64, 32, 4, 3), LaunchConfig(64, 64, 32, 4, 3)),
    "linear forward": (LaunchConfig(128, 64, 32, 4, 3), LaunchConfig(128, 64, 32, 4, 3)),
    "linear input gradient": (LaunchConfig(128, 64, 32, 4, 3), LaunchConfig(128, 64, 32, 4, 3)),
    "linear weight gradient": (LaunchConfig(32, 64, 64, 4, 2), LaunchConfig(64, 32, 64, 4, 2)),
}
"""Configurations of each kernel for activations of 2 bytes (fp16, bf16) and of 4 bytes (tf32)."""
FP32_CONFIG = LaunchConfig(64, 32, 32, 4, 2)
"""Configuration for "fp32", whose three tf32 products need more registers."""


def launch_config(kernel: str, precision: Precision, m: int, n: int, k: int | None = None) -> LaunchConfig:
    """Launch configuration of a kernel for a product of these sizes.

    No block is larger than the next power of two of its axis, except that of an axis not given.
    """
    config = FP32_CONFIG if precision == "fp32" else LAUNCH_CONFIGS[kernel][precision == "tf32"]
    block_k = config.k if k is None else min(config.k, next_power_of_two(k))
    return config._replace(m=min(config.m, next_power_of_two(m)), n=min(config.n, next_power_of_two(n)), k=block_k)
