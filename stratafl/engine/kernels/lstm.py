"""LSTM of C clients, each with its own weights.

    i, f, o = sigmoid(gates),  g = tanh(gates),  gates = x w^T + state v^T + biases
    cell = f * cell + i * g,  state = o * tanh(cell)

If the state weights of a client fit into the shared memory of a multiprocessor, one program takes
some of its samples through all steps of a layer, and writes to memory only what the backward pass
needs. Otherwise each step is a product of state and weights by torch, and one kernel for everything
up to the next product. In both cases the gates of all steps overwrite their input part x w^T, and
the gradient of the state weights is one product over all steps.

Gates are (C, B, T, G), states and cells (C, B, T + 1, O), with a zero before the first step.
C clients, B samples, T steps, I inputs, O outputs (N in the kernels), G = 4 * O gates: i, f, g, o,
in torch's order.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import activation_dtype, cdiv, next_power_of_two
from stratafl.engine.kernels.reference import linear_nd
from stratafl.engine.precision import Precision

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Input weights (C, G, I), state weights (C, G, O), and their biases (C, G)."""

MAX_HIDDEN = 128
"""Most outputs for which 16-bit state weights, 128 KB, fit into 227 KB of shared memory."""
SAMPLES, WARPS = 64, 8
"""Samples and warps of one program that computes all steps."""


