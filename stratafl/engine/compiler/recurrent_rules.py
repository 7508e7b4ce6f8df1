"""Batching rules of recurrent layers of any depth and direction, and of their cells.

They draw where they drop out between layers, and taken apart by vmap they would be hundreds of
small operations.

Shape suffixes: C clients, T places, B samples, I features in, H hidden features, G gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratafl.engine.compiler.batching_rules import dropped
from stratafl.engine.compiler.values import BatchingRule, Context, PerClient

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, "Weights"], State]


class Weights:
    """Of one layer in one direction."""

    def __init__(self, w_CGI: Tensor, w_CGH: Tensor, b_CG: Tensor | None, c_CG: Tensor | None, w_CPH: Tensor | None):
        """w_CPH: what a smaller output is made of the hidden state by."""
        self.input_CIG, self.state_CHG = w_CGI.mT, w_CGH.mT
        self.b_C1G = None if b_CG is None else b_CG[:, None]
        self.c_C1G = None if c_CG is None else c_CG[:, None]
        self.project_CHP = None if w_CPH is None else w_CPH.mT

    def inner(self, x_CMI: Tensor, joined: bool) -> Tensor:
        """What inputs give to the gates, with the state's bias where that may be added to it."""
        bias = self.b_C1G if not joined or self.b_C1G is None or self.c_C1G is None else self.b_C1G + self.c_C1G
        return torch.bmm(x_CMI, self.input_CIG) if bias is None else torch.baddbmm(bias, x_CMI, self.input_CIG)

    def state(self, h_CBH: Tensor) -> Tensor:
        if self.c_C1G is None:
            return torch.bmm(h_CBH, self.state_CHG)
        return torch.baddbmm(self.c_C1G, h_CBH, self.state_CHG)


def _lstm(gates_CBG: Tensor, state: State, w: Weights) -> State:
    h, c = state
    enter, forget, new, leave = torch.baddbmm(gates_CBG, h, w.state_CHG).chunk(4, dim=-1)
    c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
    h = leave.sigmoid() * c.tanh()
    return h if w.project_CHP is None else torch.bmm(h, w.project_CHP), c


def _gru(gates_CBG: Tensor, state: State, w: Weights) -> State:
    (h,) = state
    reset, update, new = gates_CBG.chunk(3, dim=-1)
    own_reset, own_update, own_new = w.state(h).chunk(3, dim=-1)
    update = (update + own_update).sigmoid()
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return (new + update * (h - new),)


def _plain(function: Callable[[Tensor], Tensor]) -> Cell:
    def cell(gates_CBG: Tensor, state: State, w: Weights) -> State:
        return (function(torch.baddbmm(gates_CBG, state[0], w.state_CHG)),)

    return cell


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _plain(torch.tanh), "rnn_relu": _plain(torch.relu)}


def _run_direction(x_CTBI: Tensor, state: State, w: Weights, cell: Cell, turned: bool) -> tuple[Tensor, State]:
    """All places, from the end where it is turned; outputs in their order and the last state."""
    _, places, batch, _ = x_CTBI.shape
    gates = w.inner(x_CTBI.flatten(1, 2), joined=cell is not _gru).unflatten(1, (places, batch))
    outputs = []
    for gates_CBG in reversed(gates.unbind(1)) if turned else gates.unbind(1):
        state = cell(gates_CBG, state, w)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if turned else outputs, dim=1), state


def rnn_rule(
    frame: Context, op: Any, x: Any, hidden: Any, params: Any, biases: bool, count: int, dropout: float, train: bool,
    both: bool, batch_first: bool = False,
) -> Any:  # fmt: skip
    """`nn.LSTM`, `nn.GRU` and `nn.RNN`."""
    if op._overloadname != "input":
        return NotImplemented
    given = frame.expanded(x)
    alone = given.dim() == 3
    if _has_fused_cpu_kernel(op, given) and not (dropout and train and count > 1):
        every = [frame.expanded(each) for each in (x, *hidden, *params)]
        shape = biases, count, dropout, train, both, batch_first
        done = [op(own[0], own[1:3], own[3:], *shape) for own in zip(*(each.unbind() for each in every), strict=True)]
        return tuple(PerClient(torch.stack(parts)) for parts in zip(*done, strict=True))
    if alone:
        given, batch_first = given[:, :, None], False
    x_CTBI = given.transpose(1, 2) if batch_first else given
    kind, states = op._opname, [frame.expanded(each) for each in (hidden if op._opname == "lstm" else [hidden])]
    if alone:
        states = [each[:, :, None] for each in states]
    cell, directions = CELLS[kind], 2 if both else 1
    projects = kind == "lstm" and states[0].shape[-1] != states[1].shape[-1]
    each = (4 if biases else 2) + projects
    weights = [frame.expanded(value) for value in params]
    ends: list[State] = []
    for layer in range(count):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            b, c = own[2:4] if biases else (None, None)
            w = Weights(own[0], own[1], b, c, own[-1] if projects else None)
            y, end = _run_direction(x_CTBI, tuple(one[:, number] for one in states), w, cell, direction == 1)
            outputs.append(y)
            ends.append(end)
        x_CTBI = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if dropout and train and layer < count - 1:
            x_CTBI = dropped(frame, x_CTBI, dropout)
    y = x_CTBI.transpose(1, 2) if batch_first else x_CTBI
    last = [torch.stack([end[part] for end in ends], dim=1) for part in range(len(states))]
    if alone:
        y, last = y[:, :, 0], [one[:, :, 0] for one in last]
    return PerClient(y), *(PerClient(one) for one in last)


def _has_fused_cpu_kernel(op: Any, given: Tensor) -> bool:
    """Whether a CPU's library has the whole layer as one kernel, which beats many small products of
    all clients."""
    on_cpu = given.device.type == "cpu" and given.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return op._opname == "lstm" and on_cpu and torch.backends.mkldnn.is_available()


def cell_rule(frame: Context, op: Any, x: Any, hidden: Any, w: Any, v: Any, b: Any = None, c: Any = None) -> Any:
    """`nn.LSTMCell` and the others."""
    kind = op._opname.removesuffix("_cell")
    states = [frame.expanded(each) for each in (hidden if kind == "lstm" else [hidden])]
    x_CBI = frame.expanded(x)
    if x_CBI.dim() != 3:
        return NotImplemented
    own = [None if each is None else frame.expanded(each) for each in (b, c)]
    weights = Weights(frame.expanded(w), frame.expanded(v), own[0], own[1], None)
    cell = CELLS[kind]
    end = cell(weights.inner(x_CBI, joined=cell is not _gru), tuple(states), weights)
    return tuple(map(PerClient, end)) if kind == "lstm" else PerClient(end[0])


RECURRENT_RULES: dict[str, BatchingRule] = {
    **dict.fromkeys(CELLS, rnn_rule),
    **{f"{kind}_cell": cell_rule for kind in CELLS},
}
