"""Products: linear layers, matrices and their inverses, sums by letters, convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.engine.compiler.forms.stack import BatchingRule, Context, PerClient, align_rank, rank_of


def linear(frame: Context, op: Any, x: Any, w: Any, b: Any = None) -> Any:
    """Shape suffixes: C clients, M all axes of a client's input but the last, I O features."""
    if not isinstance(w, PerClient):
        y = F.linear(x.t if isinstance(x, PerClient) else x, w, None if isinstance(b, PerClient) else b)
        return PerClient(y if not isinstance(b, PerClient) else frame.expanded(_back(y, x)) + align_rank(b, rank_of(x)))
    if w.rank != 2:
        return NotImplemented
    given = frame.expanded(x)
    x_CMI, w_COI = _rows(given), w.t
    b_C1O = None if b is None else frame.expanded(b)[:, None]
    y_CMO = torch.bmm(x_CMI, w_COI.mT) if b_C1O is None else torch.baddbmm(b_C1O, x_CMI, w_COI.mT)
    return PerClient(y_CMO.view(*given.shape[:-1], w_COI.shape[1]))


def _rows(x: Tensor) -> Tensor:
    """All axes of a client's values but the last as one."""
    return x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])


def _back(y: Tensor, x: Any) -> Any:
    return PerClient(y) if isinstance(x, PerClient) else y


def matmul(frame: Context, op: Any, a: Any, b: Any) -> Any:
    """Of any number of axes, as the library has it: a vector is a row on the left, a column on the
    right."""
    ranks = rank_of(a), rank_of(b)
    left, right = (_at_least_two(frame, each, side) for side, each in enumerate((a, b)))
    rank = max(rank_of(left), rank_of(right))
    if isinstance(right, PerClient) and right.rank == 2 and rank > 2:
        x = frame.expanded(left)
        y = torch.bmm(_rows(x), right.t).view(*x.shape[:-1], right.t.shape[-1])
    else:
        y = align_rank(left, rank) @ align_rank(right, rank)
    if 1 in ranks:
        y = y.reshape(frame.clients, *frame.shape)
    return PerClient(y)


def _at_least_two(frame: Context, value: Any, side: int) -> Any:
    if rank_of(value) > 1:
        return value
    if isinstance(value, PerClient):
        return PerClient(value.t.unsqueeze(-1 if side else 1))
    return value.unsqueeze(-1 if side else 0)


