"""The operations of a module that have a client-batched form, and that form.

Each function here is given a node of the traced module and returns what to do when the program
runs. Operations that see one sample at a time are taken; those that mix the samples of a batch are
refused in `lowering`.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch import Tensor, fx, nn

from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.kernels import reference
from stratafl.engine.kernels.reference import Pair
from stratafl.engine.trace.functions import (
    FUNCTIONS,
    METHODS,
    Lower,
    dropped,
    flattened,
    is_relu,
    on_images,
    softmax,
    unchanged,
)
from stratafl.engine.trace.lowering import IMAGE, Frame, Lowering, Run
from stratafl.models.networks import Recurrent


def lower(low: Lowering, node: fx.Node) -> Run:
    """What to do for a node."""
    if node in low.fused:
        done = low.fused[node]
        if done in low.last:
            low.last.add(node)
        return lambda frame: frame.values[done]
    if node.op == "get_attr":
        return _constant(low, node)
    if node.op == "call_module":
        module = low.module(node)
        if "forward" in vars(module):
            raise UnsupportedModule(f"layer {type(module).__name__} with another forward")
        if type(module) in MODULES:
            return MODULES[type(module)](low, node)
        raise UnsupportedModule(f"layer {type(module).__name__}")
    table: dict[Any, Lower] = METHODS if node.op == "call_method" else FUNCTIONS
    if node.target in table:
        return table[node.target](low, node)
    raise UnsupportedModule(f"operation {getattr(node.target, '__name__', node.target)}")


def _constant(low: Lowering, node: fx.Node) -> Run:
    value = operator.attrgetter(str(node.target))(low.root)
    if not isinstance(value, Tensor):
        raise UnsupportedModule(f"attribute {node.target}")
    if str(node.target).startswith("_tensor_constant"):
        return lambda frame: value.expand(len(next(iter(frame.values.values()))), *value.shape)
    return low.parameter(value)


def _linear(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.Linear)
    x, own, relu = low.fetch(node.args[0]), low.weights(layer.weight, layer.bias), _with_relu(low, node)

    def run(frame: Frame) -> Tensor:
        given = x(frame)
        y = own.call(frame, "linear", given.flatten(1, -2), *own.of(frame), relu, frame.compute)
        return y.view(*given.shape[:-1], -1)

    return run


def _with_relu(low: Lowering, node: fx.Node) -> bool:
    """Whether a ReLU is all that follows, which then is done with the node."""
    after = low.sole_user(node)
    if after is None or not is_relu(low, after):
        return False
    low.fused[after] = node
    return True


def _conv2d(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.Conv2d)
    if layer.padding_mode != "zeros" or low.rank(node) != IMAGE:
        raise UnsupportedModule(f"convolution with padding mode {layer.padding_mode!r} of rank {low.rank(node)}")
    x, own = low.fetch(node.args[0], last=True), low.weights(layer.weight, layer.bias)
    stride, dilation, groups = _pair(layer.stride), _pair(layer.dilation), layer.groups
    padding = _padding(layer)
    low.last.add(node)
    if dilation != (1, 1) or groups != 1 or stride[0] != stride[1] or padding[0] != padding[1]:
        # kernels of our own do not know these
        return lambda frame: reference.conv2d(
            x(frame), *own.of(frame), stride, padding, frame.compute, dilation, groups
        )
    if own.w is not None:
        low.filters.add(own.w)
    rectified = low.sole_user(node)
    if stride == (1, 1) and rectified is not None and is_relu(low, rectified):
        pooled = low.sole_user(rectified)
        if pooled is not None and _is_halving(low, pooled):
            low.fused |= {rectified: node, pooled: node}
            op, plan = "conv2d_relu_pool", (padding[0],)
            return lambda frame: own.call(frame, op, x(frame), *own.of(frame), *plan, frame.compute)
    square = stride[0], padding[0]
    return lambda frame: own.call(frame, "conv2d", x(frame), *own.of(frame), *square, frame.compute)


def _padding(layer: nn.Conv2d) -> Pair:
    if layer.padding == "valid":
        return 0, 0
    if layer.padding == "same":
        reach = [d * (k - 1) for d, k in zip(_pair(layer.dilation), _pair(layer.kernel_size), strict=True)]
        if any(r % 2 for r in reach):
            raise UnsupportedModule("convolution whose padding is uneven")
        return reach[0] // 2, reach[1] // 2
    return _pair(layer.padding)


def _pair(given: Any) -> Pair:
    return (given, given) if isinstance(given, int) else (int(given[0]), int(given[1]))


def _is_halving(low: Lowering, node: fx.Node) -> bool:
    if node.op != "call_module" or type(low.module(node)) is not nn.MaxPool2d:
        return False
    pool = low.module(node)
    assert isinstance(pool, nn.MaxPool2d)
    shape = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return [_pair(part) for part in shape] == [(2, 2), (2, 2), (0, 0), (1, 1)] and not (
        pool.ceil_mode or pool.return_indices
    )


def _group_norm(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.GroupNorm)
    if low.rank(node) != IMAGE:
        raise UnsupportedModule(f"group norm of rank {low.rank(node)}")
    x, own = low.fetch(node.args[0], last=True), low.weights(layer.weight, layer.bias)
    relu = _with_relu(low, node)
    low.last.add(node)
    if not layer.affine:
        # a kernel of our own has scale and shift
        return lambda frame: reference.group_norm(x(frame), layer.num_groups, None, None, layer.eps, relu)
    return lambda frame: own.call(frame, "group_norm", x(frame), layer.num_groups, *own.of(frame), layer.eps, relu)


def _layer_norm(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.LayerNorm)
    if low.rank(node) <= len(layer.normalized_shape):
        raise UnsupportedModule("layer norm over the samples of a batch")
    x, own = low.fetch(node.args[0]), low.weights(layer.weight, layer.bias)
    shape = tuple(layer.normalized_shape)
    return lambda frame: own.call(frame, "layer_norm", x(frame), shape, *own.of(frame), layer.eps)


def _embedding(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.Embedding)
    if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise UnsupportedModule("embedding with options")
    codes, own = low.fetch(node.args[0]), low.weights(layer.weight, None)

    def run(frame: Frame) -> Tensor:
        given = codes(frame)
        y_CBTE = own.call(frame, "embedding", given.view(*given.shape[:2], -1), own.of(frame)[0], frame.compute)
        return y_CBTE.view(*given.shape, -1)

    return run


def _recurrent(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, Recurrent)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    x = low.fetch(node.args[0])
    weights = [
        [low.parameter(getattr(layer, f"{name}_l{number}")) for name in names] for number in range(layer.num_layers)
    ]

    def run(frame: Frame) -> Tensor:
        layers = [tuple(weight(frame) for weight in each) for each in weights]
        return frame.ops.ops["lstm"](x(frame), layers, frame.compute)

    return run


def _dropout(low: Lowering, node: fx.Node) -> Run:
    layer: Any = low.module(node)
    if not layer.training or layer.p == 0:
        return unchanged(low, node)
    if type(layer) is not nn.Dropout:
        raise UnsupportedModule("dropout of whole channels")
    return dropped(low, node, layer.p, layer.inplace)


def _flatten_layer(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.Flatten)
    return flattened(low, node.args[0], layer.start_dim, layer.end_dim)


def _unary_layer(low: Lowering, node: fx.Node) -> Run:
    """A layer without weights that treats each number alone."""
    layer = copy.copy(low.module(node))
    if getattr(layer, "inplace", False):
        low.once(node.args[0])
        layer.inplace = False  # type: ignore[assignment]
    source = unchanged(low, node)
    return lambda frame: layer(source(frame))


def _image_layer(low: Lowering, node: fx.Node) -> Run:
    """A layer without weights that treats each image alone."""
    layer = low.module(node)
    if getattr(layer, "return_indices", False):
        raise UnsupportedModule("indices of a pool")
    return on_images(low, node, layer)


def _max_pool(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    assert isinstance(layer, nn.MaxPool2d)
    kernel, stride, padding = (_pair(each) for each in (layer.kernel_size, layer.stride, layer.padding))
    plain = _pair(layer.dilation) == (1, 1) and not (layer.ceil_mode or layer.return_indices)
    if not plain or low.rank(node) != IMAGE or kernel[0] * kernel[1] > reference.MAX_POOL_WINDOW:
        return _image_layer(low, node)
    x = low.fetch(node.args[0], last=True)
    low.last.add(node)
    return lambda frame: frame.ops.ops["max_pool2d"](x(frame), kernel, stride, padding)


def _softmax_layer(low: Lowering, node: fx.Node) -> Run:
    layer = low.module(node)
    return softmax(type(layer) is nn.LogSoftmax, low, node.args[0], layer.dim)


_UNARY = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.ReLU6,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.Softsign, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
_POOLS = (nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)

MODULES: dict[type[nn.Module], Lower] = {
    **dict.fromkeys(_UNARY, _unary_layer),
    **dict.fromkeys(_POOLS, _image_layer),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout), _dropout),
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.MaxPool2d: _max_pool,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.Flatten: _flatten_layer,
    nn.Softmax: _softmax_layer,
    nn.LogSoftmax: _softmax_layer,
    Recurrent: _recurrent,
}
