"""Batching rules of LSTM, GRU and RNN layers, of any depth and direction, and of their cells.

Reasons for rules: layers may drop out between each other, vmap would decompose every time step
into many more operations, and a GPU's fused cells have no rule in vmap.

Shape suffixes: C clients, T time steps, B samples, I input features, H hidden features, G gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stratafl.engine.compiler.batching_rules import drop_elements
from stratafl.engine.compiler.values import BatchingRule, Context, PerClient, wrap

LARGEST_HEAP_BLOCK = 31 << 20
"""Bytes of a block just below 32 MB, from which on glibc never takes blocks from its heap."""

State = tuple[Tensor, ...]
"""Hidden state, and the cell state of an LSTM, of one layer and direction."""
Cell = Callable[[Tensor, State, "CellWeights"], State]
"""(gates of the input, state, weights) -> state after one time step."""


class CellWeights:
    """Stacked parameters of one layer in one direction, in torch's order."""

    def __init__(
        self, w_CGI: Tensor, w_CGH: Tensor, b_input_CG: Tensor | None = None, b_hidden_CG: Tensor | None = None,
        projection_CPH: Tensor | None = None,
    ):  # fmt: skip
        self.input_CIG, self.hidden_CHG = w_CGI.mT, w_CGH.mT
        self.b_input_C1G = None if b_input_CG is None else b_input_CG[:, None]
        self.b_hidden_C1G = None if b_hidden_CG is None else b_hidden_CG[:, None]
        self.projection_CHP = None if projection_CPH is None else projection_CPH.mT

    def input_gates(self, x_CMI: Tensor, cell: Cell) -> Tensor:
        """Contribution of the input to the gates, with both biases. A GRU adds the hidden bias
        itself, since its reset gate applies to it."""
        bias = self.b_input_C1G
        if bias is not None and self.b_hidden_C1G is not None and cell is not _gru:
            bias = bias + self.b_hidden_C1G
        return _product(x_CMI, self.input_CIG, bias)


def _product(x_CMI: Tensor, w_CIG: Tensor, bias_C1G: Tensor | None) -> Tensor:
    return torch.bmm(x_CMI, w_CIG) if bias_C1G is None else torch.baddbmm(bias_C1G, x_CMI, w_CIG)


def _lstm(gates_CBG: Tensor, state: State, w: CellWeights) -> State:
    h, c = state
    i, f, g, o = torch.baddbmm(gates_CBG, h, w.hidden_CHG).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if w.projection_CHP is None else torch.bmm(h, w.projection_CHP), c


def _gru(gates_CBG: Tensor, state: State, w: CellWeights) -> State:
    (h,) = state
    input_r, input_z, input_n = gates_CBG.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = _product(h, w.hidden_CHG, w.b_hidden_C1G).chunk(3, dim=-1)
    z = (input_z + hidden_z).sigmoid()
    n = (input_n + (input_r + hidden_r).sigmoid() * hidden_n).tanh()
    return (n + z * (h - n),)


def _elman(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(gates_CBG: Tensor, state: State, w: CellWeights) -> State:
        return (activation(torch.baddbmm(gates_CBG, state[0], w.hidden_CHG)),)

    return cell


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _elman(torch.tanh), "rnn_relu": _elman(torch.relu)}


def _run_direction(x_CTBI: Tensor, state: State, w: CellWeights, cell: Cell, backward: bool) -> tuple[Tensor, State]:
    """Outputs of all time steps, in the order of the input, and the final state."""
    _, times, batch, _ = x_CTBI.shape
    gates_CTBG = w.input_gates(x_CTBI.flatten(1, 2), cell).unflatten(1, (times, batch))
    order = -1 if backward else 1
    outputs = []
    for gates_CBG in gates_CTBG.unbind(1)[::order]:
        state = cell(gates_CBG, state, w)
        outputs.append(state[0])
    return torch.stack(outputs[::order], dim=1), state


