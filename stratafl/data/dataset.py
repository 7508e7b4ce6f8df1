"""Samples of a run: their source, the samples of each client, and test data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import CPU, Stream, derive_seed, seeded_rng
from stratafl.data.inputs import Inputs, Pair, Shape, as_type, combine, shape_of


class Classes(NamedTuple):
    """Labels that a classification loss accepts."""

    size: int
    """Number of classes; labels go from 0 to `size - 1`."""
    ignored: int
    """Label that the loss ignores."""

    @property
    def allowed(self) -> str:
        return f"a class, 0 to {self.size - 1}, or {self.ignored}, to be ignored"

    def outside(self, labels: Tensor) -> Tensor:
        """Mask of the labels that are neither a class nor ignored; of probabilities none is."""
        if labels.is_floating_point() or labels.is_complex():
            return torch.zeros_like(labels, dtype=torch.bool)
        wide = labels.long()  # in a narrow type the one that is passed over may be another's number
        return ((wide < 0) | (wide >= self.size)) & (wide != self.ignored)

    def check(self, field: str, labels: Tensor) -> None:
        """Refuse labels that the loss does not accept.

        On a CPU the loss would raise in some later round, and on a GPU it may not raise at all.
        """
        if not bool(self.outside(labels).any()):
            return
        counted = labels[labels.long() != self.ignored]
        low, high = int(counted.min()), int(counted.max())
        if low < 0:
            allowed = f"classes are counted from 0, and {self.ignored} is a label to ignore"
            raise InvalidInput(f"{field} labels", f"{low} to {high}", allowed)
        allowed = f"{field} labels go from {low} to {high}, so {high + 1} classes are needed"
        raise InvalidInput("model output", f"{self.size} classes", allowed)


class BinaryTargets(NamedTuple):
    """Targets that a loss of yes or no accepts, which PyTorch does not check."""

    no: int
    """Target of a no: 0, where targets may also lie between no and yes, or -1; that of a yes is
    1."""

    @property
    def allowed(self) -> str:
        return "from 0 to 1" if self.no == 0 else "-1 or 1"

    def outside(self, targets: Tensor) -> Tensor:
        """Mask of the targets that the loss does not accept, but for those that are no number."""
        if self.no == 0:
            return (targets < 0) | (targets > 1)
        return (targets != -1) & (targets != 1) & ~targets.isnan()

    def check(self, field: str, targets: Tensor) -> None:
        """Refuse targets that the loss does not accept."""
        outside = self.outside(targets)
        if bool(outside.any()):
            first = f"{targets[outside][0].item():g}"
            raise InvalidInput(f"{field} labels", first, f"must be {self.allowed}, as the loss is one of yes or no")


class BatchKey(NamedTuple):
    """Identity of a batch: seed of the run, client and step."""

    seed: int
    client: int
    step: int


class SampleSource(Protocol):
    """Samples of a run, addressed by their numbers."""

    @property
    def targets_N(self) -> Tensor:
        """Targets of all samples."""
        ...

    @property
    def is_on_device(self) -> bool:
        """Whether a batch is an index into device memory, as a CUDA graph requires."""
        ...

    @property
    def device(self) -> torch.device: ...

    def to(self, device: torch.device, dtype: torch.dtype) -> SampleSource:
        """Copy the samples to a device, floating-point values with this dtype."""
        ...

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        """Samples of one client's batch."""
        ...

    def client_batches(
        self, index_CB: Tensor, length_C: np.ndarray, seed: int, client_C: Tensor, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        """Batches of several clients, stacked along a first axis.

        Positions beyond a client's `length_C` are padding.
        """
        ...

    def head(self, count: int) -> Inputs:
        """Inputs to try a model on: at least the first `count` samples, if there are as many."""
        ...


@dataclass(frozen=True, eq=False)
class InMemorySamples:
    """Samples in memory: a batch is an index into tensors."""

    inputs_N: Inputs
    targets_N: Tensor
    is_on_device = True

    @property
    def device(self) -> torch.device:
        return self.inputs_N.device

    def to(self, device: torch.device, dtype: torch.dtype) -> InMemorySamples:
        return InMemorySamples(as_type(self.inputs_N, dtype, device), as_type(self.targets_N, dtype, device))

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        return self.inputs_N[index_B], self.targets_N[index_B]

    def client_batches(
        self, index_CB: Tensor, length_C: np.ndarray, seed: int, client_C: Tensor, step: int | Tensor
    ) -> tuple[Inputs, Tensor]:
        return self.inputs_N[index_CB], self.targets_N[index_CB]

    def head(self, count: int) -> Inputs:
        return self.inputs_N


@dataclass(frozen=True, eq=False)
class LazySamples:
    """Samples that are read anew for every batch."""

    read: Callable[[Sequence[int]], Pair]
    """Reads the samples of these numbers."""
    targets_N: Tensor
    place: torch.device = CPU
    dtype: torch.dtype | None = None
    accepted: Classes | BinaryTargets | None = None
    """Targets that the loss accepts, checked in every batch; None for all."""
    is_on_device = False

    @property
    def device(self) -> torch.device:
        return self.place

    def to(self, device: torch.device, dtype: torch.dtype) -> LazySamples:
        return replace(self, targets_N=as_type(self.targets_N, dtype, device), place=device, dtype=dtype)

    def batch(self, index_B: Tensor, key: BatchKey) -> Pair:
        with seeded_rng(derive_seed(key.seed, Stream.READ, key.client, key.step)):
            inputs, targets = self.read(index_B.tolist())
        self._check(index_B, targets)
        if self.dtype is None:
            return inputs, targets
        return as_type(inputs, self.dtype, self.place), as_type(targets, self.dtype, self.place)

    def client_batches(
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
        return combine(torch.stack, [inputs for inputs, _ in pairs]), torch.stack([targets for _, targets in pairs])

    def _check(self, index_B: Tensor, targets_B: Tensor) -> None:
        """Refuse a label that the loss does not accept; a sample may be read with another one than
        before."""
        if self.accepted is None:
            return
        outside = self.accepted.outside(targets_B)
        if bool(outside.any()):
            place, *_ = outside.nonzero()[0].tolist()
            label = targets_B[place][outside[place]].flatten()[0].item()
            raise InvalidInput(f"data.source[{int(index_B[place])}] label", label, f"must be {self.accepted.allowed}")

    def head(self, count: int) -> Inputs:
        return self.batch(torch.arange(min(count, len(self.targets_N))), BatchKey(0, 0, 0))[0]


class ClientIndex:
    """Sample numbers of all clients in one tensor.

    Client i has `order[offsets[i] : offsets[i + 1]]`.
    """

    def __init__(self, order: Tensor, offsets: np.ndarray):
        self.order, self.offsets = order, offsets

    @staticmethod
    def from_lists(numbers: Sequence[np.ndarray | Tensor]) -> ClientIndex:
        """Index of a list of sample numbers per client, which may be empty or on another device."""
        offsets = np.cumsum([0, *map(len, numbers)])
        parts = [torch.as_tensor(part).cpu() for part in numbers]
        return ClientIndex(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), offsets)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        if not 0 <= client < len(self):
            raise IndexError(client)
        return self.of_range(client, client + 1)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(len(self)))

    def of_range(self, first: int, end: int) -> Tensor:
        """Sample numbers of neighbouring clients, such as those of one group."""
        return self.order[self.offsets[first] : self.offsets[end]]

    def part(self, first: int, end: int) -> ClientIndex:
        """Index of some neighbouring clients alone."""
        return ClientIndex(self.of_range(first, end), self.offsets[first : end + 1] - self.offsets[first])

    def largest(self) -> Tensor:
        """Sample numbers of the client that has most; of the first one if several have."""
        return self[int(self.sizes.argmax())]

    def numpy(self) -> list[np.ndarray]:
        """Sample numbers of each client as arrays."""
        return [numbers.numpy() for numbers in self]

    def to(self, device: torch.device) -> ClientIndex:
        return ClientIndex(self.order.to(device), self.offsets)


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedData:
    """A data set, the samples of each client in it, and the data sets that models are tested on."""

    samples: InMemorySamples | LazySamples
    clients: ClientIndex | None = None
    """Samples of each client; None as long as they are not divided."""
    test: FederatedData | None = None
    """Samples that the root's model is tested on."""
    client_test: FederatedData | None = None
    """Samples that each client's model is tested on, where clients have test data of their own."""
    classes: tuple[str, ...] = ()
    """Names of all classes; empty where targets are no class numbers."""
    declared_classes: Mapping[int, str] = field(default_factory=dict)
    """Names of class numbers as far as the data set itself gives them."""
    owners: Sequence[object] | np.ndarray | None = None
    """Owner of each sample, for a natural partition."""
    augment: Callable[..., Any] | None = None
    """Transform of every training batch; see `core.client_training.Augment`."""
    angles: np.ndarray | None = None
    """Degrees by which each client's training images are rotated; None if they are not."""
    partition_notes: tuple[str, ...] = ()
    """How each level was divided, in words, root first."""
    warnings: tuple[str, ...] = ()
    """What a user should know about how the samples are read."""
    is_users: bool = False
    """Whether a user's file or function made it, so that a fingerprint must cover the inputs."""

    @property
    def client_sizes(self) -> list[int]:
        """Number of samples of each client."""
        return [] if self.clients is None else self.clients.sizes.tolist()

    @property
    def inputs(self) -> Inputs:
        """Inputs of all samples; of a few if they are read for every batch."""
        return self.samples.head(FEW_SAMPLES)

    @property
    def shape(self) -> Shape:
        """Shape of one sample's inputs."""
        return shape_of(self.inputs)

    @property
    def outputs(self) -> int:
        """Number of a model's outputs per sample: one for each class, or for each target."""
        return len(self.classes) or math.prod(self.samples.targets_N.shape[1:])


FEW_SAMPLES = 4
"""Samples that represent a data set which is not held in memory."""
