"""Recording of a simulation in a run folder, in one process or several after another.

A run can be stopped after any synchronisation of the clients, and continues from there to the same
bits. Right after a synchronisation its state is in one place; while clients train it is spread over
the engine and partial sums. So a signal only sets a flag: training goes on up to the next
synchronisation, a checkpoint is written, and then the run stops. A second signal stops at once, and
the run continues from its last checkpoint, as after a power failure.

On several ranks each has a recorder. The first one writes the folder and broadcasts its contents to
the others, who do not need access to it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from stratafl.base import errors
from stratafl.base.errors import InvalidInput
from stratafl.base.signals import Interrupted, InterruptHandler
from stratafl.base.state_dict import StateDict
from stratafl.distributed.communicator import PEER_LOST_MESSAGE
from stratafl.distributed.launcher import RUN_KEY
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.checkpoint import Progress
from stratafl.runs.writer import RunWriter, summary_of
from stratafl.simulation.simulation import Simulation

RoundCallback = Callable[[RoundResult], None]
MessageCallback = Callable[[str], None]


def ignore(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True)
class FinishedRun:
    """Path and summary of a finished run."""

    path: Path
    summary: dict[str, Any]


class NullRunFolder:
    """Run folder on ranks other than the first, which does nothing."""

    path = Path()

    def append_round(self, record: RoundResult, *, sync: bool = False) -> None: ...

    def checkpoint(self, progress: Progress, state: StateDict) -> None: ...

    def finish(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None: ...

    def keep_only(self, *kept: Progress) -> None: ...

    def set_status(self, status: str, progress: Progress, reason: str = "") -> None: ...

    def close(self) -> None: ...


class StoragePolicy(NamedTuple):
    """Settings of what a run stores besides its records."""

    checkpoint_every: int = 10
    """Rounds between checkpoints; 0: only when the run is stopped."""
    keep_state: bool = False
    """Whether a finished run keeps the state of every node in a last checkpoint."""


class RunRecorder:
    """Recorder of a run whose input and folder have been checked, ready to start or continue."""

    def __init__(self, name: str, simulation: Simulation, folder: RunWriter | NullRunFolder, keeping: StoragePolicy):
        self.name, self.simulation, self.folder, self.keeping = name, simulation, folder, keeping
        self.ranks = simulation.ranks
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(RUN_KEY, str(folder.path))
        if self.ranks.watchdog is not None:
            self.ranks.watchdog.on_peer_lost = self._lost
        self._stopped_together = False

    @property
    def progress(self) -> Progress:
        """Progress of the run."""
        return Progress(len(self.simulation.history), self.simulation.meetings)

    @property
    def resume_command(self) -> str:
        """Hint with the command that resumes this run."""
        return f"go on with: stratafl resume {shlex.quote(str(self.folder.path))}"

    def run(self, watch: RoundCallback = lambda record: None, say: MessageCallback = ignore) -> FinishedRun:
        """Train the remaining rounds."""
        try:
            with self.record_outcome(), InterruptHandler(say) as stop:
                while not self.simulation.done:
                    self.round(stop, watch)
                return FinishedRun(self.folder.path, self.finish(say))
        finally:
            self.folder.close()

    def round(self, stop: InterruptHandler, watch: RoundCallback) -> RoundResult:
        """Train and record the next global round, or the rest of it."""
        simulation, folder, every = self.simulation, self.folder, self.keeping.checkpoint_every
        while True:
            record = simulation.advance()
            if record is not None:
                folder.append_round(record)
                watch(record)
                simulation.check()  # raises if all updates were rejected for several rounds
                if simulation.done:
                    return record
            signal_number = max(self.ranks.all_gather(stop.signal))
            if signal_number or (record is not None and every and record.round % every == 0):
                folder.checkpoint(self.progress, simulation.state(history=False))
            if signal_number:
                self._stopped_together = True
                raise Interrupted(signal_number)
            if record is not None:
                return record

    def finish(self, say: MessageCallback = ignore) -> dict[str, Any]:
        """Finish the run and return its summary."""
        self._report_rejected_rounds(say)
        progress, keeps_state = self.progress, self.keeping.keep_state
        if keeps_state:
            self.folder.checkpoint(progress, self.simulation.state(history=False))
        result = self.simulation.result()
        summary = summary_of(result)
        self.folder.finish(result.module.state_dict(), summary)
        self.folder.keep_only(*([progress] if keeps_state else []))
        return summary

    @contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Record the outcome if an exception ends the block."""
        try:
            yield
        except SystemExit as system_exit:
            error = InvalidInput("run", self.name, f"something in the model or rule ended the process: {system_exit}")
            self._end(format.FAILED, str(error))
            raise error from system_exit
        except Interrupted as interruption:
            self._end(format.INTERRUPTED, "it was stopped")
            problem = Interrupted(interruption.number, f"interrupted; {self.resume_command}")
            self.ranks.common_error = problem if self._stopped_together else None
            raise problem from None
        except BaseException as problem:
            self._end(format.FAILED, errors.error_message(problem))
            self.ranks.record_failure(errors.error_message(problem))
            raise

    def _report_rejected_rounds(self, say: MessageCallback) -> None:
        """Report last rounds whose updates were all rejected; raise if all rounds were such."""
        history = self.simulation.history
        lost = len(list(takewhile(lambda record: record.lost, reversed(history))))
        if lost == len(history):
            raise InvalidInput(
                "rounds", lost, "in all of them every update was refused, and the model is the first one"
            )
        if lost:
            say(f"every update of the last {lost} rounds was refused: the model is that of round {len(history) - lost}")

    def _lost(self) -> str:
        """Record that another rank was lost; returns how to resume."""
        self._end(format.FAILED, self.ranks.failure_reason() or PEER_LOST_MESSAGE)
        return f"; {self.resume_command}"

    def _end(self, status: str, reason: str) -> None:
        try:
            self.folder.set_status(status, self.progress, reason)
        except InvalidInput:
            # the first problem is what the user needs to know, not that it cannot be recorded
            return
