"""Operations that draw: each client from its own stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratafl.engine import kernels, precision
from stratafl.engine.compiler.forms.stack import (
    BatchingRule,
    Context,
    PerClient,
    is_channels_last,
    tensor_arguments,
    wrap,
)
from stratafl.engine.random_streams import multinomial


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


FORMS: dict[str, BatchingRule] = {
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
