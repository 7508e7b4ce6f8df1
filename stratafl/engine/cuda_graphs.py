"""CUDA graphs of training steps.

One step of a chunk of clients is captured once, and replayed for every step, chunk and round. A
graph reads and writes fixed memory, so what changes between replays lies in tensors that are filled
before: the state, the sample indices of all steps, the learning rate, and the number of the step,
which the graph itself increases.

Shape suffixes: C clients, H steps, B samples of a batch.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from stratafl.base.rng import PROCESS_LOCK
from stratafl.engine.batches import ChunkIndices, StepBatch
from stratafl.engine.chunk import ChunkState

TrainStep = Callable[[ChunkState, StepBatch, Tensor], tuple[object, ...]]
"""(state, batch, learning rate) -> objects that a CUDA graph of the step has to keep; changes the
state in place."""


class CapturePolicy:
    """Decides whether a kind of step occurs often enough to capture it as a CUDA graph.

    Capturing takes as long as many steps. Where aggregators wait by time, the number of clients
    changes at every synchronisation, and a graph would be used for one synchronisation alone.
    """

    WINDOW, MIN_OCCURRENCES = 4, 2

    def __init__(self) -> None:
        self._last: deque[object] = deque(maxlen=self.WINDOW)

    def should_capture(self, kind: object) -> bool:
        """Record a kind of step, and return whether it has occurred often of late."""
        is_often = self._last.count(kind) >= self.MIN_OCCURRENCES
        self._last.append(kind)
        return is_often


class CapturedStep:
    """CUDA graph of a step, with the state that it reads and writes."""

    def __init__(self, state: ChunkState, indices: ChunkIndices, train_step: TrainStep):
        """Capture a step on this state, which must be loaded and is overwritten."""
        device = state.x_CP.device
        self.state = state
        self._indices = indices._replace(
            client_C=torch.empty_like(indices.client_C),
            index_CHB=torch.empty_like(indices.index_CHB),
            mask_CHB=torch.empty_like(indices.mask_CHB),
        )
        self.steps = indices.index_CHB.shape[1]
        self._step_index_1 = torch.zeros(1, dtype=torch.long, device=device)
        """Place of the next step among those of the indices."""
        self._step = torch.zeros((), dtype=torch.long, device=device)
        """Number of that step in the run."""
        self._lr = torch.zeros((), dtype=state.x_CP.dtype, device=device)
        self._copy_inputs(indices, 0, 0.0)
        self._replay = _capture(partial(self._run_once, train_step), device)

    def run(self, indices: ChunkIndices, step: int, lr: float) -> None:
        """Train the loaded state on all steps of the indices."""
        self._copy_inputs(indices, step, lr)
        for _ in range(indices.index_CHB.shape[1]):
            self._replay()

    def _run_once(self, train_step: TrainStep) -> None:
        # modulo the number of steps, so that the steps before a capture do not run past them
        self._step_index_1.remainder_(self.steps)
        indices = self._indices
        index_CB, mask_CB = (
            rows.index_select(1, self._step_index_1)[:, 0] for rows in (indices.index_CHB, indices.mask_CHB)
        )
        batch = StepBatch(indices.client_C, index_CB, mask_CB, indices.length_CH[:, 0], self._step)
        self._reads = train_step(self.state, batch, self._lr)
        self._step_index_1.add_(1)
        self._step.add_(1)

    def _copy_inputs(self, indices: ChunkIndices, step: int, lr: float) -> None:
        steps = indices.index_CHB.shape[1]
        self._indices.client_C.copy_(indices.client_C)
        self._indices.index_CHB[:, :steps].copy_(indices.index_CHB)
        self._indices.mask_CHB[:, :steps].copy_(indices.mask_CHB)
        self._step_index_1.zero_()
        self._step.fill_(step)
        self._lr.fill_(lr)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Disable garbage collection while a CUDA graph is captured.

    Freeing the memory of an earlier graph would end the capture of another.
    """
    with PROCESS_LOCK:
        gc.collect()
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def _capture(once: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture a function as a CUDA graph, and return the function that replays it."""
    # libraries initialise themselves at their first calls, which a graph must not hold
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
