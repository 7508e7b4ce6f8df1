"""Operations that treat every number alone, or axes that they name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratafl.engine.compiler.forms.stack import (
    BatchingRule,
    Context,
    PerClient,
    align_rank,
    is_channels_last,
    rank_of,
    tensor_arguments,
    wrap,
)

POINTWISE = {
    "copy_", "fill", "fill_", "masked_fill", "masked_fill_", "where", "relu6", "relu6_", "selu", "selu_", "prelu",
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
ALIKE = {
    "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy", "view_as_real", "tril", "triu", "tril_", "triu_",
    "mT", "adjoint", "zero_", "zero", "zeros_like", "ones_like", "empty_like", "full_like", "pixel_shuffle",
    "pixel_unshuffle", "constant_pad_nd", "one_hot", "contiguous", "clone", "to", "_to_copy", "type_as", "float",
    "double", "half", "cholesky", "linalg_inv", "linalg_det", "linalg_cholesky", "matrix_exp", "linalg_matrix_exp",
    "diag_embed", "bucketize", "pairwise_distance", "cdist", "mH", "_conj", "_conj_physical", "_neg_view",
    "requires_grad_", "linalg_eigh", "linalg_eigvalsh", "linalg_svd", "linalg_svdvals", "linalg_qr", "linalg_slogdet",
    "slogdet", "logdet", "det", "inverse", "linalg_pinv", "pinverse", "linalg_matrix_power", "linalg_inv_ex",
    "linalg_cholesky_ex", "fake_quantize_per_tensor_affine",
}  # fmt: skip
"""What treats the last axes, or each number, the same however many axes are in front."""


def is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op._opname in POINTWISE


def pointwise(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    rank = max(rank_of(each) for each in tensor_arguments((args, kwargs)))
    if op._opname == "prelu":
        return _prelu(frame, op, *args)
    return wrap(op(*(align_rank(each, rank) for each in args), **{k: align_rank(v, rank) for k, v in kwargs.items()}))


def _prelu(frame: Context, op: Any, x: Any, w: Any) -> Any:
    """One slope for every channel, which is the second axis."""
    given = frame.expanded(x)
    slopes = frame.expanded(w)
    between = [1] * max(given.dim() - 3, 0)
    slopes = slopes.view(frame.clients, *([1] if given.dim() > 2 else []), -1, *between)
    return PerClient(torch.where(given > 0, given, slopes * given))


def leading_axes_rule(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    if len(tensor_arguments((args, kwargs))) > 1:
        if op._opname not in ("type_as", "to", "pairwise_distance", "cdist", "_cdist_forward"):
            return NotImplemented
        args = tuple(frame.expanded(each) if isinstance(each, PerClient | Tensor) else each for each in args)
    return wrap(op(*(each.t if isinstance(each, PerClient) else each for each in args), **kwargs))


# -- axes by their numbers -------------------------------------------------------------------------

DIMS = (
    "dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis0", "axis1", "source", "destination", "axis",
    "dimension",
)  # fmt: skip
BY_AXIS = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll",
    "transpose", "swapaxes", "swapdims", "select", "slice", "unsqueeze", "unsqueeze_", "squeeze", "squeeze_", "narrow",
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unfold", "flatten", "unflatten", "movedim",
    "moveaxis", "cat", "concat", "concatenate", "stack", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "topk", "sort", "argsort", "diff", "glu", "diagonal", "repeat_interleave", "cosine_similarity", "kthvalue",
    "cummax", "cummin", "take_along_dim", "linalg_cross", "select_scatter", "slice_scatter", "scatter_reduce",
    "scatter_reduce_", "linalg_matrix_norm", "softmin", "transpose_", "split_copy", "fft_fft", "fft_rfft", "fft_ifft",
    "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn",
}  # fmt: skip
REDUCING = {
    "sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "var", "std", "logsumexp", "norm",
    "linalg_vector_norm", "linalg_norm", "max", "min", "var_mean", "std_mean", "nansum", "nanmean", "count_nonzero",
    "median", "aminmax", "mode",
}  # fmt: skip


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


def by_axis(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Dimensions from the front are one further on; those from the end stay."""
    packet, given = op._opname, bind_arguments(op, args, kwargs)
    if packet in ("squeeze", "squeeze_") and "dim" not in given:
        return PerClient(frame.expanded(args[0]).reshape(frame.clients, *frame.shape))
    if any(given[name] is None for name in DIMS if name in given) or (packet == "roll" and not given["dims"]):
        return NotImplemented  # of all axes as one
    for name, value in given.items():
        if isinstance(value, PerClient | Tensor):
            given[name] = frame.expanded(value)
        elif name in DIMS:
            given[name] = _moved(value)
        elif isinstance(value, list | tuple) and any(isinstance(each, PerClient | Tensor) for each in value):
            given[name] = [frame.expanded(each) for each in _with_axes(value)]
    return wrap(call_bound(op, given))


def _with_axes(parts: Any) -> list[Any]:
    """What is put together, but for tensors of no numbers and one axis, which fit any other."""
    shapes = [each.t.shape[1:] if isinstance(each, PerClient) else each.shape for each in parts]
    fitting_any = [shape == (0,) for shape in shapes]
    return [each for each, fits in zip(parts, fitting_any, strict=True) if not fits or all(fitting_any)]


