"""The networks of the experiments, as plain modules whose sizes follow the data set.

A user's own module is named by import path ("package.module:Class") or file ("my_model.py:Net").
Inputs are (B, channels, height, width), (B, features) or, for sequences, (B, length) of integer
codes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratafl.errors import InvalidInput, guarded, unknown
from stratafl.own_code import import_module, load_module

Shape = Sequence[int]


def logistic(input_shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(input_shape: Shape, classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Perceptron with two hidden layers of 200."""
    _check_sizes("hidden", hidden)
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(input_shape: Shape, classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64 channels with pooling, then 384 and 192 units."""
    channels, height, width = _image("cnn", input_shape, least=16)
    flat = 64 * _after_two_convolutions(height) * _after_two_convolutions(width)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def _after_two_convolutions(size: int) -> int:
    return ((size - 4) // 2 - 4) // 2


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.GroupNorm(groups, channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18_gn(input_shape: Shape, classes: int, groups: int = 2) -> nn.Module:
    """ResNet-18 with group normalisation and the ImageNet stem."""
    channels, _, _ = _image("resnet18_gn", input_shape, least=8)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or 64 % groups:
        raise InvalidInput("groups", groups, "must be a divisor of 64")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        nn.GroupNorm(groups, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, width, stride, groups), Block(width, width, 1, groups)]
        before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Recurrent(nn.LSTM):
    """`nn.LSTM` written out step by step, since the fused kernels cannot be mapped over clients."""

    def forward(self, x_BTF: Tensor) -> Tensor:  # type: ignore[override]
        for layer in range(self.num_layers):
            weight_in, weight_state, bias_in, bias_state = (
                getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            gates_BTG = functional.linear(x_BTF, weight_in, bias_in + bias_state)
            hidden = torch.zeros_like(gates_BTG[:, 0, : self.hidden_size])
            cell = torch.zeros_like(hidden)
            outputs = []
            for gates in gates_BTG.unbind(1):
                enter, forget, new, leave = (gates + functional.linear(hidden, weight_state)).chunk(4, dim=-1)
                cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
                hidden = leave.sigmoid() * cell.tanh()
                outputs.append(hidden)
            x_BTF = torch.stack(outputs, dim=1)
        return x_BTF


class NextCharacter(nn.Module):
    """Embedding, recurrent layers, and a guess at what follows the sequence."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = Recurrent(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, codes_BT: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(codes_BT.long()))[:, -1])


def lstm(
    input_shape: Shape,
    classes: int,
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 100,
    layers: int = 2,
) -> nn.Module:
    """Two-layer LSTM that predicts the next character."""
    if len(input_shape) != 1:
        raise InvalidInput("input_shape", tuple(input_shape), "lstm takes sequences: (length,)")
    vocabulary = classes if vocabulary is None else vocabulary
    _check_sizes("vocabulary, embedding, hidden, layers", (vocabulary, embedding, hidden, layers))
    return NextCharacter(vocabulary, embedding, hidden, layers, classes)


MODELS: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function for function in (logistic, mlp, cnn, resnet18_gn, lstm)
}


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue, at the sizes it has in the paper's experiments."""

    name: str
    description: str
    input_shape: tuple[int, ...]
    classes: int
    parameters: int


_EXAMPLES: dict[str, tuple[tuple[int, ...], int]] = {
    "logistic": ((1, 28, 28), 10),
    "mlp": ((1, 28, 28), 10),
    "cnn": ((3, 32, 32), 10),
    "resnet18_gn": ((3, 32, 32), 100),
    "lstm": ((80,), 80),
}


def catalogue() -> list[Entry]:
    """The models known by name; parameters are counted without allocating any."""
    entries = []
    for name, (input_shape, classes) in _EXAMPLES.items():
        with torch.device("meta"):
            model = MODELS[name](input_shape, classes)
        description = (MODELS[name].__doc__ or "").strip().rstrip(".")
        entries.append(Entry(name, description, input_shape, classes, parameters(model)))
    return entries


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def build(name: str, input_shape: Shape, classes: int, /, **params: Any) -> nn.Module:
    """A model by name, or a user's own by "package.module:Class" or "file.py:Class".

    `input_shape` is one sample's, as the model sees it. A user's class or function gets `params`,
    and `input_shape` and `classes` where it has arguments of these names.
    """
    _check_sizes("input_shape", input_shape)
    _check_sizes("classes", (classes,))
    given: dict[str, Any] = {"input_shape": tuple(input_shape), "classes": classes}
    if not isinstance(name, str):
        raise InvalidInput("model.name", name, 'must be a name or "package.module:Class"')
    if ":" in name:
        maker = _load(name)
        with guarded("model.name", name, "does not say what it takes"):
            accepted = inspect.signature(maker).parameters
        arguments = {key: value for key, value in given.items() if key in accepted}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    elif name in MODELS:
        maker, arguments, open_ended = MODELS[name], given, False
        accepted = inspect.signature(maker).parameters
    else:
        raise unknown("model.name", name, MODELS)
    for key in params:
        if key in given or (key not in accepted and not open_ended):
            raise unknown("model key", key, [k for k in accepted if k not in given])
    try:
        inspect.signature(maker).bind(**arguments, **params)
    except TypeError as error:
        raise InvalidInput("model.name", name, f"cannot be made: {error}") from None
    with guarded("model.name", name, "cannot be made"):
        model = maker(**arguments, **params)
    if not isinstance(model, nn.Module):
        raise InvalidInput("model.name", name, f"must make a torch.nn.Module, not {type(model).__name__}")
    return model


def _load(path: str) -> Callable[..., Any]:
    """What "module:attribute" or "file.py:attribute" names."""
    source, _, attribute = path.rpartition(":")
    is_file = source.endswith(".py")
    module = load_module("model.name", Path(source)) if is_file else import_module("model.name", path, source)
    maker = getattr(module, attribute, None)
    if not callable(maker):
        raise unknown("model.name", attribute, [n for n in vars(module) if not n.startswith("_")])
    if not _makes_modules(maker):
        raise InvalidInput("model.name", path, "must be a torch.nn.Module's class, or a Python function that makes one")
    return maker


def _makes_modules(maker: object) -> bool:
    """Whether it may be called at all: what is neither a module's class nor a function of Python's may do anything."""
    while isinstance(maker, functools.partial):
        maker = maker.func
    if isinstance(maker, type):
        return issubclass(maker, nn.Module)
    # what `functools.cache` makes of a function is none itself
    return inspect.isfunction(inspect.unwrap(maker)) or inspect.ismethod(maker)  # type: ignore[arg-type]


def _image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        allowed = f"{name} takes images of at least {least}x{least}: (channels, height, width)"
        raise InvalidInput("input_shape", tuple(shape), allowed)
    return shape[0], shape[1], shape[2]


def _check_sizes(field: str, sizes: Sequence[object]) -> None:
    if not isinstance(sizes, Sequence) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes
    ):
        raise InvalidInput(field, sizes, "must be whole numbers above 0")
