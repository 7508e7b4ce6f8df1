"""The calls that a device's kernels get for the paper's models: which, with what options, how the
tensors lie, and how many copies are made around them.

The kernels are those of plain torch, which take part in the calls that a GPU's kernels would get:
they note what they are given, and write gradients to where they are wanted. The expected calls
are in `kernel_calls.json`: a kernel that is no longer called, or gets a tensor that lies otherwise,
costs a GPU time that no result shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import LossOnScores
from stratafl.core.rows import IndexedRows
from stratafl.engine import kernels
from stratafl.engine.batches import ClientBatches
from stratafl.engine.kernels import reference
from stratafl.engine.random_streams import ClientStream, RandomSource
from stratafl.models.networks import cnn, lstm, mlp, resnet18_gn
from tests.engine.selected import select

EXPECTED = Path(__file__).parent / "kernel_calls.json"
CLIENTS, BATCH = 2, 4
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack"}
SINKING = frozenset({"linear", "conv2d", "conv2d_relu_pool", "group_norm", "embedding"})


def dropout_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(), nn.Dropout(0.25), nn.MaxPool2d(3, stride=1, padding=1), nn.Flatten(), nn.Linear(576, 32), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(32, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp((1, 28, 28), 10), (1, 28, 28)),
    "cnn": (lambda: cnn((3, 32, 32), 10), (3, 32, 32)),
    "resnet18_gn": (lambda: resnet18_gn((3, 32, 32), 10), (3, 32, 32)),
    "lstm": (lambda: lstm((6,), 10), (6,)),
    "cnn with dropout": (dropout_cnn, (1, 28, 28)),
}


def as_text(value: Any) -> str:
    """An argument of a kernel; of a tensor its shape, and how it lies if not contiguous."""
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape))
        return shape if value.is_contiguous() else f"{shape} strides {'x'.join(map(str, value.stride()))}"
    if isinstance(value, reference.GradientBuffers):
        return f"({', '.join(as_text(each) for each in value)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_text(each) for each in value)}]"
    return "source" if isinstance(value, RandomSource) else str(value)


class NotingKernels:
    """Plain torch in the place of a device's kernels."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def table(self, *_: Any) -> kernels.Backend:
        functions = {name: self.noting(name, function) for name, function in reference.REFERENCE_OPS.items()}
        convert_filters = lambda filters, out: out.copy_(filters)  # noqa: E731
        return kernels.Backend(functions, SINKING, False, reference.fused_optimizer_step, convert_filters)

    def noting(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(
            *args: Any,
            gradient_buffers: reference.GradientBuffers | None = None,
            loss_scale: float = 1.0,
            **options: Any,
        ) -> Tensor:
            sink = gradient_buffers
            if name != "layer_norm":  # has no kernel
                given = [*map(as_text, args), *(f"{key}={as_text(value)}" for key, value in options.items())]
                self.calls.append(f"{name}({', '.join(given)})" + ("" if sink is None else f" -> {as_text(sink)}"))
            if sink is None or name == "linear":
                return function(
                    *args, **options, **({} if sink is None else {"gradient_buffers": sink, "loss_scale": loss_scale})
                )
            places = iter([(sink.weight, sink.add_weight), (sink.bias, sink.add_bias)])
            return function(*(self.settling(each, places, loss_scale) for each in args), **options)

        return call

    def settling(self, value: Any, places: Iterator[Any], scale: float) -> Any:
        """A parameter whose gradient is written to the next of these places."""
        if not (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
            return value
        place, correction = next(places)
        parameter = value.detach().requires_grad_()
        parameter.register_hook(lambda gradient: reference.write_gradient(gradient, place, correction, scale))
        return parameter


class Copies(TorchDispatchMode):
    """Counts the operations that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in COPIES:
            self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def noted(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The calls and copies of one gradient, which is checked on the way."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    flat = FlatModule(make().train())
    inputs = torch.randint(10, (BATCH, *shape)) if len(shape) == 1 else torch.randn(BATCH, *shape)
    targets = torch.arange(BATCH) % 10
    noting = NotingKernels()
    monkeypatch.setattr(kernels, "backend_for", noting.table)
    loss = LossOnScores(F.cross_entropy)
    method, how = select(flat, loss, inputs, targets, class_indices=True)
    assert method is not None and how == "stacked"
    x_P, b_Z = flat.flatten_module(flat.module)
    x_CP, b_CZ = x_P.repeat(CLIENTS, 1), b_Z.repeat(CLIENTS, 1)
    rows_CP = torch.empty_like(x_CP)
    method.layout.into(rows_CP, IndexedRows(x_CP), range(CLIENTS))
    inputs_CB, targets_CB = torch.stack([inputs] * CLIENTS), torch.stack([targets] * CLIENTS)
    mask_CB, stream = torch.ones(CLIENTS, BATCH, dtype=torch.bool), ClientStream(0, torch.arange(CLIENTS), 0)
    batch = ClientBatches(inputs_CB, targets_CB, mask_CB, np.full(CLIENTS, BATCH), stream)
    method(rows_CP, b_CZ, batch)  # what is made once is made now
    noting.calls.clear()
    with Copies() as copies:
        g_CP = method(rows_CP, b_CZ, batch).grads_CP
    got_CP = torch.empty_like(x_CP)
    method.layout.restore(g_CP, got_CP)
    if "dropout" not in name:
        expected_P = flat.gradient(x_P, b_Z, inputs, targets, loss)
        assert float((got_CP[0] - expected_P).norm() / expected_P.norm()) < 1e-4
    return {"calls": list(noting.calls), "copies": dict(sorted(copies.count.items()))}


@pytest.mark.parametrize("name", MODELS)
def test_kernel_calls_and_copies_are_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, actual = json.loads(EXPECTED.read_text())[name], noted(name, monkeypatch)
    assert actual["calls"] == expected["calls"]
    more = {op: count for op, count in actual["copies"].items() if count > expected["copies"].get(op, 0)}
    assert not more, f"copies that were not made before: {more}, of {expected['copies']}"
