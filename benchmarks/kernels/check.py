"""Comparison of every kernel with PyTorch in float64 (`reference`), over a grid of shapes.

    python -m benchmarks.kernels.check [fp32 ...] [conv2d ...]

compares all kernels and precisions, or some of them, on this machine's GPU (or, slowly, in Triton's
interpreter).
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels import reference
from benchmarks.kernels.reference import USUAL, Extreme
from stratafl.engine import kernels
from stratafl.engine.precision import Precision

LIMITS = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 6e-2}
"""Largest accepted ||out - reference|| / ||reference||. The reference gets rounded inputs, too."""


@dataclass(frozen=True)
class Case:
    """Kernel at one shape, and the function that measures the errors of its results."""

    name: str
    precision: Precision
    errors: Callable[[], dict[str, float]]


Sizes = tuple[Any, ...]
"""First arguments of a function of `reference`, such as clients, batch and channels."""

# clients, batch, image, channels, kernel, stride, padding
CONVOLUTIONS: list[Sizes] = [
    (1, 2, (7, 6), (3, 5), (3, 3), 1, 0),
    (2, 3, (8, 9), (4, 6), (3, 3), 2, 1),
    (2, 1, (9, 9), (3, 4), (7, 7), 2, 3),
    (2, 2, (6, 6), (5, 3), (1, 1), 2, 0),
    (1, 2, (5, 8), (2, 4), (2, 4), 3, 1),
    # some taps never overlap the image
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
    """Grid of shapes; `small` is what the interpreter can compute in a minute."""
    # without bf16 in the interpreter, which multiplies bf16 as integers
    precisions: Sequence[Precision] = ("fp32", "tf32", "fp16") if small else ("fp32", "tf32", "fp16", "bf16")
    families = (
        _convolutions(precisions, small),
        _layers(precisions, small),
        _extremes(precisions, small),
        _lookups(small),
        _lstms(precisions, small),
        _drifts(small),
        _optimizer_steps(small),
    )
    for name, precision, errors in itertools.chain(*families):
        yield Case(name, precision, functools.partial(errors, device=device))


Measurement = tuple[str, Precision, Callable[..., dict[str, float]]]
"""Name, precision, and function of the device that measures the errors."""


def _convolution(shape: Sizes, precision: Precision, **options: Any) -> Callable[..., dict[str, float]]:
    clients, batch, image, channels, kernel, stride, padding = shape
    return functools.partial(
        reference.convolution_errors,
        clients=clients,
        batch=batch,
        image=image,
        channels=channels,
        kernel=kernel,
        stride=stride,
        padding=padding,
        precision=precision,
        **{"extreme": USUAL, **options},
    )


def _linear(
    shape: Sizes, precision: Precision, relu: bool, extreme: Extreme = USUAL
) -> Callable[..., dict[str, float]]:
    clients, batch, size = shape
    return functools.partial(
        reference.linear_errors,
        clients=clients,
        batch=batch,
        size=size,
        relu=relu,
        extreme=extreme,
        precision=precision,
    )


def _convolutions(precisions: Sequence[Precision], small: bool) -> Iterator[Measurement]:
    shapes = CONVOLUTIONS + ([] if small else LARGE_CONVOLUTIONS)
    for precision, shape, bias in itertools.product(precisions, shapes, (True, False)):
        if (precision == "fp32" and (bias or shape is shapes[0])) or not small:
            name = f"conv2d {shape}{'' if bias else ' without bias'}"
            yield name, precision, _convolution(shape, precision, bias=bias, pool=False, first_grad=True)
    pooled = POOLED_CONVOLUTIONS + ([] if small else LARGE_POOLED_CONVOLUTIONS)
    for precision, shape, data in itertools.product(precisions, pooled, (False, True)):
        if precision == "fp32" or not small or shape is pooled[0]:
            name = f"conv2d_relu_pool {shape}{' of data' if data else ''}"
            yield name, precision, _convolution(shape, precision, bias=True, pool=True, first_grad=not data)


def _layers(precisions: Sequence[Precision], small: bool) -> Iterator[Measurement]:
    sizes: list[Sizes] = [(2, 5, (7, 9)), (1, 18, (33, 20))]
    sizes += [] if small else [(3, 50, (1600, 384)), (3, 50, (192, 10)), (3, 130, (784, 200)), (1000, 3, (40, 10))]
    for precision, size, relu in itertools.product(precisions, sizes, (False, True)):
        yield f"linear {size}{' relu' if relu else ''}", precision, _linear(size, precision, relu)
    images: list[Sizes] = [(2, 3, (4, 5), 6, 2), (1, 2, (1, 1), 8, 1)]
    for image in images + ([] if small else [(3, 20, (16, 16), 64, 2), (3, 20, (2, 2), 512, 32)]):
        yield f"group_norm {image}", "fp32", functools.partial(reference.group_norm_errors, *image)
    for image in [(2, 3, (4, 5), 6), (1, 2, (3, 3), 70)]:
        yield f"flatten {image}", "fp32", functools.partial(reference.flatten_errors, *image)
    windows = WINDOWS + ([] if small else LARGE_WINDOWS)
    pooled: Sequence[Precision] = ("fp32", "fp16") if small else ("fp32", "fp16", "bf16")
    for precision, window in itertools.product(pooled, windows):
        clients, batch, image, channels, kernel, stride, padding = window
        measure: Callable[..., dict[str, float]] = functools.partial(
            reference.max_pool2d_errors,
            clients=clients,
            batch=batch,
            image=image,
            channels=channels,
            kernel=kernel,
            stride=stride,
            padding=padding,
            precision=precision,
        )
        yield f"max_pool2d {window}", precision, measure
    for filters in [(2, 3, 4, 3, 3), (1, 2, 5, 3, 1), *([] if small else [(3, 96, 200, 3, 3), (100, 64, 64, 5, 5)])]:
        measure = functools.partial(reference.convert_filters_errors, *filters)
        yield f"convert_filters {filters}", "fp32", measure


def _extremes(precisions: Sequence[Precision], small: bool) -> Iterator[Measurement]:
    """Extreme values in the layers whose products may have a smaller range than float32."""
    tried: Sequence[Precision] = ("tf32",) if small else precisions
    for precision, (name, extreme) in itertools.product(tried, EXTREMES.items()):
        if precision == "fp16" and extreme.inputs > 1:
            continue  # beyond the range of fp16
        for flag in (False, True):
            plain = _convolution(CONVOLUTIONS[1], precision, bias=flag, pool=False, first_grad=True, extreme=extreme)
            yield f"conv2d {name}{'' if flag else ' without bias'}", precision, plain
            pooled = _convolution(
                POOLED_CONVOLUTIONS[0], precision, bias=True, pool=True, first_grad=not flag, extreme=extreme
            )
            yield f"conv2d_relu_pool {name}{' of data' if flag else ''}", precision, pooled
            yield (
                f"linear {name}{' relu' if flag else ''}",
                precision,
                _linear((2, 5, (7, 9)), precision, flag, extreme),
            )


def _lookups(small: bool) -> Iterator[Measurement]:
    for vocabulary in [(2, 3, 7, 11, 5), (2, 3, 7, 5000, 5), *([] if small else LARGE_VOCABULARIES)]:
        yield f"embedding {vocabulary}", "fp32", functools.partial(reference.embedding_errors, *vocabulary)
    logits = [(2, 5, 7), *([] if small else [(100, 50, 10), (3, 300, 100)])]
    for shape, masked in itertools.product(logits, (False, True)):
        name = f"cross_entropy {shape}{' masked' if masked else ''}"
        yield name, "fp32", functools.partial(reference.cross_entropy_errors, *shape, masked=masked)


def _lstms(precisions: Sequence[Precision], small: bool) -> Iterator[Measurement]:
    large = [(3, 50, 80, 8, 100), (2, 130, 9, 8, 128), (3, 50, 80, 8, 256)]
    sequences = [(2, 3, 4, 5, 6), *([(1, 70, 3, 4, 20)] if small else large)]
    for precision, sequence in itertools.product(precisions, sequences):
        yield f"lstm {sequence}", precision, functools.partial(reference.lstm_errors, *sequence, precision=precision)


def _drifts(small: bool) -> Iterator[Measurement]:
    for family in [(5, 2, 37), *([] if small else [(100, 10, 797_962)])]:
        yield f"drift {family}", "fp32", functools.partial(reference.drift_errors, *family)


def _optimizer_steps(small: bool) -> Iterator[Measurement]:
    matrices = [(3, 37), (1, 5), (2, 300), *([] if small else [(4, 100_003), (3, 797_962)])]
    chains = [(None, False), (1.0, False), (1.0, True)]
    for matrix, (clip, with_norms), optimizer, gap in itertools.product(matrices, chains, reference.OPTIMIZERS, (0, 6)):
        name = f"update {matrix} clip={clip} {optimizer} gap={gap}{' known squares' if with_norms else ''}"
        measure = functools.partial(
            reference.optimizer_step_errors, *matrix, clip=clip, name=optimizer, gap=gap, with_norms=with_norms
        )
        yield name, "fp32", measure


def run(device: str, small: bool, only: Sequence[str] = ()) -> list[str]:
    """Print the largest error of each family, and print and return the errors over their limit.

    only: precisions and families to check; empty for all.
    """
    selected: dict[tuple[str, str], list[Case]] = {}
    failures = []
    precisions, families = set(only) & LIMITS.keys(), set(only) - LIMITS.keys()
    unknown = set(families)
    for case in cases(device, small):
        family = case.name.split()[0]
        unknown.discard(family)
        if (not precisions or case.precision in precisions) and (not families or family in families):
            selected.setdefault((family, case.precision), []).append(case)
    if unknown:
        raise SystemExit(f"no cases of {', '.join(sorted(unknown))}")
    for (family, precision), members in selected.items():
        worst = 0.0
        for case in members:
            for part, error in case.errors().items():
                worst = max(worst, error)
                if not error <= LIMITS[precision]:
                    failures.append(f"{case.name} {precision}: {part} {error:.1e}")
                    print(failures[-1], flush=True)
        print(f"{family:20} {precision:5} {worst:.1e}", flush=True)
    return failures


if __name__ == "__main__":
    # without it, cuBLAS raises where deterministic algorithms are asked for
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    failures = run("cpu" if kernels.is_interpreted() else "cuda", kernels.is_interpreted(), sys.argv[1:])
    print(f"{len(failures)} over their limits" if failures else "all within their limits")
    raise SystemExit(1 if failures else 0)
