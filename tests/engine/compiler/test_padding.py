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
    # samples meet: in a statistic, a product, an order or a number
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
    # its draws have another axis than that of the samples in front
    "recurrent with dropout", "LSTM of two layers, dropping", "LSTM in both directions, dropping",
    "LSTM that projects, dropping", "GRU of two layers, dropping", "GRU in both directions, dropping",
    "RNN of two layers, dropping", "image, fractional max",
    # what an operation does with the samples is not known
    "embedding bag, sum", "embedding bag, mean", "embedding bag, max", "embedding bag with a padding code",
    "embedding bag with weights", "bag of words", "spatial transformer", "solved", "matrices taken apart",
    "product of two inputs", "spectra of a series", "graph by edges that all share", "graphs of a batch in a row",
    "input filled in place",
    # values decide what is done
    "packed sequences", "experts that see their own samples", "decided by a value", "decided by a weight",
    "as often as the data say", "early exit", "stochastic depth",
}  # fmt: skip
"""What goes by the length of batches."""


def outputs(given: Problem, flat: FlatModule, inputs_CB: Any) -> list[Tensor]:
    """What two clients' modules give, all clients at once."""
    rows = [flat.flatten_module(client) for client in given.clients[:2]]
    named = flat.unflatten(*(torch.stack(parts) for parts in zip(*rows, strict=True)))
    own = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}
    shared = {name: value.detach() for name, value in own.items() if name not in named}
    program = BatchedProgram(flat, map_tensors(lambda each: each[0], inputs_CB), all_outputs=True)
    with torch.no_grad():
        return output_tensors(
            program(named, shared, inputs_CB.clone(), RandomSource(ClientStream(0, torch.arange(2), 0)))
        )


def some(each: Tensor) -> Tensor:
    """Batches of two clients."""
    return torch.stack([each[:FEW], each[1 : FEW + 1]])


def with_another_last(each: Tensor) -> Tensor:
    changed = some(each)
    changed[:, -1] = each[FEW + 1 : FEW + 3]
    return changed


def is_padded(name: str) -> bool:
    """Whether batches are padded; where they are, another last sample changes nothing of the
    others."""
    given = problem(ZOO[name])
    flat, (mine_CB, theirs_CB) = (
        FlatModule(given.module),
        (map_tensors(way, given.inputs) for way in (some, with_another_last)),
    )
    mask_CB, length_C = torch.ones(2, FEW, dtype=torch.bool), np.array([FEW, FEW])
    if not can_pad(flat, ClientBatches(mine_CB, torch.zeros(2, FEW), mask_CB, length_C), all_outputs=True):
        return False
    for mine, theirs in zip(outputs(given, flat, mine_CB), outputs(given, flat, theirs_CB), strict=True):
        assert mine.shape[:2] == (2, FEW)
        assert torch.equal(mine[:, :-1].nan_to_num(), theirs[:, :-1].nan_to_num())
    return True


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO])
def test_batches_are_padded_where_every_sample_is_alone(name: str) -> None:
    assert is_padded(name) == (name not in BY_LENGTH)
