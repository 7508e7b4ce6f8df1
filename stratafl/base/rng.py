"""Random numbers: counter-based streams, and torch's, NumPy's and Python's global generators."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """Purpose of random numbers; streams of two purposes are independent."""

    BATCH = 1
    PARTICIPATION = 2
    MODULE = 3
    TRANSFORM = 4
    WEIGHTS = 5
    PARTITION = 6
    SAMPLES = 7
    READ = 8
    TEST = 9
    NETWORK = 10
    """Link and device of a node."""
    CLOCK = 11
    """Variations on the timeline from one synchronisation to the next."""


_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
MIXING = (_GOLDEN, _MULTIPLY_1, _MULTIPLY_2)
"""Constants of the hash, for kernels that continue from `stream_prefix` themselves."""


def _shifted(word: Tensor, bits: int) -> Tensor:
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_bits(seed: int, purpose: Stream, *where: int | Tensor) -> Tensor:
    """Draw 64 random bits (int64) per position; integer tensors in `where` are broadcast."""
    # plain integers in front are mixed without tensors, which is a hundred times as fast
    front = list(itertools.takewhile(lambda word: not isinstance(word, Tensor), where))
    device = next((word.device for word in where if isinstance(word, Tensor)), None)
    # filled in on the device rather than copied to it, so that a draw can be part of a CUDA graph
    state = torch.full((), _signed(_hash(seed, int(purpose), *map(int, front))), dtype=torch.long, device=device)
    for word in where[len(front) :]:
        state = mix(state, word if isinstance(word, Tensor) else _signed(word))
    return state


def stream_prefix(seed: int, purpose: Stream) -> int:
    """Hash that all random numbers of a purpose start from, as a signed 64-bit integer."""
    return _signed(_hash(seed, int(purpose)))


def mix(state: Tensor, word: Tensor | int) -> Tensor:
    """Hash of `random_bits` continued by one more word."""
    # in place: most of the time goes to memory
    state = (state ^ word).add_(_GOLDEN)
    state.bitwise_xor_(_shifted(state, 30)).mul_(_MULTIPLY_1)
    state.bitwise_xor_(_shifted(state, 27)).mul_(_MULTIPLY_2)
    return state.bitwise_xor_(_shifted(state, 31))


def _mixed_integer(state: int, word: int) -> int:
    state = ((state ^ (word & _MASK)) + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _MULTIPLY_1) & _MASK
    state = ((state ^ (state >> 27)) * _MULTIPLY_2) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, purpose: Stream, *where: int | Tensor) -> Tensor:
    """Draw float64 uniform in [0, 1)."""
    return _shifted(random_bits(seed, purpose, *where), 11).double() * 2.0**-53


def generator(seed: int, purpose: Stream, *where: int) -> np.random.Generator:
    """Independent NumPy generator for random numbers on the host."""
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, purpose, *where)))


def derive_seed(seed: int, purpose: Stream, *where: int) -> int:
    """Derive a non-negative 63-bit seed for another generator."""
    return _hash(seed, int(purpose), *where) >> 1


def _hash(*words: int) -> int:
    return functools.reduce(_mixed_integer, words, 0)


CPU = torch.device("cpu")
PROCESS_LOCK = threading.RLock()
"""Lock for temporary changes to the state of the process.

That is global generators, the number of threads, switches of libraries and replaced functions. Runs
in several threads wait for each other here, so that none restores what another has changed.
"""

ALIKE = 0
"""Seed of random numbers that must be equal in all processes.

An example is what user files draw while they are imported.
"""


def device_generator(device: torch.device) -> torch.Generator:
    """Default generator of torch's operations on a device."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def torch_as_before(device: torch.device = CPU) -> Iterator[None]:
    """Restore torch's generators of the host and of a device afterwards.

    Without naming the device, `torch.random.fork_rng` initialises and copies all GPUs.
    """
    with PROCESS_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def preserve_rng(device: torch.device = CPU) -> Iterator[None]:
    """Restore every global generator afterwards."""
    with torch_as_before(device):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators on the host and on GPUs in use, and restore them afterwards.

    No other GPU is initialised.
    """
    with PROCESS_LOCK:
        of_gpus = torch.cuda.default_generators
        generators = [torch.default_generator, *of_gpus]
        before = [generator.get_state() for generator in generators]
        try:
            torch.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            if not of_gpus:
                # the library keeps the last seed for GPUs that are opened later: the user's again
                torch.cuda.manual_seed_all(torch.default_generator.initial_seed())


@contextmanager
def seeded_rng(seed: int, devices: bool = False) -> Iterator[None]:
    """Seed all generators of the host, and restore them afterwards.

    seed: 63 bits; devices: whether GPUs in use are included, which takes far longer.
    """
    with preserve_rng(), torch_seeded(seed) if devices else nullcontext():
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)
        yield


def rng_states() -> tuple[bytes, str, object]:
    """States of the host's generators; equal states mean that no number was drawn in between."""
    return torch.default_generator.get_state().numpy().tobytes(), str(np.random.get_state()), random.getstate()
