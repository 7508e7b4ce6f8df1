"""Images of a step, from the data set to the model's input: gather, flip and crop in one pass.

N images of the data set, C clients, B samples of a batch, K channels, H and W height and width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.base.rng import MIXING, Stream, stream_prefix
from stratafl.data.transforms import PAD
from stratafl.engine.kernels.common import activation_dtype, hash_step, logical_right_shift, next_power_of_two
from stratafl.engine.precision import Precision


@triton.jit
def _uniform(state, draw, golden, first, second):
    """Random float64 in [0, 1) of a number of a draw: 53 bits of the hash, times 2^-53."""
    word = hash_step(state, draw, golden, first, second)
    return logical_right_shift(word, 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _load_images(
    data_ptr, index_ptr, client_ptr, step_ptr, out_ptr, start, golden, first, second, B,
    K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one image; flip it and shift it by at most MARGIN pixels, each with probability 1/2.

    start, golden, first, second: state and constants of the hash, see `base.rng.mix`.
    """
    sample = tl.program_id(0).to(tl.int64)
    client = tl.load(client_ptr + sample // B)
    state = hash_step(start, client, golden, first, second)
    state = hash_step(state, tl.load(step_ptr), golden, first, second)
    state = hash_step(state, sample % B, golden, first, second)
    flipped = _uniform(state, 0, golden, first, second) < 0.5
    cropped = _uniform(state, 1, golden, first, second) < 0.5
    down = (_uniform(state, 2, golden, first, second) * (2 * MARGIN + 1)).to(tl.int32) - MARGIN
    right = (_uniform(state, 3, golden, first, second) * (2 * MARGIN + 1)).to(tl.int32) - MARGIN
    down = tl.where(cropped, down, 0)
    right = tl.where(cropped, right, 0)

    pixel = tl.arange(0, BLOCK)
    row = pixel // W + down
    column = pixel % W + right
    column = tl.where(flipped, W - 1 - column, column)
    in_image = pixel < H * W
    mask = in_image & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    image = tl.load(index_ptr + sample) * (K * H * W)
    for k in range(K):
        value = tl.load(data_ptr + image + k * H * W + row * W + column, mask=mask, other=0.0)
        offset = out_ptr + sample * (K * H * W) + pixel * K + k
        tl.store(offset, value.to(out_ptr.dtype.element_ty), mask=in_image)


def load_images(
    data_NKHW: Tensor, index_CB: Tensor, seed: int, client_C: Tensor, step: int | Tensor, precision: Precision = "fp32"
) -> Tensor:
    """Images `flip_and_crop(data_NKHW[index_CB], seed, client_C, step)`, (C, B, K, H, W).

    They are channels-last in memory, and of the type of activations in this precision.
    """
    clients, batch = index_CB.shape
    channels, height, width = data_NKHW.shape[1:]
    dtype, device = activation_dtype(precision), data_NKHW.device
    out_CBHWK = torch.empty(clients, batch, height, width, channels, dtype=dtype, device=device)
    step = torch.as_tensor(step, dtype=torch.long, device=device)
    golden, first, second = MIXING
    _load_images[(clients * batch,)](
        data_ptr=data_NKHW, index_ptr=index_CB.contiguous(), client_ptr=client_C, step_ptr=step, out_ptr=out_CBHWK,
        start=stream_prefix(seed, Stream.TRANSFORM), golden=golden, first=first, second=second,
        B=batch, K=channels, H=height, W=width, MARGIN=PAD, BLOCK=next_power_of_two(height * width),
    )  # fmt: skip
    return out_CBHWK.permute(0, 1, 4, 2, 3)
