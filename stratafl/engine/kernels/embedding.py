"""Embedding of C clients, each with its own table, and the table's gradient.

    y[n] = w[code[n]],  dw[v] = sum of dy[n] over all n with code[n] = v

C clients, N codes of a client, V entries of a table, E features of an entry.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import (
    LayerOptions,
    activation_dtype,
    cdiv,
    gradient_targets,
    next_power_of_two,
    per_client_parameter,
    store_gradient,
)
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.precision import Precision

MAX_UNSORTED_ENTRIES = 4096
"""Most entries of a table for which the program of a block of entries reads all codes.

For a larger table codes are sorted, and a program reads only the codes of its block.
"""


@triton.jit
def _forward(code_ptr, w_ptr, y_ptr, stride_w, N, V, E, BN: tl.constexpr, BE: tl.constexpr):
    """Look up BN codes of a client. A code out of range gives NaN, not another client's entry."""
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
    """Compute the gradients of BE features of BV entries: dw_VE = one_hot_VN dy_NE.

    As a product, the sum over codes has a fixed order, unlike atomic additions. If codes are
    SORTED, position_ptr has their places before, and start_ptr the first code of each block.
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
    """Sort the codes of each client.

    Returns the sorted codes, their positions before, and the bounds of the codes of each block of
    entries. Equal codes stay in their order, so that sums have the same bits every time.
    """
    sorted_CN, position_CN = codes_CN.long().sort(dim=1, stable=True)
    bounds = torch.arange(0, entries + block, block, device=codes_CN.device).clamp(max=entries)
    return sorted_CN, position_CN, torch.searchsorted(sorted_CN, bounds.expand(len(codes_CN), -1).contiguous())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, w: Tensor, options: LayerOptions) -> Tensor:
        codes = codes.contiguous()
        clients, entries, features = w.shape
        count = codes[0].numel()
        y = torch.empty((*codes.shape, features), dtype=activation_dtype(options.precision), device=w.device)
        weight, stride_w = per_client_parameter(w)
        be = next_power_of_two(features, 1)
        bn = max(1, 2048 // be)
        _forward[(cdiv(count, bn), clients)](
            code_ptr=codes, w_ptr=weight, y_ptr=y, stride_w=stride_w,
            N=count, V=entries, E=features, BN=bn, BE=be,
        )  # fmt: skip
        ctx.save_for_backward(codes, w)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        codes, w = ctx.saved_tensors
        clients, entries, features = w.shape
        dw, _ = gradient_targets(ctx.options.buffers, w)
        is_sorted = entries > MAX_UNSORTED_ENTRIES
        bv, bn = (64, 16) if is_sorted else (min(32, next_power_of_two(entries)), 32)
        be = min(64, next_power_of_two(features))
        codes = codes.flatten(1)
        codes, position, start = _sorted(codes, entries, bv) if is_sorted else (codes, codes, codes)
        programs = cdiv(entries, bv) * cdiv(features, be)
        _weight_gradient[(programs, clients)](
            code_ptr=codes, position_ptr=position, start_ptr=start, dy_ptr=gradients[0].contiguous(), dw_ptr=dw.grad,
            correction_ptr=dw.correction, squares_ptr=dw.new_partial_squares(programs),
            stride_w=dw.grad.stride(0), scale=1 / ctx.options.loss_scale,
            N=codes.shape[1], V=entries, E=features, CORRECT=dw.has_correction, SORTED=is_sorted, BV=bv, BN=bn, BE=be,
        )  # fmt: skip
        return None, dw.returned, None


def embedding(
    codes_CBT: Tensor,
    w_CVE: Tensor,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Embeddings of each client's codes from its own table, (C, B, T, E)."""
    return _Embedding.apply(codes_CBT, w_CVE, LayerOptions(precision, gradient_buffers, loss_scale))
