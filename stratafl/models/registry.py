"""Models by name: registration, checks of their arguments, and construction.

A user's own module is named by import path ("package.module:Class") or file ("my_model.py:Net").
Inputs are (B, channels, height, width), (B, features) or, for sequences, (B, length) of integer
codes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from stratafl.base.errors import InvalidInput, convert_errors, unknown_name
from stratafl.base.user_code import load_attribute
from stratafl.base.validation import find_name

Shape = Sequence[int]
Maker = TypeVar("Maker", bound=Callable[..., nn.Module])


class _Entry(NamedTuple):
    make: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    classes: int


_models: dict[str, _Entry] = {}
_shipped: set[str] = set()
"""Names of the package's own models, which users cannot register again."""


def register(example: tuple[tuple[int, ...], int]) -> Callable[[Maker], Maker]:
    """Decorator that registers a model under its function's name.

    The function takes `input_shape`, `classes`, and arguments with defaults; the first line of its
    docstring describes the model. `example` is the input shape and the number of classes with which
    the model is listed. Names of the package's own models are rejected.
    """

    def add(make: Maker) -> Maker:
        if make.__name__ in _shipped:
            allowed = "is the name of a model that stratafl ships: give the function another one"
            raise InvalidInput("register", make.__name__, allowed)
        _models[make.__name__] = _Entry(make, *example)
        return make

    return add


def keep_names() -> None:
    """Reserve all names registered so far."""
    _shipped.update(_models)


@dataclass(frozen=True)
class ListedModel:
    """A registered model, with the sizes it has in the paper's experiments."""

    name: str
    description: str
    input_shape: tuple[int, ...]
    classes: int
    parameters: int


def catalogue() -> list[ListedModel]:
    """Registered models, smallest first; parameters are counted without allocating memory."""
    listed = []
    for name, (make, input_shape, classes) in _models.items():
        with torch.device("meta"):
            model = make(input_shape, classes)
        description = (make.__doc__ or "").strip().rstrip(".")
        listed.append(ListedModel(name, description, input_shape, classes, count_parameters(model)))
    return sorted(listed, key=lambda entry: entry.parameters)


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def build(name: str, input_shape: Shape | Mapping[str, Shape], classes: int, /, **params: Any) -> nn.Module:
    """Build a registered model, or a user's own named "package.module:Class" or "file.py:Class".

    `input_shape` is the shape of one sample at the model's input, or a table of shapes if inputs
    have names; `classes` is the number of outputs per sample. A user's class or function gets
    `params`, and these two if it has arguments of these names.
    """
    if not isinstance(name, str):
        raise InvalidInput("model.name", name, 'must be a name or "package.module:Class"')
    task: dict[str, Any] = {"input_shape": _check_input_shape(name, input_shape), "classes": classes}
    check_sizes("classes", (classes,))
    if ":" in name:
        maker = _load_factory(name)
        with convert_errors("model.name", name, "does not say what it takes"):
            accepted = inspect.signature(maker).parameters
        arguments = {key: value for key, value in task.items() if key in accepted}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    else:
        maker, arguments, open_ended = _models[find_name("model.name", name, _models)].make, task, False
        accepted = inspect.signature(maker).parameters
    for key in params:
        if key in task or (key not in accepted and not open_ended):
            raise unknown_name("model key", key, [k for k in accepted if k not in task])
    try:
        inspect.signature(maker).bind(**arguments, **params)
    except TypeError as error:
        raise InvalidInput("model.name", name, f"cannot be made: {error}") from None
    with convert_errors("model.name", name, "cannot be made"):
        model = maker(**arguments, **params)
    if not isinstance(model, nn.Module):
        raise InvalidInput("model.name", name, f"must make a torch.nn.Module, not {type(model).__name__}")
    return model


def _check_input_shape(name: str, shape: Shape | Mapping[str, Shape]) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """Check the shape of a sample; shapes by name are for a user's own model only."""
    if not isinstance(shape, Mapping):
        check_sizes("input_shape", shape)
        return tuple(shape)
    if ":" not in name:
        raise InvalidInput("model.name", name, f"takes one input, and the data has {', '.join(shape)}")
    return {key: tuple(size) for key, size in shape.items()}


def _load_factory(path: str) -> Callable[..., Any]:
    """Load a user's class or function by its path."""
    maker = load_attribute("model.name", path)
    if not _is_model_factory(maker):
        raise InvalidInput("model.name", path, "must be a torch.nn.Module's class, or a Python function that makes one")
    return maker


def _is_model_factory(maker: object) -> bool:
    """Whether an object is a module's class or a Python function.

    Other callables are not called, since they could do anything.
    """
    while isinstance(maker, functools.partial):
        maker = maker.func
    if isinstance(maker, type):
        return issubclass(maker, nn.Module)
    # the result of `functools.cache` is not a function itself
    return inspect.isfunction(inspect.unwrap(maker)) or inspect.ismethod(maker)  # type: ignore[arg-type]


def image_shape(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """Channels, height and width of an image shape, which must have at least a certain size."""
    if len(shape) != 3 or min(shape[1:]) < least:
        allowed = f"{name} takes images of at least {least}x{least}: (channels, height, width)"
        raise InvalidInput("input_shape", tuple(shape), allowed)
    return shape[0], shape[1], shape[2]


def check_sizes(field: str, sizes: Sequence[object]) -> None:
    """Check that a value is a sequence of positive integers."""
    if not isinstance(sizes, Sequence) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes
    ):
        raise InvalidInput(field, sizes, "must be whole numbers above 0")
