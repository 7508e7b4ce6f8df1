"""The JAX baseline trains what the others train."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed import jax_baseline
from benchmarks.speed.jax_baseline import (
    JaxClients,
    UnsupportedByJax,
    convert,
    drawn_batches,
    flipped_and_cropped,
    images_last,
    jax_vmap_baseline,
)
from benchmarks.speed.torch_baselines import TrainingJob
from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, uniform
from stratafl.data.transforms import flip_and_crop
from stratafl.models.registry import build

jax = pytest.importorskip("jax")

SHAPES = {"logistic": (1, 6, 6), "mlp": (2, 5, 4), "cnn": (3, 17, 16)}
"""Odd sizes and unequal sides, which wrong orders do not survive."""
LR = 0.1


def make_job(name: str = "mlp", clients: int = 3, size: int = 6, **changed: Any) -> TrainingJob:
    torch.manual_seed(1)
    shape = SHAPES[name]
    inputs, targets = torch.randn(clients * size, *shape), torch.randint(4, (clients * size,))
    partition = list(torch.randperm(clients * size).split(size))
    job = TrainingJob(build(name, shape, 4), inputs, targets, partition, size, 2, LR, 10.0, None, 0)
    return job._replace(**changed)


def in_torch_order(weights: list[tuple[Any, ...]], axis: int = 0) -> list[Tensor]:
    """Converted weights, or their gradients, as the module has them; `axis` is how many axes stand
    before theirs."""
    orders = {2: (1, 0), 4: (3, 2, 0, 1)}
    tensors = []
    for layer in weights:
        for value in layer:
            order = orders.get(value.ndim - axis, range(value.ndim - axis))
            moved = np.transpose(np.asarray(value), (*range(axis), *(axis + place for place in order)))
            tensors.append(torch.tensor(moved))
    return tensors


def trained(job: TrainingJob) -> list[Tensor]:
    """The round by hand, for clients whose batches hold all of their samples."""
    ends = []
    for samples in job.partition:
        weights = {name: value.detach().clone() for name, value in job.module.named_parameters()}
        for _ in range(job.steps):
            leaves = {name: value.requires_grad_() for name, value in weights.items()}
            output = torch.func.functional_call(job.module, leaves, (job.inputs[samples],))
            rows = torch.autograd.grad(F.cross_entropy(output, job.targets[samples]), list(leaves.values()))
            length = torch.cat([row.flatten() for row in rows]).norm()
            shrink = job.clip / length.clamp(min=job.clip)
            weights = {
                name: (value - job.lr * shrink * row).detach()
                for (name, value), row in zip(leaves.items(), rows, strict=True)
            }
        ends.append(list(weights.values()))
    return [torch.stack(same).mean(dim=0) for same in zip(*ends, strict=True)]


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_gradients_are_the_modules(name: str) -> None:
    job = make_job(name)
    # nested as a user might
    module = nn.Sequential(nn.Sequential(*list(job.module)[:2]), *list(job.module)[2:])
    network = convert(module)
    output = module(job.inputs)
    pull_BK = torch.randn_like(output)

    def pulled(weights: Any) -> Any:
        return (network.apply(weights, images_last(job.inputs)) * pull_BK.numpy()).sum()

    jax_output = torch.tensor(np.asarray(network.apply(network.weights, images_last(job.inputs))))
    torch.testing.assert_close(jax_output, output, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((output * pull_BK).sum(), list(module.parameters()))
    jax_gradients = in_torch_order(jax.grad(pulled)(network.weights))
    for one, other in zip(jax_gradients, gradients, strict=True):
        # the sums are over hundreds of positions, so what counts is the size of the whole
        torch.testing.assert_close(one / other.norm(), other / other.norm(), atol=1e-5, rtol=1e-5)


def test_convolutions_of_every_kind() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=2, groups=2, bias=False))
    x = torch.randn(2, 4, 9, 8)
    network = convert(module)
    jax_output = np.asarray(network.apply(network.weights, images_last(x)))
    torch.testing.assert_close(torch.tensor(jax_output).permute(0, 3, 1, 2), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "clip"), [("mlp", 10.0), ("mlp", 0.1), ("cnn", 0.5)])
def test_a_round_is_the_one_computed_by_hand(name: str, clip: float) -> None:
    job = make_job(name, clip=clip)
    clients = JaxClients(job)
    clients.round()
    for rows, expected in zip(in_torch_order(clients.weights, axis=1), trained(job), strict=True):
        torch.testing.assert_close(rows, expected.expand_as(rows), atol=1e-5, rtol=1e-5)


def test_bf16_keeps_weights_in_float32() -> None:
    job = make_job("cnn")
    clients = JaxClients(job, "bf16")
    clients.round()
    weights, expected = in_torch_order(clients.weights, axis=1), trained(job)
    errors = [((rows[0] - one).norm() / one.norm()).item() for rows, one in zip(weights, expected, strict=True)]
    assert all(rows.dtype == torch.float32 for rows in weights)
    assert 1e-6 < max(errors) < 3e-2


@pytest.mark.parametrize("augment", [None, flip_and_crop])
def test_a_round_changes_the_weights_and_all_clients_end_equal(augment: Any) -> None:
    job = make_job("cnn", batch=4, steps=3, augment=augment)
    clients = JaxClients(job)
    before = list(job.module.parameters())
    for _ in range(2):
        clients.round()
        after = in_torch_order(clients.weights, axis=1)
        for rows, old in zip(after, before, strict=True):
            assert rows.isfinite().all() and not torch.equal(rows[0], old)
            assert all(torch.equal(rows[0], row) for row in rows)
        before = [rows[0] for rows in after]


def test_rounds_can_be_had_without_the_weights() -> None:
    assert jax_vmap_baseline(make_job("logistic"))() is None  # type: ignore[func-returns-value]


def test_no_step_is_longer_than_the_clip() -> None:
    job = make_job(clients=1, clip=1e-3, steps=1)
    clients = JaxClients(job)
    clients.round()
    moved = [
        (rows[0] - old).flatten()
        for rows, old in zip(in_torch_order(clients.weights, axis=1), job.module.parameters(), strict=True)
    ]
    assert torch.cat(moved).norm().item() == pytest.approx(LR * job.clip, rel=1e-2)


def test_corrections_are_added() -> None:
    job = make_job(steps=1, clip=1e6)
    clients = JaxClients(job)
    clients.corrections = jax.tree.map(lambda value: value + 0.5, clients.corrections)
    clients.round()
    for rows, plain in zip(in_torch_order(clients.weights, axis=1), trained(job), strict=True):
        torch.testing.assert_close(rows[0], plain - LR * 0.5, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "steps"), [(5, 4), (4, 6), (4, 2), (20, 2)])
def test_an_epoch_draws_every_sample_once(batch: int, steps: int) -> None:
    samples_CS = np.arange(20).reshape(2, 10)
    index_TCB, present_TB = (np.asarray(part) for part in drawn_batches(jax.random.key(3), samples_CS, batch, steps))
    assert index_TCB.shape == (steps, 2, min(batch, 10)) and present_TB.shape == (steps, min(batch, 10))
    per_epoch = -(-10 // batch)
    orders = []
    for start in range(0, steps, per_epoch):
        for client in range(2):
            chosen = index_TCB[start : start + per_epoch, client][present_TB[start : start + per_epoch] > 0]
            assert len(set(chosen)) == len(chosen) and set(chosen) <= set(samples_CS[client])
            assert len(chosen) == (10 if start + per_epoch <= steps else (steps - start) * batch)
            orders.append(tuple(chosen % 10))
    assert len(set(orders)) == len(orders), "clients and epochs have orders of their own"


def test_padding_of_a_batch_does_not_count() -> None:
    # with samples all alike every batch has one gradient, whatever its size
    job = make_job(size=6, batch=4, steps=2)
    job = job._replace(inputs=job.inputs[:1].expand_as(job.inputs), targets=job.targets[:1].expand_as(job.targets))
    clients = JaxClients(job)
    clients.round()
    for rows, expected in zip(in_torch_order(clients.weights, axis=1), trained(job), strict=True):
        torch.testing.assert_close(rows[0], expected, atol=1e-5, rtol=1e-5)


def test_flips_and_crops_are_those_of_the_same_draws() -> None:
    images, client_C, position_B = torch.randn(12, 3, 9, 7), torch.arange(4), torch.arange(25)
    index_CB = torch.randint(12, (4, 25))
    draws = torch.stack([uniform(5, Stream.TRANSFORM, client_C[:, None], 2, position_B, draw) for draw in range(4)])
    expected = flip_and_crop(images[index_CB], 5, client_C, 2)
    actual = flipped_and_cropped(images_last(images), index_CB.numpy(), draws.numpy())
    assert torch.equal(torch.tensor(np.asarray(actual)).permute(0, 1, 4, 2, 3), expected)


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)


SAME = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "module",
    [
        build("resnet18_gn", (3, 8, 8), 4),
        build("lstm", (5,), 4),
        Reversed(nn.Linear(3, 3)),
        nn.Sequential(SAME, SAME),
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(0),
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_refused(module: nn.Module) -> None:
    with pytest.raises(UnsupportedByJax):
        convert(module)


@pytest.mark.parametrize(
    "changed",
    [
        {"module": nn.Sequential(nn.Linear(16, 4))},
        {"module": nn.Conv2d(3, 4, 3)},
        {"augment": lambda images, seed, client, step: images},
        {"partition": [torch.arange(3), torch.arange(4)]},
        {"inputs": torch.empty(18, 3, 17, 16, device="meta")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_jobs_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        jax_vmap_baseline(make_job("cnn")._replace(**changed))


def test_available_tells_whether_jax_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_baseline.available()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not jax_baseline.available()
