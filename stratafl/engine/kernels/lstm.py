"""LSTM of C clients, each with its own weights.

Where a client's state weights fit next to a multiprocessor's tensor cores, one program takes some
of its samples through all steps of a layer, and nothing but what the way back needs goes through
memory. Elsewhere a step's product of state and weights is the library's, and what lies between it
and the next is one kernel. Either way gates, cells and states are kept in the places they came in,
and the state weights' gradient is one product over all steps.

C clients, B samples, T steps, I inputs, O outputs (N in the kernels), G = 4 * O gates: enter,
forget, new, leave.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import activation_dtype, cdiv, next_power_of_two
from stratafl.engine.ops import linear_of_any
from stratafl.engine.precision import Precision

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Input weights (C, G, I), state weights (C, G, O), and their biases (C, G)."""


MAX_HIDDEN = 128
"""Outputs whose state weights, in 16 bits, leave room for the rest: 128 KB of 227."""
SAMPLES, WARPS = 64, 8
"""What one program takes through all steps."""


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _pre(gates_ptr, product_ptr, at, row, inside, FIRST: tl.constexpr):
    value = tl.load(gates_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if not FIRST:
        value += tl.load(product_ptr + row, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["t"])
def _cell_forward(
    product_ptr, gates_ptr, cell_ptr, state_ptr, t, T, N: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of a row; cells and states have a zero in front of the first step."""
    r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < N
    at = (r * T + t) * 4 * N + o
    row = r * 4 * N + o
    enter = tl.sigmoid(_pre(gates_ptr, product_ptr, at, row, inside, FIRST))
    forget = tl.sigmoid(_pre(gates_ptr, product_ptr, at + N, row + N, inside, FIRST))
    new = _tanh(_pre(gates_ptr, product_ptr, at + 2 * N, row + 2 * N, inside, FIRST))
    leave = tl.sigmoid(_pre(gates_ptr, product_ptr, at + 3 * N, row + 3 * N, inside, FIRST))
    before = (r * (T + 1) + t) * N + o
    cell = forget * tl.load(cell_ptr + before, mask=inside, other=0.0) + enter * new
    kind = gates_ptr.dtype.element_ty
    tl.store(gates_ptr + at, enter.to(kind), mask=inside)
    tl.store(gates_ptr + at + N, forget.to(kind), mask=inside)
    tl.store(gates_ptr + at + 2 * N, new.to(kind), mask=inside)
    tl.store(gates_ptr + at + 3 * N, leave.to(kind), mask=inside)
    tl.store(cell_ptr + before + N, cell, mask=inside)
    tl.store(state_ptr + before + N, (leave * _tanh(cell)).to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["t"])
def _cell_gradient(
    gates_ptr, cell_ptr, dstate_ptr, dafter_ptr, dcell_ptr, dgates_ptr, t, T, N: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < N
    at = (r * T + t) * 4 * N + o
    enter = tl.load(gates_ptr + at, mask=inside, other=0.0).to(tl.float32)
    forget = tl.load(gates_ptr + at + N, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(gates_ptr + at + 2 * N, mask=inside, other=0.0).to(tl.float32)
    leave = tl.load(gates_ptr + at + 3 * N, mask=inside, other=0.0).to(tl.float32)
    before = (r * (T + 1) + t) * N + o
    wide = _tanh(tl.load(cell_ptr + before + N, mask=inside, other=0.0))
    dstate = tl.load(dstate_ptr + (r * T + t) * N + o, mask=inside, other=0.0).to(tl.float32)
    if not LAST:
        dstate += tl.load(dafter_ptr + r * N + o, mask=inside, other=0.0).to(tl.float32)
    dcell = dstate * leave * (1.0 - wide * wide)
    if not LAST:
        dcell += tl.load(dcell_ptr + r * N + o, mask=inside, other=0.0)
    kind = dgates_ptr.dtype.element_ty
    last_cell = tl.load(cell_ptr + before, mask=inside, other=0.0)
    tl.store(dgates_ptr + at, (dcell * new * enter * (1.0 - enter)).to(kind), mask=inside)
    tl.store(dgates_ptr + at + N, (dcell * last_cell * forget * (1.0 - forget)).to(kind), mask=inside)
    tl.store(dgates_ptr + at + 2 * N, (dcell * enter * (1.0 - new * new)).to(kind), mask=inside)
    tl.store(dgates_ptr + at + 3 * N, (dstate * wide * leave * (1.0 - leave)).to(kind), mask=inside)
    tl.store(dcell_ptr + r * N + o, dcell * forget, mask=inside)


@triton.jit
def _state_weights(w_ptr, stride_summed: tl.constexpr, stride_other: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    """Each gate's, as the second operand of a product: what is summed over comes first."""
    i = tl.arange(0, BN)
    at = i[:, None] * stride_summed + i[None, :] * stride_other
    inside = (i < N)[:, None] & (i < N)[None, :]
    enter = tl.load(w_ptr + at, mask=inside, other=0.0)
    forget = tl.load(w_ptr + N * N + at, mask=inside, other=0.0)
    new = tl.load(w_ptr + 2 * N * N + at, mask=inside, other=0.0)
    leave = tl.load(w_ptr + 3 * N * N + at, mask=inside, other=0.0)
    return enter, forget, new, leave


@triton.jit
def _sequence_forward(
    gates_ptr, w_ptr, cell_ptr, state_ptr, B, T, N: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All steps of BB samples of a client; cells and states have a zero in front of the first
    step."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.arange(0, BN)
    kind = gates_ptr.dtype.element_ty
    w_enter, w_forget, w_new, w_leave = _state_weights(w_ptr + c * 4 * N * N, 1, N, N, BN)
    # steps move the pointers, one number each; the offsets of a step's values stay in 32 bits
    inside = (b < B)[:, None] & (o < N)[None, :]
    gates_ptr += c * B * T * 4 * N
    cell_ptr += c * B * (T + 1) * N + N
    state_ptr += c * B * (T + 1) * N + N
    gate = (b * T * 4 * N)[:, None] + o[None, :]
    out = (b * (T + 1) * N)[:, None] + o[None, :]
    cell = tl.zeros((BB, BN), tl.float32)
    state = tl.zeros((BB, BN), kind)
    for _ in range(T):
        forget = tl.load(gates_ptr + N + gate, mask=inside, other=0.0).to(tl.float32)
        forget = tl.sigmoid(tl.dot(state, w_forget, forget))
        tl.store(gates_ptr + N + gate, forget.to(kind), mask=inside)
        cell *= forget
        enter = tl.load(gates_ptr + gate, mask=inside, other=0.0).to(tl.float32)
        enter = tl.sigmoid(tl.dot(state, w_enter, enter))
        tl.store(gates_ptr + gate, enter.to(kind), mask=inside)
        new = tl.load(gates_ptr + 2 * N + gate, mask=inside, other=0.0).to(tl.float32)
        new = _tanh(tl.dot(state, w_new, new))
        tl.store(gates_ptr + 2 * N + gate, new.to(kind), mask=inside)
        cell += enter * new
        tl.store(cell_ptr + out, cell, mask=inside)
        leave = tl.load(gates_ptr + 3 * N + gate, mask=inside, other=0.0).to(tl.float32)
        leave = tl.sigmoid(tl.dot(state, w_leave, leave))
        tl.store(gates_ptr + 3 * N + gate, leave.to(kind), mask=inside)
        state = (leave * _tanh(cell)).to(kind)
        tl.store(state_ptr + out, state, mask=inside)
        gates_ptr += 4 * N
        cell_ptr += N
        state_ptr += N


@triton.jit
def _sequence_backward(
    gates_ptr, w_ptr, cell_ptr, dstate_ptr, dgates_ptr, B, T, N: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.arange(0, BN)
    kind = gates_ptr.dtype.element_ty
    w_enter, w_forget, w_new, w_leave = _state_weights(w_ptr + c * 4 * N * N, N, 1, N, BN)
    inside = (b < B)[:, None] & (o < N)[None, :]
    gates_ptr += (c * B * T + T - 1) * 4 * N
    dgates_ptr += (c * B * T + T - 1) * 4 * N
    dstate_ptr += (c * B * T + T - 1) * N
    cell_ptr += (c * B * (T + 1) + T - 1) * N
    gate = (b * T * 4 * N)[:, None] + o[None, :]
    given = (b * T * N)[:, None] + o[None, :]
    before = (b * (T + 1) * N)[:, None] + o[None, :]
    dcell = tl.zeros((BB, BN), tl.float32)
    dstate = tl.zeros((BB, BN), tl.float32)
    for _ in range(T):
        # products first: a loaded value then meets the products' layout once, and not each of its
        # terms
        dstate += tl.load(dstate_ptr + given, mask=inside, other=0.0).to(tl.float32)
        leave = tl.load(gates_ptr + 3 * N + gate, mask=inside, other=0.0).to(tl.float32)
        wide = _tanh(tl.load(cell_ptr + N + before, mask=inside, other=0.0))
        through = dstate * leave
        dcell += through - through * wide * wide
        product = through * wide
        dleave = (product - product * leave).to(kind)
        tl.store(dgates_ptr + 3 * N + gate, dleave, mask=inside)
        enter = tl.load(gates_ptr + gate, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(gates_ptr + 2 * N + gate, mask=inside, other=0.0).to(tl.float32)
        dstate = tl.dot(dleave, w_leave)
        through = dcell * enter
        product = through * new
        denter = (product - product * enter).to(kind)
        tl.store(dgates_ptr + gate, denter, mask=inside)
        dstate = tl.dot(denter, w_enter, dstate)
        dnew = (through - product * new).to(kind)
        tl.store(dgates_ptr + 2 * N + gate, dnew, mask=inside)
        dstate = tl.dot(dnew, w_new, dstate)
        forget = tl.load(gates_ptr + N + gate, mask=inside, other=0.0).to(tl.float32)
        dcell *= forget
        product = dcell * tl.load(cell_ptr + before, mask=inside, other=0.0)
        dforget = (product - product * forget).to(kind)
        tl.store(dgates_ptr + N + gate, dforget, mask=inside)
        dstate = tl.dot(dforget, w_forget, dstate)
        gates_ptr -= 4 * N
        dgates_ptr -= 4 * N
        dstate_ptr -= N
        cell_ptr -= N


def _weights_fit(outputs: int, kind: torch.dtype) -> bool:
    """Whether a client's state weights have room beside the tensor cores that use them."""
    return kind.itemsize == 2 and next_power_of_two(outputs) <= MAX_HIDDEN


def _launch_sequence(kernel: Any, shape: torch.Size, **pointers: Tensor) -> None:
    """Launch a kernel that goes through all steps of gates of this shape, (C, B, T, G)."""
    clients, batch, steps, gates = shape
    outputs, samples = gates // 4, min(SAMPLES, next_power_of_two(batch))
    kernel[(clients, cdiv(batch, samples))](
        **pointers, B=batch, T=steps, N=outputs, BB=samples, BN=next_power_of_two(outputs),
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In fp32, whatever the operands are."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates_CBTG: Tensor, w_CGO: Tensor) -> Tensor:
        """From each step's gates without their state's part; these are used up."""
        clients, batch, steps, gates = gates_CBTG.shape
        outputs = gates // 4
        state = torch.empty((clients, batch, steps + 1, outputs), dtype=gates_CBTG.dtype, device=gates_CBTG.device)
        cell = torch.empty(state.shape, dtype=torch.float32, device=state.device)
        state[:, :, 0].zero_()
        cell[:, :, 0].zero_()
        w = w_CGO.to(state.dtype)
        if _weights_fit(outputs, state.dtype):
            w = w.contiguous()
            _launch_sequence(
                _sequence_forward, gates_CBTG.shape, gates_ptr=gates_CBTG, w_ptr=w, cell_ptr=cell, state_ptr=state
            )
        else:
            block = min(512, next_power_of_two(outputs))
            product = gates_CBTG  # not looked at before there is one
            for t in range(steps):
                if t:
                    product = torch.bmm(state[:, :, t], w.mT)
                _cell_forward[(clients * batch, cdiv(outputs, block))](
                    product_ptr=product, gates_ptr=gates_CBTG, cell_ptr=cell, state_ptr=state,
                    t=t,
                    T=steps, N=outputs, FIRST=t == 0, BLOCK=block,
                )  # fmt: skip
        ctx.save_for_backward(gates_CBTG, cell, state, w)
        return state[:, :, 1:]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        gates, cell, state, w = ctx.saved_tensors
        clients, batch, steps, _ = gates.shape
        outputs = state.shape[-1]
        dstate = given[0].contiguous()
        dgates = torch.empty_like(gates)
        if _weights_fit(outputs, state.dtype):
            _launch_sequence(
                _sequence_backward, gates.shape,
                gates_ptr=gates, w_ptr=w, cell_ptr=cell, dstate_ptr=dstate, dgates_ptr=dgates,
            )  # fmt: skip
        else:
            dcell = torch.empty_like(cell[:, :, 0])
            block = min(512, next_power_of_two(outputs))
            after = dcell  # not looked at before there is one
            for t in range(steps - 1, -1, -1):
                last = t == steps - 1
                if not last:
                    after = torch.bmm(dgates[:, :, t + 1], w)
                _cell_gradient[(clients * batch, cdiv(outputs, block))](
                    gates_ptr=gates, cell_ptr=cell, dstate_ptr=dstate, dafter_ptr=after, dcell_ptr=dcell,
                    dgates_ptr=dgates,
                    t=t,
                    T=steps, N=outputs, LAST=last, BLOCK=block,
                )  # fmt: skip
        dw_CGO = _product(dgates.flatten(1, 2).mT, state[:, :, :-1].flatten(1, 2))
        return dgates, dw_CGO


def recurrent(x_CBTI: Tensor, layers: list[LayerWeights], compute: Precision = "fp32") -> Tensor:
    """An LSTM's outputs at each step, (C, B, T, O)."""
    x_CBTI = x_CBTI.to(activation_dtype(compute))
    for w_CGI, w_CGO, b_CG, c_CG in layers:
        x_CBTI = _Layer.apply(linear_of_any(x_CBTI, w_CGI, b_CG + c_CG, compute), w_CGO)
    return x_CBTI