def added(frame: Context, op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`addmm` and its likes."""
    product = matmul(frame, op, a, b).t
    return PerClient(product * alpha + beta * align_rank(bias, len(frame.shape)))


def dotted(frame: Context, op: Any, a: Any, b: Any) -> Any:
    if max(rank_of(a), rank_of(b)) > 1:
        return NotImplemented
    return PerClient((frame.expanded(a) * frame.expanded(b)).sum(dim=1))


def outer(frame: Context, op: Any, a: Any, b: Any) -> Any:
    return PerClient(frame.expanded(a)[:, :, None] * frame.expanded(b)[:, None])


def einsum(frame: Context, op: Any, equation: str, operands: Any, **_: Any) -> Any:
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if not arrow:
        letters = sorted(each for each in set(inputs) - {",", "."} if inputs.count(each) == 1)
        output = ("..." if "..." in inputs else "") + "".join(letters)
    # capitals and small letters are taken; a letter that no operand uses is the clients'
    new = next(letter for letter in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation)
    if (
        "..." in inputs
        and len({rank_of(each) - len(part.replace("...", "")) for each, part in _dotted(operands, parts)}) > 1
    ):
        return NotImplemented
    stacked = [isinstance(each, PerClient) for each in operands]
    left = ",".join(new + part if own else part for part, own in zip(parts, stacked, strict=True))
    values = [each.t if isinstance(each, PerClient) else each for each in operands]
    return PerClient(torch.einsum(f"{left}->{new}{output}", *values))


def _dotted(operands: Any, parts: list[str]) -> list[tuple[Any, str]]:
    return [(each, part) for each, part in zip(operands, parts, strict=True) if "..." in part]


def tensordot(frame: Context, op: Any, a: Any, b: Any, dims_a: Any, dims_b: Any) -> Any:
    letters = iter("abcdefghijklmnopqrstuvwxy")
    ranks = rank_of(a), rank_of(b)
    first, second = [next(letters) for _ in range(ranks[0])], [next(letters) for _ in range(ranks[1])]
    for one, other in zip(dims_a, dims_b, strict=True):
        second[other % ranks[1]] = first[one % ranks[0]]
    joined = {first[each % ranks[0]] for each in dims_a}
    out = [each for each in (*first, *second) if each not in joined]
    return einsum(frame, op, f"{''.join(first)},{''.join(second)}->{''.join(out)}", [a, b])


def convolution(frame: Context, op: Any, x: Any, w: Any, b: Any = None, *more: Any, **kwargs: Any) -> Any:
    """Filters that clients have of their own give a CPU nothing to share, and one call a client
    needs no transposed copies; on a GPU the clients are groups of one convolution."""
    given = frame.expanded(x)
    batched = given.dim() == frame.expanded(w).dim()
    if not isinstance(w, PerClient) and not isinstance(b, PerClient) and batched:
        return PerClient(op(given.flatten(0, 1), w, b, *more, **kwargs).unflatten(0, given.shape[:2]))
    w_C, b_C = frame.expanded(w), None if b is None else frame.expanded(b)
    names = [each.name for each in op._schema.arguments][3:]
    args = dict(zip(names, more, strict=False)) | kwargs
    if given.device.type == "cpu" or not batched or isinstance(args.get("padding"), str):
        biases = [None] * frame.clients if b_C is None else list(b_C.unbind())
        if frame.channels_last:
            given = given.movedim(2, -1).contiguous().movedim(-1, 2)
        each = zip(given.unbind(), w_C.unbind(), biases, strict=True)
        return frame.images([op(*one, *more, **kwargs) for one in each])
    merged = given.transpose(0, 1).flatten(1, 2)
    args["groups"] = frame.clients * args.get("groups", 1)
    y = op(merged, w_C.flatten(0, 1), None if b_C is None else b_C.flatten(), **args)
    return PerClient(y.unflatten(1, (frame.clients, -1)).transpose(0, 1))


def bilinear(frame: Context, op: Any, x: Any, y: Any, w: Any, b: Any = None) -> Any:
    scores = einsum(frame, op, "...i,oij,...j->...o", [x, w, y])
    return scores if b is None or scores is NotImplemented else PerClient(scores.t + align_rank(b, scores.rank))


def solved(frame: Context, op: Any, a: Any, b: Any, *more: Any, **kwargs: Any) -> Any:
    """Equations with several right sides, which must not be taken for many with one each."""
    rank = max(rank_of(a), rank_of(b))
    if rank_of(b) < 2 or (op._opname == "linalg_solve" and rank_of(b) < rank_of(a)):
        return NotImplemented
    return PerClient(op(*(align_rank(each, rank) for each in (a, b)), *more, **kwargs))


def weight_norm(frame: Context, op: Any, v: Any, g: Any, dim: int = 0) -> Any:
    """A direction, and how long it is."""
    given = frame.expanded(v)
    others = [axis for axis in range(1, given.dim()) if axis != dim % (given.dim() - 1) + 1 or dim == -1]
    return PerClient(given * (frame.expanded(g) / torch.linalg.vector_norm(given, dim=others, keepdim=True)))


FORMS: dict[str, BatchingRule] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), added),
    **dict.fromkeys(("dot", "vdot", "inner"), dotted),
    **dict.fromkeys(("outer", "ger"), outer),
    "einsum": einsum,
    "tensordot": tensordot,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution
    ),
    "_weight_norm": weight_norm,
    "bilinear": bilinear,
    "linalg_solve": solved,
    "linalg_solve_triangular": solved,
    "cholesky_solve": solved,
}
