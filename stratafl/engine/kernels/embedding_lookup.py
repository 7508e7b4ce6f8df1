"""Embedding of C clients, each with its own table. C clients, N codes of a client, V entries, E
features."""

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
    next_power_of_two,
    per_client_parameter,
    settle,
    target,
)
from stratafl.engine.ops import Sink

MANY = 4096
"""Entries up to which every block of them looks at all codes; of more it looks at its own alone,
for which these are sorted."""


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
    code_ptr, place_ptr, start_ptr, dy_ptr, dw_ptr, extra_ptr, squares_ptr, stride_w, scale, N, V, E,
    EXTRA: tl.constexpr, SORTED: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """A product with the codes' indicators: the sum over codes has one order, which atomic adds
    would not. Of sorted codes, `place` is where each was, `start` where those of a block begin."""
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
        place = n
        if SORTED:
            place = tl.load(place_ptr + c * N + n, mask=n < end, other=0).to(tl.int32)
        inside = (n < end)[:, None] & (e < E)[None, :]
        dy = tl.load(dy_ptr + c * N * E + place[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
        acc = tl.dot((code[None, :] == v[:, None]).to(tl.float32), dy, acc, input_precision="ieee")
    at = c * stride_w + v[:, None] * E + e[None, :]
    squares = settle(dw_ptr, extra_ptr, at, acc * scale, (v < V)[:, None] & (e < E)[None, :], EXTRA)
    tl.store(squares_ptr + c * tl.num_programs(0) + tl.program_id(0), squares)


def _sorted(codes_CN: Tensor, entries: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each client's codes in order, where each was, and where those of each block of entries begin
    and the last one's end. Equal codes stay in their order, so that a sum has the same bits
    again."""
    sorted_CN, place_CN = codes_CN.long().sort(dim=1, stable=True)
    bounds = torch.arange(0, entries + block, block, device=codes_CN.device).clamp(max=entries)
    return sorted_CN, place_CN, torch.searchsorted(sorted_CN, bounds.expand(len(codes_CN), -1).contiguous())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, w: Tensor, compute: str, sink: Sink | None, grad_scale: float) -> Tensor:
        codes = codes.contiguous()
        clients, entries, features = w.shape
        count = codes[0].numel()
        y = torch.empty((*codes.shape, features), dtype=activation_dtype(compute), device=w.device)
        weight, stride_w = per_client_parameter(w)
        be = next_power_of_two(features, 1)
        bn = max(1, 2048 // be)
        _forward[(cdiv(count, bn), clients)](
            code_ptr=codes, w_ptr=weight, y_ptr=y,
            stride_w=stride_w,
            N=count, V=entries, E=features, BN=bn, BE=be,
        )  # fmt: skip
        ctx.save_for_backward(codes, w)
        ctx.plan = sink, grad_scale
        return y

    @staticmethod
    def backward(ctx: Any, *dy_: Tensor) -> Any:
        codes, w = ctx.saved_tensors
        sink, grad_scale = ctx.plan
        clients, entries, features = w.shape
        dw = target(sink, w)
        many = entries > MANY
        bv, bn, be = (
            64 if many else min(32, next_power_of_two(entries)),
            16 if many else 32,
            min(64, next_power_of_two(features)),
        )
        codes = codes.flatten(1)
        codes, place, start = _sorted(codes, entries, bv) if many else (codes, codes, codes)
        programs = cdiv(entries, bv) * cdiv(features, be)
        _weight_gradient[(programs, clients)](
            code_ptr=codes, place_ptr=place, start_ptr=start, dy_ptr=dy_[0].contiguous(), dw_ptr=dw.grad,
            extra_ptr=dw.extra, squares_ptr=dw.parts(programs),
            stride_w=dw.grad.stride(0), scale=1 / grad_scale,
            N=codes.shape[1], V=entries, E=features, EXTRA=dw.corrected, SORTED=many, BV=bv, BN=bn, BE=be,
        )  # fmt: skip
        return None, None if sink else dw.grad, None, None, None


def embedding(
    codes_CBT: Tensor, w_CVE: Tensor, compute: str = "fp32", sink: Sink | None = None, grad_scale: float = 1.0
) -> Tensor:
    """Each client's codes looked up in its own table, (C, B, T, E)."""
    return _Embedding.apply(codes_CBT, w_CVE, compute, sink, grad_scale)
