"""The functions and methods of a traced module that have a client-batched form, and that form.

Each function here is given a node and returns what to do when the program runs.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.kernels import reference
from stratafl.engine.trace.lowering import IMAGE, Frame, Lowering, Run

Lower = Callable[[Lowering, fx.Node], Run]


def linear(low: Lowering, node: fx.Node) -> Run:
    given = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    w, b = given["weight"], given.get("bias")
    if w in low.batched or b in low.batched or low.rank(low.tensor(w)) != 2:
        raise UnsupportedModule("weights that depend on the input")
    x, weight = low.fetch(given["input"]), low.fetch(w)
    bias: Run = (lambda frame: None) if b is None else low.fetch(b)
    return lambda frame: reference.linear_nd(x(frame), weight(frame), bias(frame), frame.compute)


def is_relu(low: Lowering, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(low.module(node)) is nn.ReLU
    return node.target in (F.relu, torch.relu, "relu")


def _elementwise(function: Callable[..., Tensor], changes: bool = False) -> Lower:
    def lowered(low: Lowering, node: fx.Node) -> Run:
        if changes or node.kwargs.get("inplace"):
            low.once(node.args[0])
        tensors = [low.tensor(each) for each in node.all_input_nodes]
        rank = max(low.rank(each) for each in tensors)
        if any(low.rank(each) < rank for each in tensors if each in low.batched):
            raise UnsupportedModule(f"{node}, which matches a batch with another axis")
        last = rank == IMAGE and any(each in low.last for each in tensors)
        if last:
            low.last.add(node)
        fetched = {each: low.fetch(each, rank, last) for each in tensors}
        kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}

        def run(frame: Frame) -> Tensor:
            return function(
                *map_arg(node.args, lambda each: fetched[each](frame)),
                **map_arg(kwargs, lambda each: fetched[each](frame)),
            )

        return run

    return lowered


def on_images(low: Lowering, node: fx.Node, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Run:
    if low.rank(node) != IMAGE:
        raise UnsupportedModule(f"pool of rank {low.rank(node)}")
    low.plain(*args, *kwargs.values())
    x = low.fetch(node.args[0], last=True)
    low.last.add(node)
    return lambda frame: reference.per_image(lambda images: function(images, *args, **kwargs), x(frame))


def _pool(function: Callable[..., Tensor]) -> Lower:
    def lowered(low: Lowering, node: fx.Node) -> Run:
        return on_images(low, node, function, *node.args[1:], **node.kwargs)

    return lowered


def _flatten(low: Lowering, node: fx.Node) -> Run:
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return flattened(low, node.args[0], given.get("start_dim", 0), given.get("end_dim", -1))


def flattened(low: Lowering, source: Any, start: Any, end: Any) -> Run:
    first, final = low.axis(source, start), low.axis(source, end)
    if source in low.last and (first, final) == (2, IMAGE):
        lying = low.fetch(source, last=True)
        return lambda frame: frame.ops.ops["flatten"](lying(frame))
    x = low.fetch(source)
    return lambda frame: x(frame).flatten(first, final)


def _reshape(low: Lowering, node: fx.Node) -> Run:
    x = low.fetch(node.args[0])
    sizes: Any = node.args[1:] or (node.kwargs["shape"],)

    def run(frame: Frame) -> Tensor:
        shape = map_arg(sizes, lambda each: frame.values[each])
        shape = shape[0] if isinstance(shape[0], tuple | list) else shape
        tensor = x(frame)
        return tensor.reshape(len(tensor), *shape)

    return run


def _size(low: Lowering, node: fx.Node) -> Run:
    x = low.fetch(node.args[0])
    dims = node.args[1:] or tuple(node.kwargs.values())
    low.plain(*dims)
    if not dims:
        return lambda frame: tuple(x(frame).shape[1:])
    dim: Any = dims[0]
    return lambda frame: tuple(x(frame).shape[1:])[dim]


def _attribute(low: Lowering, node: fx.Node) -> Run:
    if node.args[1] != "shape":
        raise UnsupportedModule(f"attribute {node.args[1]}")
    x = low.fetch(node.args[0])
    return lambda frame: tuple(x(frame).shape[1:])


def _item(low: Lowering, node: fx.Node) -> Run:
    source, index = node.args
    if any(isinstance(each, fx.Node) for each in node.all_input_nodes[1:]):
        raise UnsupportedModule("an index that is computed")
    if not low.is_tensor(source):
        if not isinstance(source.meta["value"], torch.Size):  # type: ignore[union-attr]
            raise UnsupportedModule(f"{node}, a part of a list")
        return lambda frame: frame.values[source][index]  # type: ignore[index]
    x, where = low.fetch(source), index if isinstance(index, tuple) else (index,)
    if source in low.batched and where[0] not in (slice(None), Ellipsis):
        raise UnsupportedModule("a choice among the samples of a batch")
    return lambda frame: x(frame)[(slice(None), *where)]


def _reduced(function: Callable[..., Tensor]) -> Lower:
    def lowered(low: Lowering, node: fx.Node) -> Run:
        given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
        low.plain(*given.values())
        if set(given) - {"dim", "keepdim"}:
            raise UnsupportedModule(f"{function.__name__} with {sorted(given)}")
        x, axes = low.fetch(node.args[0]), low.axes(node.args[0], given.get("dim"))
        keep = bool(given.get("keepdim", False))
        return lambda frame: function(x(frame), dim=axes, keepdim=keep)

    return lowered


def _softmax_function(log: bool) -> Lower:
    def lowered(low: Lowering, node: fx.Node) -> Run:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        return softmax(log, low, node.args[0], dim)

    return lowered


def softmax(log: bool, low: Lowering, source: Any, dim: Any) -> Run:
    x, axis = low.fetch(source), low.axis(source, dim)
    function = F.log_softmax if log else F.softmax
    return lambda frame: function(x(frame), dim=axis)


def _joined(low: Lowering, node: fx.Node) -> Run:
    parts: Any = node.args[0]
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(parts, list | tuple) or not all(part in low.batched for part in parts):
        raise UnsupportedModule("a join of other things than the input's")
    axis, fetched = low.axis(parts[0], dim), [low.fetch(part) for part in parts]
    return lambda frame: torch.cat([part(frame) for part in fetched], dim=axis)


def _squeezed(function: Callable[..., Tensor], new: int) -> Lower:
    def lowered(low: Lowering, node: fx.Node) -> Run:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(dim, int):
            raise UnsupportedModule("squeeze of every axis")
        x, axis = low.fetch(node.args[0]), (dim + low.rank(low.tensor(node.args[0])) + new if dim < 0 else dim) + 1
        return lambda frame: function(x(frame), axis)

    return lowered


def _transposed(low: Lowering, node: fx.Node) -> Run:
    low.plain(*node.args[1:])
    x, axes = low.fetch(node.args[0]), low.axes(node.args[0], list(node.args[1:]))
    return lambda frame: x(frame).transpose(*axes)


def _matmul(low: Lowering, node: fx.Node) -> Run:
    left, right = (low.tensor(each) for each in node.args)
    rank = max(low.rank(left), low.rank(right))
    # samples are an axis of both or stand in the rows of the left
    apart = all(low.rank(each) == rank >= 3 for each in (left, right) if each in low.batched)
    if min(low.rank(left), low.rank(right)) < 2 or not (apart or (right not in low.batched and low.rank(left) == rank)):
        raise UnsupportedModule("a product over the samples of a batch")
    a, b = low.fetch(left, rank), low.fetch(right, rank)
    return lambda frame: a(frame) @ b(frame)


def _cast(low: Lowering, node: fx.Node) -> Run:
    x = unchanged(low, node)
    kind: Any = node.target
    return lambda frame: getattr(x(frame), kind)()


def unchanged(low: Lowering, node: fx.Node) -> Run:
    """The node's input, lying as it lies."""
    source = low.tensor(node.args[0])
    if source in low.last:
        low.last.add(node)
    return lambda frame: frame.values[source]


