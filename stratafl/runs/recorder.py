"""A simulation recorded in a run directory from its first round to its last, in one go or several.

A run can be stopped after any meeting of the leaves with their parents, and goes on from there to
the same bits. Between two meetings its state lies in one place; before them it is spread over
engine and half-made sums. So a signal only asks: the group round in progress is finished, a
checkpoint written, and then the run stops. A second signal stops at once, and the run goes on from
its last checkpoint, as after a power cut.

On several ranks each has a recorder. The first one's keeps the directory; what it reads there it
tells the others, who need not see it.
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
    """Say nothing."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done."""

    path: Path
    summary: dict[str, Any]


class NullRunFolder:
    """A run directory that the first rank keeps, as the others see it."""

    path = Path()

    def add(self, record: RoundResult, *, sync: bool = False) -> None: ...

    def checkpoint(self, place: Progress, state: StateDict) -> None: ...

    def finish(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None: ...

    def keep_only(self, *places: Progress) -> None: ...

    def end(self, status: str, place: Progress, reason: str = "") -> None: ...

    def close(self) -> None: ...


class StoragePolicy(NamedTuple):
    """What is kept of a run besides its records."""

    checkpoint_every: int = 10
    """Rounds; 0 for only when the run is stopped."""
    keep_state: bool = False
    """Whether a finished run keeps every node's model and correction, in a last checkpoint."""


class Recorder:
    """A run about to go on: what is wrong with its input or its folder was said before this
    exists."""

    def __init__(self, name: str, simulation: Simulation, folder: RunWriter | NullRunFolder, keeping: StoragePolicy):
        self.name, self.simulation, self.folder, self.keeping = name, simulation, folder, keeping
        self.ranks = simulation.ranks
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(RUN_KEY, str(folder.path))
        if self.ranks.lifeline is not None:
            self.ranks.lifeline.on_loss = self._lost
        self._stopped_together = False

    @property
    def place(self) -> Progress:
        """How far the run has come."""
        return Progress(len(self.simulation.history), self.simulation.meetings)

    @property
    def go_on(self) -> str:
        """How to, once it was stopped."""
        return f"go on with: stratafl run --resume {shlex.quote(str(self.folder.path))}"

    def run(self, watch: RoundCallback = lambda record: None, say: MessageCallback = ignore) -> FinishedRun:
        """Do the rounds that are left."""
        try:
            with self.ending(), InterruptHandler(say) as stop:
                while not self.simulation.done:
                    self.round(stop, watch)
                return FinishedRun(self.folder.path, self.finish(say))
        finally:
            self.folder.close()

    def round(self, stop: InterruptHandler, watch: RoundCallback) -> RoundResult:
        """The next global round, or what is left of it, recorded."""
        simulation, folder, every = self.simulation, self.folder, self.keeping.checkpoint_every
        while True:
            record = simulation.advance()
            if record is not None:
                folder.add(record)
                watch(record)
                simulation.check()
                if simulation.done:
                    return record
            asked = max(self.ranks.all(stop.signal))
            if asked or (record is not None and every and record.round % every == 0):
                folder.checkpoint(self.place, simulation.state(history=False))
            if asked:
                self._stopped_together = True
                raise Interrupted(asked)
            if record is not None:
                return record

    def finish(self, say: MessageCallback = ignore) -> dict[str, Any]:
        """All rounds are done: the run in numbers."""
        self._say_what_was_lost(say)
        place, keeps = self.place, self.keeping.keep_state
        if keeps:
            self.folder.checkpoint(place, self.simulation.state(history=False))
        result = self.simulation.result()
        numbers = summary_of(result)
        self.folder.finish(result.module.state_dict(), numbers)
        self.folder.keep_only(*([place] if keeps else []))
        return numbers

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Note down how it ended, where something ends it."""
        try:
            yield
        except SystemExit as ending:
            told = InvalidInput("run", self.name, f"something in the model or rule ended the process: {ending}")
            self._end(format.FAILED, str(told))
            raise told from ending
        except Interrupted as stopped:
            self._end(format.INTERRUPTED, "it was stopped")
            problem = Interrupted(stopped.number, f"interrupted; {self.go_on}")
            self.ranks.agreed_on = problem if self._stopped_together else None
            raise problem from None
        except BaseException as problem:
            self._end(format.FAILED, errors.error_message(problem))
            self.ranks.leave_word(errors.error_message(problem))
            raise

    def _say_what_was_lost(self, say: MessageCallback) -> None:
        """A model that is older than the run, or no result at all, is no success."""
        history = self.simulation.history
        lost = len(list(takewhile(lambda record: record.lost, reversed(history))))
        if lost == len(history):
            raise InvalidInput(
                "rounds", lost, "in all of them every update was refused, and the model is the first one"
            )
        if lost:
            say(f"every update of the last {lost} rounds was refused: the model is that of round {len(history) - lost}")

    def _lost(self) -> str:
        """Another rank is gone: say so in the directory, and how to go on."""
        self._end(format.FAILED, self.ranks.last_word() or PEER_LOST_MESSAGE)
        return f"; {self.go_on}"

    def _end(self, status: str, reason: str) -> None:
        try:
            self.folder.end(status, self.place, reason)
        except InvalidInput:
            # what brought us here is what the user needs to know, not that it could not be noted
            # down either
            return
