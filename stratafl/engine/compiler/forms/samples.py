"""Operations that treat each sample alone, whoever's it is: pools, resizing, attention; norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratafl.engine.compiler.forms.stack import BatchingRule, Context, PerClient, wrap
from stratafl.engine.random_streams import math_attention

POOLS = ("max", "avg", "adaptive_avg", "adaptive_max")
BATCHED = {
    **{f"{kind}_pool{axes}d": axes + 2 for axes in (1, 2, 3) for kind in POOLS},
    **{f"max_pool{axes}d_with_indices": axes + 2 for axes in (1, 2, 3)},
    **{f"{kind}_pad{axes}d": axes + 2 for axes in (1, 2, 3) for kind in ("reflection", "replication")},
    **{f"fractional_max_pool{axes}d": axes + 2 for axes in (2, 3)},
    **{f"upsample_{kind}1d": 3 for kind in ("nearest", "linear")},
    **{f"upsample_{kind}2d": 4 for kind in ("nearest", "bilinear", "bicubic")},
    **{f"upsample_{kind}3d": 5 for kind in ("nearest", "trilinear")},
    "_upsample_nearest_exact2d": 4, "grid_sampler": 4, "grid_sampler_2d": 4, "im2col": 4, "col2im": 3,
    "channel_shuffle": 4, "max_unpool2d": 4, "native_channel_shuffle": 4,
}  # fmt: skip
"""Operations, and how many axes a batch of samples has there."""


def fold_batch_rule(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The samples of all clients as one batch."""
    rank = BATCHED[op._opname]
    given = [frame.expanded(each) if isinstance(each, PerClient | Tensor) else each for each in args]
    ranks = {each.dim() - 1 for each in given if isinstance(each, Tensor)}
    if rank - 1 in ranks and rank not in ranks:
        return wrap(op(*given, **kwargs))
    shape = given[0].shape[:2]
    result = op(*(each.flatten(0, 1) if isinstance(each, Tensor) else each for each in given), **kwargs)
    if isinstance(result, tuple):
        return tuple(PerClient(each.unflatten(0, shape)) for each in result)
    return PerClient(result.unflatten(0, shape))


def grid(frame: Context, op: Any, theta: PerClient, size: Any, *more: Any) -> Any:
    """Where the pixels of every sample come from."""
    front = theta.t.shape[:2]
    made = op(theta.t.flatten(0, 1), [frame.clients * size[0], *size[1:]], *more)
    return PerClient(made.unflatten(0, front))


def padded(frame: Context, op: Any, x: PerClient, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if mode == "constant":
        return PerClient(op(x.t, pad, mode, value))
    axes = len(pad) // 2
    if x.rank == axes + 1:
        return PerClient(op(x.t, pad, mode, value))
    return PerClient(op(x.t.flatten(0, 1), pad, mode, value).unflatten(0, x.t.shape[:2]))


def spectrum(frame: Context, op: Any, x: PerClient, *more: Any, **kwargs: Any) -> Any:
    """Of one series or of several, with a window that all share."""
    if any(isinstance(each, PerClient) for each in (*more, *kwargs.values())):
        return NotImplemented
    if x.rank == 1:
        return PerClient(op(x.t, *more, **kwargs))
    return PerClient(op(x.t.flatten(0, 1), *more, **kwargs).unflatten(0, x.t.shape[:2]))


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


# -- norms -----------------------------------------------------------------------------------------


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


FORMS: dict[str, BatchingRule] = {
    **dict.fromkeys(BATCHED, fold_batch_rule),
    "affine_grid_generator": grid,
    "pad": padded,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"), cross_entropy_rule),
    "stft": spectrum,
    "scaled_dot_product_attention": attention,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
}