def call_bound(op: Any, given: dict[str, Any]) -> Any:
    positional = [each.name for each in op._schema.arguments if not each.kwarg_only]
    args = [given[name] for name in positional if name in given]
    return op(*args, **{name: value for name, value in given.items() if name not in positional})


def reducing(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    packet, given = op._opname, bind_arguments(op, args, kwargs)
    if any(isinstance(each, Tensor) for each in tensor_arguments((args, kwargs))):
        return NotImplemented
    if op._overloadname in ("other",):
        return pointwise(frame, op, *args, **kwargs)
    x = given["self"] if "self" in given else given["input"]
    dims = given.get("dim")
    if (x.rank and isinstance(dims, int)) or (isinstance(dims, list | tuple) and dims):
        given = {name: _moved(value) if name == "dim" else value for name, value in given.items()}
        return wrap(call_bound(op, {name: value.t if value is x else value for name, value in given.items()}))
    flat = x.t.reshape(frame.clients, -1)
    simple = {"max": torch.amax, "min": torch.amin, "median": None, "mode": None, "aminmax": None}
    function = simple.get(packet, getattr(torch, packet, None))
    if packet in ("linalg_vector_norm", "linalg_norm"):
        function = torch.linalg.vector_norm if packet == "linalg_vector_norm" or given["ord"] is None else None
    if function is None:
        return NotImplemented
    more = {name: value for name, value in given.items() if name not in ("self", "input", "dim", "keepdim")}
    if packet == "norm":
        function, more = torch.linalg.vector_norm, {"ord": 2 if given.get("p") is None else given["p"]}
    if packet in ("linalg_vector_norm", "linalg_norm"):
        more = {name: value for name, value in more.items() if value is not None}
    if packet in ("var", "std", "var_mean", "std_mean") and "unbiased" in more:
        more = {"correction": int(more["unbiased"])}
    if packet in ("var", "std") and more.get("correction") is None:
        more["correction"] = 1
    result = function(flat, dim=1, **more)
    if isinstance(result, tuple):
        return tuple(
            PerClient(each.view(frame.clients, *shape)) for each, shape in zip(result, frame.shape, strict=True)
        )
    return PerClient(result.view(frame.clients, *frame.shape))


LOSSES = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "kl_div", "poisson_nll_loss",
}  # fmt: skip


def loss(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Of numbers one by one, then their sum or mean."""
    given = bind_arguments(op, args, kwargs)
    rank = max(rank_of(each) for each in tensor_arguments((args, kwargs)))
    kind, given = given["reduction"], {name: align_rank(value, rank) for name, value in given.items()}
    first = "self" if "self" in given else "input"
    given[first], given["target"] = torch.broadcast_tensors(given[first], given["target"])
    values = call_bound(op, given | {"reduction": 0})
    if kind == 0:
        return PerClient(values)
    flat = values.reshape(frame.clients, -1)
    return PerClient(flat.mean(dim=1) if kind == 1 else flat.sum(dim=1))


def permuted(frame: Context, op: Any, x: PerClient, dims: Any) -> Any:
    return PerClient(x.t.permute(0, *(dim % x.rank + 1 for dim in dims)))


def transpose_rule(frame: Context, op: Any, x: PerClient) -> Any:
    """The last two axes, or all of them, the other way round."""
    if op._opname == "matrix_H":
        return PerClient(x.t.mH)
    if op._opname == "t":
        return PerClient(x.t.transpose(1, 2)) if x.rank == 2 else x
    return PerClient(x.t.permute(0, *range(x.rank, 0, -1)))


# -- shapes ----------------------------------------------------------------------------------------


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


def expand_rule(frame: Context, op: Any, x: Any, *_: Any, **__: Any) -> Any:
    return PerClient(align_rank(x, len(frame.shape)).expand(frame.clients, *frame.shape))


def broadcast(frame: Context, op: Any, parts: Any) -> Any:
    pairs = zip(parts, frame.shape, strict=True)
    return tuple(PerClient(align_rank(each, len(shape)).expand(frame.clients, *shape)) for each, shape in pairs)


def repeated(frame: Context, op: Any, x: PerClient, repeats: Any) -> Any:
    times = [1] * (x.rank - len(repeats)) + list(repeats)
    return PerClient(align_rank(x, len(times)).repeat(1, *times))


def new(frame: Context, op: Any, x: PerClient, size: Any, *more: Any, **kwargs: Any) -> Any:
    return PerClient(op(x.t, [frame.clients, *size], *more, **kwargs))


def complex_pairs(frame: Context, op: Any, x: PerClient) -> Any:
    """Rows begin anywhere, and a complex number must not begin in the middle of a pair."""
    return PerClient(op(x.t.clone(memory_format=torch.contiguous_format)))


FORMS: dict[str, BatchingRule] = {
    **dict.fromkeys(ALIKE, leading_axes_rule),
    **dict.fromkeys(BY_AXIS, by_axis),
    **dict.fromkeys(REDUCING, reducing),
    **dict.fromkeys(LOSSES, loss),
    **dict.fromkeys(("reshape", "_unsafe_view", "view_as", "reshape_as", "ravel"), reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand_rule),
    **dict.fromkeys(("repeat", "tile"), repeated),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), new),
    **dict.fromkeys(("t", "numpy_T", "matrix_H"), transpose_rule),
    "flatten": flattened,
    "broadcast_tensors": broadcast,
    "view": viewed,
    "view_as_complex": complex_pairs,
    "permute": permuted,
}
