"""Fusion: replace operations of a captured graph, and chains of them, by kernels of a backend.

Images are (C, B, K, H, W) to the graph, whatever their strides. Kernels take and return
channels-last images (C, B, H, W, K): they get a view with moved dimensions, which is contiguous if
another kernel made the image.

A kernel that writes the gradients of its parameters to their place saves autograd a copy. It may do
so only if no other operation uses these parameters, since autograd would have to add the gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from stratafl.engine import kernels
from stratafl.engine.compiler.batching_rules import is_pointwise
from stratafl.engine.compiler.graph import CapturedGraph, mutated_arguments, node_arguments, op_name, storage_id
from stratafl.engine.compiler.values import Context, PerClient, wrap
from stratafl.engine.kernels import reference
from stratafl.engine.precision import Precision

KEEPS_IMAGES = {
    "conv2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "linear", "dropout", "dropout_",
    "flatten", "view", "reshape", "_unsafe_view", "mean", "sum", "cat", "matmul", "bmm", "transpose", "permute",
    "squeeze", "unsqueeze", "select", "slice", "softmax", "log_softmax", "layer_norm", "embedding", "contiguous",
    "clone", "detach", "prelu", "expand", "t", "unbind", "split", "chunk", operator.getitem,
}  # fmt: skip
"""Operations besides pointwise ones that are right and fast for channels-last images. Of some
others, such as instance norm of one sample, torch's own gradients are wrong for such images."""
MAX_VOCABULARY = 4096
"""Entries of an embedding table up to which the kernel is faster than a lookup: its gradient is a
product with the whole table."""
IMAGE_RANK = 4
"""Rank of a batch of images."""
LSTM_LAYER_PARAMETERS = 4

Kernel = Callable[..., Any]


class FusedOp(NamedTuple):
    """Kernel in place of a chain of captured operations."""

    kernel: str
    """Name in `Backend.ops`."""
    nodes: tuple[fx.Node, ...]
    """The chain, first to last; the kernel's result is the value of the last."""
    source: fx.Node
    """First operand of the chain."""
    parameters: tuple[fx.Node | None, ...]
    """Trained parameters that the chain uses."""
    call: Callable[[Kernel, Tensor, list[Tensor | None], Precision], Any]
    """(kernel, source, parameters, precision) -> stacked value of the last node."""
    names: tuple[str | None, ...] = ()
    """Names of the parameters."""
    shared: bool = False
    """Whether other operations use one of the parameters, too."""
    on_images: bool = False
    """Whether source and result are images, which the kernel takes and returns channels-last."""

    def run(self, context: Context, source: PerClient, parameters: list[PerClient | None]) -> Any:
        tensors = [None if parameter is None else parameter.tensor for parameter in parameters]
        kernel = context.kernel(self.kernel, self.names, self.shared)
        if self.on_images:
            return PerClient(self.call(kernel, source.tensor.movedim(2, -1), tensors, context.precision).movedim(-1, 2))
        return wrap(self.call(kernel, source.tensor, tensors, context.precision))


