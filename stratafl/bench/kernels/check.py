"""Every kernel against PyTorch in float64 (see `compare`), over a grid of shapes.

`python -m stratafl.engine.kernels.check [fp32 ...] [conv2d ...]` runs all of it, or some modes and families, on this
machine's GPU (or, slowly, in Triton's interpreter).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stratafl.engine import kernels
from stratafl.engine.kernels import compare

LIMITS = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 6e-2}
"""Largest ||out - reference|| / ||reference||; 16-bit inputs are rounded before the reference sees them too."""


class Case(NamedTuple):
    name: str
    compute: str
    errors: Callable[[], dict[str, float]]


def cases(device: str, small: bool) -> Iterator[Case]:
    """The grid of shapes; `small` is what the interpreter can do in a minute."""

    def case(name: str, compute: str, function: Callable[..., dict[str, float]], *arguments: Any) -> Case:
        return Case(name, compute, lambda: function(*arguments, device))

    # The interpreter multiplies bf16 as integers.
    modes = ("fp32", "tf32", "fp16") if small else ("fp32", "tf32", "fp16", "bf16")
    # clients, batch, image, channels, kernel, stride, padding
    shapes: list[tuple[Any, ...]] = [
        (1, 2, (7, 6), (3, 5), (3, 3), 1, 0),
        (2, 3, (8, 9), (4, 6), (3, 3), 2, 1),
        (2, 1, (9, 9), (3, 4), (7, 7), 2, 3),
        (2, 2, (6, 6), (5, 3), (1, 1), 2, 0),
        (1, 2, (5, 8), (2, 4), (2, 4), 3, 1),
        # some taps never meet the image
        (2, 3, (1, 1), (4, 3), (3, 3), 1, 1),
        (1, 2, (2, 2), (3, 4), (3, 3), 2, 1),
        (2, 2, (1, 5), (3, 2), (5, 3), 1, 2),
        (1, 2, (2, 1), (2, 3), (2, 2), 1, 3),
    ]
    pools: list[tuple[Any, ...]] = [
        (2, 2, (12, 12), (3, 5), (5, 5), 1, 0),
        (1, 3, (9, 10), (1, 4), (3, 3), 1, 1),
        (2, 1, (11, 9), (6, 5), (5, 5), 1, 2),
    ]
    if not small:
        shapes += [
            (3, 20, (16, 16), (64, 64), (3, 3), 1, 1),
            (3, 20, (16, 16), (64, 128), (3, 3), 2, 1),
            (3, 20, (15, 17), (64, 96), (1, 1), 2, 0),
            (3, 20, (32, 32), (3, 64), (7, 7), 2, 3),
            (2, 5, (2, 2), (512, 512), (3, 3), 1, 1),
            (2, 50, (2, 2), (256, 512), (3, 3), 2, 1),
            (3, 50, (1, 1), (512, 512), (3, 3), 1, 1),
            (1000, 2, (5, 5), (8, 8), (3, 3), 1, 1),
        ]
        pools += [
            (3, 50, (32, 32), (3, 64), (5, 5), 1, 0),
            (3, 50, (14, 14), (64, 64), (5, 5), 1, 0),
            (3, 20, (28, 28), (1, 32), (5, 5), 1, 2),
            (2, 20, (14, 14), (32, 64), (5, 5), 1, 2),
            (1000, 3, (12, 12), (3, 8), (5, 5), 1, 0),
        ]
    for compute, shape, bias in itertools.product(modes, shapes, (True, False)):
        if (compute == "fp32" and (bias or shape is shapes[0])) or not small:
            name = f"conv2d {shape}{'' if bias else ' without bias'}"
            yield case(name, compute, compare.convolution, *shape, bias, False, True, compute)
    for compute, shape, data in itertools.product(modes, pools, (False, True)):
        if compute == "fp32" or not small or shape is pools[0]:
            name = f"conv2d_relu_pool {shape}{' of data' if data else ''}"
            yield case(name, compute, compare.convolution, *shape, True, True, not data, compute)
    sizes: list[tuple[Any, ...]] = [(2, 5, (7, 9)), (1, 18, (33, 20))]
    sizes += [] if small else [(3, 50, (1600, 384)), (3, 50, (192, 10)), (3, 130, (784, 200)), (1000, 3, (40, 10))]
    for compute, size, relu in itertools.product(modes, sizes, (False, True)):
        yield case(f"linear {size}{' relu' if relu else ''}", compute, compare.linear, *size, relu, compute)
    images: list[tuple[Any, ...]] = [(2, 3, (4, 5), 6, 2), (1, 2, (1, 1), 8, 1)]
    for image in images + ([] if small else [(3, 20, (16, 16), 64, 2), (3, 20, (2, 2), 512, 32)]):
        yield case(f"group_norm {image}", "fp32", compare.group_norm, *image)
    for image in [(2, 3, (4, 5), 6), (1, 2, (3, 3), 70)]:
        yield case(f"flatten {image}", "fp32", compare.flatten, *image)
    windows: list[tuple[Any, ...]] = [
        (2, 3, (7, 8), 5, (3, 3), (2, 2), (1, 1)),
        (1, 2, (6, 9), 3, (2, 4), (3, 1), (1, 2)),
        (2, 1, (5, 5), 2, (5, 5), (1, 1), (2, 2)),
    ]
    if not small:
        windows += [(3, 50, (16, 16), 64, (3, 3), (2, 2), (1, 1)), (100, 2, (9, 7), 70, (2, 2), (2, 2), (0, 0))]
    for compute, window in itertools.product(("fp32", "fp16") if small else ("fp32", "fp16", "bf16"), windows):
        yield case(f"max_pool2d {window}", compute, compare.max_pool2d, *window, compute)
    for bank in [(2, 3, 4, 3, 3), (1, 2, 5, 3, 1), *([] if small else [(3, 96, 200, 3, 3), (100, 64, 64, 5, 5)])]:
        yield case(f"reorder {bank}", "fp32", compare.reorder, *bank)
    for table in [(2, 3, 7, 11, 5), *([] if small else [(3, 50, 80, 90, 8)])]:
        yield case(f"embedding {table}", "fp32", compare.embedding, *table)
    for logits, masked in itertools.product(
        [(2, 5, 7), *([] if small else [(100, 50, 10), (3, 300, 100)])], (False, True)
    ):
        yield case(
            f"cross_entropy {logits}{' masked' if masked else ''}", "fp32", compare.cross_entropy, *logits, masked
        )
    matrices = [(3, 37), (1, 5), (2, 300), *([] if small else [(4, 100_003), (3, 797_962)])]
    sequences = [
        (2, 3, 4, 5, 6),
        *([(1, 70, 3, 4, 20)] if small else [(3, 50, 80, 8, 100), (2, 130, 9, 8, 128), (3, 50, 80, 8, 256)]),
    ]
    for compute, sequence in itertools.product(modes, sequences):
        yield case(f"recurrent {sequence}", compute, compare.recurrent, *sequence, compute)
    for family in [(5, 2, 37), *([] if small else [(100, 10, 797_962)])]:
        yield case(f"drift {family}", "fp32", compare.drift, *family)
    chains = [(None, False), (1.0, False), (1.0, True)]
    for matrix, (clip, known), momentum, gap in itertools.product(matrices, chains, (0.0, 0.9), (0, 6)):
        name = f"update {matrix} clip={clip} momentum={momentum} gap={gap}{' known squares' if known else ''}"
        yield case(name, "fp32", compare.update, *matrix, clip, momentum, gap, known)


def run(device: str, small: bool, only: Sequence[str] = ()) -> list[str]:
    """Print the worst error of each family, of these modes and families only, and what is over its limit, which is
    returned too."""
    worst: dict[tuple[str, str], float] = {}
    failures = []
    modes, families = set(only) & LIMITS.keys(), set(only) - LIMITS.keys()
    for name, compute, errors in cases(device, small):
        key = name.split()[0], compute
        if (modes and compute not in modes) or (families and key[0] not in families):
            continue
        found = errors()
        if worst and key not in worst:
            _report(worst)
        worst[key] = max(worst.get(key, 0.0), *found.values())
        for part, error in found.items():
            if not error <= LIMITS[compute]:
                failures.append(f"{name} {compute}: {part} {error:.1e}")
                print(failures[-1], flush=True)
    _report(worst)
    return failures


def _report(worst: dict[tuple[str, str], float]) -> None:
    (family, compute), error = list(worst.items())[-1]
    print(f"{family:20} {compute:5} {error:.1e}", flush=True)


if __name__ == "__main__":
    # the library's products refuse to be deterministic without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = run("cpu" if kernels.interpreted() else "cuda", kernels.interpreted(), sys.argv[1:])
    print(f"{len(found)} over their limits" if found else "all within their limits")
    raise SystemExit(1 if found else 0)
