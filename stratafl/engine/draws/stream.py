"""Random numbers of one client or of several, by what they are for and where they stand.

A number is a hash of (seed, client, step, which draw of the step, place in what is drawn). So a
client's draws are the same whichever engine trains it, with whom it shares a chunk or a rank, on
which device, and after a resume. What is drawn for several clients has them in front: everything
of the first, then of the second.

Shape suffixes: C clients, n values of one client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stratafl.base.rng import Purpose, bits, mixed

BLOCK = 1 << 15
"""Words that are hashed at a time on a CPU, whose nearest memory holds them."""
EXACT = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a number below one that a type holds."""


class Stream(NamedTuple):
    """Whose draws, and of which step: of one client by integers, of several by tensors (C)."""

    seed: int
    client: int | Tensor
    step: int | Tensor

    def some(self, mine: slice | list[int]) -> Stream:
        """Of some of several clients."""
        assert isinstance(self.client, Tensor)
        own = self.step[mine] if isinstance(self.step, Tensor) and self.step.dim() else self.step
        return self._replace(client=self.client[mine], step=own)

    @property
    def clients(self) -> int:
        return len(self.client) if isinstance(self.client, Tensor) else 1

    def words(self, draw: int, count: int, device: torch.device) -> Tensor:
        """64 random bits each, (C, count); of one client (count)."""
        if not isinstance(self.client, Tensor):
            return _hashed((self.seed, self.client, self.step, draw), count, device)
        if self.client.device.type != device.type:
            return self.words(draw, count, self.client.device).to(device)  # of a loss that draws on the host
        step = self.step[:, None] if isinstance(self.step, Tensor) and self.step.dim() else self.step
        if device.type != "cpu":
            place = torch.arange(count, device=device)
            return bits(self.seed, Purpose.MODULE, self.client[:, None], step, draw, place)
        key_C1 = bits(self.seed, Purpose.MODULE, self.client[:, None], step, draw)
        out, some = torch.empty(self.clients, count, dtype=torch.long), max(1, BLOCK // max(count, 1))
        for start in range(0, count, BLOCK):
            place = torch.arange(start, min(start + BLOCK, count))
            for first in range(0, self.clients, some):
                part = slice(first, first + some)
                out[part, start : start + BLOCK] = mixed(key_C1[part], place)
        return out


def _hashed(key: tuple[int, int | Tensor, int | Tensor, int], count: int, device: torch.device) -> Tensor:
    seed, *where = key
    if device.type != "cpu" or count <= BLOCK:
        return bits(seed, Purpose.MODULE, *where, torch.arange(count, device=device))
    out = torch.empty(count, dtype=torch.long)
    for first in range(0, count, BLOCK):
        part = out[first : first + BLOCK]
        part.copy_(bits(seed, Purpose.MODULE, *where, torch.arange(first, first + len(part))))
    return out


class Source:
    """Draws of a stream, one after another."""

    def __init__(self, stream: Stream, count: int = 0):
        """`count`: how many draws came before."""
        self.stream, self.count = stream, count

    def number(self) -> int:
        """Of the draw that comes next."""
        self.count += 1
        return self.count - 1

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """64 random bits each."""
        count = math.prod(shape) // self.stream.clients
        return self.stream.words(self.number(), count, device).view(tuple(shape))

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float64 in [0, 1)."""
        return self.words(shape, device).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double() * 2.0**-53

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float64, by the polar form of two uniform numbers."""
        first, second = self.uniform(shape, device), self.uniform(shape, device)
        return (-2 * torch.log1p(-first)).sqrt_() * torch.cos(2 * math.pi * second)

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float64, above zero."""
        return -torch.log1p(-self.uniform(shape, device)) + 2.0**-54

    def chance(self, share: float, shape: Sequence[int], device: torch.device) -> Tensor:
        """True with this probability, by 32 bits each: half a word."""
        count, below = math.prod(shape) // self.stream.clients, bound_of(share)
        words = self.stream.words(self.number(), -(-count // 2), device)
        if below < -(2**31):
            return torch.zeros(*shape, dtype=torch.bool, device=device)
        return (words.view(torch.int32)[..., :count] <= below).view(tuple(shape))

    def order(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """A permutation of the last axis."""
        return self.words(shape, device).argsort(dim=-1, stable=True)


def bound_of(share: float) -> int:
    """The largest of this share of all 32-bit integers, in their order."""
    return round(min(max(share, 0.0), 1.0) * 2**32) - 2**31 - 1


def real(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 in [0, 1) in another type, rounded down: one is never among them."""
    digits = EXACT.get(dtype, 53)
    return values if digits == 53 else (values * 2.0**digits).floor_().mul_(2.0**-digits).to(dtype)


def choices(source: Source, weights: Tensor, count: int, replacement: bool) -> Tensor:
    """`torch.multinomial` of the last axis, with any axes in front."""
    shape, kinds = weights.shape[:-1], weights.shape[-1]
    if not replacement:
        ratio = weights.double() / source.exponential(weights.shape, weights.device)
        return ratio.topk(count, dim=-1).indices
    edges = weights.double().cumsum(dim=-1)
    at = source.uniform((*shape, count), weights.device) * edges[..., -1:]
    return torch.searchsorted(edges, at, right=True).clamp_(max=kinds - 1)
