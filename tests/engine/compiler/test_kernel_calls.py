"""Exact kernel calls for the paper's models: options, strides of tensors, and number of copies.

The reference kernels stand in for those of a GPU: they record their calls, and write gradients to
the given buffers. Expected calls are in `kernel_calls.json`. A kernel that is no longer called, or
gets a tensor with other strides, makes a GPU slower without changing any result.
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
from tests.slow import slow_unless

EXPECTED = Path(__file__).parent / "kernel_calls.json"
CLIENTS, BATCH = 2, 4
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack"}
WRITING = frozenset({"linear", "conv2d", "conv2d_relu_pool", "group_norm", "embedding"})


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
    """Text of an argument; of a tensor its shape, and its strides unless it is contiguous."""
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape))
        return shape if value.is_contiguous() else f"{shape} strides {'x'.join(map(str, value.stride()))}"
    if isinstance(value, reference.GradientBuffers):
        return f"({', '.join(map(as_text, value))})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_text, value))}]"
    return "source" if isinstance(value, RandomSource) else str(value)


class RecordingKernels:
    """Backend of reference kernels that records their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backend(self, *_: Any) -> kernels.Backend:
        functions = {name: self.recording(name, function) for name, function in reference.REFERENCE_OPS.items()}
        convert_filters = lambda filters, out: out.copy_(filters)  # noqa: E731
        return kernels.Backend(functions, WRITING, False, reference.fused_optimizer_step, convert_filters)

    def recording(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(
            *args: Any,
            gradient_buffers: reference.GradientBuffers | None = None,
            loss_scale: float = 1.0,
            **options: Any,
        ) -> Tensor:
            buffers = gradient_buffers
            if name != "layer_norm":  # has no kernel
                texts = [*map(as_text, args), *(f"{key}={as_text(value)}" for key, value in options.items())]
                target = "" if buffers is None else f" -> {as_text(buffers)}"
                self.calls.append(f"{name}({', '.join(texts)}){target}")
            if buffers is None:
                return function(*args, **options)
            if name == "linear":
                return function(*args, gradient_buffers=buffers, loss_scale=loss_scale, **options)
            places = iter([(buffers.weight, buffers.add_weight), (buffers.bias, buffers.add_bias)])
            return function(*(self.with_hook(value, places, loss_scale) for value in args), **options)

        return call

    def with_hook(self, value: Any, places: Iterator[Any], scale: float) -> Any:
        """Parameter with a hook that writes its gradient to the next of these places."""
        if not (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
            return value
        place, correction = next(places)
        parameter = value.detach().requires_grad_()
        parameter.register_hook(lambda gradient: reference.write_gradient(gradient, place, correction, scale))
        return parameter


class Copies(TorchDispatchMode):
    """Dispatch mode that counts operations that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in COPIES:
            self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def calls_and_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernel calls and copies of one gradient, whose value is checked, too."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    flat = FlatModule(make().train())
    inputs = torch.randint(10, (BATCH, *shape)) if len(shape) == 1 else torch.randn(BATCH, *shape)
    targets = torch.arange(BATCH) % 10
    recorder = RecordingKernels()
    monkeypatch.setattr(kernels, "backend_for", recorder.backend)
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
    method(rows_CP, b_CZ, batch)  # captures the program
    recorder.calls.clear()
    with Copies() as copies:
        g_CP = method(rows_CP, b_CZ, batch).grads_CP
    got_CP = torch.empty_like(x_CP)
    method.layout.restore(g_CP, got_CP)
    if "dropout" not in name:
        expected_P = flat.gradient(x_P, b_Z, inputs, targets, loss)
        assert float((got_CP[0] - expected_P).norm() / expected_P.norm()) < 1e-4
    return {"calls": list(recorder.calls), "copies": dict(sorted(copies.count.items()))}


@pytest.mark.parametrize("name", slow_unless(lambda name: name != "resnet18_gn", MODELS))
def test_kernel_calls_and_copies_are_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, actual = json.loads(EXPECTED.read_text())[name], calls_and_copies(name, monkeypatch)
    assert actual["calls"] == expected["calls"]
    more = {op: count for op, count in actual["copies"].items() if count > expected["copies"].get(op, 0)}
    assert not more, f"copies that are not in the record: {more}, of {expected['copies']}"
