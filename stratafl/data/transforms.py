"""Transforms of images: scale and normalise, flip and crop, rotate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, uniform
from stratafl.data.catalog.storage import channel_statistics
from stratafl.data.inputs import Inputs, NamedInputs, Pair, tensors_of

PAD = 4


def channels_first(images: Tensor) -> Tensor:
    """Convert stored images, (N, H, W) or (N, H, W, K), to the layout of models, (N, K, H, W)."""
    if images.dim() == 3:
        return images[:, None]
    if images.dim() == 4:
        return images.permute(0, 3, 1, 2).contiguous()
    raise InvalidInput("images", tuple(images.shape), "must be (N, H, W) or (N, H, W, K)")


def normalise(images_BKHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Convert uint8 pixels to normalised float32, per channel: (pixel / 255 - mean) / std."""
    channels = images_BKHW.shape[-3]
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise InvalidInput(name, tuple(values), f"needs one value per channel, {channels}")
    if min(std) <= 0:
        raise InvalidInput("std", tuple(std), "must be above 0")
    mean_K11 = torch.tensor(mean, device=images_BKHW.device, dtype=torch.float32)[:, None, None]
    std_K11 = torch.tensor(std, device=images_BKHW.device, dtype=torch.float32)[:, None, None]
    return (images_BKHW.float() / 255.0 - mean_K11) / std_K11


CHANNELS = (1, 3, 4)
"""Numbers of channels of an image whose channels are its last axis."""


@dataclass(frozen=True)
class ByteScale:
    """Scale of inputs in bytes: pixel / 255, or also standardised by channel."""

    statistics: Mapping[str, tuple[Tensor, Tensor] | None]
    """Mean and deviation of pixel / 255 of each input in bytes, by name; None to divide only."""

    @staticmethod
    def of(inputs: Inputs, is_standard: bool) -> ByteScale:
        """Scale of these training inputs; those that are not in bytes stay as they are."""
        tensors = tensors_of(inputs)
        in_bytes = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
        if not in_bytes:
            dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
            given = "standard" if is_standard else "unit"
            raise InvalidInput("data.scale", given, f"is for bytes (uint8), not {dtypes}")
        return ByteScale({name: _statistics(images) if is_standard else None for name, images in in_bytes.items()})

    def __call__(self, inputs: Inputs) -> Inputs:
        scaled = {name: self._scale(name, tensor) for name, tensor in tensors_of(inputs).items()}
        return NamedInputs(scaled) if isinstance(inputs, NamedInputs) else scaled[""]

    def _scale(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.statistics:
            return tensor
        if tensor.dtype != torch.uint8:
            allowed = "must be bytes (uint8), as the inputs to train on are, for data.scale"
            raise InvalidInput("data.test inputs", str(tensor.dtype).removeprefix("torch."), allowed)
        unit, statistics = tensor.float() / 255.0, self.statistics[name]
        return unit if statistics is None else (unit - statistics[0]) / statistics[1]

    def reader(self, read: Callable[[Sequence[int]], Pair]) -> Callable[[Sequence[int]], Pair]:
        """Reader of lazy samples that scales what it reads."""

        def read_scaled(numbers: Sequence[int]) -> Pair:
            inputs, targets = read(numbers)
            return self(inputs), targets

        return read_scaled


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation by channel, shaped to be broadcast.

    Channels are the first axis of an image, as in PyTorch, unless only the last one can be it.
    Inputs without an axis of channels have one channel. A constant channel becomes 0.
    """
    axis = 3 if images.dim() == 4 and images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS else 1
    by_channel = images.movedim(axis, -1) if images.dim() == 4 else images.reshape(len(images), -1, 1)[..., None]
    shape = [1] * images.dim()
    if images.dim() == 4:
        shape[axis] = -1
    mean, std = (torch.tensor(values).reshape(shape) for values in channel_statistics(by_channel.numpy()))
    return mean, torch.where(std > 0, std, 1.0)


def flip_and_crop(images_BKHW: Tensor, seed: int, client: int | Tensor, step: int | Tensor, pad: int = PAD) -> Tensor:
    """Flip an image with probability 1/2, then crop it from a zero padding with probability 1/2.

    For stacked clients the images are (clients, B, K, H, W), `client` holds their numbers, and
    `step` is one number or one per client. As in the paper's code the images are normalised before,
    so that zero padding has the mean colour.
    """
    *_, batch, _, height, width = images_BKHW.shape
    device = images_BKHW.device
    position_B = torch.arange(batch, device=device)
    key = [where[:, None] if isinstance(where, Tensor) and where.dim() else where for where in (client, step)]
    flips, crops, down, right = (uniform(seed, Stream.TRANSFORM, *key, position_B, draw) for draw in range(4))
    offsets = 2 * pad + 1
    cropped = crops < 0.5
    down = torch.where(cropped, (down * offsets).long() - pad, 0)
    right = torch.where(cropped, (right * offsets).long() - pad, 0)
    row_BH = torch.arange(height, device=device) + down[..., None]
    column_BW = torch.arange(width, device=device) + right[..., None]
    column_BW = torch.where((flips < 0.5)[..., None], width - 1 - column_BW, column_BW)

    inside_BHW = _within(row_BH, height)[..., :, None] & _within(column_BW, width)[..., None, :]
    source_BHW = row_BH.clamp(0, height - 1)[..., :, None] * width
    source_BHW = source_BHW + column_BW.clamp(0, width - 1)[..., None, :]
    flat = images_BKHW.flatten(-2)
    source = source_BHW.flatten(-2)[..., None, :].expand_as(flat)
    moved = flat.gather(-1, source).unflatten(-1, (height, width))
    return torch.where(inside_BHW[..., None, :, :], moved, moved.new_zeros(()))


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


CHUNK = 4096


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre.

    Interpolation is bilinear, pixels from outside are zero, and the size stays the same.

    images   (N, H, W) or (N, H, W, C), as data sets store them
    degrees  one angle, or one per image
    """
    if images.dtype != torch.uint8 or images.dim() not in (3, 4):
        raise InvalidInput("images", (images.dtype, tuple(images.shape)), "must be uint8 (N, H, W) or (N, H, W, C)")
    angles_N = torch.as_tensor(degrees, dtype=torch.float64, device=images.device)
    angles_N = angles_N.expand(len(images))
    parts = [_rotate(part, angles) for part, angles in zip(images.split(CHUNK), angles_N.split(CHUNK), strict=True)]
    return torch.cat(parts) if parts else images.clone()


def _rotate(images: Tensor, angles_N: Tensor) -> Tensor:
    channels_last = images.dim() == 4
    pixels = images.permute(0, 3, 1, 2) if channels_last else images[:, None]
    height, width = pixels.shape[-2:]
    radians = torch.deg2rad(angles_N)
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # The grid says where each output pixel comes from, in coordinates from -1 to 1 with y pointing
    # down; the ratio of the sides keeps the turn rigid in images that are not square.
    theta = torch.stack(
        [
            torch.stack([cos, -sin * height / width, zero], dim=-1),
            torch.stack([sin * width / height, cos, zero], dim=-1),
        ],
        dim=-2,
    ).float()
    grid = functional.affine_grid(theta, list(pixels.shape), align_corners=False)
    turned = functional.grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    turned = turned.round().clamp(0, 255).to(torch.uint8)
    return turned.permute(0, 2, 3, 1).contiguous() if channels_last else turned[:, 0]
