"""How many clients fit at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST = 512
"""Clients at once on a GPU: more than fill it gain nothing, and their memory is better left to the
rows."""
SHARE = 0.4
"""Of the free memory: a captured step keeps memory of its own beside what the first, eager ones
left behind."""
CACHE = 16 << 20
"""Bytes at once on a CPU: a step goes over its rows several times, and what stays in the cache is
quick."""
NEAR = 4 << 20
"""Bytes of an activation that a CPU's caches hold while the next operation comes."""
WIDER = 4
"""Activations of a batch in terms of its inputs, roughly; it matters where a model has few
parameters only."""


def fitting(
    device: torch.device,
    clients: int,
    row_bytes: int,
    batch_bytes: int,
    value_bytes: int,
    attempt: Callable[[int], None],
) -> int:
    """Clients at once; `value_bytes` are those of one client's largest activation, and `attempt`
    takes a step of so many, from which a GPU's need of memory is measured."""
    if device.type != "cuda":
        near = NEAR // max(1, value_bytes)
        return max(1, min(clients, near, CACHE // (row_bytes + WIDER * batch_bytes)))
    few = min(clients, 8)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    attempt(few)
    torch.cuda.synchronize(device)
    each = max(1, (torch.cuda.max_memory_allocated(device) - before) // few)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(clients, MOST, int(SHARE * free / each)))
