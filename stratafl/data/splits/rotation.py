"""Feature shift: the training images of each group turned by an angle of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_number

CHUNK = 4096
MOST_DEGREES = 1e6
"""Beyond it the last turn has no exact place left in a number."""


def leaf_angles(
    parents: Sequence[Sequence[int] | np.ndarray],
    start: float = -50.0,
    step: float = 10.0,
    level: int = 1,
) -> np.ndarray:
    """Each leaf's angle in degrees: node i (from 0) of the level turns its own by start + step * i.

    The defaults are the paper's; where its groups are counted from 1, start is -40.
    """
    depth = len(parents) - 1
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= depth:
        raise InvalidInput("rotation.level", level, f"must be a level of the tree, 1 to {depth}")
    start, step = (
        check_number(f"rotation.{name}", value, at_least=-MOST_DEGREES, at_most=MOST_DEGREES)
        for name, value in (("start", start), ("step", step))
    )
    node = np.arange(len(parents[-1]))
    for lower in range(depth, level, -1):
        node = np.asarray(parents[lower])[node]
    return start + step * node


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """uint8 images turned counter-clockwise about their centre: bilinear, zero outside, same size.

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