def dropped(low: Lowering, node: fx.Node, p: float, in_place: bool) -> Run:
    """Some of the node's input left out."""
    if in_place:
        low.once(node.args[0])
    x = unchanged(low, node)
    last = node in low.last

    def run(frame: Frame) -> Tensor:
        assert frame.source is not None, "draws without a stream"
        return frame.ops.ops["dropout"](x(frame), p, frame.source, last)

    return run


def _dropout(low: Lowering, node: fx.Node) -> Run:
    names = ("input", "p", "training", "inplace")
    given: dict[str, Any] = (
        {"p": 0.5, "training": True, "inplace": False} | dict(zip(names, node.args, strict=False)) | node.kwargs
    )
    low.plain(given["p"], given["training"])
    if not given["training"] or given["p"] == 0:
        return unchanged(low, node)
    return dropped(low, node, given["p"], given["inplace"])


_ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (
    torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.log, torch.sqrt, torch.abs, torch.neg, torch.square,
    torch.sin, torch.cos, torch.clamp, torch.pow, torch.add, torch.sub, torch.mul, torch.div,
    torch.maximum, torch.minimum,
    F.relu, F.tanh, F.sigmoid, F.gelu, F.silu, F.elu, F.leaky_relu, F.softplus, F.relu6, F.hardswish, F.mish,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
)  # fmt: skip
_ELEMENTWISE_METHODS = (
    "relu", "tanh", "sigmoid", "exp", "log", "sqrt", "abs", "neg", "square", "sin", "cos", "clamp", "pow",
    "add", "sub", "mul", "div",
)  # fmt: skip
_IN_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}

FUNCTIONS: dict[Any, Lower] = {
    **{function: _elementwise(function) for function in _ELEMENTWISE},
    **{changes: _elementwise(function, changes=True) for changes, function in _IN_PLACE.items()},
    **{function: _pool(function) for function in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)},
    F.linear: linear,
    F.dropout: _dropout,
    F.softmax: _softmax_function(log=False),
    F.log_softmax: _softmax_function(log=True),
    torch.softmax: _softmax_function(log=False),
    torch.log_softmax: _softmax_function(log=True),
    torch.flatten: _flatten,
    torch.reshape: _reshape,
    torch.mean: _reduced(torch.mean),
    torch.sum: _reduced(torch.sum),
    torch.cat: _joined,
    torch.matmul: _matmul,
    torch.bmm: _matmul,
    torch.squeeze: _squeezed(torch.squeeze, new=0),
    torch.unsqueeze: _squeezed(torch.unsqueeze, new=1),
    torch.transpose: _transposed,
    operator.matmul: _matmul,
    operator.getitem: _item,
    builtins.getattr: _attribute,
}
METHODS: dict[Any, Lower] = {
    **{name: _elementwise(getattr(Tensor, name)) for name in _ELEMENTWISE_METHODS},
    **dict.fromkeys(("long", "float", "double"), _cast),
    "contiguous": unchanged,
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "size": _size,
    "mean": _reduced(torch.mean),
    "sum": _reduced(torch.sum),
    "softmax": _softmax_function(log=False),
    "log_softmax": _softmax_function(log=True),
    "matmul": _matmul,
    "squeeze": _squeezed(torch.squeeze, new=0),
    "unsqueeze": _squeezed(torch.unsqueeze, new=1),
    "transpose": _transposed,
}
