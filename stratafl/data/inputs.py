"""Inputs of a model: one tensor, or several by name; samples are along the first axis.

`NamedInputs` supports indexing, moving and copying like a tensor, so that most code works with
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput


class NamedInputs:
    """Tensors of the same samples by name, such as token codes and their mask."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.named = dict(named)

    def map(self, function: Callable[[Tensor], Tensor]) -> NamedInputs:
        return NamedInputs({name: function(value) for name, value in self.named.items()})

    def __len__(self) -> int:
        return len(next(iter(self.named.values())))

    def __getitem__(self, index: Any) -> NamedInputs:
        return self.map(lambda value: value[index])

    @property
    def device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def clone(self) -> NamedInputs:
        return self.map(torch.clone)

    def split(self, size: int) -> list[NamedInputs]:
        return [self[first : first + size] for first in range(0, len(self), size)]

    def tensor_split(self, parts: int) -> list[NamedInputs]:
        split = {name: value.tensor_split(parts) for name, value in self.named.items()}
        return [NamedInputs({name: pieces[part] for name, pieces in split.items()}) for part in range(parts)]


Inputs = Tensor | NamedInputs
Kind = TypeVar("Kind", bound=Inputs)
Pair = tuple[Inputs, Tensor]
"""Inputs and targets."""
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]
"""Shape of one sample; by name if inputs have names."""
AS_GIVEN = (torch.bool, torch.uint8, torch.int64)
"""Integer dtypes that are not converted: masks, and the types that losses accept."""


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Kind) -> Kind:
    """Apply a function to every tensor of the inputs."""
    return cast(Kind, inputs.map(function) if isinstance(inputs, NamedInputs) else function(inputs))


def combine(function: Callable[[list[Tensor]], Tensor], several: Sequence[Inputs]) -> Inputs:
    """Combine several inputs by a function such as `torch.cat`."""
    tables = [value.named for value in several if isinstance(value, NamedInputs)]
    if not tables:
        return function([value for value in several if isinstance(value, Tensor)])
    return NamedInputs({name: function([table[name] for table in tables]) for name in tables[0]})


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """Tensors of the inputs by name; the name of a single tensor is empty."""
    return inputs.named if isinstance(inputs, NamedInputs) else {"": inputs}


def call_arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments to call a module with."""
    return ((), inputs.named) if isinstance(inputs, NamedInputs) else ((inputs,), {})


def as_type(inputs: Kind, dtype: torch.dtype, device: torch.device | None = None) -> Kind:
    """Convert floating-point tensors to a dtype, and move all tensors to a device."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(device or tensor.device, dtype if tensor.is_floating_point() else tensor.dtype)

    return map_tensors(convert, inputs)


def shape_of(inputs: Inputs) -> Shape:
    """Shape of one sample."""
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in tensors_of(inputs).items()}
    return shapes if isinstance(inputs, NamedInputs) else shapes[""]


def sample_bytes(inputs: Inputs) -> int:
    """Size of one sample in bytes."""
    return sum(tensor[:1].nbytes for tensor in tensors_of(inputs).values())


def as_tensor(field: str, value: object) -> Tensor:
    """Convert a tensor, an array, an image or a pandas table to a dense tensor."""
    if not isinstance(value, np.ndarray | Tensor) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            raise InvalidInput(field, type(value).__name__, "must have all its values, and some are masked")
        if not (value.flags.writeable and value.dtype.isnative and min(value.strides, default=0) >= 0):
            value = value.astype(value.dtype.newbyteorder("="))  # torch warns of the first and cannot take the others
    try:
        tensor = torch.as_tensor(value).detach()
    except Exception:
        raise InvalidInput(field, type(value).__name__, "must be an array of numbers, as long in every row") from None
    odd = unusable_because(tensor)
    if odd:
        raise InvalidInput(field, type(value).__name__, f"must be a dense tensor with values, and this one {odd}")
    return tensor


def is_array(value: object) -> bool:
    """Whether a value is an array or converts itself to one, as images and pandas tables do.

    A NumPy scalar is not an array.
    """
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def targets(field: str, value: object) -> Tensor:
    """Convert targets to a tensor; integers get a dtype that PyTorch's losses accept."""
    if _are_texts(value):
        allowed = "are texts: number the classes, as numpy.unique(targets, return_inverse=True)[1] does"
        raise InvalidInput(f"{field} targets", type(value).__name__, allowed)
    tensor = as_tensor(f"{field} targets", value)
    return tensor if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in AS_GIVEN else tensor.long()


def _are_texts(value: object) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, Tensor) or not is_array(value):
        return isinstance(value, str)
    array = np.asarray(value)
    return array.dtype.kind in "US" or (array.dtype.kind == "O" and isinstance(next(array.flat, None), str))


def unusable_because(tensor: Tensor) -> str:
    """Reason why a tensor cannot be used; empty if it can."""
    if tensor.is_nested:
        return "is nested: pad its rows to one length"
    if tensor.is_meta:
        return "is on the meta device and has none"
    if tensor.is_quantized:
        return "is quantised: call its dequantize()"
    if tensor.layout is not torch.strided:
        return f"is of layout {tensor.layout}: call its to_dense()"
    return ""


def parse_inputs(field: str, value: object) -> Inputs:
    """Convert a tensor or an array, or a table of these by name, to inputs."""
    if not isinstance(value, Mapping):
        return as_tensor(field, value)
    for name in value:
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidInput(f"{field} input", name, "must be the name of an argument of the model")
    if not value:
        raise InvalidInput(field, dict(value), "has no inputs")
    return NamedInputs({name: as_tensor(f"{field} input {name}", array) for name, array in value.items()})
