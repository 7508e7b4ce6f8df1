"""Running out of memory is raised everywhere, rather than taken as a property of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base import errors
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import LossOnScores
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine import batches, kernels, module_profile, selection
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler import padding
from stratafl.engine.compiler import program as capture
from stratafl.engine.compiler.capture import trace_fx
from stratafl.engine.gradients import GradientTask, PerClientLoss
from stratafl.engine.validation import ModelUnderTest, check_single_sample_batches
from tests.flat import update_of

HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
KINDS = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(HOST), MemoryError()]
X, LABELS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0, 2])
LOSS = LossOnScores(F.cross_entropy)


class Failing(nn.Linear):
    """A module that fails from its first call on."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(4, 3)
        self.problem = [problem]
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        raise self.problem[0]

    def __deepcopy__(self, memo: dict) -> Failing:
        return Failing(self.problem[0])


def raising(problem: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise problem

    return function


def training(problem: BaseException) -> ClientTraining:
    return ClientTraining(
        flat=FlatModule(Failing(problem)),
        loss=LOSS,
        samples=InMemorySamples(X, LABELS),
        clients=ClientIndex.from_lists([torch.arange(6)]),
        client_update=update_of(0.1),
        batch_size=None,
        sampling="shuffle",
        seed=0,
    )


def of_losses(problem: BaseException) -> None:
    batch = ClientBatches(X[None], LABELS[None], torch.ones(1, 6, dtype=torch.bool), np.array([6]))
    PerClientLoss(raising(problem), torch.float32, kernels.TORCH_BACKEND, False)(
        X[None, :, :3].clone().requires_grad_(), batch
    )


def select(flat: FlatModule) -> None:
    task = GradientTask(flat, LOSS, X, LABELS)
    selection.select_gradient_method(task, ("stacked", "vmap"), module_profile.ModuleProfile())


def of_trials(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "copy_module", raising(problem))
    select(FlatModule(nn.Linear(4, 3)))


def of_a_method(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "CompiledGradients", raising(problem))
    select(FlatModule(nn.Linear(4, 3)))


def of_padding(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "capture", raising(problem))
    mask_CB = torch.ones(1, 6, dtype=torch.bool)
    padding.can_pad(FlatModule(nn.Linear(4, 3)), ClientBatches(X[None], LABELS[None], mask_CB, np.array([6])))


def of_one_operation(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "vmap", raising(problem))
    program = capture.BatchedProgram(FlatModule(nn.Sequential(Renormed(), nn.Linear(4, 3))), X)
    named = {"1.weight": torch.zeros(2, 3, 4), "1.bias": torch.zeros(2, 3)}
    program(named, {}, torch.stack([X, X]), None)


class Renormed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(x, 2, 0, 1.0)


PLACES: dict[str, Callable[[BaseException, pytest.MonkeyPatch], object]] = {
    "a loss that is mapped": lambda problem, _: of_losses(problem),
    "a trial": lambda problem, _: select(training(problem).flat),
    "the trial in float64": of_trials,
    "a method on trial": of_a_method,
    "a profile": lambda problem, _: module_profile.profile_module(training(problem)),
    "an augmentation of stacks": lambda problem, _: batches.supports_stacked_batches(raising(problem), X, 0),
    "recording": lambda problem, _: trace_fx(raising(problem), [X]),
    "padding": of_padding,
    "an operation that is mapped": of_one_operation,
    "a batch of one": lambda problem, _: check_single_sample_batches(
        ModelUnderTest(training(problem).flat, *training(problem).flat.flatten_module(Failing(problem)), LOSS),
        X, LABELS, 5, "shuffle", {"it": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", KINDS, ids=lambda problem: type(problem).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_is_raised(place: str, problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(problem)) as raised:
        PLACES[place](problem, monkeypatch)
    assert raised.value is problem


def test_a_loss_is_still_mapped_after_out_of_memory() -> None:
    problems: Iterator[Exception] = iter([KINDS[0]])
    calls: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        for problem in problems:
            raise problem
        return outputs.square().mean()

    losses = PerClientLoss(loss, torch.float32, kernels.TORCH_BACKEND, False)
    outputs, mask_CB = torch.randn(5, 6, 3, requires_grad=True), torch.ones(5, 6, dtype=torch.bool)
    batch = ClientBatches(X.expand(5, 6, 4), LABELS.expand(5, 6), mask_CB, np.full(5, 6))
    with pytest.raises(torch.OutOfMemoryError):
        losses(outputs, batch)
    calls.clear()
    assert losses(outputs, batch).shape == (5,) and len(calls) == 1


def test_other_errors_are_not_out_of_memory() -> None:
    for problem in (RuntimeError("shapes cannot be multiplied"), ValueError(HOST), KeyError("x")):
        assert not errors.is_out_of_memory(problem)
        errors.reraise_out_of_memory(problem)
    assert all(map(errors.is_out_of_memory, KINDS))
    assert errors.is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
