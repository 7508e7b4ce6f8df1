"""One step of a chunk of clients as a CUDA graph: captured once, replayed for every step, chunk and
round.

A graph reads and writes fixed memory, so what changes between replays lies in tensors that are
filled before: the rows, the batches of all steps, the learning rate, and the number of the step,
which the graph itself moves on.

Shape suffixes: C clients, H steps, B places in a batch.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from stratafl.engine.chunk import ChunkState


class ChunkIndices(NamedTuple):
    """The samples of a chunk's steps."""

    client_C: Tensor
    index_CHB: Tensor
    mask_CHB: Tensor


class StaticInputs(NamedTuple):
    """What a graph reads: a chunk's rows and samples, where its steps stand, and the learning
    rate."""

    rows: ChunkState
    samples: ChunkIndices
    number_1: Tensor
    """Which of the samples' steps comes next."""
    step: Tensor
    """The number of that step in the run."""
    lr: Tensor


class CapturePolicy:
    """Which kinds of step keep coming, so that capturing them is worth its time.

    A capture takes as long as many steps. Where parents wait by time, another number of clients
    takes part in every meeting, and each would be captured for one meeting alone.
    """

    LAST, OFTEN = 4, 2

    def __init__(self) -> None:
        self._last: deque[object] = deque(maxlen=self.LAST)

    def comes(self, kind: object) -> bool:
        """Whether a kind that comes up now did so often of late."""
        is_often = self._last.count(kind) >= self.OFTEN
        self._last.append(kind)
        return is_often


class CapturedStep:
    """A captured step, with the rows it works on."""

    def __init__(self, rows: ChunkState, samples: ChunkIndices, take: Callable[[StaticInputs], tuple[object, ...]]):
        """`take` does one step on these rows and on samples that look like these, and gives what
        the graph of it has to keep; the rows must be loaded, and are used up."""
        device = rows.x_CP.device
        self.rows = rows
        self._fixed = StaticInputs(
            rows,
            ChunkIndices(*(torch.empty_like(each) for each in samples)),
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros((), dtype=torch.long, device=device),
            torch.zeros((), dtype=rows.x_CP.dtype, device=device),
        )
        self.steps = samples.index_CHB.shape[1]

        def once() -> None:
            # of the steps there are, so that trying it out does not run past them
            self._fixed.number_1.remainder_(self.steps)
            self._reads = take(self._fixed)
            self._fixed.number_1.add_(1)
            self._fixed.step.add_(1)

        self._fill(samples, 0, 0.0)
        self._replay = _capture(once, device)

    def run(self, samples: ChunkIndices, step: int, lr: float) -> None:
        """Do all the samples' steps on the rows as they are loaded."""
        self._fill(samples, step, lr)
        for _ in range(samples.index_CHB.shape[1]):
            self._replay()

    def _fill(self, samples: ChunkIndices, step: int, lr: float) -> None:
        steps = samples.index_CHB.shape[1]
        self._fixed.samples.client_C.copy_(samples.client_C)
        self._fixed.samples.index_CHB[:, :steps].copy_(samples.index_CHB)
        self._fixed.samples.mask_CHB[:, :steps].copy_(samples.mask_CHB)
        self._fixed.number_1.zero_()
        self._fixed.step.fill_(step)
        self._fixed.lr.fill_(lr)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Nothing is collected meanwhile: to free what an earlier graph held would end the capture of
    another."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _capture(once: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same on the device alone."""
    # libraries set themselves up at their first calls, which a graph must not hold
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            once()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with garbage_collection_paused(), torch.cuda.graph(graph):
        once()
    return graph.replay
