"""The leaf's step on C clients' rows of P parameters, in place:

gradient with its correction -> clip by each client's norm -> + weight decay -> momentum -> SGD.

One pass, after one for partial sums of squares if there is a clip and nobody has them yet. Rows may lie apart, all
matrices' alike; what lies between them is treated like the rest and must be zero.
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

FEW = 256
"""Parts of a sum that every program of the pass may add up for itself."""


@triton.jit
def _squares(
    g_ptr, part_ptr, P, WIDTH, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums of squares of the same stretches of every row, so that they do not depend on where in the matrix it lies."""
    c = tl.program_id(1).to(tl.int64)
    row = tl.multiple_of(c * WIDTH, ALIGN)
    first = tl.program_id(0) * STEPS * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    # A mask against P would keep the loads from being wide, so only the last program has one.
    if first + STEPS * BLOCK <= P:
        for step in range(STEPS):
            d = tl.load(g_ptr + row + first + step * BLOCK + tl.arange(0, BLOCK))
            total += d * d
    else:
        for step in range(STEPS):
            p = first + step * BLOCK + tl.arange(0, BLOCK)
            d = tl.load(g_ptr + row + p, mask=p < P, other=0.0)
            total += d * d
    tl.store(part_ptr + c * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _total(part_ptr, out_ptr, PARTS, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PARTS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + tl.program_id(0) * PARTS + part, mask=part < PARTS, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _shrink(part_ptr, c, clip, PARTS, BLOCK_PARTS: tl.constexpr):
    part = tl.arange(0, BLOCK_PARTS)
    norm = tl.sqrt(tl.sum(tl.load(part_ptr + c * PARTS + part, mask=part < PARTS, other=0.0), 0))
    return clip / tl.where(norm < clip, clip, norm)


@triton.jit
def _move(
    x_ptr, g_ptr, velocity_ptr, at, inside, lr, shrink, decay, momentum, CLIP: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + at, mask=inside)
    d = tl.load(g_ptr + at, mask=inside)
    if CLIP:
        d *= shrink
    d += decay * x
    if MOMENTUM:
        d += momentum * tl.load(velocity_ptr + at, mask=inside)
        tl.store(velocity_ptr + at, d, mask=inside)
    tl.store(x_ptr + at, x - lr * d, mask=inside)


@triton.jit(do_not_specialize=["C"])
def _step(
    x_ptr, g_ptr, velocity_ptr, lr_ptr, part_ptr, clipped_ptr, stride_lr, clip, decay, momentum, C, WIDTH, PARTS,
    CLIP: tl.constexpr, MOMENTUM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A stretch of the whole matrix, where loads are aligned whatever P is; it holds at most two clients' values."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    c = first // WIDTH
    after = tl.minimum(c + 1, C - 1)
    mine = at < (c + 1) * WIDTH
    lr = tl.where(mine, tl.load(lr_ptr + c * stride_lr), tl.load(lr_ptr + after * stride_lr))
    shrink = 1.0
    if CLIP:
        own = _shrink(part_ptr, c, clip, PARTS, BLOCK_PARTS)
        following = _shrink(part_ptr, after, clip, PARTS, BLOCK_PARTS)
        shrink = tl.where(mine, own, following)
        if COUNT:
            # each client counts where its row begins: at the start of this stretch or within it
            begins = (first % WIDTH == 0) & (own < 1.0)
            within = (first % WIDTH != 0) & ((c + 1) * WIDTH < first + BLOCK) & (c + 1 < C) & (following < 1.0)
            tl.atomic_add(clipped_ptr, (begins | within).to(tl.int64))
    end = C.to(tl.int64) * WIDTH
    if first + BLOCK <= end:
        _move(x_ptr, g_ptr, velocity_ptr, at, None, lr, shrink, decay, momentum, CLIP, MOMENTUM)
    else:
        _move(x_ptr, g_ptr, velocity_ptr, at, at < end, lr, shrink, decay, momentum, CLIP, MOMENTUM)


def update(
    x_CP: Tensor,
    g_CP: Tensor,
    lr: float | Tensor,
    clip: float | None = None,
    decay: float = 0.0,
    momentum: float = 0.0,
    velocity_CP: Tensor | None = None,
    squares: Sequence[Tensor] = (),
    clipped: Tensor | None = None,
) -> None:
    """One step of every client, in place. `lr` is a number, a scalar on the device (a graph can change it between
    replays) or one per client; `velocity_CP` holds the momentum.

    `squares` are parts (C, n) of each client's sum of squares of `g_CP`, as a `Sink` collects them, if all are known.
    To `clipped`, an int64 on the device, is added how many clients' steps the clip shortened.
    """
    clients, parameters = x_CP.shape
    given = [matrix for matrix in (x_CP, g_CP, velocity_CP) if matrix is not None]
    width = x_CP.stride(0) if clients > 1 else parameters
    if any(m.shape != x_CP.shape or m.stride(1) != 1 or (clients > 1 and m.stride(0) != width) for m in given):
        raise ValueError("update takes matrices of one shape whose rows lie alike")
    if momentum and velocity_CP is None:
        raise ValueError("momentum needs velocity_CP")
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=x_CP.device)
    block, steps = min(2048, power(parameters // 2 + 1, 1)), 8
    if clip is None:
        sums = x_CP  # not looked at
        parts = 1
    elif squares:
        sums = squares[0] if len(squares) == 1 else torch.cat(list(squares), dim=1)
        parts = sums.shape[1]
    else:
        parts = cdiv(parameters, block * steps)
        sums = torch.empty((clients, parts), dtype=torch.float32, device=x_CP.device)
        _squares[(parts, clients)](g_CP, sums, parameters, width, math.gcd(width, 4), block, steps)
    if parts > FEW:
        total = torch.empty((clients, 1), dtype=torch.float32, device=x_CP.device)
        _total[(clients,)](sums, total, parts, 1024)
        sums, parts = total, 1
    _step[(cdiv(clients * width, block),)](
        x_CP, g_CP, velocity_CP if momentum else x_CP, rate, sums, sums if clipped is None else clipped,
        rate.stride(0) if rate.ndim else 0, clip or 1.0, decay, momentum, clients, width, parts, clip is not None,
        momentum > 0, clipped is not None, block, power(parts),
    )  # fmt: skip
