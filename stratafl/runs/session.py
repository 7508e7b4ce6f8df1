"""A run and its folder, from the first round or a checkpoint to the end.

A run can be stopped after any synchronisation of the clients, and continues from there to the same
bits. Right after a synchronisation its state is in one place; while clients train it is spread over
the engine and partial sums. So a signal only sets a flag: training goes on up to the next
synchronisation, a checkpoint is written, and then the run stops. A second signal stops at once, and
the run continues from its last checkpoint, as after a power failure.

On several ranks each has a session. The first one writes the folder and broadcasts its contents to
the others, who do not need access to it.
"""

from __future__ import annotations

import os
import shlex
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from stratafl.base import errors, files
from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.base.signals import Interrupted, InterruptExit, InterruptHandler
from stratafl.distributed.communicator import PEER_LOST_MESSAGE, Communicator
from stratafl.distributed.launcher import RUN_KEY
from stratafl.engine.factory import EngineName, make_engine
from stratafl.experiment import toml
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.fields import options
from stratafl.experiment.loading import LabelCounts
from stratafl.experiment.sections import Storage
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.checkpoint import Progress
from stratafl.runs.describe import objects_of, plain_config
from stratafl.runs.provenance import EXTENT, extensions
from stratafl.runs.resume import Driver, MessageCallback, ignore, resuming
from stratafl.runs.trackers import check_trackers, trackers_for
from stratafl.runs.writer import RunDescription, RunWriter, summary_of
from stratafl.simulation.build import build
from stratafl.simulation.callbacks import tracking
from stratafl.simulation.progress import in_notebook
from stratafl.simulation.simulation import Simulation

RoundCallback = Callable[[RoundResult], None]
COMMAND = Driver(
    option="RUN",
    by_force="--allow-changes goes on all the same",
    resumption=lambda path: f"go on with: stratafl resume {shlex.quote(str(path))}",
    rejected={
        "job": "is the root of a deployed run: `stratafl deploy up`, or its start.sh, goes on with it",
        "objects": "its model and data are objects of a Python program: run that again, with the same `save`",
    },
)
PROGRAM = Driver(
    option="save",
    by_force="simulation.save(..., force=True) in place of save= goes on all the same",
    resumption=lambda path: f"the same program goes on from there: the run is kept in {path}",
    rejected={"job": "is the folder of a deployed run's root"},
)
DONE = "this run is done; with --rounds N it goes on, if its state was kept (storage.keep_state)"
_open_here: weakref.WeakValueDictionary[Path, RunSession] = weakref.WeakValueDictionary()
"""The programs' runs of this process that have not ended, by their folder: a program, such as a
notebook, may set the same run up once more."""


@dataclass(frozen=True)
class FinishedRun:
    """Path and summary of a finished run."""

    path: Path
    summary: dict[str, Any]


