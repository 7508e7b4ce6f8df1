"""Batching rules: operations of a captured graph for all clients at once.

`torch.func.vmap` of the one operation is the rule of everything that is not here. What is here has
a reason, which stands where `BATCHING_RULES` lists it: it is faster, draws from the clients' own
streams, changes statistics in place, checks its input, or is what a kernel takes.

Shape suffixes: C clients, M all axes of a client's input but the last, I O features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.engine import kernels, precision
from stratafl.engine.compiler.values import (
    BatchingRule,
    Context,
    PerClient,
    align_rank,
    is_channels_last,
    rank_of,
    tensor_arguments,
    wrap,
)
from stratafl.engine.random_streams import math_attention, multinomial

# -- numbers one by one ----------------------------------------------------------------------------


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
"""Those that the library does not mark as such."""


def is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op._opname in POINTWISE


def pointwise(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """In place, too, where vmap refuses to write a client's values to what has none."""
    rank = max(rank_of(each) for each in tensor_arguments((args, kwargs)))
    return wrap(op(*(align_rank(each, rank) for each in args), **{k: align_rank(v, rank) for k, v in kwargs.items()}))


# -- axes and shapes -------------------------------------------------------------------------------


DIMS = (
    "dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis0", "axis1", "source", "destination", "axis",
    "dimension",
)  # fmt: skip


def bind_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name, with defaults."""
    schema = op._schema.arguments
    given = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
    return {
        each.name: given.get(each.name, each.default_value)
        for each in schema
        if each.name in given or each.has_default_value()
    }


def _moved(dim: Any) -> Any:
    if isinstance(dim, list | tuple):
        return [_moved(each) for each in dim]
    return dim + 1 if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 else dim


def call_bound(op: Any, given: dict[str, Any]) -> Any:
    positional = [each.name for each in op._schema.arguments if not each.kwarg_only]
    args = [given[name] for name in positional if name in given]
    return op(*args, **{name: value for name, value in given.items() if name not in positional})


SHIFTED = {
    "transpose", "select", "slice", "unsqueeze", "squeeze", "split", "chunk", "unbind", "softmax", "log_softmax",
    "mean", "contiguous", "clone", "detach", "to", "_to_copy",
}  # fmt: skip
"""Operations whose dimensions from the front are one further on for all clients."""


def shifted(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Dimensions from the front are one further on; those from the end stay."""
    given = {k: v for k, v in bind_arguments(op, args, kwargs).items() if k != "memory_format"}
    if op._opname == "squeeze" and "dim" not in given:
        return PerClient(frame.expanded(args[0]).reshape(frame.clients, *frame.shape))
    # a mean of everything is each client's own
    if (op._opname == "mean" and not given.get("dim")) or len(tensor_arguments((args, kwargs))) > 1:
        return NotImplemented
    moved = {name: _moved(value) if name in DIMS else value for name, value in given.items()}
    return wrap(call_bound(op, {k: v.t if isinstance(v, PerClient) else v for k, v in moved.items()}))


def permuted(frame: Context, op: Any, x: PerClient, dims: Any) -> Any:
    return PerClient(x.t.permute(0, *(dim % x.rank + 1 for dim in dims)))


def reshaped(frame: Context, op: Any, x: Any, *_: Any, **__: Any) -> Any:
    return PerClient(frame.expanded(x).reshape(frame.clients, *frame.shape))


def viewed(frame: Context, op: Any, x: Any, *more: Any, **kwargs: Any) -> Any:
    if op._overloadname == "dtype":
        return PerClient(op(x.t, *more))
    return reshaped(frame, op, x)


def flattened(frame: Context, op: Any, x: Any, start: int = 0, end: int = -1) -> Any:
    """Images that a kernel left channels-last become rows in the module's order by another."""
    given = frame.expanded(x)
    if is_channels_last(given) and (start % 4, end % 4) == (1, 3):
        return PerClient(frame.table.ops["flatten"](given.movedim(2, -1)))
    return reshaped(frame, op, x)


def complex_pairs(frame: Context, op: Any, x: PerClient) -> Any:
    """Rows begin anywhere, and a complex number must not begin in the middle of a pair."""
    return PerClient(op(x.t.clone(memory_format=torch.contiguous_format)))


# -- products --------------------------------------------------------------------------------------


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


def weight_norm(frame: Context, op: Any, v: Any, g: Any, dim: int = 0) -> Any:
    """A direction, and how long it is."""
    given = frame.expanded(v)
    others = [axis for axis in range(1, given.dim()) if axis != dim % (given.dim() - 1) + 1 or dim == -1]
    return PerClient(given * (frame.expanded(g) / torch.linalg.vector_norm(given, dim=others, keepdim=True)))


