"""The generators that a user's own code draws from: torch's, NumPy's and Python's, which are one
for the whole process."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

CPU = torch.device("cpu")
PROCESS = threading.RLock()
"""Held by whoever changes for a while what belongs to the whole process: these generators, its
number of threads, switches of the library, and functions of it that are replaced. So runs in
several threads take turns, where they would otherwise leave behind what another had changed."""
ALIKE = 0
"""Seed for what must be the same in every process and run, such as what a user's file draws while
it is imported."""


def generator_of(device: torch.device) -> torch.Generator:
    """What torch's operations on a device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def torch_as_before(device: torch.device = CPU) -> Iterator[None]:
    """Leave torch's generators of the host and of a device as they were; unless it is told which,
    the library does so with every GPU's, and opens them all."""
    with PROCESS, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def as_before(device: torch.device = CPU) -> Iterator[None]:
    """Leave every generator as it was."""
    with torch_as_before(device):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Torch's generators set from a seed, on the host and on the GPUs that are in use, and left as
    they were afterwards; no other GPU is opened for it."""
    with PROCESS:
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
def seeded(seed: int, devices: bool = False) -> Iterator[None]:
    """Every generator of the host set from a 63-bit seed, and left as it was afterwards; devices:
    those of the GPUs in use, too, which takes far longer."""
    with as_before(), torch_seeded(seed) if devices else nullcontext():
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)
        yield


def states() -> tuple[bytes, str, object]:
    """Where the generators of the host stand; two that are equal saw no draw between them."""
    return torch.default_generator.get_state().numpy().tobytes(), str(np.random.get_state()), random.getstate()
