"""Embedding of C clients, each with its own table.

C clients, N codes of a client, V entries, E features.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    activation_dtype,
    cdiv,
    gradient_target,
    next_power_of_two,
    per_client_parameter,
    store_gradient,
)
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.precision import Precision

MAX_UNSORTED_ENTRIES = 4096
"""Entries of a table up to which every block of entries goes through all codes. In a larger table a
block goes through its own codes only, for which the codes are sorted."""


@triton.jit
def _forward(code_ptr, w_ptr, y_ptr, stride_w, N, V, E, BN: tl.constexpr, BE: tl.constexpr):
    """A code beyond the table gives NaN: the entry that lies there is another client's."""
    c = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    e = tl.arange(0, BE)
    code = tl.load(code_ptr + c * N + n, mask=n < N, other=0)
    mask = (n < N)[:, None] & (e < E)[None, :]
    valid = ((code >= 0) & (code < V))[:, None]
    w = tl.load(w_ptr + c * stride_w + code[:, None] * E + e[None, :], mask=mask & valid, other=float("nan"))
    tl.store(y_ptr + c * N * E + n[:, None] * E + e[None, :], w.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient(
    code_ptr, position_ptr, start_ptr, dy_ptr, dw_ptr, correction_ptr, squares_ptr, stride_w, scale, N, V, E,
    CORRECT: tl.constexpr, SORTED: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """A product with the codes' indicators: its sum over codes has one order, unlike atomic adds.

    Of sorted codes, `position` says where each was before, and `start` where a block's codes begin.
    """
    c = tl.program_id(1).to(tl.int64)
    blocks_e = tl.cdiv(E, BE)
    block = tl.program_id(0) // blocks_e
    v = block * BV + tl.arange(0, BV)
    e = (tl.program_id(0) % blocks_e) * BE + tl.arange(0, BE)
    acc = tl.zeros((BV, BE), tl.float32)
    begin, end = 0, N
    if SORTED:
        start_ptr += c * (tl.cdiv(V, BV) + 1) + block
        begin, end = tl.load(start_ptr).to(tl.int32), tl.load(start_ptr + 1).to(tl.int32)
    for first in range(begin, end, BN):
        n = first + tl.arange(0, BN)
        code = tl.load(code_ptr + c * N + n, mask=n < end, other=-1)
        position = n
        if SORTED:
            position = tl.load(position_ptr + c * N + n, mask=n < end, other=0).to(tl.int32)
        mask = (n < end)[:, None] & (e < E)[None, :]
        dy = tl.load(dy_ptr + c * N * E + position[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = tl.dot((code[None, :] == v[:, None]).to(tl.float32), dy, acc, input_precision="ieee")
    offset = c * stride_w + v[:, None] * E + e[None, :]
    squares = store_gradient(dw_ptr, correction_ptr, offset, acc * scale, (v < V)[:, None] & (e < E)[None, :], CORRECT)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def _sorted(codes_CN: Tensor, entries: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort each client's codes.

    Returns the sorted codes, where each was before, and where the codes of each block of entries
    begin and the last block's end. Equal codes stay in their order, so that sums have the same bits
    every time.
    """
    sorted_CN, position_CN = codes_CN.long().sort(dim=1, stable=True)
    bounds = torch.arange(0, entries + block, block, device=codes_CN.device).clamp(max=entries)
    return sorted_CN, position_CN, torch.searchsorted(sorted_CN, bounds.expand(len(codes_CN), -1).contiguous())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        codes: Tensor,
        w: Tensor,
        precision: Precision,
        buffers: GradientBuffers | None,
        loss_scale: float,
    ) -> Tensor:
        codes = codes.contiguous()
        clients, entries, features = w.shape
        count = codes[0].numel()
        y = torch.empty((*codes.shape, features), dtype=activation_dtype(precision), device=w.device)
        weight, stride_w = per_client_parameter(w)
        be = next_power_of_two(features, 1)
        bn = max(1, 2048 // be)
        _forward[(cdiv(count, bn), clients)](
            code_ptr=codes, w_ptr=weight, y_ptr=y,
            stride_w=stride_w,
            N=count, V=entries, E=features, BN=bn, BE=be,
        )  # fmt: skip
        ctx.save_for_backward(codes, w)
        ctx.plan = buffers, loss_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        codes, w = ctx.saved_tensors
        buffers, loss_scale = ctx.plan
        clients, entries, features = w.shape
        dw = gradient_target(buffers, w)
        is_sorted = entries > MAX_UNSORTED_ENTRIES
        bv, bn, be = (
            64 if is_sorted else min(32, next_power_of_two(entries)),
            16 if is_sorted else 32,
            min(64, next_power_of_two(features)),
        )
        codes = codes.flatten(1)
        codes, position, start = _sorted(codes, entries, bv) if is_sorted else (codes, codes, codes)
        programs = cdiv(entries, bv) * cdiv(features, be)
        _weight_gradient[(programs, clients)](
            code_ptr=codes, position_ptr=position, start_ptr=start, dy_ptr=dy_[0].contiguous(), dw_ptr=dw.grad,
            correction_ptr=dw.correction, squares_ptr=dw.new_partial_norms(programs),
            stride_w=dw.grad.stride(0), scale=1 / loss_scale,
            N=codes.shape[1], V=entries, E=features, CORRECT=dw.has_correction, SORTED=is_sorted, BV=bv, BN=bn, BE=be,
        )  # fmt: skip
        return None, None if buffers else dw.grad, None, None, None


def embedding(
    codes_CBT: Tensor,
    w_CVE: Tensor,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Each client's codes looked up in its own table, (C, B, T, E)."""
    return _Embedding.apply(codes_CBT, w_CVE, precision, gradient_buffers, loss_scale)