class Matcher:
    """Conditions that patterns check in a graph."""

    def __init__(self, graph: CapturedGraph, trained: Collection[str], filters: Collection[str] | None):
        self.graph, self._trained, self._filters = graph, set(trained), filters

    def are_trained(self, *nodes: Any) -> bool:
        """Whether all nodes are trained floating-point parameters, or None."""
        return all(
            node is None
            or (
                isinstance(node, fx.Node)
                and self.graph.parameters.get(node) in self._trained
                and node.meta["val"].dtype.is_floating_point
            )
            for node in nodes
        )

    def is_filter(self, node: fx.Node) -> bool:
        """Whether a parameter may be channels-last in the rows."""
        return self._filters is None or self.graph.parameters[node] in self._filters

    def is_per_client(self, node: Any, *ranks: int) -> bool:
        """Whether a node's value differs by client and has one of these ranks."""
        return isinstance(node, fx.Node) and node in self.graph.per_client and node.meta["val"].dim() in ranks

    def only_user(self, node: fx.Node | None, *names: str) -> fx.Node | None:
        """The only user of a value, if it is one of the named operations."""
        users = [] if node is None else list(node.users)
        return users[0] if len(users) == 1 and op_name(users[0]) in names else None

    def with_relu(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The node, followed by the ReLU that is its only user."""
        relu = self.only_user(node, "relu", "relu_")
        return (node,) if relu is None else (node, relu)


def fuse_linear(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """linear, or linear -> relu."""
    arguments = node_arguments(node)
    x, w, b = arguments["input"], arguments["weight"], arguments["bias"]
    if not matcher.are_trained(w, b) or not matcher.is_per_client(x, *range(2, 9)) or w.meta["val"].dim() != 2:
        return None
    chain = matcher.with_relu(node)

    return FusedOp(
        "linear", chain, x, (w, b), lambda kernel, x, parameters, precision:
            kernel(x.flatten(1, -2), *parameters, len(chain) > 1, precision).view(*x.shape[:-1], -1),
    )  # fmt: skip


def fuse_conv2d(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """conv2d, or conv2d -> relu -> 2x2 max_pool2d."""
    arguments = node_arguments(node)
    x, w, b = arguments["input"], arguments["weight"], arguments["bias"]
    if not matcher.are_trained(w, b) or not matcher.is_per_client(x, IMAGE_RANK) or not matcher.is_filter(w):
        return None
    stride, padding = _square(arguments["stride"]), _padding(arguments["padding"], w.meta["val"].shape[2:])
    if stride is None or padding is None or set(arguments["dilation"]) != {1} or arguments["groups"] != 1:
        return None
    name, chain, options = "conv2d", (node,), [stride, padding]
    relu = matcher.only_user(node, "relu", "relu_")
    pool = matcher.only_user(relu, "max_pool2d")
    if stride == 1 and relu and pool and _pool_sizes(pool) == ([2, 2], [2, 2], [0, 0]):
        name, chain, options = "conv2d_relu_pool", (node, relu, pool), [padding]  # type: ignore[assignment]
    return FusedOp(
        name, chain, x, (w, b), lambda kernel, x, parameters, precision: kernel(x, *parameters, *options, precision),
        on_images=True,
    )  # fmt: skip


def _square(sizes: list[int]) -> int | None:
    return sizes[0] if len(set(sizes)) == 1 else None


def _padding(padding: Any, size: Any) -> int | None:
    """Padding of an image on every side; None if the sides differ."""
    if padding == "valid":
        return 0
    if padding == "same":
        return size[0] // 2 if size[0] == size[1] and size[0] % 2 else None
    return _square(padding)


def _pool_sizes(node: fx.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Window, stride and padding of a max pool; None if it has a dilation or rounds up."""
    arguments = node_arguments(node)
    if arguments["ceil_mode"] or set(arguments["dilation"]) != {1}:
        return None
    sizes = arguments["kernel_size"], arguments["stride"] or arguments["kernel_size"], arguments["padding"]
    window, stride, padding = ([*size] * (2 // len(size)) for size in sizes)
    return window, stride, padding


def fuse_max_pool2d(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    x, sizes = node.args[0], _pool_sizes(node)
    if not matcher.is_per_client(x, IMAGE_RANK) or sizes is None:
        return None
    window, stride, padding = (tuple(size) for size in sizes)
    if window[0] * window[1] > reference.MAX_POOL_WINDOW:
        return None

    call = lambda kernel, x, *_: kernel(x, window, stride, padding)  # noqa: E731
    return FusedOp("max_pool2d", (node,), x, (), call, on_images=True)  # type: ignore[arg-type]


def fuse_group_norm(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """group_norm, or group_norm -> relu."""
    arguments = node_arguments(node)
    x, w, b, groups, eps = (arguments[name] for name in ("input", "weight", "bias", "num_groups", "eps"))
    if w is None or b is None or not matcher.are_trained(w, b) or not matcher.is_per_client(x, IMAGE_RANK):
        return None
    chain = matcher.with_relu(node)

    return FusedOp(
        "group_norm", chain, x, (w, b),
        lambda kernel, x, parameters, _: kernel(x, groups, *parameters, eps, len(chain) > 1), on_images=True,
    )  # fmt: skip


def fuse_embedding(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    arguments = node_arguments(node)
    w, codes = arguments["weight"], arguments["indices"]
    if not matcher.are_trained(w) or not matcher.is_per_client(codes, *range(1, 9)):
        return None
    special = arguments["padding_idx"] >= 0 or arguments["scale_grad_by_freq"] or arguments["sparse"]
    if special or len(w.meta["val"]) > MAX_VOCABULARY:
        return None

    return FusedOp(
        "embedding", (node,), codes, (w,), lambda kernel, codes, parameters, precision:
            kernel(codes.reshape(*codes.shape[:2], -1), *parameters, precision).view(*codes.shape, -1),
    )  # fmt: skip


def fuse_lstm(matcher: Matcher, node: fx.Node) -> FusedOp | None:
    """LSTM of one direction that begins with zeros, if only its outputs are used, not its final
    state."""
    if node.target._overloadname != "input":  # type: ignore[union-attr]
        return None
    arguments = node_arguments(node)
    x, weights, states, batch_first = (arguments[name] for name in ("input", "params", "hx", "batch_first"))
    drops = arguments["dropout"] and arguments["train"]
    if not arguments["has_biases"] or arguments["bidirectional"] or drops:
        return None
    projects = len(weights) != LSTM_LAYER_PARAMETERS * arguments["num_layers"]
    if projects or not matcher.are_trained(*weights) or not matcher.is_per_client(x, 3):
        return None
    used_results = {user.args[1] for user in node.users if user.users}
    if used_results - {0} or any(op_name(state) not in ("zeros", "new_zeros", "zeros_like") for state in states):
        return None

    def call(kernel: Kernel, x: Tensor, parameters: list[Tensor | None], precision: Precision) -> Any:
        starts = range(0, len(parameters), LSTM_LAYER_PARAMETERS)
        layers = [tuple(parameters[start : start + LSTM_LAYER_PARAMETERS]) for start in starts]
        y_CBTO = kernel(x if batch_first else x.transpose(1, 2), layers, precision)
        return y_CBTO if batch_first else y_CBTO.transpose(1, 2), None, None

    return FusedOp("lstm", (node,), x, tuple(weights), call)


PATTERNS: dict[str, Callable[[Matcher, fx.Node], FusedOp | None]] = {
    "conv2d": fuse_conv2d,
    "linear": fuse_linear,
    "max_pool2d": fuse_max_pool2d,
    "group_norm": fuse_group_norm,
    "embedding": fuse_embedding,
    "lstm": fuse_lstm,
}
"""Patterns by the first operation of the chain."""


def fuse(
    graph: CapturedGraph, trained: Collection[str], backend: kernels.Backend, filters: Collection[str] | None
) -> list[FusedOp]:
    """Chains of a graph that kernels replace; `filters`: see `BatchedProgram`."""
    matcher = Matcher(graph, trained, filters)
    fused: list[FusedOp] = []
    replaced: set[fx.Node] = set()
    for node in graph.nodes:
        pattern = PATTERNS.get(op_name(node)) if node in graph.per_client and node not in replaced else None
        op = None if pattern is None else pattern(matcher, node)
        if op is None or _is_overwritten(op.nodes[-1]):
            continue
        if op.kernel == "lstm" and backend.ops["lstm"] is reference.lstm:
            continue  # a CPU has a fused LSTM of its own, see `recurrent_rules`
        names = tuple(None if parameter is None else graph.parameters[parameter] for parameter in op.parameters)
        shared = any(parameter is not None and len(parameter.users) > 1 for parameter in op.parameters)
        fused.append(op._replace(names=names, shared=shared))
        replaced |= set(op.nodes)
    others = {op_name(node) for node in graph.nodes if node not in replaced and not is_pointwise(node.target)}
    keeps_images = others <= KEEPS_IMAGES and any(op.kernel.startswith("conv2d") for op in fused)
    mutated = (target for node in graph.nodes for target in mutated_arguments(node))
    if keeps_images and not any(_is_visible_in_view(target) for target in mutated):
        return fused
    return [op for op in fused if not op.on_images]


def _is_visible_in_view(node: fx.Node) -> bool:
    """Whether a write to this value may be visible in another that shares its memory. With other
    strides of images, what was a view may be a copy."""
    sources = [source for source in node.all_input_nodes if storage_id(source) == storage_id(node)]
    in_place = [source for source in sources if source in mutated_arguments(node)]
    return len(node.users) > 1 or sources != in_place or any(_is_visible_in_view(source) for source in in_place)


def _is_overwritten(node: fx.Node) -> bool:
    """Whether a value is changed in place that the backward pass of a kernel may need."""
    return any(node in mutated_arguments(user) and not overwrites_alone(user) for user in node.users)


def overwrites_alone(node: fx.Node) -> bool:
    """Whether an operation in place can return a new value instead, since nothing else uses the
    old one."""
    target: Any = node.args[0] if node.args else None
    return isinstance(target, fx.Node) and len(target.users) == 1 and functional_twin(node.target) is not None


def functional_twin(op: Any) -> Any:
    """Operation that returns a new value where `op` works in place; None if there is none."""
    if not isinstance(op, torch._ops.OpOverload) or op._namespace != "aten":
        return None
    if not op._opname.endswith("_") or op._opname.endswith("__"):
        return None
    return getattr(getattr(torch.ops.aten, op._opname[:-1], None), op._overloadname, None)