# -- samples one by one, and norms -----------------------------------------------------------------


FOLDED = {
    "max_pool2d": 4, "avg_pool2d": 4, "adaptive_avg_pool2d": 4, "adaptive_max_pool2d": 4, "fractional_max_pool2d": 4,
    "fractional_max_pool3d": 5,
}  # fmt: skip
"""Pools, and how many axes a batch of samples has there."""


def fold_batch_rule(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The samples of all clients as one batch."""
    if rank_of(args[0]) != FOLDED[op._opname]:
        return NotImplemented
    given = [frame.expanded(each) if isinstance(each, PerClient | Tensor) else each for each in args]
    shape = given[0].shape[:2]
    result = op(*(each.flatten(0, 1) if isinstance(each, Tensor) else each for each in given), **kwargs)
    if isinstance(result, tuple):
        return tuple(PerClient(each.unflatten(0, shape)) for each in result)
    return PerClient(result.unflatten(0, shape))


def affine_grid(frame: Context, op: Any, theta: PerClient, size: Any, *more: Any) -> Any:
    """Where the pixels of every sample come from."""
    front = theta.t.shape[:2]
    grid = op(theta.t.flatten(0, 1), [frame.clients * size[0], *size[1:]], *more)
    return PerClient(grid.unflatten(0, front))


def attention(
    frame: Context,
    op: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    **more: Any,
) -> Any:
    q, k, v = (frame.expanded(each) for each in (q, k, v))
    if len({each.dim() for each in (q, k, v)}) > 1:
        return NotImplemented
    front, folds = q.shape[:2], q.dim() == 5
    if isinstance(mask, PerClient) or (mask is not None and folds and mask.dim() == 4 and len(mask) > 1):
        own = frame.expanded(mask)
        own = own[(slice(None), *[None] * (q.dim() - own.dim()))]
        mask = own.expand(*front, *own.shape[2:]).flatten(0, 1) if folds else own
    if folds:
        q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    elif q.dim() > 5:
        return NotImplemented
    if dropout:
        with math_attention(q.device), frame.drawing():
            y = op(q, k, v, mask, dropout, causal, **more)
    else:
        y = op(q, k, v, mask, 0.0, causal, **more)
    return PerClient(y.unflatten(0, front) if folds else y)


def cross_entropy_rule(
    frame: Context, op: Any, x: Any, labels: Any, weight: Any = None, kind: int = 1, ignored: int = -100,
    smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """A loss of scores and class numbers: of each sample, then the sum or mean of a client's."""
    given = frame.expanded(labels)
    if weight is not None or smoothing or given.is_floating_point() or not isinstance(x, PerClient) or x.rank < 2:
        return NotImplemented
    losses = op(x.t.flatten(0, 1), given.flatten(0, 1), None, 0, ignored).view_as(given)
    if kind == 0:
        return PerClient(losses)
    total_C = losses.flatten(1).sum(dim=1)
    return PerClient(total_C / (given != ignored).flatten(1).sum(dim=1) if kind == 1 else total_C)


def layer_norm(frame: Context, op: Any, x: Any, shape: Any, w: Any = None, b: Any = None, *more: Any) -> Any:
    if not isinstance(w, PerClient) and not isinstance(b, PerClient):
        return PerClient(op(x.t, shape, w, b, *more))
    plain = op(frame.expanded(x), shape, *([None, None, *more] if op._opname == "layer_norm" else [None, b]))
    if op._opname == "rms_norm":
        b = None
    return PerClient(_affine(frame, plain, w, b, plain.dim() - 1 - len(shape)))


def group_norm(frame: Context, op: Any, x: Any, groups: int, w: Any = None, b: Any = None, *more: Any) -> Any:
    given = frame.expanded(x)
    own = isinstance(w, PerClient) or isinstance(b, PerClient)
    y = op(given.flatten(0, 1), groups, None if own else w, None if own else b, *more).unflatten(0, given.shape[:2])
    return PerClient(_affine(frame, y, w, b, 1, given.dim() - 3) if own else y)


def _affine(frame: Context, y: Tensor, w: Any, b: Any, before: int, after: int = 0) -> Tensor:
    """Scale and shift by each client's own, which have so many axes of one around them."""

    def fitting(rows: Any) -> Tensor:
        own = frame.expanded(rows)
        return own.reshape(len(own), *[1] * before, *own.shape[1:], *[1] * after)

    if w is None:
        return y if b is None else y + fitting(b)
    return y * fitting(w) if b is None else torch.addcmul(fitting(b), y, fitting(w))


def batch_norm(
    frame: Context, op: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
    *more: Any,
) -> Any:  # fmt: skip
    """The clients' channels side by side; statistics are written to each client's own. On a CPU
    one call a client is faster for images, which need not be transposed then."""
    given = frame.expanded(x)
    if given.dim() < 3:
        return NotImplemented
    if given.device.type == "cpu" and given.dim() > 3:
        nobody = [None] * frame.clients
        every = [nobody if each is None else frame.expanded(each).unbind() for each in (x, w, b, mean, var)]
        done = [op(*own, training, momentum, eps, *more) for own in zip(*every, strict=True)]
        return frame.images(done)
    w, b = (None if each is None else frame.expanded(each).reshape(-1) for each in (w, b))
    kept = [None if each is None else frame.expanded(each).reshape(-1) for each in (mean, var)]
    if training and kept[0] is not None:
        kept = [each.clone() for each in kept if each is not None]
    merged = given.transpose(0, 1).flatten(1, 2)
    y = op(merged, w, b, *kept, training, momentum, eps, *more)
    if training:
        for each, now in zip((mean, var), kept, strict=True):
            if isinstance(each, PerClient) and now is not None:
                each.t.copy_(now.view_as(each.t))
    return PerClient(y.unflatten(1, (frame.clients, -1)).transpose(0, 1))


# -- lookups ---------------------------------------------------------------------------------------


def embedding(
    frame: Context, op: Any, w: Any, codes: Any, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Any:
    if scale:
        return NotImplemented
    if not isinstance(w, PerClient):
        return PerClient(F.embedding(codes.t, w))
    given, beyond = _known(frame, w, codes)
    y = F.embedding(_in_one_table(frame, w, given), w.t.flatten(0, 1))
    if padding >= 0:
        y = torch.where((given == padding)[..., None], y.detach(), y)
    return PerClient(y if beyond is None else y.masked_fill(beyond[..., None], torch.nan))


def _known(frame: Context, w: PerClient, codes: Any) -> tuple[Tensor, Tensor | None]:
    """Codes within a client's table, beyond which lies the next one's. Another is an error, or,
    where the host must not wait for the device to find out, one of those that come second."""
    entries, given = w.t.shape[1], frame.expanded(codes).long()
    beyond = (given < 0) | (given >= entries)
    if given.device.type != "cpu":
        return given.masked_fill(beyond, 0), beyond
    if bool(beyond.any()):
        raise IndexError(f"index out of range: code {int(given[beyond][0])} in a vocabulary of {entries}")
    return given, None


def _in_one_table(frame: Context, w: PerClient, codes: Tensor) -> Tensor:
    """Where codes are in the tables one behind the other."""
    offset = torch.arange(frame.clients, device=codes.device) * w.t.shape[1]
    return codes + offset.view(-1, *[1] * (codes.dim() - 1))


def bags(
    frame: Context, op: Any, w: Any, codes: Any, offsets: Any, scale: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, last: bool = False, padding: int | None = None,
) -> Any:  # fmt: skip
    """Of four results the first, which is all that a layer uses."""
    on_cpu = isinstance(w, PerClient) and w.t.device.type == "cpu"
    if scale or last or padding is not None or not on_cpu:
        return NotImplemented
    given, _ = _known(frame, w, codes)
    start = torch.arange(frame.clients)[:, None] * given.shape[1]
    places = _in_one_table(frame, w, given).flatten(), (frame.expanded(offsets) + start).flatten()
    own = None if weights is None else frame.expanded(weights).flatten()
    y, *_ = torch.ops.aten.embedding_bag.default(w.t.flatten(0, 1), *places, False, mode, False, own)
    return PerClient(y.unflatten(0, (frame.clients, -1))), None, None, None


def one_hot(frame: Context, op: Any, codes: Any, classes: int = -1) -> Any:
    """One-hot vectors by PyTorch's operation, which refuses codes that are no class, as under vmap
    it does not."""
    return PerClient(op(frame.expanded(codes), classes))


def masked_put(frame: Context, op: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """One value written to all places of a mask, by which vmap cannot choose."""
    mask = indices[0]
    is_mask = len(indices) == 1 and isinstance(mask, PerClient) and mask.t.dtype == torch.bool
    if not is_mask or accumulate or isinstance(values, PerClient) or rank_of(values) or not isinstance(x, PerClient):
        return NotImplemented
    given = x.t if op._opname.endswith("_") else x.t.clone()
    return PerClient(given.masked_fill_(mask.t[(..., *[None] * (x.rank - mask.rank))], values))


# -- random numbers --------------------------------------------------------------------------------


def dropped(frame: Context, x: Tensor, p: float) -> Tensor:
    """Some left out, and the others larger by as much."""
    # a kernel takes 16 bits as well as the rows' type
    rows = torch.float32 if x.dtype in precision.HALF_DTYPES.values() else x.dtype
    kernel = kernels.backend_for(x.device, rows).ops["dropout"]
    if is_channels_last(x):
        return kernel(x.movedim(2, -1), p, frame.draws(), True).movedim(-1, 2)
    return kernel(x, p, frame.draws(), False)


def dropout(frame: Context, op: Any, x: Any, p: float, train: bool) -> Any:
    given = frame.expanded(x)
    in_place = op._opname.endswith("_")
    if not train or p == 0 or given.numel() == 0:
        return PerClient(given)
    y = dropped(frame, given, p)
    return PerClient(given.copy_(y) if in_place else y)


def by_channel(frame: Context, op: Any, x: Any, p: float, train: bool) -> Any:
    """Whole channels of the samples are left out, which the library knows by the first two axes."""
    given = frame.expanded(x)
    if given.dim() < 3:
        return NotImplemented
    if op._opname.endswith("_"):
        with frame.drawing():
            result = getattr(torch.ops.aten, op._opname.removesuffix("_")).default(given.flatten(0, 1), p, train)
        return PerClient(given.copy_(result.view_as(given)))
    with frame.drawing():
        return PerClient(op(given.flatten(0, 1), p, train).view_as(given))


def elementwise_random_rule(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Of numbers that lie with the clients in front."""
    shape = max((tuple(frame.expanded(each).shape) for each in tensor_arguments(args)), key=len)

    def own(value: Any) -> Any:
        if not isinstance(value, PerClient | Tensor):
            return value
        given = frame.expanded(value)
        return (
            given
            if given.dim() == len(shape)
            else given.view(frame.clients, *[1] * (len(shape) - given.dim()), *given.shape[1:])
        )

    with frame.drawing():
        return wrap(op(*map(own, args), **kwargs))


def factory_rule(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a size, the last of what stands in its order."""
    if tensor_arguments(args):
        return elementwise_random_rule(frame, op, *args, **kwargs)
    *front, size = args
    with frame.drawing():
        return PerClient(op(*front, [frame.clients, *size], **kwargs))


def ordered(frame: Context, op: Any, count: int, **kwargs: Any) -> Any:
    device = torch.device(kwargs.get("device") or "cpu")
    return PerClient(frame.draws().order((frame.clients, count), device).to(kwargs.get("dtype") or torch.int64))


def chosen(frame: Context, op: Any, weights: Any, count: int, replacement: bool = False, **_: Any) -> Any:
    return PerClient(multinomial(frame.draws(), frame.expanded(weights), count, replacement))


RANDOM_RULES: dict[str, BatchingRule] = {
    **dict.fromkeys(("dropout", "dropout_"), dropout),
    **dict.fromkeys(
        ("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"), by_channel
    ),
    **dict.fromkeys(
        (
            "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_", "bernoulli", "bernoulli_", "rand_like", "randn_like",
            "randint_like", "random_", "uniform_", "normal_", "exponential_", "log_normal_", "rrelu_with_noise",
            "native_dropout",
        ),
        elementwise_random_rule,
    ),
    **dict.fromkeys(("rand", "randn", "randint", "normal"), factory_rule),
    "randperm": ordered,
    "multinomial": chosen,
}  # fmt: skip
"""What draws: each client from its own stream."""

BATCHING_RULES: dict[str, BatchingRule] = {
    **RANDOM_RULES,
    # faster on a CPU: one product or call for each client without transposed copies
    "linear": linear,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution
    ),
    "group_norm": group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "_weight_norm": weight_norm,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"), cross_entropy_rule),
    # faster on a CPU: nothing but the shape or an axis differs, and a transformer has many of them
    **dict.fromkeys(SHIFTED, shifted),
    **dict.fromkeys(("reshape", "_unsafe_view"), reshaped),
    "view": viewed,
    "permute": permuted,
    # vmap has no rule, or none for images that lie channels-last
    **dict.fromkeys(FOLDED, fold_batch_rule),
    "affine_grid_generator": affine_grid,
    **dict.fromkeys(("index_put", "index_put_"), masked_put),
    # changes its statistics in place, of each client
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    # written to each client's own, of which vmap may see none
    "zero_": pointwise,
    # draws where it is told of a share to leave out, and has a fused form that vmap takes apart
    "scaled_dot_product_attention": attention,
    # checks its input: beyond a client's table lies the next one's
    "embedding": embedding,
    "embedding_bag": bags,
    # checks its input, which vmap leaves out
    "one_hot": one_hot,
    # rows begin anywhere
    "view_as_complex": complex_pairs,
    # has a kernel for images that lie channels-last
    "flatten": flattened,
}
"""By the name of the operation; what is not here, and not pointwise, is mapped by vmap."""
