"""Places in nested data, and the same data with something else there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def paths(value: Any, where: tuple = ()) -> Iterator[tuple]:
    """Paths to all values in nested data, outermost first."""
    if where:
        yield where
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from paths(inner, (*where, key))


def changed(value: Any, where: tuple, new: Any) -> Any:
    value = copy.deepcopy(value)
    inside = value
    for key in where[:-1]:
        inside = inside[key]
    if new is KeyError:
        del inside[where[-1]]
    else:
        inside[where[-1]] = new
    return value
