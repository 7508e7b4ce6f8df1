"""One step of a chunk of clients as a CUDA graph: captured once, replayed for every step, chunk and
round.

A graph reads and writes fixed memory, so what changes between replays lies in tensors that are
filled before: the state, the batches of all steps, the learning rate, and the number of the step,
which the graph itself increases.

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

from stratafl.base.rng import PROCESS
from stratafl.engine.chunk import ChunkState


class ChunkIndices(NamedTuple):
    """Sample indices of all steps of a chunk's clients."""

    client_C: Tensor
    index_CHB: Tensor
    mask_CHB: Tensor


class StaticInputs(NamedTuple):
    """Inputs of a graph, in fixed memory."""

    state: ChunkState
    samples: ChunkIndices
    step_index_1: Tensor
    """Which of the samples' steps comes next."""
    step: Tensor
    """Number of that step in the run."""
    lr: Tensor


class CapturePolicy:
    """Decides whether a kind of step occurs often enough to capture it as a CUDA graph.

    A capture takes as long as many steps. Where aggregators wait by time, another number of clients
    takes part in every synchronisation, and each would be captured for one synchronisation alone.
    """

    WINDOW, MIN_OCCURRENCES = 4, 2

    def __init__(self) -> None:
        self._last: deque[object] = deque(maxlen=self.WINDOW)

    def should_capture(self, kind: object) -> bool:
        """Record a kind of step, and say whether it has occurred often of late."""
        is_often = self._last.count(kind) >= self.MIN_OCCURRENCES
        self._last.append(kind)
        return is_often


class CapturedStep:
    """A captured step, with the state it works on."""

    def __init__(
        self, state: ChunkState, samples: ChunkIndices, run_step: Callable[[StaticInputs], tuple[object, ...]]
    ):
        """`run_step` takes one step on this state and on samples of these shapes, and returns what
        its graph has to keep. The state must be loaded, and is overwritten."""
        device = state.x_CP.device
        self.state = state
        self._inputs = StaticInputs(
            state,
            ChunkIndices(*(torch.empty_like(indices) for indices in samples)),
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros((), dtype=torch.long, device=device),
            torch.zeros((), dtype=state.x_CP.dtype, device=device),
        )
        self.steps = samples.index_CHB.shape[1]

        def once() -> None:
            # modulo the number of steps, so that the trial steps do not run past them
            self._inputs.step_index_1.remainder_(self.steps)
            self._reads = run_step(self._inputs)
            self._inputs.step_index_1.add_(1)
            self._inputs.step.add_(1)

        self._copy_inputs(samples, 0, 0.0)
        self._replay = _capture(once, device)

    def run(self, samples: ChunkIndices, step: int, lr: float) -> None:
        """Take all the samples' steps on the loaded state."""
        self._copy_inputs(samples, step, lr)
        for _ in range(samples.index_CHB.shape[1]):
            self._replay()

    def _copy_inputs(self, samples: ChunkIndices, step: int, lr: float) -> None:
        steps = samples.index_CHB.shape[1]
        self._inputs.samples.client_C.copy_(samples.client_C)
        self._inputs.samples.index_CHB[:, :steps].copy_(samples.index_CHB)
        self._inputs.samples.mask_CHB[:, :steps].copy_(samples.mask_CHB)
        self._inputs.step_index_1.zero_()
        self._inputs.step.fill_(step)
        self._inputs.lr.fill_(lr)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Disable garbage collection while a CUDA graph is captured.

    Freeing the memory of an earlier graph would end the capture of another.
    """
    with PROCESS:
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