class RunSession:
    """Run that is recorded in its folder, which is locked until the session is closed."""

    def __init__(
        self,
        simulation: Simulation,
        path: Path,
        name: str,
        writer: RunWriter | None,
        config: Mapping[str, Any],
        driver: Driver = COMMAND,
    ):
        """writer: None on ranks other than the first. config: the experiment as plain tables."""
        self.simulation, self.path, self.name, self.writer, self.config = simulation, path, name, writer, config
        self.ranks, self.driver = simulation.ranks, driver
        self.say: MessageCallback = ignore
        """Called with messages for the user."""
        self.watch: RoundCallback = lambda record: None
        """Called with the record of every round."""
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(RUN_KEY, str(path))
        if self.ranks.watchdog is not None:
            self.ranks.watchdog.on_peer_lost = self._peer_lost
        self._closing = ExitStack()
        if writer is not None:
            self._closing.callback(writer.close)
        # also where a program forgets the run before it is done
        self.close = weakref.finalize(self, self._closing.close)
        """Close and unlock the folder; a second call does nothing."""
        self.summary: dict[str, Any] = {}
        """Numbers of the finished run."""
        self._stop: InterruptHandler | None = None
        self._stopped_together = False

    # -- begin or resume ---------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        experiment: Experiment,
        name: str,
        parent: Path,
        *,
        ranks: Communicator | None = None,
        id: str | None = None,
    ) -> RunSession:
        """Begin a run in a new folder, NAME-ID in `parent`. id: a new one unless given."""
        ranks = Communicator() if ranks is None else ranks
        with ranks.raise_together():
            format.check_name(name)
            if ranks.is_first:
                files.check_writable("--runs", parent)
            simulation = build(experiment, ranks)
            counts = LabelCounts.of(simulation.data)
        config = experiment.to_table()
        ranks.check_equal("config", config)
        ranks.check_equal("data", counts.fingerprint)
        id = ranks.broadcast_first(format.new_id() if id is None else id)
        path = parent / f"{name}-{id}"
        with ranks.raise_together():
            description = RunDescription.of(config, simulation, counts)
            writer = RunWriter.create(path, name, id, description) if ranks.is_first else None
        return cls(simulation, path, name, writer, config)

    @classmethod
    def resume(
        cls,
        path: Path,
        experiment: Experiment | None = None,
        *,
        ranks: Communicator | None = None,
        say: MessageCallback = ignore,
        force: bool = False,
    ) -> RunSession:
        """Resume an interrupted or failed run, or extend a finished one, from its last valid
        checkpoint.

        experiment: the current one of the run, which may extend it, or have its files at other
        paths; device, engine and precision remain as they were. force: continue also if its config,
        the user's files or its data have changed, and record that.
        """
        ranks = Communicator() if ranks is None else ranks
        with resuming(path, COMMAND, ranks, say, force) as stored:
            before = Experiment.from_table(stored.described["config"])
            experiment = before if experiment is None else experiment
            if stored.was_done and not extensions(stored.described["config"], experiment.to_table()):
                raise stored.rejection(DONE)
            experiment = experiment.replace(execution=before.execution)
            config = experiment.to_table()

            def make() -> tuple[Simulation, LabelCounts]:
                simulation = build(experiment.replace({"execution.engine": stored.described["engine"]}), ranks)
                return simulation, LabelCounts.of(simulation.data)

            restored = stored.restore(config, make)
            writer = stored.reopen(config, restored)
            return cls(restored.simulation, path, stored.described["name"], writer, config)

    @classmethod
    def save(
        cls, simulation: Simulation, path: Path, *, tensorboard: bool = False, force: bool = False
    ) -> RunSession | None:
        """Begin the run of a program in this folder, or resume the run that is there; None if that
        is done, and the simulation then has its records.

        force: resume also where arguments, files or data have changed, and record that.
        """
        ranks, name = simulation.ranks, format.slug(path.name)
        with ranks.raise_together():
            if tensorboard:
                check_trackers(["tensorboard"])
            if ranks.is_first:
                files.check_writable("save", path.absolute().parent)
        config, counts = plain_config(simulation), LabelCounts.of(simulation.data)
        ranks.check_equal("config", config)
        ranks.check_equal("data", counts.fingerprint)
        before = _open_here.get(path.resolve())
        if before is not None:
            before.close()

        def say(text: str) -> None:
            if ranks.is_first:
                print(escape_control(f"{name}: {text}"), file=sys.stderr, flush=True)

        if ranks.broadcast_first(os.path.lexists(path / format.RUN)):
            if simulation.history or simulation.meetings:
                raise InvalidInput("save", path, "is a run's folder already: a run that has begun needs another one")
            with resuming(path, PROGRAM, ranks, say, force) as stored:
                _use_engine(stored.described["engine"], simulation)
                restored = stored.restore_saved(config, simulation, counts)
                if restored is None:
                    say(f"done already: {len(simulation.history)} rounds in result().history")
                    if stored.locked is not None:
                        stored.locked.lock.release()
                    return None
                writer = stored.reopen(config, restored)
        else:
            writer = None
            with ranks.raise_together():
                if ranks.is_first:
                    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                        raise InvalidInput("save", path, "there is something else: a run needs a folder of its own")
                    description = RunDescription.of(config, simulation, counts, objects_of(simulation.experiment))
                    writer = RunWriter.create(path, name, format.new_id(), description, simulation.history)
        session = cls(simulation, path, name, writer, config, PROGRAM)
        session.say = say
        tracked = ["tensorboard"] if tensorboard and writer is not None else []
        trackers = trackers_for(tracked, path, name, "", len(simulation.history))
        session.watch = session._closing.enter_context(tracking(trackers, config))
        if simulation.done:
            # all rounds were done when it was stopped, and only the end was not written
            session.finish()
            return None
        _open_here[path.resolve()] = session
        return session

    # -- train -------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Progress of the run."""
        return Progress(len(self.simulation.history), self.simulation.meetings)

    def run(self, watch: RoundCallback | None = None, say: MessageCallback | None = None) -> FinishedRun:
        """Train the remaining rounds.

        watch: called with the record of every round. say: called with messages for the user.
        """
        self.watch, self.say = watch or self.watch, say or self.say
        with self.listening():
            while not self.simulation.done:
                self.next_round()
            if self.close.alive:
                # all rounds were done when it was stopped, and only the end was not written
                self.finish()
        return FinishedRun(self.path, self.summary)

    def next_round(self) -> RoundResult:
        """Train and record the next round; after the last one, finish the run."""
        with self.listening():
            assert self._stop is not None
            record = self.train_round(self._stop)
            if self.simulation.done:
                self.finish()
            return record

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this is open, a signal stops the run after the clients' next synchronisation."""
        is_over = self.simulation.done and not self.close.alive
        if self._stop is not None or is_over:
            yield
            return
        if not self.close.alive:
            raise InvalidInput(self.driver.option, self.path, "this run was ended: set it up again, and it goes on")
        try:
            with self.record_outcome(), InterruptHandler(self.say) as self._stop:
                yield
        except BaseException as problem:
            self.close()
            if self.driver is COMMAND or not isinstance(problem, Interrupted):
                raise
            self.say(problem.message)
            # a notebook goes on, and has words of its own for a program that ends
            raise (KeyboardInterrupt(problem.message) if in_notebook() else InterruptExit(problem)) from None
        finally:
            self._stop = None

    def train_round(self, stop: InterruptHandler) -> RoundResult:
        """Train and record the next global round, or the rest of it."""
        simulation, every = self.simulation, self.storage.checkpoint_every
        while True:
            record = simulation.advance()
            if record is not None:
                if self.writer is not None:
                    self.writer.append_round(record)
                self.watch(record)
                simulation.check()  # raises if all updates were rejected for several rounds
                if simulation.done:
                    return record
            signal_number = max(self.ranks.all_gather(stop.signal))
            if signal_number or (record is not None and every and record.round % every == 0):
                self._write_checkpoint()
            if signal_number:
                self._stopped_together = True
                raise Interrupted(signal_number)
            if record is not None:
                return record

    def finish(self) -> None:
        """Finish the run and close the session: write the root's model and the summary, and remove
        the checkpoints, or all but that of the last round."""
        self._report_rejected_rounds()
        progress, keeps_state = self.progress, self.storage.keep_state is not False
        if keeps_state:
            self._write_checkpoint()
        result = self.simulation.result()
        self.summary = summary_of(result)
        if self.writer is not None:
            self.writer.finish(result.module.state_dict(), self.summary)
            self.writer.keep_only(*([progress] if keeps_state else []))
        self.close()

    @contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Record the outcome if an exception ends the block."""
        try:
            yield
        except SystemExit as system_exit:
            error = InvalidInput("run", self.name, f"something in the model or rule ended the process: {system_exit}")
            self.set_status(format.FAILED, str(error))
            raise error from system_exit
        except Interrupted as interruption:
            self.set_status(format.INTERRUPTED, "it was stopped")
            problem = Interrupted(interruption.number, f"interrupted; {self.driver.resumption(self.path)}")
            self.ranks.common_error = problem if self._stopped_together else None
            raise problem from None
        except BaseException as problem:
            self.set_status(format.FAILED, errors.error_message(problem))
            self.ranks.record_failure(errors.error_message(problem))
            raise

    def set_status(self, status: str, reason: str) -> None:
        """Record how the run ended before its last round."""
        # the first problem is what the user needs to know, not that it cannot be recorded
        with suppress(InvalidInput):
            if self.writer is not None:
                self.writer.set_status(status, self.progress, reason)

    @property
    def storage(self) -> Storage:
        """What is kept of the run besides its records."""
        return self.simulation.experiment.storage

    def _write_checkpoint(self) -> None:
        state = self.simulation.state(history=False)  # on all ranks
        if self.writer is not None:
            self.writer.checkpoint(self.progress, state)

    def _report_rejected_rounds(self) -> None:
        """Report last rounds whose updates were all rejected; raise if all rounds were such."""
        history = self.simulation.history
        lost = len(list(takewhile(lambda record: record.lost, reversed(history))))
        if lost == len(history):
            raise InvalidInput(
                "rounds", lost, "in all of them every update was refused, and the model is the first one"
            )
        if lost:
            text = f"every update of the last {lost} rounds was refused: the model is that of round"
            self.say(f"{text} {len(history) - lost}")

    def _peer_lost(self) -> str:
        """Record that another rank was lost; returns how to resume."""
        self.set_status(format.FAILED, self.ranks.failure_reason() or PEER_LOST_MESSAGE)
        return f"; {self.driver.resumption(self.path)}"


def extended(path: Path, changes: Sequence[str]) -> Experiment:
    """Experiment of a stored run with "section.key=value" changes of its length or storage."""
    allowed = [*EXTENT, *(f"storage.{key}" for key in options(Storage))]
    for change in changes:
        if (key := change.partition("=")[0].strip()) not in allowed:
            raise InvalidInput("--set", key, f"a run goes on as it began, but for {join_names(allowed)}")
    described = format.with_moved_paths(format.read_description(path), path)
    return Experiment.from_table(toml.with_changes(described["config"], changes))


def _use_engine(name: EngineName, simulation: Simulation) -> None:
    """Go on with what trained the run before, where the program names no engine: another
    measurement, or another version, may choose another one."""
    execution = simulation.experiment.execution
    if execution.engine in (None, "auto") and simulation.engine.name != name in get_args(EngineName):
        simulation.engine = make_engine(name, simulation.engine.training, precision=execution.precision)
