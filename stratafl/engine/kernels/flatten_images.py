"""From channels-last images to the rows a linear layer takes, channel first as `nn.Flatten` has
them, and back.

C clients, B samples, N = H * W pixels, K channels.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import next_power_of_two


@triton.jit
def _transpose(x_ptr, out_ptr, A, B, BA: tl.constexpr, BB: tl.constexpr):
    """(A, B) to (B, A) of one sample."""
    sample = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BA + tl.arange(0, BA)[:, None]
    b = tl.program_id(2) * BB + tl.arange(0, BB)[None, :]
    inside = (a < A) & (b < B)
    x = tl.load(x_ptr + sample * A * B + a * B + b, mask=inside)
    tl.store(out_ptr + sample * A * B + b * A + a, x, mask=inside)


def _transposed(x: Tensor, samples: int, a: int, b: int) -> Tensor:
    out = torch.empty((samples, b, a), dtype=x.dtype, device=x.device)
    ba, bb = min(64, next_power_of_two(a, 1)), min(64, next_power_of_two(b, 1))
    _transpose[(samples, triton.cdiv(a, ba), triton.cdiv(b, bb))](
        x_ptr=x.contiguous(), out_ptr=out,
        A=a, B=b, BA=ba, BB=bb,
    )  # fmt: skip
    return out


class _Flatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        clients, batch, height, width, channels = x.shape
        return _transposed(x, clients * batch, height * width, channels).view(clients, batch, -1)

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        clients, batch, height, width, channels = ctx.shape
        return _transposed(dy_[0], clients * batch, channels, height * width).view(ctx.shape)


def flatten(x_CBHWK: Tensor) -> Tensor:
    """(C, B, K * H * W), in the order of a flattened channels-first image."""
    return _Flatten.apply(x_CBHWK)
