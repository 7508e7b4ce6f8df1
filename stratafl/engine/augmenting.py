"""A user's transform of batches, for many clients at once.

Shape suffixes: C clients, B places in a batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stratafl.engine.work import Augment


def takes_stacks(augment: Augment, inputs_B: Tensor, seed: int) -> bool:
    """Whether the transform of several clients' batches is the same as of each alone, tried on two."""
    client_C = torch.arange(2, device=inputs_B.device)
    try:
        together_CB = augment(inputs_B.expand(2, *inputs_B.shape), seed, client_C, torch.ones_like(client_C[0]))
        alone_CB = torch.stack([augment(inputs_B, seed, client, 1) for client in range(2)])
        return torch.equal(together_CB, alone_CB)
    except Exception:
        return False


def one_by_one(
    augment: Augment, inputs_CB: Tensor, seed: int, client_C: Tensor, step: int | Tensor, length_C: np.ndarray
) -> Tensor:
    """A transform that takes one client at a time, whose batch it must see without padding."""
    changed = []
    for inputs_B, client, length in zip(inputs_CB, client_C.tolist(), length_C, strict=True):
        own_B = augment(inputs_B[:length], seed, client, step)
        changed.append(torch.cat([own_B, own_B[:1].expand(len(inputs_B) - length, *own_B.shape[1:])]))
    return torch.stack(changed)
