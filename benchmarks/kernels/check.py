"""Every kernel against PyTorch in float64 (see `reference`), over a grid of shapes.

`python -m benchmarks.kernels.check [fp32 ...] [conv2d ...]` runs all of it, or some modes and
families, on this machine's GPU (or, slowly, in Triton's interpreter).
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.kernels import reference
from benchmarks.kernels.reference import USUAL, Extreme
from stratafl.engine import kernels

LIMITS = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 6e-2}
"""Largest ||out - reference|| / ||reference||; 16-bit inputs are rounded before the reference sees
them too."""


class Case(NamedTuple):
    """A kernel at one shape, and how far each of its results is from float64's."""

    name: str
    compute: str
    errors: Callable[[], dict[str, float]]


Sizes = tuple[Any, ...]
"""What a function of `reference` takes before the arithmetic, such as clients, batch and
channels."""

# clients, batch, image, channels, kernel, stride, padding
CONVOLUTIONS: list[Sizes] = [
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
LARGE_CONVOLUTIONS: list[Sizes] = [
    (3, 20, (16, 16), (64, 64), (3, 3), 1, 1),
    (3, 20, (16, 16), (64, 128), (3, 3), 2, 1),
    (3, 20, (15, 17), (64, 96), (1, 1), 2, 0),
    (3, 20, (32, 32), (3, 64), (7, 7), 2, 3),
    (2, 5, (2, 2), (512, 512), (3, 3), 1, 1),
    (2, 50, (2, 2), (256, 512), (3, 3), 2, 1),
    (3, 50, (1, 1), (512, 512), (3, 3), 1, 1),
    (1000, 2, (5, 5), (8, 8), (3, 3), 1, 1),
]
POOLED_CONVOLUTIONS: list[Sizes] = [
    (2, 2, (12, 12), (3, 5), (5, 5), 1, 0),
    (1, 3, (9, 10), (1, 4), (3, 3), 1, 1),
    (2, 1, (11, 9), (6, 5), (5, 5), 1, 2),
]
LARGE_POOLED_CONVOLUTIONS: list[Sizes] = [
    (3, 50, (32, 32), (3, 64), (5, 5), 1, 0),
    (3, 50, (14, 14), (64, 64), (5, 5), 1, 0),
    (3, 20, (28, 28), (1, 32), (5, 5), 1, 2),
    (2, 20, (14, 14), (32, 64), (5, 5), 1, 2),
    (1000, 3, (12, 12), (3, 8), (5, 5), 1, 0),
]
# clients, batch, image, channels, window, stride, padding
WINDOWS: list[Sizes] = [
    (2, 3, (7, 8), 5, (3, 3), (2, 2), (1, 1)),
    (1, 2, (6, 9), 3, (2, 4), (3, 1), (1, 2)),
    (2, 1, (5, 5), 2, (5, 5), (1, 1), (2, 2)),
]
LARGE_WINDOWS: list[Sizes] = [
    (3, 50, (16, 16), 64, (3, 3), (2, 2), (1, 1)),
    (100, 2, (9, 7), 70, (2, 2), (2, 2), (0, 0)),
]
# clients, batch, length, entries, features
LARGE_VOCABULARIES: list[Sizes] = [(3, 50, 80, 90, 8), (3, 50, 80, 30_000, 96)]
EXTREMES: dict[str, Extreme] = {
    "inputs x 1e5": Extreme(inputs=1e5),
    "gradients x 100": Extreme(gradients=100.0),
    "infinite gradient": Extreme(broken=float("inf")),
    "gradient NaN": Extreme(broken=float("nan")),
}


def cases(device: str, small: bool) -> Iterator[Case]:
    """The grid of shapes; `small` is what the interpreter can do in a minute."""
    # the interpreter multiplies bf16 as integers
    modes = ("fp32", "tf32", "fp16") if small else ("fp32", "tf32", "fp16", "bf16")
    layers = itertools.chain(_convolutions(modes, small), _layers(modes, small), _extremes(modes, small))
    others = itertools.chain(_lookups(small), _recurrent(modes, small), _meetings(small), _updates(small))
    for name, compute, function, *arguments in itertools.chain(layers, others):
        yield Case(name, compute, functools.partial(function, *arguments, device))


def _convolutions(modes: Sequence[str], small: bool) -> Iterator[tuple[Any, ...]]:
    shapes = CONVOLUTIONS + ([] if small else LARGE_CONVOLUTIONS)
    for compute, shape, bias in itertools.product(modes, shapes, (True, False)):
        if (compute == "fp32" and (bias or shape is shapes[0])) or not small:
            name = f"conv2d {shape}{'' if bias else ' without bias'}"
            yield name, compute, reference.convolution, *shape, bias, False, True, USUAL, compute
    pooled = POOLED_CONVOLUTIONS + ([] if small else LARGE_POOLED_CONVOLUTIONS)
    for compute, shape, data in itertools.product(modes, pooled, (False, True)):
        if compute == "fp32" or not small or shape is pooled[0]:
            name = f"conv2d_relu_pool {shape}{' of data' if data else ''}"
            yield name, compute, reference.convolution, *shape, True, True, not data, USUAL, compute


def _layers(modes: Sequence[str], small: bool) -> Iterator[tuple[Any, ...]]:
    sizes: list[Sizes] = [(2, 5, (7, 9)), (1, 18, (33, 20))]
    sizes += [] if small else [(3, 50, (1600, 384)), (3, 50, (192, 10)), (3, 130, (784, 200)), (1000, 3, (40, 10))]
    for compute, size, relu in itertools.product(modes, sizes, (False, True)):
        yield f"linear {size}{' relu' if relu else ''}", compute, reference.linear, *size, relu, USUAL, compute
    images: list[Sizes] = [(2, 3, (4, 5), 6, 2), (1, 2, (1, 1), 8, 1)]
    for image in images + ([] if small else [(3, 20, (16, 16), 64, 2), (3, 20, (2, 2), 512, 32)]):
        yield f"group_norm {image}", "fp32", reference.group_norm, *image
    for image in [(2, 3, (4, 5), 6), (1, 2, (3, 3), 70)]:
        yield f"flatten {image}", "fp32", reference.flatten, *image
    windows = WINDOWS + ([] if small else LARGE_WINDOWS)
    for compute, window in itertools.product(("fp32", "fp16") if small else ("fp32", "fp16", "bf16"), windows):
        yield f"max_pool2d {window}", compute, reference.max_pool2d, *window, compute
    for bank in [(2, 3, 4, 3, 3), (1, 2, 5, 3, 1), *([] if small else [(3, 96, 200, 3, 3), (100, 64, 64, 5, 5)])]:
        yield f"reorder {bank}", "fp32", reference.reorder, *bank


def _extremes(modes: Sequence[str], small: bool) -> Iterator[tuple[Any, ...]]:
    """Numbers of any size in the layers that may multiply in a type of a smaller range than
    float32's."""
    for compute, (name, extreme) in itertools.product(("tf32",) if small else modes, EXTREMES.items()):
        if compute == "fp16" and extreme.inputs > 1:
            continue  # which it does not hold
        for flag in (False, True):
            last = extreme, compute
            plain = *CONVOLUTIONS[1], flag, False, True, *last
            yield f"conv2d {name}{'' if flag else ' without bias'}", compute, reference.convolution, *plain
            pooled = *POOLED_CONVOLUTIONS[0], True, True, not flag, *last
            yield f"conv2d_relu_pool {name}{' of data' if flag else ''}", compute, reference.convolution, *pooled
            yield f"linear {name}{' relu' if flag else ''}", compute, reference.linear, 2, 5, (7, 9), flag, *last


def _lookups(small: bool) -> Iterator[tuple[Any, ...]]:
    for vocabulary in [(2, 3, 7, 11, 5), (2, 3, 7, 5000, 5), *([] if small else LARGE_VOCABULARIES)]:
        yield f"embedding {vocabulary}", "fp32", reference.embedding, *vocabulary
    logits = [(2, 5, 7), *([] if small else [(100, 50, 10), (3, 300, 100)])]
    for shape, masked in itertools.product(logits, (False, True)):
        name = f"cross_entropy {shape}{' masked' if masked else ''}"
        yield name, "fp32", reference.cross_entropy, *shape, masked


def _recurrent(modes: Sequence[str], small: bool) -> Iterator[tuple[Any, ...]]:
    large = [(3, 50, 80, 8, 100), (2, 130, 9, 8, 128), (3, 50, 80, 8, 256)]
    sequences = [(2, 3, 4, 5, 6), *([(1, 70, 3, 4, 20)] if small else large)]
    for compute, sequence in itertools.product(modes, sequences):
        yield f"recurrent {sequence}", compute, reference.recurrent, *sequence, compute


def _meetings(small: bool) -> Iterator[tuple[Any, ...]]:
    for family in [(5, 2, 37), *([] if small else [(100, 10, 797_962)])]:
        yield f"drift {family}", "fp32", reference.drift, *family


def _updates(small: bool) -> Iterator[tuple[Any, ...]]:
    matrices = [(3, 37), (1, 5), (2, 300), *([] if small else [(4, 100_003), (3, 797_962)])]
    chains = [(None, False), (1.0, False), (1.0, True)]
    for matrix, (clip, known), optimiser, gap in itertools.product(matrices, chains, reference.OPTIMISERS, (0, 6)):
        name = f"update {matrix} clip={clip} {optimiser} gap={gap}{' known squares' if known else ''}"
        yield name, "fp32", reference.update, *matrix, clip, optimiser, gap, known


def run(device: str, small: bool, only: Sequence[str] = ()) -> list[str]:
    """Print the worst error of each family, of these modes and families only, and what is over its
    limit, which is returned too."""
    chosen: dict[tuple[str, str], list[Case]] = {}
    failures = []
    modes, families = set(only) & LIMITS.keys(), set(only) - LIMITS.keys()
    for case in cases(device, small):
        family = case.name.split()[0]
        if (not modes or case.compute in modes) and (not families or family in families):
            chosen.setdefault((family, case.compute), []).append(case)
    for (family, compute), some in chosen.items():
        worst = 0.0
        for case in some:
            for part, error in case.errors().items():
                worst = max(worst, error)
                if not error <= LIMITS[compute]:
                    failures.append(f"{case.name} {compute}: {part} {error:.1e}")
                    print(failures[-1], flush=True)
        print(f"{family:20} {compute:5} {worst:.1e}", flush=True)
    return failures


if __name__ == "__main__":
    # the library's products refuse to be deterministic without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = run("cpu" if kernels.interpreted() else "cuda", kernels.interpreted(), sys.argv[1:])
    print(f"{len(found)} over their limits" if found else "all within their limits")
    raise SystemExit(1 if found else 0)
