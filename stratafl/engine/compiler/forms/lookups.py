"""Lookups: values chosen, written or added by tensors of places."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.engine.compiler.forms.axes import bind_arguments, call_bound
from stratafl.engine.compiler.forms.stack import BatchingRule, Context, PerClient, align_rank, rank_of, wrap


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


def by_index(frame: Context, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Slices of an axis by their places, which all clients share or each has of its own."""
    given, name = bind_arguments(op, args, kwargs), op._opname
    x, index = frame.expanded(given["self"]), given["index"]
    if x.dim() < 2 or isinstance(given.get("value"), PerClient):
        return NotImplemented
    dim, source = given["dim"] % (x.dim() - 1) + 1, given.get("source")
    moved = given | {"self": x, "dim": dim} | ({} if source is None else {"source": frame.expanded(source)})
    if not isinstance(index, PerClient):
        return wrap(call_bound(op, moved))
    if "value" in given:
        return NotImplemented
    shape = list(x.shape if source is None else moved["source"].shape)
    shape[dim] = index.t[0].numel()
    places = index.t.reshape(-1, *[1] * (dim - 1), shape[dim], *[1] * (x.dim() - 1 - dim)).expand(shape)
    if source is None:
        return PerClient(x.gather(dim, places))
    write = name.replace("index_add", "scatter_add").replace("index_copy", "scatter")
    return PerClient(getattr(x, write)(dim, places, moved["source"] * given.get("alpha", 1)))


def _places(indices: Any) -> list[int] | None:
    """Which axes are chosen from, if they follow on each other and are chosen by numbers."""
    given = [each.t if isinstance(each, PerClient) else each for each in indices]
    places = [number for number, each in enumerate(given) if each is not None]
    adjacent = places == list(range(places[0], places[-1] + 1))
    whole = all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in given)
    return places if adjacent and whole else None


def _where(frame: Context, indices: Any, places: list[int], device: torch.device) -> Any:
    """The same choice with the clients in front."""
    if not any(isinstance(each, PerClient) for each in indices):
        return (slice(None), *(slice(None) if each is None else each for each in indices))
    if places[0] != 0:
        return None
    rank = max(rank_of(each) for each in indices if each is not None)
    own = torch.arange(frame.clients, device=device).view(-1, *[1] * rank)
    return (own, *(align_rank(each, rank) for each in indices if each is not None))


def indexed(frame: Context, op: Any, x: Any, indices: Any) -> Any:
    """A choice by tensors of places, in axes that follow on each other."""
    places, given = _places(indices), frame.expanded(x)
    where = None if places is None else _where(frame, indices, places, given.device)
    return NotImplemented if where is None else PerClient(given[where])


def put(frame: Context, op: Any, x: PerClient, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Values written to such places, or one value to all places of a mask."""
    given, first = x.t if op._opname.endswith("_") else x.t.clone(), indices[0]
    if len(indices) == 1 and isinstance(first, PerClient) and first.t.dtype == torch.bool:
        if rank_of(values) or isinstance(values, PerClient):
            return NotImplemented
        return PerClient(given.masked_fill_(first.t[(..., *[None] * (x.rank - first.rank))], values))
    places = _places(indices)
    where = None if places is None or accumulate else _where(frame, indices, places, given.device)
    if where is None:
        return NotImplemented
    given[where] = align_rank(values, given[where].dim() - 1)
    return x if op._opname.endswith("_") else PerClient(given)


BY_INDEX = ("index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
FORMS: dict[str, BatchingRule] = {
    "embedding": embedding,
    "embedding_bag": bags,
    **dict.fromkeys(BY_INDEX, by_index),
    "index": indexed,
    **dict.fromkeys(("index_put", "index_put_"), put),
}
