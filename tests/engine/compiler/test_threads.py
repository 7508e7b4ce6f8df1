"""Runs in several threads of a process: what belongs to all of it is changed by one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer

from stratafl.base import rng
from stratafl.engine import cuda_graphs, loop, precision, random_streams
from stratafl.engine.compiler import program
from stratafl.engine.compiler.capture import opaque_autograd_functions, trace_fx
from tests.engine.zoo.entry import Net
from tests.simulation.module_profiles import data, run

A_WHILE = 0.2
"""Seconds within which another thread gets in where nothing keeps it out."""


def in_threads(*calls: Callable[[], object]) -> None:
    """Call these at the same time; what one of them raises is raised."""
    problems: list[BaseException] = []

    def kept(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=kept, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for problem in problems:
        raise problem


def patched() -> list[Any]:
    """What a capture replaces in the library."""
    return [
        torch.utils.checkpoint.CheckpointFunction,
        Distribution._validate_args,
        transformer._detect_is_causal_mask,
        vars(torch.autograd.Function)["apply"],
    ]


def test_captures_leave_the_library_as_it_was() -> None:
    before, inside, first_is_done = patched(), threading.Event(), threading.Event()
    overlaps = []

    def first(x: Tensor) -> Tensor:
        second.start()
        overlaps.append(inside.wait(A_WHILE))
        return x + 1

    def later(x: Tensor) -> Tensor:
        inside.set()
        first_is_done.wait(10)
        return x + 1

    def capture(call: Callable[[Tensor], Tensor]) -> None:
        with opaque_autograd_functions():
            trace_fx(call, [torch.ones(2)])

    second = threading.Thread(target=capture, args=(later,), daemon=True)
    capture(first)
    first_is_done.set()
    second.join(10)
    assert overlaps == [False]
    assert all(now is then for now, then in zip(patched(), before, strict=True))


CUDA = torch.device("cuda")
CHANGING: dict[str, Callable[[], Any]] = {
    "torch's generators": rng.torch_as_before,
    "every generator": rng.preserve_rng,
    "torch's generators seeded": lambda: rng.torch_seeded(0),
    "every generator seeded": lambda: rng.seeded_rng(0),
    "threads": lambda: loop.limit_threads(1),
    "products": lambda: precision.float32_matmul_precision("fp32", CUDA),
    "layers": precision.cudnn_disabled,
    "attention": lambda: random_streams.math_attention(CUDA),
    "mapping": program.vmap_fallback_disabled,
    "garbage collection": cuda_graphs.garbage_collection_paused,
}


@pytest.mark.parametrize("name", CHANGING)
def test_one_thread_at_a_time(name: str) -> None:
    """Whichever it is, and not the same twice: all of them are one process's."""
    inside = threading.Event()

    def other() -> None:
        with CHANGING[name]():
            inside.set()

    with ExitStack() as stack:
        stack.enter_context(CHANGING["threads" if name != "threads" else "mapping"]())
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert not inside.wait(A_WHILE / 4)
    thread.join(10)
    assert inside.is_set()


def test_runs_in_two_threads_draw_what_each_draws_alone() -> None:
    expected = [run(dropping(None), data(), seed=seed).run().models[0] for seed in (1, 2)]
    together, found = threading.Barrier(2), {}

    def train(module: nn.Module, seed: int) -> None:
        found[seed] = run(module, data(), seed=seed).run().models[0]

    one, other = dropping(together), dropping(together)
    in_threads(lambda: train(one, 1), lambda: train(other, 2))
    assert all(torch.equal(found[seed], model) for seed, model in zip((1, 2), expected, strict=True))


def dropping(together: threading.Barrier | None) -> nn.Module:
    """Waits before it draws until another thread is about to, where one can be."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if together is not None:
            with suppress(threading.BrokenBarrierError):
                together.wait(A_WHILE)
        return m.linear(nn.functional.dropout(x, 0.5, m.training))

    torch.manual_seed(0)
    return Net(forward, linear=nn.Linear(4, 3)).double()
