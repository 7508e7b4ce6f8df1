"""Captured steps keep the objects that their graph reads, with a stand-in for the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from stratafl.engine import cuda_graphs, gradients
from stratafl.engine.gradients import CompiledGradients
from tests.engine.compiler.test_capture import Windowed, batch, chosen, trained
from tests.engine.pairs import federation, stacked


def forgetting(once: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Stand-in for a capture: like a CUDA graph, the result refers to no Python object."""
    once()
    return lambda: None


def lengths(method: CompiledGradients) -> list[int]:
    """Batch lengths whose programs are kept."""
    return [key[0][1][0] for key in method._programs]


def test_programs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MAX_PROGRAMS", 2)
    method, _ = chosen(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    for length in (5, 4, 5, 3):
        trained(method, [length])
    assert lengths(method) == [5, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_graph_keeps_the_constants_that_it_reads(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for rows in the module's order rather than the program's."""
    monkeypatch.setattr(gradients, "MAX_PROGRAMS", 1)
    monkeypatch.setattr(cuda_graphs, "_capture", forgetting)
    sim = stacked(federation(model=lambda: Windowed().double()))
    engine, method = sim.engine, sim.engine._gradients
    assert isinstance(method, CompiledGradients)
    if not in_order:
        monkeypatch.setattr(engine, "_gradients_for", lambda state: engine._gradients_in_module_order)
    engine._uses_cuda_graphs = True
    sim.federation.begin_round()
    work = sim.federation.train_request(0, 1, 0)
    (chunk,) = engine._chunks(replace(work, clients=[3, 4]), 1)
    captured = engine._cuda_graph(work, chunk)
    (program,) = method._programs.values()
    reads = weakref.ref(program)
    del program
    other = batch([2])
    method.program(other._replace(inputs_CB=other.inputs_CB.double()))
    gc.collect()
    assert lengths(method) == [2] and reads() is not None
    engine._captured_steps.clear()
    del captured
    gc.collect()
    assert reads() is None
