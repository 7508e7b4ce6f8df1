"""The leaf's step on C clients' rows of P parameters, in place.

gradient with its correction -> clip by each client's norm -> + weight decay -> SGD or Adam.

One pass, after one for partial sums of squares if there is a clip and nobody has them yet. Rows may
lie apart, all matrices' alike; what lies between them is treated like the rest and must be zero.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.core.client_update import PLAIN
from stratafl.core.optimizer import SGD, STEP_COUNT, Adam, Optimiser
from stratafl.core.rule import Rows
from stratafl.engine.kernels.common import cdiv, next_power_of_two

MAX_PARTS = 256
"""Parts of a sum that every program of the pass may add up for itself."""


@triton.jit
def _squared_norms(
    g_ptr, part_ptr, P, WIDTH, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums of squares of the same stretches of every row, so that they do not depend on where in
    the matrix it lies."""
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
def _sum_parts(part_ptr, out_ptr, PARTS, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PARTS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + tl.program_id(0) * PARTS + part, mask=part < PARTS, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _clip_factor(part_ptr, c, clip, PARTS, BLOCK_PARTS: tl.constexpr):
    part = tl.arange(0, BLOCK_PARTS)
    norm = tl.sqrt(tl.sum(tl.load(part_ptr + c * PARTS + part, mask=part < PARTS, other=0.0), 0))
    return clip / tl.where(norm < clip, clip, norm)


@triton.jit
def _update_block(
    x_ptr, g_ptr, first_ptr, second_ptr, path_ptr, at, inside, lr, shrink, unbias1, unbias2, decay, beta1, beta2, rest1,
    rest2, eps, decoupled, CLIP: tl.constexpr, KIND: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """The first state is a velocity or Adam's first moment, the second its second."""
    x = tl.load(x_ptr + at, mask=inside)
    d = tl.load(g_ptr + at, mask=inside)
    if CLIP:
        d *= shrink
    d += decay * x
    if PATH:
        tl.store(path_ptr + at, tl.load(path_ptr + at, mask=inside) - lr * d, mask=inside)
    if KIND == "adam":
        m = beta1 * tl.load(first_ptr + at, mask=inside) + rest1 * d
        v = beta2 * tl.load(second_ptr + at, mask=inside) + rest2 * d * d
        tl.store(first_ptr + at, m, mask=inside)
        tl.store(second_ptr + at, v, mask=inside)
        d = unbias1 * m / (unbias2 * tl.sqrt_rn(v) + eps) + decoupled * x
    elif KIND != "plain":
        velocity = d + beta1 * tl.load(first_ptr + at, mask=inside)
        tl.store(first_ptr + at, velocity, mask=inside)
        d = d + beta1 * velocity if KIND == "nesterov" else velocity
    tl.store(x_ptr + at, x - lr * d, mask=inside)


@triton.jit(do_not_specialize=["C"])
def _update(
    x_ptr, g_ptr, first_ptr, second_ptr, path_ptr, lr_ptr, unbias1_ptr, unbias2_ptr, part_ptr, clipped_ptr, stride_lr,
    clip, decay, beta1, beta2, rest1, rest2, eps, decoupled, C, WIDTH, PARTS, CLIP: tl.constexpr, KIND: tl.constexpr,
    PATH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A stretch of the whole matrix, where loads are aligned whatever P is; it holds at most two
    clients' values."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    c = first // WIDTH
    after = tl.minimum(c + 1, C - 1)
    mine = at < (c + 1) * WIDTH
    lr = tl.where(mine, tl.load(lr_ptr + c * stride_lr), tl.load(lr_ptr + after * stride_lr))
    unbias1 = 1.0
    unbias2 = 1.0
    if KIND == "adam":
        unbias1 = tl.where(mine, tl.load(unbias1_ptr + c), tl.load(unbias1_ptr + after))
        unbias2 = tl.where(mine, tl.load(unbias2_ptr + c), tl.load(unbias2_ptr + after))
    shrink = 1.0
    if CLIP:
        own = _clip_factor(part_ptr, c, clip, PARTS, BLOCK_PARTS)
        following = _clip_factor(part_ptr, after, clip, PARTS, BLOCK_PARTS)
        shrink = tl.where(mine, own, following)
        if COUNT:
            # each client counts where its row begins: at the start of this stretch or within it
            begins = (first % WIDTH == 0) & (own < 1.0)
            within = (first % WIDTH != 0) & ((c + 1) * WIDTH < first + BLOCK) & (c + 1 < C) & (following < 1.0)
            tl.atomic_add(clipped_ptr, (begins | within).to(tl.int64))
    end = C.to(tl.int64) * WIDTH
    if first + BLOCK <= end:
        _update_block(
            x_ptr, g_ptr, first_ptr, second_ptr, path_ptr, at, None, lr, shrink, unbias1, unbias2, decay, beta1, beta2,
            rest1, rest2, eps, decoupled, CLIP, KIND, PATH,
        )  # fmt: skip
    else:
        _update_block(
            x_ptr, g_ptr, first_ptr, second_ptr, path_ptr, at, at < end, lr, shrink, unbias1, unbias2, decay, beta1,
            beta2, rest1, rest2, eps, decoupled, CLIP, KIND, PATH,
        )  # fmt: skip


class _OptimizerArguments(NamedTuple):
    """What the kernel is told of an optimiser: its states, and what it multiplies with."""

    kind: str
    states: tuple[Tensor, ...] = ()
    unbias: tuple[Tensor, ...] = ()
    """Of Adam's two moments, a number per client."""
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    decoupled: float = 0.0

    @staticmethod
    def of(optimiser: Optimiser, state: Rows) -> _OptimizerArguments:
        """One step more of it; a count of steps moves on here, on the device."""
        if isinstance(optimiser, Adam):
            unbias = optimiser.unbiased(state[STEP_COUNT].add_(1), torch.float32)
            states = state["m"], state["v"]
            return _OptimizerArguments("adam", states, unbias, *optimiser.betas, optimiser.eps, optimiser.decoupled)
        assert isinstance(optimiser, SGD)
        if not optimiser.momentum:
            return _OptimizerArguments("plain")
        kind = "nesterov" if optimiser.nesterov else "momentum"
        return _OptimizerArguments(kind, (state["velocity"],), beta1=optimiser.momentum)


def update(
    x_CP: Tensor,
    g_CP: Tensor,
    lr: float | Tensor,
    clip: float | None = None,
    decay: float = 0.0,
    optimiser: Optimiser = PLAIN,
    state: Rows | None = None,
    path_CP: Tensor | None = None,
    squares: Sequence[Tensor] = (),
    clipped: Tensor | None = None,
) -> None:
    """One step of every client, in place. `lr` is a number, a scalar on the device (a graph can
    change it between replays) or one per client; `state` is the optimiser's, and from the path the
    direction is subtracted, times `lr`.

    `squares` are parts (C, n) of each client's sum of squares of `g_CP`, as a `Sink` collects them,
    if all are known. To `clipped`, an int64 on the device, is added how many clients' steps the
    clip shortened.
    """
    clients, parameters = x_CP.shape
    numbers = _OptimizerArguments.of(optimiser, state or {})
    given = [x_CP, g_CP, *numbers.states, *([] if path_CP is None else [path_CP])]
    width = x_CP.stride(0) if clients > 1 else parameters
    if any(m.shape != x_CP.shape or m.stride(1) != 1 or (clients > 1 and m.stride(0) != width) for m in given):
        raise ValueError("update takes matrices of one shape whose rows lie alike")
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=x_CP.device)
    block = min(2048, next_power_of_two(parameters // 2 + 1, 1))
    sums = x_CP if clip is None else _sums(g_CP, squares, width, block)  # not looked at without a clip
    first, second, *_ = (*numbers.states, x_CP, x_CP)
    unbias1, unbias2, *_ = (*numbers.unbias, rate, rate)
    parts = 1 if clip is None else sums.shape[1]
    _update[(cdiv(clients * width, block),)](
        x_CP, g_CP, first, second, x_CP if path_CP is None else path_CP, rate, unbias1, unbias2, sums,
        sums if clipped is None else clipped, rate.stride(0) if rate.ndim else 0, clip or 1.0, decay, numbers.beta1,
        numbers.beta2, 1 - numbers.beta1, 1 - numbers.beta2, numbers.eps, numbers.decoupled, clients, width, parts,
        clip is not None, numbers.kind, path_CP is not None, clipped is not None, block, next_power_of_two(parts),
    )  # fmt: skip


def _sums(g_CP: Tensor, squares: Sequence[Tensor], width: int, block: int) -> Tensor:
    """Few parts (C, n) of each client's sum of squares."""
    (clients, parameters), steps = g_CP.shape, 8
    if squares:
        sums = squares[0] if len(squares) == 1 else torch.cat(list(squares), dim=1)
    else:
        parts = cdiv(parameters, block * steps)
        sums = torch.empty((clients, parts), dtype=torch.float32, device=g_CP.device)
        _squared_norms[(parts, clients)](g_CP, sums, parameters, width, math.gcd(width, 4), block, steps)
    if sums.shape[1] <= MAX_PARTS:
        return sums
    total = torch.empty((clients, 1), dtype=torch.float32, device=g_CP.device)
    _sum_parts[(clients,)](sums, total, sums.shape[1], 1024)
    return total
