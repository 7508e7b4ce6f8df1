"""Sample indices of a client's batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.base.rng import Stream, random_bits, uniform

Sampling = Literal["shuffle", "replacement"]


def batch_indices(
    seed: int, client: int, size: int, first: int, steps: int, batch: int | None, sampling: Sampling = "shuffle"
) -> list[Tensor]:
    """Positions in a client's list of samples for `steps` steps, from step `first` on.

    `"shuffle"`: each epoch is a new shuffle without replacement; its last batch has the remaining
    samples. `"replacement"`: each sample is drawn independently. Batches of a client with fewer
    samples than `batch` have as many as it has; `batch = None` means all samples in the stored
    order.
    """
    if batch is None:
        return [torch.arange(size)] * steps
    batch = min(batch, size)
    if sampling == "replacement":
        places = torch.arange(batch)
        return [
            (uniform(seed, Stream.BATCH, client, step, places) * size).long() for step in range(first, first + steps)
        ]
    per_epoch = -(-size // batch)
    chosen = []
    shuffled, order = -1, torch.empty(0, dtype=torch.long)
    for step in range(first, first + steps):
        epoch, slot = divmod(step, per_epoch)
        if epoch != shuffled:
            keys = random_bits(seed, Stream.BATCH, client, epoch, torch.arange(size))
            shuffled, order = epoch, keys.argsort(stable=True)
        chosen.append(order[slot * batch : (slot + 1) * batch])
    return chosen


def steps_per_epoch(size: int, batch: int | None) -> int:
    """Number of steps of one epoch over `size` samples."""
    return 1 if batch is None else -(-size // min(batch, size))


def batch_lengths(size_C: np.ndarray, step_CH: np.ndarray, batch: int | None, sampling: Sampling) -> np.ndarray:
    """Lengths of the batches of these clients and steps, (C, H)."""
    full_C1 = (size_C if batch is None else np.minimum(size_C, batch))[:, None]
    if batch is None or sampling == "replacement":
        return np.repeat(full_C1, step_CH.shape[1], axis=1)
    size_C1 = size_C[:, None]
    return np.minimum(full_C1, size_C1 - step_CH % -(-size_C1 // full_C1) * full_C1)


class PaddedBatches(NamedTuple):
    """Batches of many clients and steps, padded to the longest."""

    position_CHB: Tensor
    """Positions in each client's list of samples; a padded one repeats the first of its batch."""
    mask_CHB: Tensor
    """Positions that are not padding."""
    length_CH: np.ndarray
    """Lengths of the batches, kept on the host to avoid synchronising with the device."""


def padded_batches(
    seed: int,
    clients: Sequence[int],
    sizes: Sequence[int],
    first: int | Sequence[int] | np.ndarray,
    steps: int,
    batch: int | None,
    sampling: Sampling = "shuffle",
    device: str | torch.device = "cpu",
    places: int | None = None,
) -> PaddedBatches:
    """`batch_indices` of several clients as tensors on the device, computed without a loop.

    `first` is one step for all clients, or one per client; `places` is the length to pad to, by
    default that of the longest batch.
    """

    def on_device(array: np.ndarray) -> Tensor:
        return to_device(array, device)

    size_C = np.asarray(sizes, dtype=np.int64)
    full_C = size_C if batch is None else np.minimum(size_C, batch)
    # at least one place, so that a padded one has a first to repeat
    place_B = torch.arange(max(int(full_C.max(initial=1)), places or 1), device=device)
    client_C = on_device(np.asarray(clients, dtype=np.int64))
    step_CH = np.zeros((len(size_C), steps), dtype=np.int64) + np.reshape(first, (-1, 1)) + np.arange(steps)
    length_CH = batch_lengths(size_C, step_CH, batch, sampling)

    if batch is None or sampling == "replacement":
        mask_CHB = place_B < on_device(length_CH)[..., None]
        if batch is None:
            position_CHB = place_B.expand(*step_CH.shape, -1)
        else:
            drawn_CHB = uniform(seed, Stream.BATCH, client_C[:, None, None], on_device(step_CH)[..., None], place_B)
            position_CHB = (drawn_CHB * on_device(size_C)[:, None, None]).long()
        return PaddedBatches(torch.where(mask_CHB, position_CHB, position_CHB[..., :1]), mask_CHB, length_CH)

    per_epoch_C = -(-size_C // full_C)
    epoch_CH, slot_CH = np.divmod(step_CH, per_epoch_C[:, None])
    taken_CH = slot_CH * full_C[:, None]

    # one shuffle for each epoch a client is in, all of them laid end to end
    new_CH = np.diff(epoch_CH, axis=1, prepend=-1) != 0
    owner_S = np.repeat(np.arange(len(size_C)), new_CH.sum(axis=1))
    size_S = size_C[owner_S]
    start_S = np.cumsum(size_S) - size_S
    shuffle_CH = np.cumsum(new_CH).reshape(new_CH.shape) - 1

    total = int(size_S.sum())
    shuffle_T = torch.repeat_interleave(on_device(size_S), output_size=total)
    start_T = on_device(start_S)[shuffle_T]
    place_T = torch.arange(total, device=device) - start_T
    epoch_T = on_device(epoch_CH[new_CH])[shuffle_T]
    keys_T = random_bits(seed, Stream.BATCH, client_C[on_device(owner_S)][shuffle_T], epoch_T, place_T)
    # sorted by key, then stably by shuffle: each shuffle's positions come together in the order of
    # their keys
    by_key_T = keys_T.argsort(stable=True)
    order_T = place_T[by_key_T[shuffle_T[by_key_T].argsort(stable=True)]]

    begin_CH = on_device(start_S[shuffle_CH] + taken_CH)
    mask_CHB = place_B < on_device(length_CH)[..., None]
    where_CHB = begin_CH[..., None] + torch.where(mask_CHB, place_B, 0)
    return PaddedBatches(order_T[where_CHB], mask_CHB, length_CH)
