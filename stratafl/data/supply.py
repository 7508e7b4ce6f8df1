"""Where a batch's samples come from: held in the device's memory, or read anew every time.

What is read anew may be changed at random on the way. It then draws from the client's own stream,
keyed by (seed, client, step), so that it does not matter who reads, when, or what was read before.

Shape suffixes: C clients, B places in a batch, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import CPU, Purpose, seed_of, seeded
from stratafl.data.inputs import Inputs, Pair, merged, typed
from stratafl.data.labels import Classes


class BatchKey(NamedTuple):
    """Whose batch it is, and of which step."""

    seed: int
    client: int
    step: int


class Supply(Protocol):
    """The samples of a run, by their numbers."""

    @property
    def targets_N(self) -> Tensor:
        """Every sample's, as they were read once."""
        ...

    @property
    def resident(self) -> bool:
        """Whether a batch is an index into the device's memory, as a CUDA graph needs it."""
        ...

    @property
    def device(self) -> torch.device: ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Supply:
        """The samples on a device, real numbers in this type."""
        ...

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        """One client's samples of one step."""
        ...

    def stack(
        self, index_CB: Tensor, length_C: np.ndarray, seed: int, client_C: Tensor, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        """Several clients', with their axis in front; what is beyond a client's length is
        padding."""
        ...

    def first(self, count: int) -> Inputs:
        """Inputs to try a model on, from sample 0 on: so many at least, if there are."""
        ...


@dataclass(frozen=True, eq=False)
class Held:
    """Samples that are held in memory: a batch is an index."""

    inputs_N: Inputs
    targets_N: Tensor
    resident = True

    @property
    def device(self) -> torch.device:
        return self.inputs_N.device

    def to(self, device: torch.device, dtype: torch.dtype) -> Held:
        return Held(typed(self.inputs_N, dtype, device), typed(self.targets_N, dtype, device))

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        return self.inputs_N[index_B], self.targets_N[index_B]

    def stack(
        self, index_CB: Tensor, length_C: np.ndarray, seed: int, client_C: Tensor, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        return self.inputs_N[index_CB], self.targets_N[index_CB]

    def first(self, count: int) -> Inputs:
        return self.inputs_N


@dataclass(frozen=True, eq=False)
class Lazy:
    """Read anew for every batch."""

    read: Callable[[Sequence[int]], Pair]
    """The samples of these numbers, one after another."""
    targets_N: Tensor
    place: torch.device = CPU
    dtype: torch.dtype | None = None
    classes: Classes | None = None
    """What labels must be, whenever they are read."""
    resident = False

    @property
    def device(self) -> torch.device:
        return self.place

    def to(self, device: torch.device, dtype: torch.dtype) -> Lazy:
        return replace(self, targets_N=typed(self.targets_N, dtype, device), place=device, dtype=dtype)

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        with seeded(seed_of(key.seed, Purpose.READ, key.client, key.step)):
            inputs, targets = self.read(index_B.tolist())
        self._check(index_B, targets)
        if self.dtype is None:
            return inputs, targets
        return typed(inputs, self.dtype, self.place), typed(targets, self.dtype, self.place)

    def stack(
        self, index_CB: Tensor, length_C: np.ndarray, seed: int, client_C: Tensor, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        longest, step = index_CB.shape[1], int(step)
        # a padded place repeats the first of its batch
        padded_CB = torch.arange(longest).expand(index_CB.shape).clone()
        padded_CB[padded_CB >= torch.as_tensor(length_C)[:, None]] = 0
        pairs = []
        for client, index_B, length, place_B in zip(client_C.tolist(), index_CB, length_C, padded_CB, strict=True):
            inputs, targets = self.batch(index_B[: int(length)], BatchKey(seed, client, step))
            place_B = place_B.to(self.place)
            pairs.append((inputs[place_B], targets[place_B]))
        return merged(torch.stack, [each for each, _ in pairs]), torch.stack([each for _, each in pairs])

    def _check(self, index_B: Tensor, targets_B: Tensor) -> None:
        """Refuse a label that is no class: a sample may have another one than when all were
        read."""
        if self.classes is None or targets_B.is_floating_point() or targets_B.is_complex():
            return
        outside = self.classes.outside(targets_B)
        if bool(outside.any()):
            place, *_ = outside.nonzero()[0].tolist()
            label = int(targets_B[place][outside[place]].flatten()[0])
            told = f"must be a class, 0 to {self.classes.size - 1}, or {self.classes.ignored}, to be ignored"
            raise InvalidInput(f"data[{int(index_B[place])}] label", label, told)

    def first(self, count: int) -> Inputs:
        return self.batch(torch.arange(min(count, len(self.targets_N))), BatchKey(0, 0, 0))[0]
