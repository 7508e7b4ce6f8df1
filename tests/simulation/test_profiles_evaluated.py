"""Losses and outputs with habits of their own: their metrics are those of all samples at once."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.metrics.evaluated import evaluated
from tests.simulation.module_profiles import ENGINES, data, furthest, made, plain_rounds, run


def test_a_weighted_loss_is_evaluated_on_all_samples_at_once() -> None:
    random = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(5000, 3, generator=random), torch.arange(5000).sort().values % 7 % 3
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0]))
    order = labels.argsort()  # parts that differ
    scores, labels = scores[order], labels[order]
    metrics = evaluated(lambda x: x, weighted, scores, labels)
    assert metrics["loss"] == pytest.approx(float(weighted(scores, labels)), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
        (functools.partial(F.cross_entropy, ignore_index=-1), -1),
    ],
)
def test_ignored_labels_are_neither_right_nor_wrong(loss, ignored: int) -> None:
    random = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(3000, 3, generator=random), torch.randint(2, (3000,), generator=random)
    labels[::3] = ignored
    counted = labels != ignored
    metrics = evaluated(lambda x: x, loss, scores, labels, chunk=1000)
    assert metrics["accuracy"] == float((scores.argmax(1) == labels)[counted].double().mean())
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(scores[counted], labels[counted])), rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_labels_to_ignore_in_training(engine: str) -> None:
    inputs, labels = data()
    labels = labels.clone()
    labels[::4] = -100
    module = made(lambda: nn.Linear(4, 3))
    result = run(module, (inputs, labels), engine, test=(inputs, labels)).run()
    assert furthest(result.module, plain_rounds(module, (inputs, labels), 2, 3, 5)) < 1e-12
    assert result.history[-1].metrics["accuracy"] * 18 == pytest.approx(
        round(result.history[-1].metrics["accuracy"] * 18)
    )


def test_scores_that_are_no_numbers_have_no_accuracy() -> None:
    scores, labels = torch.randn(8, 3), torch.arange(8) % 3
    for wrong in (torch.nan, torch.inf):
        broken = scores.clone()
        broken[5, 1] = wrong
        assert np.isnan(evaluated(lambda x: x, F.cross_entropy, broken, labels)["accuracy"])
    ruled_out = scores.clone()
    ruled_out[labels != 1, 1] = -torch.inf
    assert np.isfinite(evaluated(lambda x: x, F.cross_entropy, ruled_out, labels)["accuracy"])


def test_outputs_that_are_no_rows_of_samples_are_evaluated_too() -> None:
    inputs, labels = torch.randn(5000, 4), torch.randint(3, (5000,))

    def time_first(x: Tensor) -> Tensor:
        return x[None, :, :3].expand(2, -1, -1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-1], targets)

    right = float(F.cross_entropy(inputs[:, :3], labels))
    assert evaluated(time_first, loss, inputs, labels)["loss"] == pytest.approx(right, rel=1e-5)
    assert evaluated(lambda x: x.sum(), lambda o, t: o, inputs[:90], labels[:90])["loss"] == float(inputs[:90].sum())
    pairs = evaluated(lambda x: (x[:, :3], x), lambda o, t: F.cross_entropy(o[0], t), inputs, labels)
    accuracy = float((inputs[:, :3].argmax(dim=1) == labels).double().mean())
    assert pairs == {"loss": pytest.approx(right, rel=1e-5), "accuracy": accuracy}


class Counting(nn.Module):
    """Writes to a buffer also when it is evaluated, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.out(x) * (1 + 0.1 * self.seen)


def test_an_evaluation_changes_nothing() -> None:
    results = [run(made(Counting), data(), evaluate_every=every, test=data(), rounds=4).run() for every in (1, 4)]
    assert torch.equal(results[0].models[0], results[1].models[0])
    assert torch.equal(results[0].buffers[0], results[1].buffers[0])
