"""Types of stacked batches of several clients (indices, padded samples), and their augmentation.

Shape suffixes: N samples of a run, C clients of a chunk, H steps, B samples of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import reraise_out_of_memory
from stratafl.base.rng import Stream, derive_seed, device_generator, preserve_rng, rng_states, torch_as_before
from stratafl.core.client_training import Augment
from stratafl.data.dataset import InMemorySamples, SampleSource
from stratafl.data.inputs import Inputs, NamedInputs, combine, map_tensors, parse_inputs, tensors_of
from stratafl.engine.precision import HALF_DTYPES
from stratafl.engine.random_streams import ClientStream


class StepBatch(NamedTuple):
    """Sample indices of the clients of a chunk in one step."""

    client_C: Tensor
    """Numbers of the clients in the whole tree."""
    index_CB: Tensor
    mask_CB: Tensor
    """Places that are not padding."""
    length_C: np.ndarray
    """Batch length of each client, on the host."""
    step: int | Tensor
    """Number of the step in the run: one for all clients, or one for each."""


class ChunkIndices(NamedTuple):
    """Sample indices of the clients of a chunk in several steps."""

    client_C: Tensor
    """Numbers of the clients in the whole tree."""
    index_CHB: Tensor
    mask_CHB: Tensor
    """Places that are not padding."""
    length_CH: np.ndarray
    """Batch lengths, on the host."""

    def select(self, clients: slice, steps: int) -> ChunkIndices:
        """The first steps of some of the clients."""
        part = clients, slice(steps)
        return ChunkIndices(self.client_C[clients], self.index_CHB[part], self.mask_CHB[part], self.length_CH[part])


class ClientBatches(NamedTuple):
    """Samples of a chunk's clients in one step, padded to a common length."""

    inputs_CB: Inputs
    targets_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """Batch length of each client, on the host."""
    stream: ClientStream | None = None
    """Random numbers for the clients' modules."""

    def select(self, clients: slice | list[int], length: int) -> ClientBatches:
        """Batches of some of the clients, cut to this length."""
        stream = None if self.stream is None else self.stream.select(clients)
        targets, mask = (rows[clients, :length] for rows in (self.targets_CB, self.mask_CB))
        return ClientBatches(self.inputs_CB[clients, :length], targets, mask, self.length_C[clients], stream)


def group_by_length(length_C: np.ndarray) -> list[tuple[int, slice | list[int]]]:
    """Pairs of a batch length and the clients that have it: a slice where all clients do."""
    lengths = np.unique(length_C)
    if len(lengths) == 1:
        return [(int(lengths[0]), slice(None))]
    return [(int(length), np.flatnonzero(length_C == length).tolist()) for length in lengths]


def upcast_inputs(inputs_CB: Inputs, dtype: torch.dtype) -> Inputs:
    """Cast images that were loaded in 16 bits to the module's type."""
    halves = tuple(HALF_DTYPES.values())
    return map_tensors(lambda samples: samples.to(dtype) if samples.dtype in halves else samples, inputs_CB)


def image_tensor(supply: SampleSource, dtype: torch.dtype) -> Tensor | None:
    """Images of a source if they are in the form that the kernel `load_images` takes, or None."""
    images = supply.inputs_N if isinstance(supply, InMemorySamples) else None
    if not isinstance(images, Tensor) or images.dim() != 4 or images.dtype != dtype:
        return None
    return images if images.is_contiguous() and images.is_cuda else None


# -- augmentation ----------------------------------------------------------------------------------


def augment_for_named_inputs(augment: Augment) -> Augment:
    """Adapt a user's function on a dictionary of tensors to `NamedInputs`."""

    def transform(inputs: NamedInputs, seed: int, client: int | Tensor, step: int | Tensor) -> Inputs:
        return parse_inputs("augment", augment(dict(inputs.named), seed, client, step))

    return transform


def supports_stacked_batches(augment: Augment, inputs_B: Inputs, seed: int) -> bool:
    """Whether augmenting several clients' batches together equals augmenting one after another.

    This is tried on two clients. It does not hold for a function that draws from torch's generator
    or any other that all clients share.
    """
    device = inputs_B.device

    def generators() -> object:
        return rng_states(), device_generator(device).get_state().numpy().tobytes()

    with preserve_rng(device):
        before = generators()
        client_C = torch.arange(2, device=device)
        try:
            inputs_CB = map_tensors(lambda samples: samples.expand(2, *samples.shape), inputs_B)
            together = tensors_of(augment(inputs_CB, seed, client_C, torch.ones_like(client_C[0])))
            alone = tensors_of(combine(torch.stack, [augment(inputs_B, seed, client, 1) for client in range(2)]))
            is_same = together.keys() == alone.keys()
            is_same = is_same and all(torch.equal(together[name], samples) for name, samples in alone.items())
        except Exception as problem:
            reraise_out_of_memory(problem)
            return False
        return is_same and generators() == before


def augment_per_client(
    augment: Augment, inputs_CB: Inputs, seed: int, client_C: Tensor, step: int | Tensor, length_C: np.ndarray
) -> Inputs:
    """Augment one client's batch after another, each without its padding.

    From torch's generator a user's function draws the same numbers as in the loop engine.
    """
    changed, device = [], inputs_CB.device
    for place, (client, length) in enumerate(zip(client_C.tolist(), length_C, strict=True)):
        inputs_B = inputs_CB[place]
        with torch_as_before(device):
            device_generator(device).manual_seed(derive_seed(seed, Stream.MODULE, client, int(step)))
            augmented_B: Inputs = augment(inputs_B[:length], seed, client, step)
        padding = len(inputs_B) - length

        def padded(samples: Tensor, padding: int = padding) -> Tensor:
            return torch.cat([samples, samples[:1].expand(padding, *samples.shape[1:])])

        changed.append(map_tensors(padded, augmented_B))
    return combine(torch.stack, changed)
