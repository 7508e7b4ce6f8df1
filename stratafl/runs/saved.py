"""A Python program's run in a directory of its own: the same program, run again, goes on with
it."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from stratafl.base import files
from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.signals import Interrupted, InterruptExit, InterruptHandler
from stratafl.base.validation import check_integer
from stratafl.engine.factory import EngineName, make_engine
from stratafl.experiment.loading import LabelCounts
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.describe import objects_of, plain_config
from stratafl.runs.recorder import NullRunFolder, RunRecorder, StoragePolicy
from stratafl.runs.resume import ResumeHints, ResumeSession, lock_for_resume
from stratafl.runs.trackers import check_trackers, trackers_for
from stratafl.runs.writer import RunDescription, RunWriter
from stratafl.simulation.callbacks import tracking
from stratafl.simulation.progress import in_notebook
from stratafl.simulation.simulation import Simulation

HINTS = ResumeHints(
    "save",
    "simulation.save(..., force=True) in place of save= goes on all the same",
    "for more rounds begin another, with storage.keep_state = true",
)
_open_here: weakref.WeakValueDictionary[Path, SavedRun] = weakref.WeakValueDictionary()
"""The runs of this process that have not ended, by their folder: a program, such as a notebook, may
set the same run up once more."""


class SavedRun(RunRecorder):
    """Records the rounds that a program asks for, one after another."""

    def __init__(self, saving: Saving, folder: RunWriter | NullRunFolder, keeping: StoragePolicy, tensorboard: bool):
        super().__init__(saving.name, saving.simulation, folder, keeping)
        self.path, self._say = saving.path, saving.say
        self._stop: InterruptHandler | None = None
        open_now = ExitStack()
        open_now.callback(folder.close)
        names = ["tensorboard"] if tensorboard and isinstance(folder, RunWriter) else []
        trackers = trackers_for(names, folder.path, self.name, "", len(self.simulation.history))
        self._watch = open_now.enter_context(tracking(trackers, saving.config))
        # also where a program forgets the run before it is done
        self.close = weakref.finalize(self, open_now.close)
        _open_here[saving.path.resolve()] = self

    @property
    def resume_command(self) -> str:
        return f"the same program goes on from there: the run is kept in {self.path}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this is open, a signal stops the run after the clients' next synchronisation."""
        is_over = self.simulation.done and not self.close.alive
        if self._stop is not None or is_over:
            yield
            return
        if not self.close.alive:
            raise InvalidInput("save", self.path, "this run was ended: set it up again, and it goes on")
        try:
            with self.record_outcome(), InterruptHandler(self._say) as self._stop:
                yield
        except BaseException as problem:
            self.close()
            if not isinstance(problem, Interrupted):
                raise
            self._say(problem.message)
            # a notebook goes on, and has words of its own for a program that ends
            raise (KeyboardInterrupt(problem.message) if in_notebook() else InterruptExit(problem)) from None
        finally:
            self._stop = None

    def next_round(self) -> RoundResult:
        """Train and record the next round; after the last one, finish the run."""
        with self.listening():
            assert self._stop is not None
            record = self.round(self._stop, self._watch)
            if self.simulation.done:
                self.finish(self._say)
                self.close()
            return record


class Saving(NamedTuple):
    """A simulation, where it is to be kept, and what it was made of."""

    simulation: Simulation
    path: Path
    config: dict[str, Any]
    objects: dict[str, str]
    counts: LabelCounts

    @property
    def name(self) -> str:
        return format.slug(self.path.name)

    def say(self, text: str) -> None:
        """Print a line on the error stream, on the first rank only."""
        if self.simulation.ranks.is_first:
            print(escape_control(f"{self.name}: {text}"), file=sys.stderr, flush=True)


def saved(
    simulation: Simulation,
    path: Path,
    checkpoint_every: int,
    keep_state: bool,
    tensorboard: bool,
    force: bool,
) -> SavedRun | None:
    """A recorder of the run, which goes on where it stood if it is there; None where it is done."""
    ranks, keeping = (
        simulation.ranks,
        StoragePolicy(check_integer("checkpoint_every", checkpoint_every, at_least=0), keep_state),
    )
    with ranks.raise_together():
        if tensorboard:
            check_trackers(["tensorboard"])
        if ranks.is_first:
            files.check_writable("save", path.absolute().parent)
    config = plain_config(simulation)
    saving = Saving(simulation, path, config, objects_of(simulation.experiment), LabelCounts.of(simulation.data))
    ranks.check_equal("config", config)
    ranks.check_equal("data", saving.counts.fingerprint)
    before = _open_here.get(path.resolve())
    if before is not None:
        before.close()
    is_there = ranks.broadcast_first(os.path.lexists(path / format.RUN))
    folder = _gone_on_with(saving, force) if is_there else _new(saving)
    if folder is None:
        return None
    recorder = SavedRun(saving, folder, keeping, tensorboard)
    if simulation.done:
        # all rounds were done when it was stopped, and only the end was not written
        recorder.finish(saving.say)
        recorder.close()
        return None
    return recorder


def _new(saving: Saving) -> RunWriter | NullRunFolder:
    simulation, path = saving.simulation, saving.path
    folder: RunWriter | NullRunFolder = NullRunFolder()
    with simulation.ranks.raise_together():
        if simulation.ranks.is_first:
            if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                raise InvalidInput("save", path, "there is something else: a run needs a folder of its own")
            description = RunDescription.of(saving.config, simulation, saving.counts, saving.objects)
            folder = RunWriter.create(path, saving.name, format.new_id(), description, simulation.history)
    return folder


def _gone_on_with(saving: Saving, force: bool) -> RunWriter | NullRunFolder | None:
    simulation, path, ranks = saving.simulation, saving.path, saving.simulation.ranks
    if simulation.history or simulation.meetings:
        raise InvalidInput("save", path, "is a run's folder already: a run that has begun needs another one")

    def check(described: dict[str, Any]) -> None:
        if "job" in described:
            raise InvalidInput("save", path, "is the folder of a deployed run's root")

    with lock_for_resume(path, ranks, check) as (described, lock):
        _with_the_engine_of(described["engine"], saving)
        reopening = ResumeSession(path, described, lock, ranks, saving.say, force, HINTS)
        if not reopening.restore_finished(saving.config, simulation, saving.counts):
            restored = reopening.restore(saving.config, lambda: (simulation, saving.counts))
            if not (restored.was_done and simulation.done):
                return reopening.reopen(saving.config, restored)
        saving.say(f"done already: {len(simulation.history)} rounds in result().history")
        if lock is not None:
            lock.release()
        return None


def _with_the_engine_of(name: EngineName, saving: Saving) -> None:
    """Go on with what trained the run before, where the program names no engine: another
    measurement, or another version, may choose another one."""
    simulation = saving.simulation
    execution = simulation.experiment.execution
    if execution.engine in (None, "auto") and simulation.engine.name != name in get_args(EngineName):
        simulation.engine = make_engine(name, simulation.engine.training, precision=execution.precision)
