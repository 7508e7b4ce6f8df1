"""Batching rules: how operations of a captured graph are computed for all clients at once.

The default is `torch.func.vmap` of the single operation. An operation has a rule of its own only
for a reason, which is stated in `BATCHING_RULES`. Parameters of a rule are those of the ATen
operation, and `context.result_shape` is the shape of one client's result.

Shape suffixes: C clients, M all dimensions of a client's input but the last, I and O features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from stratafl.engine import kernels, precision
from stratafl.engine.compiler.graph import RANDOM_OPS, bind_arguments
from stratafl.engine.compiler.values import (
    BatchingRule,
    Context,
    Operand,
    PerClient,
    align_rank,
    is_channels_last,
    rank_of,
    tensor_arguments,
    wrap,
)
from stratafl.engine.random_streams import math_attention, multinomial

# -- pointwise operations --------------------------------------------------------------------------


POINTWISE = {
    "copy_", "fill", "fill_", "masked_fill", "masked_fill_", "where", "relu6", "relu6_", "selu", "selu_",
    "square", "square_", "softshrink", "hardshrink", "threshold", "threshold_", "log_sigmoid", "clip", "clip_", "clamp",
    "clamp_", "rsub", "logit", "true_divide", "divide", "multiply", "subtract", "floor_divide", "float_power",
    "hardtanh", "hardtanh_", "hardswish", "hardsigmoid", "mish", "silu", "celu", "celu_", "elu", "elu_", "leaky_relu",
    "leaky_relu_", "softplus", "gelu", "logaddexp", "heaviside", "isinf", "isfinite", "isclose", "rad2deg", "negative",
    "absolute", "arctan", "special_expit", "fix", "frac", "lerp", "xlogy", "nan_to_num", "sinc", "special_xlog1py",
    "addcmul", "addcdiv", "fmod", "remainder", "greater", "less", "greater_equal", "less_equal", "not_equal",
    "logical_and", "logical_or", "logical_not", "positive", "real", "imag", "conj", "resolve_conj", "resolve_neg",
    "__and__", "__or__", "__xor__", "__iand__", "__ior__", "bitwise_and", "bitwise_or", "bitwise_not", "polar",
    "complex",
}  # fmt: skip
"""Pointwise operations that some release of torch does not tag as pointwise."""


def is_pointwise(op: Any) -> bool:
    """Whether every element of the result depends only on the operands' elements at its place."""
    return isinstance(op, torch._ops.OpOverload) and (torch.Tag.pointwise in op.tags or op._opname in POINTWISE)


