"""Match operations of a captured graph that a device has fused kernels for.

A value of a graph is (C, B, K, H, W) for images, whatever its strides. Kernels take and return
images channels-last, (C, B, H, W, K): what they get is a view with the axes moved, and copying it
costs nothing where another kernel made it. All chains are matched before anything runs.

A kernel that writes its parameters' gradients where they are wanted spares autograd a copy; it may
do so only if nothing else in the graph uses these parameters, whose gradients autograd would have
to add.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from stratafl.engine import kernels
from stratafl.engine.compiler.batching_rules import bind_arguments, is_pointwise
from stratafl.engine.compiler.graph import CapturedGraph, mutated_arguments, op_name, storage_id
from stratafl.engine.compiler.values import Context, PerClient
from stratafl.engine.kernels import reference

Call = Callable[[Callable[..., Tensor], Tensor, list[Tensor | None], Context], Any]
"""(kernel, first input, parameters, context) -> the value of the chain's last operation."""

KEEPS_IMAGES = {
    "conv2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "linear", "dropout", "dropout_",
    "flatten", "view", "reshape", "_unsafe_view", "mean", "sum", "cat", "matmul", "bmm", "transpose", "permute",
    "squeeze", "unsqueeze", "select", "slice", "softmax", "log_softmax", "layer_norm", "embedding", "contiguous",
    "clone", "detach", "prelu", "expand", "t", "unbind", "split", "chunk", operator.getitem,
}  # fmt: skip
"""What is right and fast for channels-last images, besides what treats numbers one by one. Of some
others, such as instance norm of one sample, the library's own gradients are wrong then."""
MAX_VOCABULARY = 4096
"""Entries of an embedding table up to which a kernel is faster: its gradient is a product with all
of them."""
IMAGE = 4
"""Rank of a batch of images."""


class FusedOp(NamedTuple):
    """One kernel in the place of a chain of captured operations."""

    kernel: str
    """Name in the device's table."""
    nodes: tuple[fx.Node, ...]
    """The chain, first to last, whose value is that of the last."""
    source: fx.Node
    """The first input."""
    parameters: tuple[fx.Node | None, ...]
    """The trained parameters it uses."""
    call: Call
    names: tuple[str | None, ...] = ()
    """Of the parameters."""
    shared: bool = False
    """Whether something else uses one of them, too."""
    on_images: bool = False

    def run(self, context: Context, source: Any, parameters: list[Any]) -> Any:
        values = [None if each is None else each.t for each in parameters]
        return self.call(context.kernel(self.kernel, self.names, self.shared), source.t, values, context)


class Matcher:
    """What patterns ask of a graph."""

    def __init__(self, graph: CapturedGraph, trained: Collection[str], filters: Collection[str] | None):
        self.graph, self._trained, self._filters = graph, set(trained), filters

    def trained(self, *nodes: Any) -> bool:
        """Whether these are trained parameters, or None."""
        return all(
            each is None
            or (
                isinstance(each, fx.Node)
                and self.graph.given.get(each) in self._trained
                and each.meta["val"].dtype.is_floating_point
            )
            for each in nodes
        )

    def is_filter(self, node: fx.Node) -> bool:
        """Whether a row may have this parameter channels-last."""
        return self._filters is None or self.graph.given[node] in self._filters

    def of_client(self, node: Any, *ranks: int) -> bool:
        """Whether every client has a value of its own of such a rank."""
        return isinstance(node, fx.Node) and node in self.graph.stacked and node.meta["val"].dim() in ranks

    def only_user(self, node: fx.Node | None, *names: str) -> fx.Node | None:
        """The operation that alone uses a value, if it is one of these."""
        users = [] if node is None else list(node.users)
        return users[0] if len(users) == 1 and op_name(users[0]) in names else None


def _relu(matcher: Matcher, node: fx.Node) -> tuple[fx.Node, ...]:
    """The node, and the ReLU that alone uses it."""
    relu = matcher.only_user(node, "relu", "relu_")
    return (node,) if relu is None else (node, relu)


