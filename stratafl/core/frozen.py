"""What a module has and does not train: it is in no row, no message and no checkpoint, so that all
who work with the same rows must have the same."""

from __future__ import annotations

import hashlib

import torch

from stratafl.base.errors import InvalidInput
from stratafl.core.flat import Flat


def frozen_digest(flat: Flat) -> str:
    """The SHA-256 of the parameters that are not trained; empty where there are none."""
    trained = set(flat.names)
    frozen = [(name, each) for name, each in flat.module.named_parameters() if name not in trained]
    digest = hashlib.sha256()
    for name, each in frozen:
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        digest.update(memoryview(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest() if frozen else ""


def check_frozen(flat: Flat, expected: str) -> None:
    """Refuse a module whose parameters that are not trained are others than those a run was made
    with."""
    if frozen_digest(flat) != expected:
        told = "its frozen weights are others than those the run was made with: give them as a file, [model] base"
        raise InvalidInput("model", type(flat.module).__name__, told)
