"""Updates of the rows of C clients, P parameters each, in one pass: optimizer step, and drift.

The step of a client is: gradient with its correction -> clip by the client's norm -> + weight decay
-> SGD or Adam. It is one pass over the matrices. If steps are clipped and the squared norms are not
given, another pass computes them. There may be gaps between rows, the same in all matrices; gaps
must hold zeros, and are updated like parameters.
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
from stratafl.core.optimizer import SGD, STEP_COUNT, Adam, Optimizer
from stratafl.core.rule import Rows
from stratafl.engine.kernels.common import cdiv, next_power_of_two

MAX_PARTS = 256
"""Most parts of a squared norm that every program of the step adds up itself."""


@triton.jit
def _squared_norms(
    g_ptr, part_ptr, P, WIDTH, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute the sum of squares of STEPS blocks of a row.

    Blocks begin at fixed places of a row, so that sums do not depend on the row's place in the
    matrix. WIDTH is the stride of the rows, a multiple of ALIGN.
    """
    c = tl.program_id(1).to(tl.int64)
    row = tl.multiple_of(c * WIDTH, ALIGN)
    first = tl.program_id(0) * STEPS * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    # a mask against P prevents wide loads, so only the last program has one
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
    """Add up the parts of one client's squared norm."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PARTS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + tl.program_id(0) * PARTS + part, mask=part < PARTS, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _clip_factor(norms_ptr, c, clip_norm, norm_parts, BLOCK_PARTS: tl.constexpr):
    """min(1, clip_norm / norm) of client c, from the parts of its squared norm."""
    part = tl.arange(0, BLOCK_PARTS)
    norm = tl.sqrt(tl.sum(tl.load(norms_ptr + c * norm_parts + part, mask=part < norm_parts, other=0.0), 0))
    return clip_norm / tl.where(norm < clip_norm, clip_norm, norm)


@triton.jit
def _update_block(
    params_ptr, grads_ptr, first_moment_ptr, second_moment_ptr, path_ptr, offset, mask, lr, clip_factor,
    bias_correction1, bias_correction2, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps,
    decoupled_decay, CLIP: tl.constexpr, OPTIMIZER: tl.constexpr, HAS_PATH: tl.constexpr,
):  # fmt: skip
    """Update a block of values. The first moment is Adam's, or the velocity of SGD."""
    x = tl.load(params_ptr + offset, mask=mask)
    d = tl.load(grads_ptr + offset, mask=mask)
    if CLIP:
        d *= clip_factor
    d += weight_decay * x
    if HAS_PATH:
        tl.store(path_ptr + offset, tl.load(path_ptr + offset, mask=mask) - lr * d, mask=mask)
    if OPTIMIZER == "adam":
        m = beta1 * tl.load(first_moment_ptr + offset, mask=mask) + one_minus_beta1 * d
        v = beta2 * tl.load(second_moment_ptr + offset, mask=mask) + one_minus_beta2 * d * d
        tl.store(first_moment_ptr + offset, m, mask=mask)
        tl.store(second_moment_ptr + offset, v, mask=mask)
        d = bias_correction1 * m / (bias_correction2 * tl.sqrt_rn(v) + eps) + decoupled_decay * x
    elif OPTIMIZER != "plain":
        velocity = d + beta1 * tl.load(first_moment_ptr + offset, mask=mask)
        tl.store(first_moment_ptr + offset, velocity, mask=mask)
        d = d + beta1 * velocity if OPTIMIZER == "nesterov" else velocity
    tl.store(params_ptr + offset, x - lr * d, mask=mask)


@triton.jit
def _per_client(value_ptr, c, next_c, is_this_client):
    """Value of client c, or of the next one where the block's values are its own."""
    return tl.where(is_this_client, tl.load(value_ptr + c), tl.load(value_ptr + next_c))