@triton.jit
def _tanh(x):
    """tanh(x), by the logistic function."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gate_input(gates_ptr, product_ptr, offset, row, mask, FIRST: tl.constexpr):
    """Gates before their activation: input part plus product of state and weights."""
    value = tl.load(gates_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if not FIRST:
        value += tl.load(product_ptr + row, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["t"])
def _cell_forward(
    product_ptr, gates_ptr, cell_ptr, state_ptr, t, T, N: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute step t of BLOCK outputs of one sample `r` of all clients' samples.

    product_ptr: product of the last state and the state weights, not read in the FIRST step.
    """
    r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < N
    offset = (r * T + t) * 4 * N + o
    row = r * 4 * N + o
    i_gate = tl.sigmoid(_gate_input(gates_ptr, product_ptr, offset, row, mask, FIRST))
    f_gate = tl.sigmoid(_gate_input(gates_ptr, product_ptr, offset + N, row + N, mask, FIRST))
    g_gate = _tanh(_gate_input(gates_ptr, product_ptr, offset + 2 * N, row + 2 * N, mask, FIRST))
    o_gate = tl.sigmoid(_gate_input(gates_ptr, product_ptr, offset + 3 * N, row + 3 * N, mask, FIRST))
    before = (r * (T + 1) + t) * N + o
    cell = f_gate * tl.load(cell_ptr + before, mask=mask, other=0.0) + i_gate * g_gate
    kind = gates_ptr.dtype.element_ty
    tl.store(gates_ptr + offset, i_gate.to(kind), mask=mask)
    tl.store(gates_ptr + offset + N, f_gate.to(kind), mask=mask)
    tl.store(gates_ptr + offset + 2 * N, g_gate.to(kind), mask=mask)
    tl.store(gates_ptr + offset + 3 * N, o_gate.to(kind), mask=mask)
    tl.store(cell_ptr + before + N, cell, mask=mask)
    tl.store(state_ptr + before + N, (o_gate * _tanh(cell)).to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t"])
def _cell_gradient(
    gates_ptr, cell_ptr, dstate_ptr, dafter_ptr, dcell_ptr, dgates_ptr, t, T, N: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the gates and the cell of step t, for BLOCK outputs of one sample.

    dstate_ptr: gradient of the layer's output. dafter_ptr, dcell_ptr: gradients of state and cell
    that the next step has written, not read in the LAST step.
    """
    r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < N
    offset = (r * T + t) * 4 * N + o
    i_gate = tl.load(gates_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    f_gate = tl.load(gates_ptr + offset + N, mask=mask, other=0.0).to(tl.float32)
    g_gate = tl.load(gates_ptr + offset + 2 * N, mask=mask, other=0.0).to(tl.float32)
    o_gate = tl.load(gates_ptr + offset + 3 * N, mask=mask, other=0.0).to(tl.float32)
    before = (r * (T + 1) + t) * N + o
    tanh_cell = _tanh(tl.load(cell_ptr + before + N, mask=mask, other=0.0))
    dstate = tl.load(dstate_ptr + (r * T + t) * N + o, mask=mask, other=0.0).to(tl.float32)
    if not LAST:
        dstate += tl.load(dafter_ptr + r * N + o, mask=mask, other=0.0).to(tl.float32)
    dcell = dstate * o_gate * (1.0 - tanh_cell * tanh_cell)
    if not LAST:
        dcell += tl.load(dcell_ptr + r * N + o, mask=mask, other=0.0)
    kind = dgates_ptr.dtype.element_ty
    last_cell = tl.load(cell_ptr + before, mask=mask, other=0.0)
    tl.store(dgates_ptr + offset, (dcell * g_gate * i_gate * (1.0 - i_gate)).to(kind), mask=mask)
    tl.store(dgates_ptr + offset + N, (dcell * last_cell * f_gate * (1.0 - f_gate)).to(kind), mask=mask)
    tl.store(dgates_ptr + offset + 2 * N, (dcell * i_gate * (1.0 - g_gate * g_gate)).to(kind), mask=mask)
    tl.store(dgates_ptr + offset + 3 * N, (dstate * tanh_cell * o_gate * (1.0 - o_gate)).to(kind), mask=mask)
    tl.store(dcell_ptr + r * N + o, dcell * f_gate, mask=mask)


@triton.jit
def _state_weights(w_ptr, stride_summed: tl.constexpr, stride_other: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    """State weights of each gate, as a second operand: the axis of the product's sum is first."""
    i = tl.arange(0, BN)
    offset = i[:, None] * stride_summed + i[None, :] * stride_other
    mask = (i < N)[:, None] & (i < N)[None, :]
    i_gate = tl.load(w_ptr + offset, mask=mask, other=0.0)
    f_gate = tl.load(w_ptr + N * N + offset, mask=mask, other=0.0)
    g_gate = tl.load(w_ptr + 2 * N * N + offset, mask=mask, other=0.0)
    o_gate = tl.load(w_ptr + 3 * N * N + offset, mask=mask, other=0.0)
    return i_gate, f_gate, g_gate, o_gate


@triton.jit
def _sequence_forward(
    gates_ptr, w_ptr, cell_ptr, state_ptr, B, T, N: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute all steps of BB samples of a client."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.arange(0, BN)
    kind = gates_ptr.dtype.element_ty
    w_i, w_f, w_g, w_o = _state_weights(w_ptr + c * 4 * N * N, 1, N, N, BN)
    # a step moves the pointers, so that the offsets within a step fit into 32 bits
    mask = (b < B)[:, None] & (o < N)[None, :]
    gates_ptr += c * B * T * 4 * N
    cell_ptr += c * B * (T + 1) * N + N
    state_ptr += c * B * (T + 1) * N + N
    gate = (b * T * 4 * N)[:, None] + o[None, :]
    out = (b * (T + 1) * N)[:, None] + o[None, :]
    cell = tl.zeros((BB, BN), tl.float32)
    state = tl.zeros((BB, BN), kind)
    for _ in range(T):
        f_gate = tl.load(gates_ptr + N + gate, mask=mask, other=0.0).to(tl.float32)
        f_gate = tl.sigmoid(tl.dot(state, w_f, f_gate))
        tl.store(gates_ptr + N + gate, f_gate.to(kind), mask=mask)
        cell *= f_gate
        i_gate = tl.load(gates_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        i_gate = tl.sigmoid(tl.dot(state, w_i, i_gate))
        tl.store(gates_ptr + gate, i_gate.to(kind), mask=mask)
        g_gate = tl.load(gates_ptr + 2 * N + gate, mask=mask, other=0.0).to(tl.float32)
        g_gate = _tanh(tl.dot(state, w_g, g_gate))
        tl.store(gates_ptr + 2 * N + gate, g_gate.to(kind), mask=mask)
        cell += i_gate * g_gate
        tl.store(cell_ptr + out, cell, mask=mask)
        o_gate = tl.load(gates_ptr + 3 * N + gate, mask=mask, other=0.0).to(tl.float32)
        o_gate = tl.sigmoid(tl.dot(state, w_o, o_gate))
        tl.store(gates_ptr + 3 * N + gate, o_gate.to(kind), mask=mask)
        state = (o_gate * _tanh(cell)).to(kind)
        tl.store(state_ptr + out, state, mask=mask)
        gates_ptr += 4 * N
        cell_ptr += N
        state_ptr += N


@triton.jit
def _sequence_backward(
    gates_ptr, w_ptr, cell_ptr, dstate_ptr, dgates_ptr, B, T, N: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the gates of BB samples of a client, last step first."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.arange(0, BN)
    kind = gates_ptr.dtype.element_ty
    w_i, w_f, w_g, w_o = _state_weights(w_ptr + c * 4 * N * N, N, 1, N, BN)
    mask = (b < B)[:, None] & (o < N)[None, :]
    gates_ptr += (c * B * T + T - 1) * 4 * N
    dgates_ptr += (c * B * T + T - 1) * 4 * N
    dstate_ptr += (c * B * T + T - 1) * N
    cell_ptr += (c * B * (T + 1) + T - 1) * N
    gate = (b * T * 4 * N)[:, None] + o[None, :]
    state_offset = (b * T * N)[:, None] + o[None, :]
    before = (b * (T + 1) * N)[:, None] + o[None, :]
    dcell = tl.zeros((BB, BN), tl.float32)
    dstate = tl.zeros((BB, BN), tl.float32)
    for _ in range(T):
        # each gate's gradient is written as a product minus a term, not as x * (1 - gate): then a
        # loaded value is converted to the layout of the products once
        dstate += tl.load(dstate_ptr + state_offset, mask=mask, other=0.0).to(tl.float32)
        o_gate = tl.load(gates_ptr + 3 * N + gate, mask=mask, other=0.0).to(tl.float32)
        tanh_cell = _tanh(tl.load(cell_ptr + N + before, mask=mask, other=0.0))
        through = dstate * o_gate
        dcell += through - through * tanh_cell * tanh_cell
        product = through * tanh_cell
        d_o = (product - product * o_gate).to(kind)
        tl.store(dgates_ptr + 3 * N + gate, d_o, mask=mask)
        i_gate = tl.load(gates_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        g_gate = tl.load(gates_ptr + 2 * N + gate, mask=mask, other=0.0).to(tl.float32)
        dstate = tl.dot(d_o, w_o)
        through = dcell * i_gate
        product = through * g_gate
        d_i = (product - product * i_gate).to(kind)
        tl.store(dgates_ptr + gate, d_i, mask=mask)
        dstate = tl.dot(d_i, w_i, dstate)
        d_g = (through - product * g_gate).to(kind)
        tl.store(dgates_ptr + 2 * N + gate, d_g, mask=mask)
        dstate = tl.dot(d_g, w_g, dstate)
        f_gate = tl.load(gates_ptr + N + gate, mask=mask, other=0.0).to(tl.float32)
        dcell *= f_gate
        product = dcell * tl.load(cell_ptr + before, mask=mask, other=0.0)
        d_f = (product - product * f_gate).to(kind)
        tl.store(dgates_ptr + N + gate, d_f, mask=mask)
        dstate = tl.dot(d_f, w_f, dstate)
        gates_ptr -= 4 * N
        dgates_ptr -= 4 * N
        dstate_ptr -= N
        cell_ptr -= N


def _weights_fit(outputs: int, kind: torch.dtype) -> bool:
    """Whether the state weights of a client fit into the shared memory of a multiprocessor."""
    return kind.itemsize == 2 and next_power_of_two(outputs) <= MAX_HIDDEN


def _launch_sequence(kernel: Any, shape: torch.Size, **pointers: Tensor) -> None:
    """Launch a kernel that computes all steps of gates of a shape (C, B, T, G)."""
    clients, batch, steps, gates = shape
    outputs, samples = gates // 4, min(SAMPLES, next_power_of_two(batch))
    kernel[(clients, cdiv(batch, samples))](
        **pointers, B=batch, T=steps, N=outputs, BB=samples, BN=next_power_of_two(outputs),
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of operands of any type, in fp32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


class _LSTMLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates_CBTG: Tensor, w_CGO: Tensor) -> Tensor:
        """States of all steps, (C, B, T, O), from the gates' input part, which is overwritten."""
        clients, batch, steps, gates = gates_CBTG.shape
        outputs = gates // 4
        state = torch.empty((clients, batch, steps + 1, outputs), dtype=gates_CBTG.dtype, device=gates_CBTG.device)
        cell = torch.empty(state.shape, dtype=torch.float32, device=state.device)
        state[:, :, 0].zero_()
        cell[:, :, 0].zero_()
        w = w_CGO.to(state.dtype)
        if _weights_fit(outputs, state.dtype):
            w = w.contiguous()
            pointers = {"gates_ptr": gates_CBTG, "w_ptr": w, "cell_ptr": cell, "state_ptr": state}
            _launch_sequence(_sequence_forward, gates_CBTG.shape, **pointers)
        else:
            block = min(512, next_power_of_two(outputs))
            product = gates_CBTG  # not read in the first step
            for t in range(steps):
                if t:
                    product = torch.bmm(state[:, :, t], w.mT)
                _cell_forward[(clients * batch, cdiv(outputs, block))](
                    product_ptr=product, gates_ptr=gates_CBTG, cell_ptr=cell, state_ptr=state,
                    t=t, T=steps, N=outputs, FIRST=t == 0, BLOCK=block,
                )  # fmt: skip
        ctx.save_for_backward(gates_CBTG, cell, state, w)
        return state[:, :, 1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gates, cell, state, w = ctx.saved_tensors
        clients, batch, steps, _ = gates.shape
        outputs = state.shape[-1]
        dstate = gradients[0].contiguous()
        dgates = torch.empty_like(gates)
        if _weights_fit(outputs, state.dtype):
            _launch_sequence(
                _sequence_backward, gates.shape,
                gates_ptr=gates, w_ptr=w, cell_ptr=cell, dstate_ptr=dstate, dgates_ptr=dgates,
            )  # fmt: skip
        else:
            dcell = torch.empty_like(cell[:, :, 0])
            block = min(512, next_power_of_two(outputs))
            after = dcell  # not read in the last step
            for t in reversed(range(steps)):
                last = t == steps - 1
                if not last:
                    after = torch.bmm(dgates[:, :, t + 1], w)
                _cell_gradient[(clients * batch, cdiv(outputs, block))](
                    gates_ptr=gates, cell_ptr=cell, dstate_ptr=dstate, dafter_ptr=after, dcell_ptr=dcell,
                    dgates_ptr=dgates,
                    t=t, T=steps, N=outputs, LAST=last, BLOCK=block,
                )  # fmt: skip
        dw_CGO = _product(dgates.flatten(1, 2).mT, state[:, :, :-1].flatten(1, 2))
        return dgates, dw_CGO


def lstm(x_CBTI: Tensor, layers: list[LayerWeights], precision: Precision = "fp32") -> Tensor:
    """Outputs of an LSTM at each step, (C, B, T, O)."""
    x_CBTI = x_CBTI.to(activation_dtype(precision))
    for w_CGI, w_CGO, b_CG, c_CG in layers:
        x_CBTI = _LSTMLayer.apply(linear_nd(x_CBTI, w_CGI, b_CG + c_CG, precision), w_CGO)
    return x_CBTI
