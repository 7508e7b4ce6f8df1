"""Embedding of C clients, each with its own table. C clients, N codes of a client, V entries, E
features."""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import cdiv, power, rows, settle, storage, target
from stratafl.engine.ops import Sink


@triton.jit
def _forward(code_ptr, w_ptr, y_ptr, stride_w, N, V, E, BN: tl.constexpr, BE: tl.constexpr):
    """A code beyond the table gives what is no number: the entry that lies there is another
    client's."""
    c = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    e = tl.arange(0, BE)
    code = tl.load(code_ptr + c * N + n, mask=n < N, other=0)
    inside = (n < N)[:, None] & (e < E)[None, :]
    known = ((code >= 0) & (code < V))[:, None]
    w = tl.load(w_ptr + c * stride_w + code[:, None] * E + e[None, :], mask=inside & known, other=float("nan"))
    tl.store(y_ptr + c * N * E + n[:, None] * E + e[None, :], w.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    code_ptr,
    dy_ptr,
    dw_ptr,
    extra_ptr,
    squares_ptr,
    stride_w,
    scale,
    N,
    V,
    E,
    EXTRA: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """A product with the codes' indicators: the sum over codes has one order, which atomic adds
    would not."""
    c = tl.program_id(1).to(tl.int64)
    blocks_e = tl.cdiv(E, BE)
    v = (tl.program_id(0) // blocks_e) * BV + tl.arange(0, BV)
    e = (tl.program_id(0) % blocks_e) * BE + tl.arange(0, BE)
    acc = tl.zeros((BV, BE), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        code = tl.load(code_ptr + c * N + n, mask=n < N, other=-1)
        inside = (n < N)[:, None] & (e < E)[None, :]
        dy = tl.load(dy_ptr + c * N * E + n[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
        acc = tl.dot((code[None, :] == v[:, None]).to(tl.float32), dy, acc, input_precision="ieee")
    at = c * stride_w + v[:, None] * E + e[None, :]
    squares = settle(dw_ptr, extra_ptr, at, acc * scale, (v < V)[:, None] & (e < E)[None, :], EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, w: Tensor, compute: str, sink: Sink | None, grad_scale: float) -> Tensor:
        codes = codes.contiguous()
        clients, entries, features = w.shape
        count = codes[0].numel()
        y = torch.empty((*codes.shape, features), dtype=storage(compute), device=w.device)
        weight, stride_w = rows(w)
        be = power(features, 1)
        bn = max(1, 2048 // be)
        _forward[(cdiv(count, bn), clients)](codes, weight, y, stride_w, count, entries, features, bn, be)
        ctx.save_for_backward(codes, w)
        ctx.plan = sink, grad_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        codes, w = ctx.saved_tensors
        sink, grad_scale = ctx.plan
        clients, entries, features = w.shape
        dw = target(sink, w)
        bv, bn, be = min(32, power(entries)), 32, min(64, power(features))
        programs = cdiv(entries, bv) * cdiv(features, be)
        _weight_gradient[(programs, clients)](
            codes, dy_[0].contiguous(), dw.grad, dw.extra, dw.parts(programs), dw.grad.stride(0), 1 / grad_scale,
            codes[0].numel(), entries, features, dw.corrected, bv, bn, be,
        )  # fmt: skip
        return None, None if sink else dw.grad, None, None, None


def embedding(
    codes_CBT: Tensor, w_CVE: Tensor, compute: str = "fp32", sink: Sink | None = None, grad_scale: float = 1.0
) -> Tensor:
    """Each client's codes looked up in its own table, (C, B, T, E)."""
    return _Embedding.apply(codes_CBT, w_CVE, compute, sink, grad_scale)
