"""What torch's own float32 products may round to while an engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stratafl.engine.ops import HALF, Compute


def honoured(precision: Compute, device: torch.device, dtype: torch.dtype, casts: bool) -> Compute:
    """What products are really computed in: only an engine that casts their operands has 16 bits,
    and only a GPU rounds float32 products to tf32."""
    if precision in HALF:
        return precision if casts else "fp32"
    return precision if device.type == "cuda" and dtype == torch.float32 else "fp32"


@contextmanager
def computing(compute: Compute, device: torch.device) -> Iterator[None]:
    """Let the GPU's float32 products be tf32 or keep them exact, and leave the setting as it
    was."""
    if device.type != "cuda":
        yield
        return
    # newer releases have one switch per library and complain about the older kind
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    layers = [getattr(convolution, name, None) for name in ("conv", "rnn")]
    newer = all(hasattr(part, "fp32_precision") for part in (matmul, *layers))
    name = "fp32_precision" if newer else "allow_tf32"
    wanted = ("ieee" if compute == "fp32" else "tf32") if newer else compute != "fp32"
    # the older switch of convolutions is that of recurrent layers, too
    parts = [matmul, *(layers if newer else [convolution])]
    before = [getattr(part, name) for part in parts]
    try:
        for part in parts:
            setattr(part, name, wanted)
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            setattr(part, name, value)