def fuse_linear(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    given = bind_arguments(node.target, node.args, node.kwargs)
    x, w, b = given["input"], given["weight"], given["bias"]
    if not matcher.trained(w, b) or not matcher.of_client(x, *range(2, 9)) or w.meta["val"].dim() != 2:
        return None
    chain = _relu(matcher, node)

    def call(kernel: Callable[..., Tensor], x: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        y_CBO = kernel(x.flatten(1, -2), *parameters, len(chain) > 1, context.compute)
        return PerClient(y_CBO.view(*x.shape[:-1], -1))

    return FusedOp("linear", chain, x, (w, b), call)


def _square(sizes: list[int]) -> int | None:
    return sizes[0] if len(set(sizes)) == 1 else None


def fuse_conv2d(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """conv2d, or conv2d -> relu -> 2x2 max_pool2d."""
    given = bind_arguments(node.target, node.args, node.kwargs)
    x, w, b = given["input"], given["weight"], given["bias"]
    if not matcher.trained(w, b) or not matcher.of_client(x, IMAGE) or not matcher.is_filter(w):
        return None
    stride, padding = _square(given["stride"]), _padding(given["padding"], w.meta["val"].shape[2:])
    if stride is None or padding is None or set(given["dilation"]) != {1} or given["groups"] != 1:
        return None
    relu = matcher.only_user(node, "relu", "relu_")
    pool = matcher.only_user(relu, "max_pool2d")
    halves = stride == 1 and pool is not None and _pool_sizes(pool) == ([2, 2], [2, 2], [0, 0])
    name, chain, options = ("conv2d", (node,), (stride, padding))
    if halves and relu is not None and pool is not None:
        name, chain, options = ("conv2d_relu_pool", (node, relu, pool), (padding,))  # type: ignore[assignment]

    def call(kernel: Callable[..., Tensor], x: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        y_CBHWK = kernel(x.movedim(2, -1), *parameters, *options, context.compute)
        return PerClient(y_CBHWK.movedim(-1, 2))

    return FusedOp(name, chain, x, (w, b), call, on_images=True)


def _padding(padding: Any, size: Any) -> int | None:
    """Places added on every side; None if not as many on all."""
    if padding == "valid":
        return 0
    if padding == "same":
        return size[0] // 2 if size[0] == size[1] and size[0] % 2 else None
    return _square(padding)


def _pool_sizes(node: fx.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Window, stride and padding of a max pool without dilation and rounding up."""
    given = bind_arguments(node.target, node.args, node.kwargs)
    if given["ceil_mode"] or set(given["dilation"]) != {1}:
        return None
    window, padding = ([*each] * (2 // len(each)) for each in (given["kernel_size"], given["padding"]))
    return window, [*(given["stride"] or window)] * (2 // len(given["stride"] or window)), padding


def fuse_max_pool2d(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    x, sizes = node.args[0], _pool_sizes(node)
    if not matcher.of_client(x, IMAGE) or sizes is None or sizes[0][0] * sizes[0][1] > reference.MAX_POOL_WINDOW:
        return None
    window, stride, padding = (tuple(each) for each in sizes)

    def call(kernel: Callable[..., Tensor], x: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        return PerClient(kernel(x.movedim(2, -1), window, stride, padding).movedim(-1, 2))

    return FusedOp("max_pool2d", (node,), x, (), call, on_images=True)  # type: ignore[arg-type]


def fuse_group_norm(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    given = bind_arguments(node.target, node.args, node.kwargs)
    x, w, b, groups, eps = given["input"], given["weight"], given["bias"], given["num_groups"], given["eps"]
    if w is None or b is None or not matcher.trained(w, b) or not matcher.of_client(x, IMAGE):
        return None
    chain = _relu(matcher, node)

    def call(kernel: Callable[..., Tensor], x: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        return PerClient(kernel(x.movedim(2, -1), groups, *parameters, eps, len(chain) > 1).movedim(-1, 2))

    return FusedOp("group_norm", chain, x, (w, b), call, on_images=True)


def fuse_embedding(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    given = bind_arguments(node.target, node.args, node.kwargs)
    w, codes = given["weight"], given["indices"]
    if not matcher.trained(w) or not matcher.of_client(codes, *range(1, 9)):
        return None
    plain = given["padding_idx"] < 0 and not given["scale_grad_by_freq"] and not given["sparse"]
    if not plain or len(w.meta["val"]) > MAX_VOCABULARY:
        return None

    def call(kernel: Callable[..., Tensor], codes: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        y_CBTE = kernel(codes.reshape(*codes.shape[:2], -1), *parameters, context.compute)
        return PerClient(y_CBTE.view(*codes.shape, -1))

    return FusedOp("embedding", (node,), codes, (w,), call)


PARTS_OF_LSTM_LAYER = 4


def fuse_lstm(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """One direction from a state of zeros, of which only the outputs at each place are used."""
    if node.target._overloadname != "input":  # type: ignore[union-attr]
        return None
    given = bind_arguments(node.target, node.args, node.kwargs)
    x, weights, states = given["input"], given["params"], given["hx"]
    plain = given["has_biases"] and not given["bidirectional"] and not (given["dropout"] and given["train"])
    projects = len(weights) != PARTS_OF_LSTM_LAYER * given["num_layers"]
    if not plain or projects or not matcher.trained(*weights) or not matcher.of_client(x, 3):
        return None
    used = {each.args[1] for each in node.users if each.users}
    if used - {0} or any(op_name(each) not in ("zeros", "new_zeros", "zeros_like") for each in states):
        return None
    first = given["batch_first"]

    def call(kernel: Callable[..., Tensor], x: Tensor, parameters: list[Tensor | None], context: Context) -> Any:
        layers = [
            tuple(parameters[start : start + PARTS_OF_LSTM_LAYER])
            for start in range(0, len(parameters), PARTS_OF_LSTM_LAYER)
        ]
        y_CBTO = kernel(x if first else x.transpose(1, 2), layers, context.compute)
        return PerClient(y_CBTO if first else y_CBTO.transpose(1, 2)), None, None

    return FusedOp("lstm", (node,), x, tuple(weights), call)


Pattern = Callable[[Matcher, fx.Node], FusedOp | None]
PATTERNS: dict[str, Pattern] = {
    "conv2d": fuse_conv2d,
    "linear": fuse_linear,
    "max_pool2d": fuse_max_pool2d,
    "group_norm": fuse_group_norm,
    "embedding": fuse_embedding,
    "lstm": fuse_lstm,
}


def fuse(
    graph: CapturedGraph, trained: Collection[str], table: kernels.Backend, filters: Collection[str] | None
) -> list[FusedOp]:
    """The chains that kernels take the place of; `filters`: the parameters that may lie
    channels-last, None for all."""
    matcher = Matcher(graph, trained, filters)
    fused: list[FusedOp] = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        pattern = PATTERNS.get(op_name(node)) if node in graph.stacked and node not in taken else None
        op = None if pattern is None else pattern(matcher, node)
        # a CPU's library has an LSTM as one kernel itself
        is_own = op is not None and (op.kernel != "lstm" or table.ops["lstm"] is not reference.lstm)
        if op is not None and is_own and not _is_overwritten(op.nodes[-1]):
            names = tuple(None if each is None else graph.given[each] for each in op.parameters)
            shared = any(each is not None and len(each.users) > 1 for each in op.parameters)
            fused.append(op._replace(names=names, shared=shared))
            taken |= set(op.nodes)
    others = {op_name(node) for node in graph.nodes if node not in taken and not is_pointwise_node(node)}
    keeps = others <= KEEPS_IMAGES and any(op.kernel.startswith("conv2d") for op in fused)
    keeps = keeps and not any(_is_seen_elsewhere(each) for node in graph.nodes for each in mutated_arguments(node))
    return [op for op in fused if keeps or not op.on_images]


def is_pointwise_node(node: fx.Node) -> bool:
    return hasattr(node.target, "_opname") and is_pointwise(node.target)


def _is_seen_elsewhere(node: fx.Node) -> bool:
    """Whether what is written to this value may be seen in another, of which it is a view: of
    images that lie otherwise it may be a copy."""
    sources = [each for each in node.all_input_nodes if storage_id(each) == storage_id(node)]
    in_place = [each for each in sources if each in mutated_arguments(node)]
    return len(node.users) > 1 or sources != in_place or any(_is_seen_elsewhere(each) for each in in_place)


def _is_overwritten(node: fx.Node) -> bool:
    """Whether a value is changed in place that a kernel may need on the way back."""
    return any(node in mutated_arguments(user) and not overwrites_alone(user) for user in node.users)


def overwrites_alone(node: fx.Node) -> bool:
    """Whether an operation changes in place what nobody else reads, so that it may as well make a
    new value."""
    target: Any = node.args[0] if node.args else None
    return isinstance(target, fx.Node) and len(target.users) == 1 and out_of_place(node) is not None


def out_of_place(node: fx.Node) -> Any:
    """The same operation without writing to its input, if there is one."""
    return functional_twin(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


def functional_twin(op: Any) -> Any:
    """An operation in place as one that makes a new value, if there is one."""
    if op._namespace != "aten" or not op._opname.endswith("_") or op._opname.endswith("__"):
        return None
    return getattr(getattr(torch.ops.aten, op._opname.removesuffix("_"), None), op._overloadname, None)
