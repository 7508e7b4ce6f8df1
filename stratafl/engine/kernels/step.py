"""The leaf's step on C clients' rows of P parameters, in place:

gradient -> + correction -> clip by each client's norm -> + weight decay -> momentum -> SGD.

At most two passes: partial sums of squares if there is a clip, then the step.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import cdiv, power


@triton.jit
def _squares(
    g_ptr, extra_ptr, part_ptr, P, EXTRA: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums of squares of the same stretches of every row, so that they do not depend on where in the matrix it lies."""
    c = tl.program_id(1).to(tl.int64)
    row = tl.multiple_of(c * P, ALIGN)
    first = tl.program_id(0) * STEPS * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    # A mask against P would keep the loads from being wide, so only the last program has one.
    if first + STEPS * BLOCK <= P:
        for step in range(STEPS):
            p = row + first + step * BLOCK + tl.arange(0, BLOCK)
            d = tl.load(g_ptr + p)
            if EXTRA:
                d += tl.load(extra_ptr + p)
            total += d * d
    else:
        for step in range(STEPS):
            p = first + step * BLOCK + tl.arange(0, BLOCK)
            d = tl.load(g_ptr + row + p, mask=p < P, other=0.0)
            if EXTRA:
                d += tl.load(extra_ptr + row + p, mask=p < P, other=0.0)
            total += d * d
    tl.store(part_ptr + c * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _shrink(part_ptr, c, clip, PARTS, BLOCK_PARTS: tl.constexpr):
    part = tl.arange(0, BLOCK_PARTS)
    norm = tl.sqrt(tl.sum(tl.load(part_ptr + c * PARTS + part, mask=part < PARTS, other=0.0), 0))
    return clip / tl.where(norm < clip, clip, norm)


@triton.jit
def _move(
    x_ptr, g_ptr, extra_ptr, momentum_ptr, copy_ptr, at, inside, lr, shrink, decay, momentum,
    EXTRA: tl.constexpr, CLIP: tl.constexpr, MOMENTUM: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + at, mask=inside)
    d = tl.load(g_ptr + at, mask=inside)
    if EXTRA:
        d += tl.load(extra_ptr + at, mask=inside)
    if CLIP:
        d *= shrink
    d += decay * x
    if MOMENTUM:
        d += momentum * tl.load(momentum_ptr + at, mask=inside)
        tl.store(momentum_ptr + at, d, mask=inside)
    x -= lr * d
    tl.store(x_ptr + at, x, mask=inside)
    if COPY:
        tl.store(copy_ptr + at, x.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["C"])
def _step(
    x_ptr, g_ptr, extra_ptr, momentum_ptr, lr_ptr, part_ptr, copy_ptr, stride_lr, clip, decay, momentum, C, P, PARTS,
    EXTRA: tl.constexpr, CLIP: tl.constexpr, MOMENTUM: tl.constexpr, COPY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A stretch of the whole matrix, where loads are aligned whatever P is; it holds at most two clients' values."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    c = first // P
    after = tl.minimum(c + 1, C - 1)
    mine = at < (c + 1) * P
    lr = tl.where(mine, tl.load(lr_ptr + c * stride_lr), tl.load(lr_ptr + after * stride_lr))
    shrink = 1.0
    if CLIP:
        shrink = tl.where(
            mine, _shrink(part_ptr, c, clip, PARTS, BLOCK_PARTS), _shrink(part_ptr, after, clip, PARTS, BLOCK_PARTS)
        )
    end = C.to(tl.int64) * P
    if first + BLOCK <= end:
        _move(
            x_ptr, g_ptr, extra_ptr, momentum_ptr, copy_ptr, at, None, lr, shrink, decay, momentum,
            EXTRA, CLIP, MOMENTUM, COPY,
        )  # fmt: skip
    else:
        _move(
            x_ptr, g_ptr, extra_ptr, momentum_ptr, copy_ptr, at, at < end, lr, shrink, decay, momentum,
            EXTRA, CLIP, MOMENTUM, COPY,
        )  # fmt: skip


def update(
    x_CP: Tensor,
    g_CP: Tensor,
    correction_CP: Tensor | None,
    lr: float | Tensor,
    clip: float | None = None,
    decay: float = 0.0,
    momentum: float = 0.0,
    velocity_CP: Tensor | None = None,
    copy_CP: Tensor | None = None,
    squares: Sequence[Tensor] = (),
) -> None:
    """One step of every client, in place. `lr` is a number, a scalar on the device (a graph can change it between
    replays) or one per client; `velocity_CP` holds the momentum; `copy_CP` gets the new rows in its own type.

    `squares` are parts (C, n) of each client's sum of squares of `g_CP`, as a `Sink` collects them, if all are known.
    """
    clients, parameters = x_CP.shape
    given = (x_CP, g_CP, correction_CP, velocity_CP, copy_CP)
    if any(t is not None and not (t.is_contiguous() and t.shape == x_CP.shape) for t in given):
        raise ValueError("update takes contiguous matrices of one shape")
    if momentum and velocity_CP is None:
        raise ValueError("momentum needs velocity_CP")
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=x_CP.device)
    block, steps = min(2048, power(parameters // 2 + 1, 1)), 8
    sums = torch.cat(list(squares), dim=1) if squares and clip is not None else None
    if sums is not None and correction_CP is not None:
        raise ValueError("squares are of the gradient with its correction: there must be no other")
    parts = cdiv(parameters, block * steps) if sums is None else sums.shape[1]
    extra = g_CP if correction_CP is None else correction_CP
    corrected = correction_CP is not None
    if sums is None:
        sums = torch.empty((clients, parts), dtype=torch.float32, device=x_CP.device)
    if clip is not None and not squares:
        align = math.gcd(parameters, 4)
        _squares[(parts, clients)](g_CP, extra, sums, parameters, corrected, align, block, steps)
    _step[(cdiv(clients * parameters, block),)](
        x_CP, g_CP, extra, velocity_CP if momentum else x_CP, rate, sums, x_CP if copy_CP is None else copy_CP,
        rate.stride(0) if rate.ndim else 0, clip or 1.0, decay, momentum, clients, parameters, parts,
        corrected, clip is not None, momentum > 0, copy_CP is not None, block, power(parts),
    )  # fmt: skip
