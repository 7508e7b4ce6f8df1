"""Static check of compiled kernels for a race: shared-memory buffers that may be overwritten while
a tensor-core product still reads them.

From Hopper on, tensor cores read shared memory while the kernel continues, and the compiler decides
how many blocks of an operand are buffered there. If a product and something else read the same
block, Triton 3.6 buffers one block too few: results are then sometimes slightly wrong, and a
comparison with float64 on an idle GPU may pass.

    python -m benchmarks.kernels.race_check [bf16 ...] [conv2d ...]

compiles the kernels for an H100 or H200 with the shapes of `check`, which needs no GPU, and prints
such buffers.
"""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kernels import check

_RING = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_PART = re.compile(r"(%\S+) = ttg\.memdesc_\w+ (%[\w.]+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w.]+, (%[\w.]+)")
_PRODUCT = re.compile(r"ttng\.warp_group_dot (%[\w.]+), (%[\w.]+), .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def overtaken(ttgir: str) -> list[str]:
    """Shared-memory buffers that may be overwritten while a tensor-core product still reads them.

    A loop copies blocks ahead: as many as there are copies before it. If the products of a step are
    still running when its copy begins, a buffer needs as many places as there are copies, the one
    in the loop included.
    """
    places = {name: int(count) for name, count in _RING.findall(ttgir)}
    part_of = dict(_PART.findall(ttgir))

    def buffer(name: str) -> str:
        while name in part_of:
            name = part_of[name]
        return name

    if not any(int(running) for running in _WAIT.findall(ttgir)):
        return []
    copies = Counter(buffer(to) for to in _COPY.findall(ttgir))
    read = {buffer(operand) for operands in _PRODUCT.findall(ttgir) for operand in operands}
    return sorted(name for name in read & copies.keys() if places[name] < copies[name])


class _Hopper:
    """Triton driver that compiles for an H100 and cannot launch."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def run(only: Sequence[str] = ()) -> list[str]:
    """Compile the kernels of these precisions and families, and return the overwritten buffers.

    The number of kernels that continue while products run is printed. After this call, the process
    can only compile kernels, not launch them.
    """
    from triton.runtime import driver, jit

    driver.set_active(_Hopper())
    launch = jit.JITFunction.run
    compiled: dict[int, tuple[str, str]] = {}

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, warmup=True, **options)
        compiled[id(kernel)] = f"{self.__module__.rpartition('.')[2]}.{self.__name__}", kernel.asm["ttgir"]
        return kernel

    jit.JITFunction.run = compile_only
    races: dict[str, None] = {}
    late = 0
    precisions, families = set(only) & check.LIMITS.keys(), set(only) - check.LIMITS.keys()
    for case in check.cases("cpu", small=False):
        if (precisions and case.precision not in precisions) or (families and case.name.split()[0] not in families):
            continue
        before = len(compiled)
        with contextlib.suppress(AssertionError):  # results were never computed
            case.errors()
        for kernel, ttgir in list(compiled.values())[before:]:
            late += any(int(running) for running in _WAIT.findall(ttgir))
            races |= dict.fromkeys(f"{kernel} in {case.name} {case.precision}: {buffer}" for buffer in overtaken(ttgir))
    print(f"{len(compiled)} kernels compiled, {late} go on while products run", flush=True)
    return list(races)


if __name__ == "__main__":
    names = run(sys.argv[1:])
    print("\n".join(names) or "no buffer is overtaken")
    raise SystemExit(1 if names else 0)
