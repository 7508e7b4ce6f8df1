"""Dry run of functions that users write on rows (matrices with one row per node), such as those of
rules and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratafl.core.rule import Edge

ROUNDING = 1e3
"""Units in the last place, of the largest entry, by which a row may differ when it is computed
together with others."""


class ImpureFunction(ValueError):
    """A function does not depend on its arguments alone, changes them, or mixes rows."""


def dry_run(function: Callable[..., Any], arguments: Mapping[str, Any], by_row: bool = True) -> Any:
    """Call a function up to three times and return its result; raises ImpureFunction if it is not
    pure.

    arguments: tensors, tables of tensors, edges and numbers by name, in their order.
    by_row: also check, on the first row, that each row of the result depends on the same row of the
        arguments only.
    """
    versions = [(path, tensor, tensor._version) for path, tensor in _argument_tensors(arguments)]
    keys = {name: list(value) for name, value in arguments.items() if isinstance(value, Mapping)}
    result = function(*arguments.values())
    for path, tensor, version in versions:
        if tensor._version != version:
            raise ImpureFunction(f"changes its argument {path} in place: make a new tensor of it")
    for name, keys_before in keys.items():
        if list(arguments[name]) != keys_before:
            raise ImpureFunction(f"changes its argument {name} in place: return a new dict")
    if not _all_close(function(*arguments.values()), result, exact=True):
        raise ImpureFunction(
            "returns something else when it is called again with the same arguments: what it remembers must be in "
            "what it returns, and it must not draw random numbers"
        )
    if by_row and not _all_close(function(*map(_first_row, arguments.values())), _first_row(result)):
        raise ImpureFunction(
            "returns something else for a node when it is called with that node's row alone: each row must depend on "
            "the arguments' same row only"
        )
    return result


def result_tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else ()
    return [tensor for part in parts for tensor in result_tensors(part)]


def _argument_tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a function's arguments, each with its name for errors."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Edge):
            yield from ((f"{name}.{key}", part) for key, part in value.tensors().items())
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", rows) for key, rows in value.items())


def _first_row(value: Any) -> Any:
    """The part of an argument or result that belongs to the first node."""
    if isinstance(value, Tensor):
        return value[:1]
    if isinstance(value, Mapping):
        return {key: rows[:1] for key, rows in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_first_row, value))
    return value.first_rows(1) if isinstance(value, Edge) else value


def _all_close(result: Any, expected: Any, exact: bool = False) -> bool:
    """Whether two results agree up to rounding; with `exact`, bit by bit on a CPU. On a GPU sums
    have no fixed order."""
    pairs = result_tensors(result), result_tensors(expected)
    return len(pairs[0]) == len(pairs[1]) and all(_close(a, b, exact) for a, b in zip(*pairs, strict=True))


def _close(a: Tensor, b: Tensor, exact: bool) -> bool:
    if a.shape != b.shape or not b.is_floating_point() or not b.numel():
        return torch.equal(a, b)
    # NaN in either result counts as equal
    tolerance = 0.0 if exact and b.device.type == "cpu" else ROUNDING * torch.finfo(b.dtype).eps
    return bool(((a - b).abs().nan_to_num() <= tolerance * b.abs().nan_to_num().max().clamp(min=1)).all())