def rnn_rule(context: Context, op: Any, x: Any, hidden: Any, params: Any, *options: Any) -> Any:
    """`nn.LSTM`, `nn.GRU` and `nn.RNN`, but for packed sequences."""
    if op._overloadname != "input":
        return NotImplemented
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    drops = dropout and train and layers > 1
    x_C, parameters = context.stacked(x), [context.stacked(parameter) for parameter in params]
    states = [context.stacked(state) for state in (hidden if op._opname == "lstm" else [hidden])]
    directions = 2 if bidirectional else 1
    cell_parameters = len(parameters) // (layers * directions)
    projects = cell_parameters % 2 == 1
    if _has_fused_cpu_kernel(op, x_C) and not drops and not projects:

        def client_lstm(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return op(x, [h, c], weights, *options)

        return wrap(_ClientByClient.apply(client_lstm, x_C, *states, *parameters))
    has_batch = x_C.dim() == 4
    if not has_batch:
        x_C, states, batch_first = x_C[:, :, None], [state[:, :, None] for state in states], False
    x_CTBI = x_C.transpose(1, 2) if batch_first else x_C
    cell = CELLS[op._opname]
    final_states: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = len(final_states)
            w, v, *others = parameters[number * cell_parameters : (number + 1) * cell_parameters]
            weights = CellWeights(w, v, *others) if has_biases else CellWeights(w, v, None, None, *others)
            state = tuple(state[:, number] for state in states)
            y, state = _run_direction(x_CTBI, state, weights, cell, backward=direction == 1)
            outputs.append(y)
            final_states.append(state)
        x_CTBI = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if drops and layer < layers - 1:
            x_CTBI = drop_elements(context, x_CTBI, dropout)
    results = [x_CTBI.transpose(1, 2) if batch_first else x_CTBI]
    results += [torch.stack(parts, dim=1) for parts in zip(*final_states, strict=True)]
    return tuple(PerClient(result if has_batch else result[:, :, 0]) for result in results)


class _ClientByClient(torch.autograd.Function):
    """Function called for one client after another, the clients divided among torch's threads.

    Threads that shared a single call would have to wait for each other in every time step.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *stacks: Tensor) -> tuple[Tensor, ...]:
        # glibc returns free memory above twice the size of the largest block freed so far, and the
        # system would clear all of it again in the next step; this block is never written to
        torch.empty(LARGEST_HEAP_BLOCK, dtype=torch.uint8)
        needs_gradient = ctx.needs_input_grad[1:]

        def call(inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
            leaves = [value.detach().requires_grad_(needs) for value, needs in zip(inputs, needs_gradient, strict=True)]
            with torch.enable_grad():
                return leaves, function(*leaves)

        ctx.calls = _divided_among_threads(call, zip(*stacks, strict=True))
        return tuple(torch.stack(parts) for parts in zip(*(outputs for _, outputs in ctx.calls), strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        def differentiate(call: Any) -> tuple[Tensor, ...]:
            (leaves, outputs), *client_gradients = call
            return torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], client_gradients)

        results = _divided_among_threads(differentiate, zip(ctx.calls, *gradients, strict=True))
        stacks = map(torch.stack, zip(*results, strict=True))
        return tuple(next(stacks) if needs else None for needs in ctx.needs_input_grad)


def _divided_among_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Results of a function, whose operations use one thread each."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [function(item) for item in items]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        # the pool's setting also reaches MKL, which has one number for all threads
        torch.set_num_threads(threads)


def _has_fused_cpu_kernel(op: Any, x_C: Tensor) -> bool:
    """Whether the CPU computes the whole layer with one kernel, which takes half the time of a
    product of all clients in every time step."""
    on_cpu = x_C.device.type == "cpu" and x_C.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return op._opname == "lstm" and on_cpu and torch.backends.mkldnn.is_available()


def cell_rule(context: Context, op: Any, x: Any, hidden: Any, *params: Any) -> Any:
    """`nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`."""
    kind, x_CBI = op._opname.removesuffix("_cell"), context.stacked(x)
    if x_CBI.dim() != 3:
        return NotImplemented
    state = tuple(context.stacked(value) for value in (hidden if kind == "lstm" else [hidden]))
    stacked: list[Any] = [None if parameter is None else context.stacked(parameter) for parameter in params]
    weights = CellWeights(*stacked)
    state = CELLS[kind](weights.input_gates(x_CBI, CELLS[kind]), state, weights)
    return wrap(state if kind == "lstm" else state[0])


RECURRENT_RULES: dict[str, BatchingRule] = {
    **dict.fromkeys(CELLS, rnn_rule),
    **{f"{kind}_cell": cell_rule for kind in CELLS},
}
