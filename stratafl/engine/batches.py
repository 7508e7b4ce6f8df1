"""Batches of several clients: load, augment, pad."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import Stream, derive_seed, device_generator, preserve_rng, rng_states, torch_as_before
from stratafl.core.client_training import Augment
from stratafl.data.dataset import InMemorySamples, SampleSource
from stratafl.data.inputs import Inputs, NamedInputs, combine, map_tensors, parse_inputs, tensors_of
from stratafl.engine import precision
from stratafl.engine.random_streams import ClientStream


def augment_fields(augment: Augment) -> Augment:
    """Wrap a user's transform of a dictionary of tensors to one of named inputs."""

    def transform(inputs: NamedInputs, seed: int, client: int | Tensor, step: int | Tensor) -> Inputs:
        return parse_inputs("augment", augment(dict(inputs.named), seed, client, step))

    return transform


def supports_stacked_batches(augment: Augment, inputs_B: Inputs, seed: int) -> bool:
    """Whether transforming several clients' batches together equals transforming each alone.

    This is tried on two clients. A transform that draws from torch's generator, or from another
    that all share, takes one client at a time.
    """
    with preserve_rng(inputs_B.device):
        before = _drawn(inputs_B.device)
        return _same_for_stacks(augment, inputs_B, seed) and _drawn(inputs_B.device) == before


def _drawn(device: torch.device) -> object:
    """States of all generators that a transform may draw from."""
    return rng_states(), device_generator(device).get_state().numpy().tobytes()


def _same_for_stacks(augment: Augment, inputs_B: Inputs, seed: int) -> bool:
    client_C = torch.arange(2, device=inputs_B.device)
    try:
        twice_CB = map_tensors(lambda each: each.expand(2, *each.shape), inputs_B)
        together_CB = tensors_of(augment(twice_CB, seed, client_C, torch.ones_like(client_C[0])))
        alone_CB = tensors_of(combine(torch.stack, [augment(inputs_B, seed, client, 1) for client in range(2)]))
        same = (torch.equal(together_CB[name], each) for name, each in alone_CB.items())
        return together_CB.keys() == alone_CB.keys() and all(same)
    except Exception as problem:
        pass_on_no_room(problem)
        return False


def augment_per_client(
    augment: Augment, inputs_CB: Inputs, seed: int, client_C: Tensor, step: int | Tensor, length_C: np.ndarray
) -> Inputs:
    """Augment one client's batch after another, each without its padding.

    From torch's generator a transform draws the same numbers as in the loop.
    """
    changed, device = [], inputs_CB.device
    for place, (client, length) in enumerate(zip(client_C.tolist(), length_C, strict=True)):
        inputs_B = inputs_CB[place]
        with torch_as_before(device):
            device_generator(device).manual_seed(derive_seed(seed, Stream.MODULE, client, int(step)))
            own_B: Inputs = augment(inputs_B[:length], seed, client, step)
        missing = len(inputs_B) - length
        padded_B = map_tensors(lambda each: torch.cat([each, each[:1].expand(missing, *each.shape[1:])]), own_B)
        changed.append(padded_B)
    return combine(torch.stack, changed)


def image_tensor(supply: SampleSource, dtype: torch.dtype) -> Tensor | None:
    """The samples as the image kernel takes them, or None if it does not."""
    images = supply.inputs_N if isinstance(supply, InMemorySamples) else None
    if not isinstance(images, Tensor) or images.dim() != 4 or images.dtype != dtype:
        return None
    return images if images.is_contiguous() and images.is_cuda else None


class StepBatch(NamedTuple):
    """Which samples the clients of a chunk train on in a step."""

    client_C: Tensor
    """Numbers of the clients in the whole tree."""
    index_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """The clients' own batch lengths, on the host."""
    step: int | Tensor
    """Number of the step in the run: one for all clients, or one each."""


class ClientBatches(NamedTuple):
    """Samples of all clients in one step, padded to a common length."""

    inputs_CB: Inputs
    targets_CB: Tensor
    mask_CB: Tensor
    length_C: np.ndarray
    """The clients' own lengths, on the host."""
    stream: ClientStream | None = None
    """Random numbers of the clients' modules."""

    def select(self, clients: slice | list[int], length: int) -> ClientBatches:
        """Batches of some of the clients, cut to this length."""
        stream = None if self.stream is None else self.stream.select(clients)
        targets, mask = (rows[clients, :length] for rows in (self.targets_CB, self.mask_CB))
        return ClientBatches(self.inputs_CB[clients, :length], targets, mask, self.length_C[clients], stream)


def upcast_inputs(inputs_CB: Inputs, dtype: torch.dtype) -> Inputs:
    """Cast images that were loaded in 16 bits to the module's type."""
    halves = tuple(precision.HALF_DTYPES.values())
    return map_tensors(lambda each: each.to(dtype) if each.dtype in halves else each, inputs_CB)


def group_by_length(length_C: np.ndarray) -> list[tuple[int, slice | list[int]]]:
    """Each batch length, with the clients that have it."""
    lengths = np.unique(length_C)
    if len(lengths) == 1:
        return [(int(lengths[0]), slice(None))]
    return [(int(length), np.flatnonzero(length_C == length).tolist()) for length in lengths]
