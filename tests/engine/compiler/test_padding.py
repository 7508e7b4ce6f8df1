"""Batches are padded where a module treats every sample alone, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import output_tensors
from stratafl.data.inputs import map_tensors
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.padding import can_pad
from stratafl.engine.compiler.program import BatchedProgram
from stratafl.engine.random_streams import ClientStream, RandomSource
from tests.engine.plain import Problem, problem
from tests.engine.zoo import ZOO

FEW = 5
QUICK = [
    "encoder layer with dropout",
    "GPT-2",
    "vision transformer",
    "words by letters, dropping",
    "samples turned round",
]
BY_LENGTH = {
    # samples are combined: in a statistic, a product, an order or a number
    "norm, batch", "norm, batch, without statistics", "norm, batch, without weights", "norm, batch of a table",
    "norm, batch of series", "norm, batch of volumes", "norm, batch, cumulative", "norm, instance, with all",
    "residual with batch norm", "batch norm used twice", "one norm evaluating, one training",
    "given in evaluation mode, with batch norm", "residual of batch norms", "inverted residual of batch norms",
    "residual of batch norms, dropping", "inverted residual of batch norms, dropping", "recomputed with batch norm",
    "MobileNetV2", "DenseNet", "DenseNet, recomputed", "ShuffleNetV2", "output that sees every sample",
    "attention between samples", "samples turned round", "samples shuffled", "scaled by the batch's length",
    "decided by the batch's length", "attention with weights", "loss within the module", "slices by their places",
    "recurrent over time first", "embedding scaled by frequency", "gradient of its own output",
    "penalty beside the scores", "outputs within outputs", "variational, with its own loss",
    # a buffer or weight is made of the whole batch
    "spectral norm", "buffer averaged in place", "buffer replaced", "buffer that counts", "quantised codes",
    "maximum kept in a buffer", "average of a weight in a buffer", "rounded by what was seen",
    "embedding of bounded norm", "weight bounded in the forward pass",
    # random values whose first axis is not that of the samples
    "recurrent with dropout", "LSTM of two layers, dropping", "LSTM in both directions, dropping",
    "LSTM that projects, dropping", "GRU of two layers, dropping", "GRU in both directions, dropping",
    "RNN of two layers, dropping", "image, fractional max",
    # operations whose effect on samples is not known
    "embedding bag, sum", "embedding bag, mean", "embedding bag, max", "embedding bag with a padding code",
    "embedding bag with weights", "bag of words", "spatial transformer", "solved", "matrices taken apart",
    "product of two inputs", "spectra of a series", "graph by edges that all share", "graphs of a batch in a row",
    "input filled in place",
    # values decide what is done
    "packed sequences", "experts that see their own samples", "decided by a value", "decided by a weight",
    "as often as the data say", "early exit", "stochastic depth",
}  # fmt: skip
"""Entries of the zoo that are grouped by batch length instead of padded."""


def outputs(task: Problem, flat: FlatModule, inputs_CB: Any) -> list[Tensor]:
    """Outputs of two clients' modules, by a captured program."""
    rows = [flat.flatten_module(client) for client in task.clients[:2]]
    named = flat.unflatten(*(torch.stack(parts) for parts in zip(*rows, strict=True)))
    state = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}
    shared = {name: value.detach() for name, value in state.items() if name not in named}
    program = BatchedProgram(flat, map_tensors(lambda samples_CB: samples_CB[0], inputs_CB), all_outputs=True)
    with torch.no_grad():
        return output_tensors(
            program(named, shared, inputs_CB.clone(), RandomSource(ClientStream(0, torch.arange(2), 0)))
        )


def two_batches(samples: Tensor) -> Tensor:
    """Batches of two clients."""
    return torch.stack([samples[:FEW], samples[1 : FEW + 1]])


def with_another_last(samples: Tensor) -> Tensor:
    """The same with other last samples."""
    changed = two_batches(samples)
    changed[:, -1] = samples[FEW + 1 : FEW + 3]
    return changed


def is_padded(name: str) -> bool:
    """Whether batches are padded; if so, another last sample must not change the other outputs."""
    task = problem(ZOO[name])
    flat = FlatModule(task.module)
    inputs_CB, changed_CB = (map_tensors(change, task.inputs) for change in (two_batches, with_another_last))
    mask_CB, length_C = torch.ones(2, FEW, dtype=torch.bool), np.array([FEW, FEW])
    if not can_pad(flat, ClientBatches(inputs_CB, torch.zeros(2, FEW), mask_CB, length_C), all_outputs=True):
        return False
    for output, changed in zip(outputs(task, flat, inputs_CB), outputs(task, flat, changed_CB), strict=True):
        assert output.shape[:2] == (2, FEW)
        assert torch.equal(output[:, :-1].nan_to_num(), changed[:, :-1].nan_to_num())
    return True


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO])
def test_batches_are_padded_if_samples_are_independent(name: str) -> None:
    assert is_padded(name) == (name not in BY_LENGTH)
