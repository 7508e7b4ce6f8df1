"""Codes beyond an embedding or the classes of one-hot vectors are found; on a GPU nothing waits for
the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import LossOnScores
from stratafl.engine import kernels
from stratafl.engine.batches import ClientBatches
from stratafl.engine.gradients import CompiledGradients, GradientTask, PerClientLoss, VmapGradients
from stratafl.engine.validation import IndexRangeCheck

CLIENTS, SAMPLES = 3, 4


def mapped(device: str, tables: int = 1) -> tuple[VmapGradients, tuple[torch.Tensor, torch.Tensor, ClientBatches]]:
    """A mapping over clients whose module looks up codes, and what to call it with."""
    layers = [nn.Embedding(6, 3), nn.Flatten(), nn.Linear(15, 3)]
    module = (nn.Sequential(*layers) if tables else nn.Sequential(nn.Linear(5, 3))).to(device)
    flat = FlatModule(module)
    x_CP, b_CZ = (row.expand(CLIENTS, -1).clone() for row in flat.flatten_module(module))
    codes = torch.arange(CLIENTS * SAMPLES * 5).remainder(6).view(CLIENTS, SAMPLES, 5)
    inputs_CB = (codes if tables else codes.float()).to(device)
    targets_CB = torch.zeros(CLIENTS, SAMPLES, dtype=torch.long, device=device)
    batch = ClientBatches(
        inputs_CB, targets_CB, torch.ones_like(targets_CB, dtype=torch.bool), np.full(CLIENTS, SAMPLES)
    )
    task = GradientTask(flat, LossOnScores(F.cross_entropy), inputs_CB[0], targets_CB[0])
    return VmapGradients(task), (x_CP, b_CZ, batch)


@pytest.mark.parametrize("tables", [0, 1])
def test_a_mapped_step_waits_for_no_device(tables: int) -> None:
    """On a device without values to wait for."""
    method, given = mapped("meta", tables)
    assert method(*given).grads_CP.shape == given[0].shape


def test_a_client_with_a_code_beyond_is_marked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    method, (x_CP, b_CZ, batch) = mapped("cpu")
    expected = method(x_CP, b_CZ, batch).grads_CP
    batch.inputs_CB[1, 2, 3] = 6
    with pytest.raises(IndexError, match="beyond an embedding's vocabulary"):
        method(x_CP, b_CZ, batch)
    outside_C = [torch.tensor([False, True, False]), torch.tensor([False, False, False])]
    marked = IndexRangeCheck.mark(expected.clone(), outside_C)
    assert marked[1].isnan().all() and torch.equal(marked[[0, 2]], expected[[0, 2]])
    assert torch.equal(IndexRangeCheck.mark(expected.clone(), []), expected)


class OneHot(nn.Module):
    """A linear layer of one-hot vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 3)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.linear(F.one_hot(codes, num_classes=6).float().flatten(1))


@pytest.mark.parametrize(("code", "reason"), [(6, "must be smaller"), (-1, "must be non-negative")])
def test_one_hot_codes_beyond_the_classes_are_found(code: int, reason: str) -> None:
    """`torch.func.vmap` gives such a code a row of zeros."""
    _, (_, _, batch) = mapped("cpu")
    flat = FlatModule(OneHot())
    x_CP, b_CZ = (row.expand(CLIENTS, -1).clone() for row in flat.flatten_module(flat.module))
    task = GradientTask(flat, LossOnScores(F.cross_entropy), batch.inputs_CB[0], batch.targets_CB[0])
    method = CompiledGradients(task)
    assert method(x_CP, b_CZ, batch).grads_CP.isfinite().all()
    batch.inputs_CB[1, 2, 3] = code
    with pytest.raises(RuntimeError, match=f"Class values {reason}"):
        method(x_CP, b_CZ, batch)


def one_hot_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(scores.log_softmax(1) * F.one_hot(labels, 3)).sum(1).mean()


def test_a_mapped_loss_of_one_hot_labels_waits_for_no_device() -> None:
    _, (_, _, batch) = mapped("meta")
    losses = PerClientLoss(one_hot_loss, torch.float32, kernels.TORCH_BACKEND, class_indices=False)
    scores_CB = torch.zeros(CLIENTS, SAMPLES, 3, device="meta", requires_grad=True)
    losses_C = losses(scores_CB, batch)
    assert losses_C.shape == (CLIENTS,) and losses_C.dtype == torch.float32 and losses._uses_vmap
