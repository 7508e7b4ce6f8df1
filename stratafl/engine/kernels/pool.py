"""What happens to four accumulators in registers: bias, ReLU and the maximum, with its place."""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relu_pool(acc0, acc1, acc2, acc3, bias_N):
    """The larger of the four plus bias, cut at zero, and which it was (the first of equals; 4 where cut; NaN stays)."""
    best = acc0
    place = tl.zeros(acc0.shape, tl.int32)
    more = (acc1 > best) | (acc1 != acc1)
    best = tl.where(more, acc1, best)
    place = tl.where(more, 1, place)
    more = (acc2 > best) | (acc2 != acc2)
    best = tl.where(more, acc2, best)
    place = tl.where(more, 2, place)
    more = (acc3 > best) | (acc3 != acc3)
    best = tl.where(more, acc3, best)
    place = tl.where(more, 3, place)
    best += bias_N[None, :]
    off = best <= 0.0
    return tl.where(off, 0.0, best), tl.where(off, 4, place)