def pointwise_rule(context: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a pointwise operation on stacked tensors, which broadcast like one client's.

    Also in place, where vmap fails if a client's values are written to a value that is shared.
    """
    rank = max(rank_of(value) for value in (*args, *kwargs.values()) if isinstance(value, Operand))
    aligned = {name: align_rank(value, rank) for name, value in kwargs.items()}
    return wrap(op(*(align_rank(value, rank) for value in args), **aligned))


# -- dimensions and shapes -------------------------------------------------------------------------


DIMS = (
    "dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis0", "axis1", "source", "destination", "axis",
    "dimension",
)  # fmt: skip
"""Names that ATen gives to arguments that are dimensions."""


def _shift_dims(dims: Any) -> Any:
    """Dimensions of one client's value as dimensions of the stacked value; negative ones stay."""
    if isinstance(dims, list | tuple):
        return [_shift_dims(dim) for dim in dims]
    return dims + 1 if isinstance(dims, int) and not isinstance(dims, bool) and dims >= 0 else dims


DIM_OPS = (
    "transpose", "select", "slice", "unsqueeze", "squeeze", "split", "chunk", "unbind", "softmax", "log_softmax",
    "mean", "contiguous", "clone", "detach", "to", "_to_copy",
)  # fmt: skip
"""Operations on one tensor that become those of all clients by shifting dimensions."""


def dim_rule(context: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation on the stacked value, with dimensions counted from the front shifted by
    one."""
    arguments = bind_arguments(op, args, kwargs)
    arguments.pop("memory_format", None)
    if op._opname == "squeeze" and "dim" not in arguments:
        return reshape_rule(context, op, args[0])
    # the mean over all elements must keep the client dimension
    if (op._opname == "mean" and not arguments.get("dim")) or len(tensor_arguments((args, kwargs))) > 1:
        return NotImplemented
    for name, value in arguments.items():
        if isinstance(value, PerClient):
            arguments[name] = value.tensor
        elif name in DIMS:
            arguments[name] = _shift_dims(value)
    return wrap(op(**arguments))


def permute_rule(context: Context, op: Any, x: PerClient, dims: Any) -> Any:
    return PerClient(x.tensor.permute(0, *(dim % x.rank + 1 for dim in dims)))


def reshape_rule(context: Context, op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if op._overloadname == "dtype":  # x.view(dtype)
        return PerClient(op(x.tensor, *args))
    return PerClient(context.stacked(x).reshape(context.clients, *context.result_shape))


def flatten_rule(context: Context, op: Any, x: Any, start: int = 0, end: int = -1) -> Any:
    """Flatten; channels-last images are brought into the module's order by the backend."""
    images = context.stacked(x)
    if is_channels_last(images) and (start % 4, end % 4) == (1, 3):
        return PerClient(context.backend.ops["flatten"](images.movedim(2, -1)))
    return reshape_rule(context, op, x)


def view_as_complex_rule(context: Context, op: Any, x: PerClient) -> Any:
    return PerClient(op(x.tensor.clone(memory_format=torch.contiguous_format)))


# -- products --------------------------------------------------------------------------------------


def linear_rule(context: Context, op: Any, x: Any, w: Any, b: Any = None) -> Any:
    """Batched matrix product; one product of all clients' inputs where the layer is frozen."""
    if not isinstance(w, PerClient):
        return NotImplemented if isinstance(b, PerClient) else PerClient(F.linear(x.tensor, w, b))
    if w.rank != 2:
        return NotImplemented
    x_C, w_COI = context.stacked(x), w.tensor
    x_CMI = x_C.reshape(len(x_C), math.prod(x_C.shape[1:-1]), x_C.shape[-1])
    y_CMO = torch.bmm(x_CMI, w_COI.mT) if b is None else torch.baddbmm(context.stacked(b)[:, None], x_CMI, w_COI.mT)
    return PerClient(y_CMO.view(*x_C.shape[:-1], w_COI.shape[1]))


def convolution_rule(context: Context, op: Any, x: Any, w: Any, b: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Convolve client by client on a CPU. vmap makes the clients groups of one convolution, which
    is right for a GPU, but takes transposed copies of images and filters."""
    x_C, w_C = context.stacked(x), context.stacked(w)
    if x_C.device.type != "cpu" or not (isinstance(w, PerClient) or isinstance(b, PerClient)):
        return NotImplemented
    biases = [None] * context.clients if b is None else context.stacked(b).unbind()
    if context.channels_last:
        x_C = x_C.movedim(2, -1).contiguous().movedim(-1, 2)
    clients = zip(x_C.unbind(), w_C.unbind(), biases, strict=True)
    return context.stack_images([op(*operands, *args, **kwargs) for operands in clients])


def weight_norm_rule(context: Context, op: Any, v: Any, g: Any, dim: int = 0) -> Any:
    v_C = context.stacked(v)
    reduced = [axis for axis in range(1, v_C.dim()) if axis != dim % (v_C.dim() - 1) + 1 or dim == -1]
    return PerClient(v_C * (context.stacked(g) / torch.linalg.vector_norm(v_C, dim=reduced, keepdim=True)))


# -- pooling, attention and norms -----------------------------------------------------------------


POOLS = {
    "max_pool2d": 4, "avg_pool2d": 4, "adaptive_avg_pool2d": 4, "adaptive_max_pool2d": 4, "fractional_max_pool2d": 4,
    "fractional_max_pool3d": 5,
}  # fmt: skip
"""Pooling operations with the rank of their batched input."""


def pool_rule(context: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Pool the samples of all clients as one batch."""
    if rank_of(args[0]) != POOLS[op._opname]:
        return NotImplemented
    front = context.stacked(args[0]).shape[:2]
    samples = (context.stacked(value).flatten(0, 1) if isinstance(value, Operand) else value for value in args)
    return pytree.tree_map_only(Tensor, lambda y: PerClient(y.unflatten(0, front)), op(*samples, **kwargs))


def affine_grid_rule(context: Context, op: Any, theta: PerClient, size: Any, *args: Any) -> Any:
    grid = op(theta.tensor.flatten(0, 1), [context.clients * size[0], *size[1:]], *args)
    return PerClient(grid.unflatten(0, theta.tensor.shape[:2]))


def attention_rule(
    context: Context, op: Any, q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Attention with the clients' samples as one batch."""
    q, k, v = (context.stacked(value) for value in (q, k, v))
    if len({value.dim() for value in (q, k, v)}) > 1 or q.dim() > 5:
        return NotImplemented
    front, has_heads = q.shape[:2], q.dim() == 5
    if isinstance(mask, PerClient) or (mask is not None and has_heads and mask.dim() == 4 and len(mask) > 1):
        mask = PerClient(context.stacked(mask))
        mask = align_rank(mask, q.dim() - 1)
        mask = mask.expand(*front, *mask.shape[2:]).flatten(0, 1) if has_heads else mask
    if has_heads:
        q, k, v = (value.flatten(0, 1) for value in (q, k, v))
    if dropout:
        with math_attention(q.device), context.client_rng():
            y = op(q, k, v, mask, dropout, *args, **kwargs)
    else:
        y = op(q, k, v, mask, 0.0, *args, **kwargs)
    return PerClient(y.unflatten(0, front) if has_heads else y)


def layer_norm_rule(context: Context, op: Any, x: Any, shape: Any, w: Any = None, b: Any = None, *args: Any) -> Any:
    """`layer_norm`, or `rms_norm`, whose last argument is eps instead of a bias."""
    if not isinstance(w, PerClient) and not isinstance(b, PerClient):
        return PerClient(op(x.tensor, shape, w, b, *args))
    y = op(context.stacked(x), shape, *([None, None, *args] if op._opname == "layer_norm" else [None, b]))
    if op._opname == "rms_norm":
        b = None
    return PerClient(_scale_and_shift(context, y, w, b, y.dim() - 1 - len(shape)))


def group_norm_rule(context: Context, op: Any, x: Any, groups: int, w: Any = None, b: Any = None, *args: Any) -> Any:
    x_C = context.stacked(x)
    trained = isinstance(w, PerClient) or isinstance(b, PerClient)
    y = op(x_C.flatten(0, 1), groups, *((None, None) if trained else (w, b)), *args).unflatten(0, x_C.shape[:2])
    return PerClient(_scale_and_shift(context, y, w, b, 1, x_C.dim() - 3) if trained else y)


def _scale_and_shift(context: Context, y: Tensor, w: Any, b: Any, before: int, after: int = 0) -> Tensor:
    """y * w + b, with dimensions of size 1 inserted before and after those of w and b."""

    def reshape(parameter: Any) -> Tensor:
        stacked = context.stacked(parameter)
        return stacked.reshape(len(stacked), *[1] * before, *stacked.shape[1:], *[1] * after)

    if w is None:
        return y if b is None else y + reshape(b)
    return y * reshape(w) if b is None else torch.addcmul(reshape(b), y, reshape(w))


def batch_norm_rule(
    context: Context, op: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *args: Any
) -> Any:
    """Batch norm with the clients' channels side by side; on a CPU one call per client for images,
    which is faster since nothing is transposed. Statistics are updated in place."""
    x_C = context.stacked(x)
    if x_C.dim() < 3:
        return NotImplemented
    operands = [None if value is None else context.stacked(value) for value in (w, b, mean, var)]
    if x_C.device.type == "cpu" and x_C.dim() > 3:
        columns = [[None] * context.clients if value is None else value.unbind() for value in (x_C, *operands)]
        return context.stack_images([op(*client, training, *args) for client in zip(*columns, strict=True)])
    weight, bias, *statistics = (None if value is None else value.reshape(-1) for value in operands)
    if training and statistics[0] is not None:
        statistics = [value.clone() for value in statistics if value is not None]
    y = op(x_C.transpose(0, 1).flatten(1, 2), weight, bias, *statistics, training, *args)
    if training:
        for buffer, updated in zip((mean, var), statistics, strict=True):
            if isinstance(buffer, PerClient) and updated is not None:
                buffer.tensor.copy_(updated.view_as(buffer.tensor))
    return PerClient(y.unflatten(1, (context.clients, -1)).transpose(0, 1))


# -- lookups ---------------------------------------------------------------------------------------


def embedding_rule(
    context: Context, op: Any, w: Any, codes: Any, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Any:
    """Look up codes in the clients' tables laid one behind another."""
    if scale:
        return NotImplemented
    if not isinstance(w, PerClient):
        return PerClient(F.embedding(codes.tensor, w))
    codes_C, out_of_range = _check_codes(context, w, codes)
    y = F.embedding(_joined_codes(context, w, codes_C), w.tensor.flatten(0, 1))
    if padding >= 0:
        y = torch.where((codes_C == padding)[..., None], y.detach(), y)
    return PerClient(y if out_of_range is None else y.masked_fill(out_of_range[..., None], torch.nan))


def _check_codes(context: Context, w: PerClient, codes: Any) -> tuple[Tensor, Tensor | None]:
    """Stacked codes, all within a client's table, behind which the next client's table begins.

    Codes out of range raise an error on a CPU. A GPU's host must not wait for the answer: there the
    codes are replaced by 0, and the second result is a mask of them.
    """
    entries, codes_C = w.tensor.shape[1], context.stacked(codes).long()
    out_of_range = (codes_C < 0) | (codes_C >= entries)
    if codes_C.device.type != "cpu":
        return codes_C.masked_fill(out_of_range, 0), out_of_range
    if bool(out_of_range.any()):
        raise IndexError(f"index out of range: code {int(codes_C[out_of_range][0])} in a vocabulary of {entries}")
    return codes_C, None


def _joined_codes(context: Context, w: PerClient, codes_C: Tensor) -> Tensor:
    """Positions of codes in the clients' tables laid one behind another."""
    offset_C = torch.arange(context.clients, device=codes_C.device) * w.tensor.shape[1]
    return codes_C + offset_C.view(-1, *[1] * (codes_C.dim() - 1))


def embedding_bag_rule(context: Context, op: Any, w: Any, codes: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
    """Bags of all clients in their tables laid one behind another; only the first of the four
    results is computed, since `nn.EmbeddingBag` uses no other."""
    options = bind_arguments(op, (w, codes, offsets, *args), kwargs)
    special = options["scale_grad_by_freq"] or options["include_last_offset"] or options.get("padding_idx") is not None
    if special or not isinstance(w, PerClient) or w.tensor.device.type != "cpu":
        return NotImplemented
    codes_C, _ = _check_codes(context, w, codes)
    start_C1 = torch.arange(context.clients)[:, None] * codes_C.shape[1]
    weights = options["per_sample_weights"]
    y, *_ = torch.ops.aten.embedding_bag.default(
        w.tensor.flatten(0, 1), _joined_codes(context, w, codes_C).flatten(),
        (context.stacked(offsets) + start_C1).flatten(), False, options["mode"], False,
        None if weights is None else context.stacked(weights).flatten(),
    )  # fmt: skip
    return PerClient(y.unflatten(0, (context.clients, -1))), None, None, None


def one_hot_rule(context: Context, op: Any, codes: Any, classes: int = -1) -> Any:
    """One-hot vectors by torch's operation, which refuses codes out of range; vmap does not."""
    return PerClient(op(context.stacked(codes), classes))


def index_put_rule(context: Context, op: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Write a shared number to all places of a stacked mask."""
    mask = indices[0]
    is_mask = len(indices) == 1 and isinstance(mask, PerClient) and mask.tensor.dtype == torch.bool
    if not is_mask or accumulate or isinstance(values, PerClient) or rank_of(values) or not isinstance(x, PerClient):
        return NotImplemented
    target = x.tensor if op._opname.endswith("_") else x.tensor.clone()
    return PerClient(target.masked_fill_(mask.tensor[(..., *[None] * (x.rank - mask.rank))], values))


# -- random operations -----------------------------------------------------------------------------


def drop_elements(context: Context, x: Tensor, p: float) -> Tensor:
    """Dropout of stacked values by the backend's kernel, each client's by its own stream."""
    # the kernel takes 16 bits, too, besides the dtype of the parameters
    dtype = torch.float32 if x.dtype in precision.HALF_DTYPES.values() else x.dtype
    kernel = kernels.backend_for(x.device, dtype).ops["dropout"]
    if is_channels_last(x):
        return kernel(x.movedim(2, -1), p, context.random_source(), True).movedim(-1, 2)
    return kernel(x, p, context.random_source(), False)


def dropout_rule(context: Context, op: Any, x: Any, p: float, train: bool) -> Any:
    x_C = context.stacked(x)
    if not train or p == 0 or x_C.numel() == 0:
        return PerClient(x_C)
    return _result(op, x_C, drop_elements(context, x_C, p))


def _result(op: Any, x_C: Tensor, y_C: Tensor) -> PerClient:
    """The result y, which an operation in place writes to x."""
    return PerClient(x_C.copy_(y_C) if op._opname.endswith("_") else y_C)


def feature_dropout_rule(context: Context, op: Any, x: Any, p: float, train: bool) -> Any:
    """Dropout of whole channels, which torch takes to be the first two dimensions."""
    x_C = context.stacked(x)
    if x_C.dim() < 3:
        return NotImplemented
    functional = getattr(torch.ops.aten, op._opname.removesuffix("_")).default
    with context.client_rng():
        return _result(op, x_C, functional(x_C.flatten(0, 1), p, train).view_as(x_C))


def elementwise_random_rule(context: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A random operation whose result has the shape of its operands."""
    rank = max(rank_of(value) for value in tensor_arguments(args))
    operands = [
        align_rank(PerClient(context.stacked(value)), rank) if isinstance(value, Operand) else value for value in args
    ]
    with context.client_rng():
        return wrap(op(*operands, **kwargs))


def factory_rule(context: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A random tensor of the size that is the last positional argument."""
    if tensor_arguments(args):
        return elementwise_random_rule(context, op, *args, **kwargs)
    *parameters, size = args
    with context.client_rng():
        return PerClient(op(*parameters, [context.clients, *size], **kwargs))


def randperm_rule(context: Context, op: Any, count: int, **kwargs: Any) -> Any:
    device = torch.device(kwargs.get("device") or "cpu")
    order = context.random_source().order((context.clients, count), device)
    return PerClient(order.to(kwargs.get("dtype") or torch.int64))


def multinomial_rule(context: Context, op: Any, weights: Any, count: int, replacement: bool = False, **_: Any) -> Any:
    return PerClient(multinomial(context.random_source(), context.stacked(weights), count, replacement))


RANDOM_RULES: dict[str, BatchingRule] = {
    **dict.fromkeys(RANDOM_OPS, elementwise_random_rule),
    **dict.fromkeys(("rand", "randn", "randint", "normal"), factory_rule),
    **dict.fromkeys(("dropout", "dropout_"), dropout_rule),
    **dict.fromkeys(
        ("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"), feature_dropout_rule
    ),
    "randperm": randperm_rule,
    "multinomial": multinomial_rule,
}
"""Rules of random operations: each client's numbers come from its own stream."""

BATCHING_RULES: dict[str, BatchingRule] = {
    **RANDOM_RULES,
    # faster on a CPU: one product, or one call per client without transposed copies
    "linear": linear_rule,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution_rule
    ),
    "group_norm": group_norm_rule,
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm_rule),
    # faster on a CPU, and frequent in transformers: vmap takes longer than the operation
    **dict.fromkeys(DIM_OPS, dim_rule),
    **dict.fromkeys(("reshape", "_unsafe_view", "view"), reshape_rule),
    "permute": permute_rule,
    # faster on a CPU, and vmap has no rule for some of them
    **dict.fromkeys(POOLS, pool_rule),
    # vmap has no rule, or none for a stacked mask
    "_weight_norm": weight_norm_rule,
    "affine_grid_generator": affine_grid_rule,
    **dict.fromkeys(("index_put", "index_put_"), index_put_rule),
    # faster: vmap would scale and shift in passes of their own
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm_rule),
    # random with dropout, and vmap decomposes its fused implementation
    "scaled_dot_product_attention": attention_rule,
    # check codes: behind a client's table begins the next client's
    "embedding": embedding_rule,
    "embedding_bag": embedding_bag_rule,
    # checks codes, which vmap leaves out
    "one_hot": one_hot_rule,
    # an offset of a client's row need not be a multiple of two, as a complex number needs
    "view_as_complex": view_as_complex_rule,
    # a kernel for channels-last images
    "flatten": flatten_rule,
}
"""Rules by the name of the operation. Other operations are pointwise or mapped by vmap."""
