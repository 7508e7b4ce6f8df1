"""Block sizes, warps and pipeline depth of the matrix kernels, measured on an H200; fixed, so that
a graph can be captured at any time. The second part of a key is the bytes of a stored
activation."""

from __future__ import annotations

from typing import NamedTuple


class LaunchConfig(NamedTuple):
    """Tile sizes, warps and pipeline stages of a launch."""

    m: int
    """Rows of the product: pixels, or weights where the weights are many."""
    n: int
    k: int
    """What is summed in one step."""
    warps: int
    stages: int


LAUNCH_CONFIGS: dict[tuple[str, int], LaunchConfig] = {
    ("conv forward", 2): LaunchConfig(128, 64, 64, 4, 3),
    ("conv forward", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("conv input gradient", 2): LaunchConfig(128, 64, 64, 4, 3),
    ("conv input gradient", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("conv weight gradient", 2): LaunchConfig(64, 64, 32, 4, 4),
    ("conv weight gradient", 4): LaunchConfig(64, 64, 32, 4, 4),
    ("pool forward", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("pool forward", 4): LaunchConfig(64, 64, 16, 4, 5),
    ("few channels forward", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("few channels forward", 4): LaunchConfig(64, 64, 32, 4, 4),
    ("few channels weight gradient", 2): LaunchConfig(64, 64, 32, 4, 3),
    ("few channels weight gradient", 4): LaunchConfig(64, 64, 32, 4, 3),
    ("linear forward", 2): LaunchConfig(128, 64, 32, 4, 3),
    ("linear forward", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("linear input gradient", 2): LaunchConfig(128, 64, 32, 4, 3),
    ("linear input gradient", 4): LaunchConfig(128, 64, 32, 4, 3),
    ("linear weight gradient", 2): LaunchConfig(32, 64, 64, 4, 2),
    ("linear weight gradient", 4): LaunchConfig(64, 32, 64, 4, 2),
}
FP32_CONFIG = LaunchConfig(64, 32, 32, 4, 2)
"""For fp32 in three products of tf32, which need more registers."""


def tuning(kernel: str, compute: str) -> LaunchConfig:
    if compute == "fp32":
        return FP32_CONFIG
    return LAUNCH_CONFIGS[kernel, 4 if compute == "tf32" else 2]