@triton.jit(do_not_specialize=["clients"])
def _update(
    params_ptr, grads_ptr, first_moment_ptr, second_moment_ptr, path_ptr,
    lr_ptr, bias_correction1_ptr, bias_correction2_ptr, norms_ptr, clipped_ptr,
    stride_lr, clip_norm, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decoupled_decay,
    clients, row_stride, norm_parts,
    CLIP: tl.constexpr, OPTIMIZER: tl.constexpr, HAS_PATH: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Update one block of the matrix, read as one long row, so that loads are aligned for every P.

    A block holds values of at most two clients: `c` and the next one.

    Matrices: params, grads, first_moment, second_moment, path (if HAS_PATH).
    Per client: lr, bias_correction1, bias_correction2, norms (`norm_parts` parts of each).
    clipped_ptr: counter of clipped steps (if COUNT). row_stride: values from row to row.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    c = first // row_stride
    next_c = tl.minimum(c + 1, clients - 1)
    is_this_client = offset < (c + 1) * row_stride
    lr = _per_client(lr_ptr, c * stride_lr, next_c * stride_lr, is_this_client)
    bias_correction1 = 1.0
    bias_correction2 = 1.0
    if OPTIMIZER == "adam":
        bias_correction1 = _per_client(bias_correction1_ptr, c, next_c, is_this_client)
        bias_correction2 = _per_client(bias_correction2_ptr, c, next_c, is_this_client)
    clip_factor = 1.0
    if CLIP:
        this_client = _clip_factor(norms_ptr, c, clip_norm, norm_parts, BLOCK_PARTS)
        next_client = _clip_factor(norms_ptr, next_c, clip_norm, norm_parts, BLOCK_PARTS)
        clip_factor = tl.where(is_this_client, this_client, next_client)
        if COUNT:
            # a client is counted by the block in which its row begins
            at_start = (first % row_stride == 0) & (this_client < 1.0)
            begins_within = (first % row_stride != 0) & ((c + 1) * row_stride < first + BLOCK) & (c + 1 < clients)
            tl.atomic_add(clipped_ptr, (at_start | (begins_within & (next_client < 1.0))).to(tl.int64))
    end = clients.to(tl.int64) * row_stride
    # only the last block has a mask, which prevents wide loads
    if first + BLOCK <= end:
        _update_block(
            params_ptr, grads_ptr, first_moment_ptr, second_moment_ptr, path_ptr, offset, None, lr, clip_factor,
            bias_correction1, bias_correction2, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps,
            decoupled_decay, CLIP, OPTIMIZER, HAS_PATH,
        )  # fmt: skip
    else:
        _update_block(
            params_ptr, grads_ptr, first_moment_ptr, second_moment_ptr, path_ptr, offset, offset < end, lr, clip_factor,
            bias_correction1, bias_correction2, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps,
            decoupled_decay, CLIP, OPTIMIZER, HAS_PATH,
        )  # fmt: skip


class _OptimizerArguments(NamedTuple):
    """Optimizer hyperparameters and states as kernel arguments."""

    kind: str
    states: tuple[Tensor, ...] = ()
    bias_correction: tuple[Tensor, ...] = ()
    """Adam's factors that undo the bias of its two moments, one number per client each."""
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    decoupled_decay: float = 0.0

    @staticmethod
    def of(optimizer: Optimizer, state: Rows) -> _OptimizerArguments:
        """Arguments of the optimizer's next step; the step count in `state` is increased by one."""
        if isinstance(optimizer, Adam):
            bias_correction = optimizer.unbiased(state[STEP_COUNT].add_(1), torch.float32)
            states = state["m"], state["v"]
            numbers = *optimizer.betas, optimizer.eps, optimizer.decoupled
            return _OptimizerArguments("adam", states, bias_correction, *numbers)
        assert isinstance(optimizer, SGD)
        if not optimizer.momentum:
            return _OptimizerArguments("plain")
        kind = "nesterov" if optimizer.nesterov else "momentum"
        return _OptimizerArguments(kind, (state["velocity"],), beta1=optimizer.momentum)


def fused_optimizer_step(
    x_CP: Tensor,
    g_CP: Tensor,
    lr: float | Tensor,
    *,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    optimizer: Optimizer = PLAIN,
    state: Rows | None = None,
    path_CP: Tensor | None = None,
    squared_norms: Sequence[Tensor] = (),
    clipped_steps: Tensor | None = None,
) -> None:
    """Clip each client's gradient, add weight decay, and take an optimizer step, in place.

    lr: a number, a scalar on the device (which a CUDA graph can change between replays), or one
        number per client on the device.
    path_CP: rows from which lr * (clipped gradient + weight decay) is subtracted.
    squared_norms: parts (C, n) of the squared norms of the rows of `g_CP`, as `GradientBuffers`
        collect them; empty if they have not been computed.
    clipped_steps: int64 scalar on the device, to which the number of clipped rows is added.
    """
    clients, parameters = x_CP.shape
    arguments = _OptimizerArguments.of(optimizer, state or {})
    matrices = [x_CP, g_CP, *arguments.states, *([] if path_CP is None else [path_CP])]
    row_stride = x_CP.stride(0) if clients > 1 else parameters
    if any(m.shape != x_CP.shape or m.stride(1) != 1 or (clients > 1 and m.stride(0) != row_stride) for m in matrices):
        raise ValueError("update takes matrices of one shape whose rows lie alike")
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=x_CP.device)
    block = min(2048, next_power_of_two(parameters // 2 + 1, 1))
    norms = x_CP if clip_norm is None else _norm_parts(g_CP, squared_norms, row_stride, block)  # read by a clip only
    first_moment, second_moment, *_ = (*arguments.states, x_CP, x_CP)
    bias_correction1, bias_correction2, *_ = (*arguments.bias_correction, rate, rate)
    norm_parts = 1 if clip_norm is None else norms.shape[1]
    _update[(cdiv(clients * row_stride, block),)](
        params_ptr=x_CP, grads_ptr=g_CP, path_ptr=x_CP if path_CP is None else path_CP,
        first_moment_ptr=first_moment, second_moment_ptr=second_moment,
        lr_ptr=rate, stride_lr=rate.stride(0) if rate.ndim else 0,
        bias_correction1_ptr=bias_correction1, bias_correction2_ptr=bias_correction2,
        norms_ptr=norms, clipped_ptr=norms if clipped_steps is None else clipped_steps,
        clip_norm=clip_norm or 1.0, weight_decay=weight_decay,
        beta1=arguments.beta1, beta2=arguments.beta2,
        one_minus_beta1=1 - arguments.beta1, one_minus_beta2=1 - arguments.beta2,
        eps=arguments.eps, decoupled_decay=arguments.decoupled_decay,
        clients=clients, row_stride=row_stride, norm_parts=norm_parts,
        CLIP=clip_norm is not None, OPTIMIZER=arguments.kind, HAS_PATH=path_CP is not None,
        COUNT=clipped_steps is not None, BLOCK=block, BLOCK_PARTS=next_power_of_two(norm_parts),
    )  # fmt: skip


def _norm_parts(g_CP: Tensor, squared_norms: Sequence[Tensor], row_stride: int, block: int) -> Tensor:
    """Parts (C, n) of each client's squared norm, with n at most `MAX_PARTS`."""
    (clients, parameters), steps = g_CP.shape, 8
    if squared_norms:
        parts_CN = squared_norms[0] if len(squared_norms) == 1 else torch.cat(list(squared_norms), dim=1)
    else:
        parts = cdiv(parameters, block * steps)
        parts_CN = torch.empty((clients, parts), dtype=torch.float32, device=g_CP.device)
        _squared_norms[(parts, clients)](
            g_ptr=g_CP, part_ptr=parts_CN,
            P=parameters, WIDTH=row_stride, ALIGN=math.gcd(row_stride, 4), BLOCK=block, STEPS=steps,
        )  # fmt: skip
    if parts_CN.shape[1] <= MAX_PARTS:
        return parts_CN
    total_C1 = torch.empty((clients, 1), dtype=torch.float32, device=g_CP.device)
    _sum_parts[(clients,)](part_ptr=parts_CN, out_ptr=total_C1, PARTS=parts_CN.shape[1], BLOCK=1024)
    return total_C1


@triton.jit
def _drift(
    x_ptr, parents_ptr, parent_ptr, rate_ptr, added_ptr, out_ptr, P, stride_added, ADD: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (x - row of its parent) / rate, + added if ADD, for BLOCK parameters of one child."""
    # siblings are neighbours and run at the same time: their parent's row is read from memory once
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    row = tl.multiple_of(n * P, ALIGN) + p
    away = tl.load(x_ptr + row, mask=mask)
    away -= tl.load(parents_ptr + tl.multiple_of(tl.load(parent_ptr + n) * P, ALIGN) + p, mask=mask)
    out = tl.div_rn(away, tl.load(rate_ptr + n))
    if ADD:
        out += tl.load(added_ptr + tl.multiple_of(n * stride_added, ALIGN) + p, mask=mask)
    tl.store(out_ptr + row, out, mask=mask)


def drift(x_NP: Tensor, parents_MP: Tensor, of_N: Tensor, rate_N1: Tensor, plus_NP: Tensor | None = None) -> Tensor:
    """Drift of N children from their M parents' models per unit of learning rate.

    This is (x - row of its parent) / rate, plus `plus_NP`. `of_N` is the number of each child's
    parent.
    """
    children, parameters = x_NP.shape
    # a stride of zero stands for one row that is added to all children
    added = plus_NP if plus_NP is None or plus_NP.stride() in ((0, 1), (parameters, 1)) else plus_NP.contiguous()
    out_NP = torch.empty(x_NP.shape, dtype=x_NP.dtype, device=x_NP.device)
    block = min(4096, next_power_of_two(parameters))
    _drift[(children, cdiv(parameters, block))](
        x_ptr=x_NP.contiguous(), parents_ptr=parents_MP.contiguous(), parent_ptr=of_N, rate_ptr=rate_N1.contiguous(),
        added_ptr=out_NP if added is None else added, out_ptr=out_NP,
        stride_added=0 if added is None else added.stride(0),
        P=parameters, ADD=added is not None, ALIGN=math.gcd(parameters, 4), BLOCK=block,
    )  # fmt: skip
    return out_NP
