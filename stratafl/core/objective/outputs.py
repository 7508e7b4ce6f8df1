"""What a model returns: a tensor of scores, or something that holds one.

The scores are the tensor itself; the entry or attribute `logits` of a table or an object, as models
of Hugging Face return them; or the first entry of a tuple. A loss or metric of the library's is
given the scores, a loss of the user's what the model returned.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

LOGITS = "logits"
WANTED = f"must be a tensor of scores, a table or an object with {LOGITS!r}, or a tuple whose first entry is one"


def place_of_scores(outputs: Any) -> Any:
    """What should be the scores, in what a model returned that is no tensor; None where nothing
    should."""
    if isinstance(outputs, Mapping):
        return outputs.get(LOGITS)
    if hasattr(outputs, LOGITS):
        return getattr(outputs, LOGITS)
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else None


def scores_of(outputs: Any) -> Tensor | None:
    """The scores in what a model returned; None where there are none."""
    found = outputs if isinstance(outputs, Tensor) else place_of_scores(outputs)
    return found if isinstance(found, Tensor) else None


def scores(outputs: Any) -> Tensor:
    """The scores in what a model returned, or the complaint."""
    found = scores_of(outputs)
    if found is None:
        raise TypeError(f"{kind_of(outputs)} holds no scores: a model's output {WANTED}")
    return found


def kind_of(outputs: Any) -> str:
    """What a model returned, in words."""
    keys = f" of {', '.join(map(str, list(outputs)[:5]))}" if isinstance(outputs, Mapping) else ""
    return f"{type(outputs).__name__}{keys}"


class Apart(Exception):
    """What a model returned for some samples cannot be put together with what it did for others."""


def joined(parts: Sequence[Any], lengths: Sequence[int]) -> Any:
    """What a model would have returned for all samples at once, from what it did for some at a
    time; `Apart` where something in it has no entry for each sample."""

    def together(tensors: Sequence[Tensor]) -> Tensor:
        if any(each.shape[:1] != (length,) for each, length in zip(tensors, lengths, strict=True)):
            raise Apart
        return torch.cat(list(tensors))

    return _merged(together, parts)


def replaced(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A model's outputs with every tensor in them replaced. What is neither a table, a tuple, a
    data class nor something with scores is left as it is."""
    return _merged(lambda tensors: function(tensors[0]), [outputs], keeps=True)


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors that `replaced` replaces, in its order."""
    found: list[Tensor] = []

    def noted(each: Tensor) -> Tensor:
        found.append(each)
        return each

    replaced(outputs, noted)
    return found


def _merged(function: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Any], keeps: bool = False) -> Any:
    """What several models' outputs are together, by a function of the tensors that stand in the
    same place; keeps: whether what is not known to hold tensors is the first's, and not `Apart`."""
    first = parts[0]
    if isinstance(first, Tensor):
        return function(parts)
    if isinstance(first, MutableMapping):
        made = copy.copy(first)
        for key in first:
            made[key] = _merged(function, [part[key] for part in parts], keeps)
        return made
    if isinstance(first, tuple | list):
        entries = [_merged(function, entry, keeps) for entry in zip(*parts, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if first is None or isinstance(first, bool | int | float | str):
        if any(part != first for part in parts):
            raise Apart
        return first
    if not (dataclasses.is_dataclass(first) or hasattr(first, LOGITS)):
        if keeps:
            return first
        raise Apart
    made = copy.copy(first)
    for name in vars(first):
        object.__setattr__(made, name, _merged(function, [getattr(part, name) for part in parts], keeps))
    return made


def size(outputs: Any) -> int:
    """Bytes of all tensors in what a model returned."""
    if isinstance(outputs, Tensor):
        return outputs.nbytes
    if isinstance(outputs, Mapping):
        inside: Any = outputs.values()
    elif isinstance(outputs, tuple | list):
        inside = outputs
    else:
        inside = vars(outputs).values() if hasattr(outputs, "__dict__") else ()
    return sum(map(size, inside))
