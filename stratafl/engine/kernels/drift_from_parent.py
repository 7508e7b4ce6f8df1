"""How N children drifted from their M parents' models, per unit of learning rate, in one pass over
P parameters."""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import cdiv, next_power_of_two


@triton.jit
def _drift(
    x_ptr, parents_ptr, of_ptr, rate_ptr, plus_ptr, out_ptr, P, stride_plus, PLUS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # siblings are neighbours and run at the same time, so that their parent's row is read from
    # memory once
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    row = tl.multiple_of(n * P, ALIGN) + p
    away = tl.load(x_ptr + row, mask=inside)
    away -= tl.load(parents_ptr + tl.multiple_of(tl.load(of_ptr + n) * P, ALIGN) + p, mask=inside)
    out = tl.div_rn(away, tl.load(rate_ptr + n))
    if PLUS:
        out += tl.load(plus_ptr + tl.multiple_of(n * stride_plus, ALIGN) + p, mask=inside)
    tl.store(out_ptr + row, out, mask=inside)


def drift(x_NP: Tensor, parents_MP: Tensor, of_N: Tensor, rate_N1: Tensor, plus_NP: Tensor | None = None) -> Tensor:
    """(x - its parent's row) / rate, added to `plus` if that is given."""
    children, parameters = x_NP.shape
    # one row for all children may be given for each, by a stride of zero
    plus = plus_NP if plus_NP is None or plus_NP.stride() in ((0, 1), (parameters, 1)) else plus_NP.contiguous()
    out_NP = torch.empty(x_NP.shape, dtype=x_NP.dtype, device=x_NP.device)
    block = min(4096, next_power_of_two(parameters))
    _drift[(children, cdiv(parameters, block))](
        x_ptr=x_NP.contiguous(), parents_ptr=parents_MP.contiguous(), of_ptr=of_N, rate_ptr=rate_N1.contiguous(),
        plus_ptr=out_NP if plus is None else plus, out_ptr=out_NP,
        stride_plus=0 if plus is None else plus.stride(0),
        P=parameters, PLUS=plus is not None, ALIGN=math.gcd(parameters, 4), BLOCK=block,
    )  # fmt: skip
    return out_NP
