"""Resumption of a run in its folder: with the same inputs, from its last valid checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratafl.base import files
from stratafl.base.environment import environment
from stratafl.base.errors import InvalidInput
from stratafl.base.state_dict import StateDict
from stratafl.distributed.communicator import Communicator
from stratafl.experiment.loading import LabelCounts
from stratafl.metrics.communication import Total
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.checkpoint import Checkpoints, Progress, read_tensors
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import Provenance, changes, config_digest, extensions, shorten
from stratafl.runs.reader import read_rounds
from stratafl.runs.recorder import MessageCallback, NullRunFolder, ignore
from stratafl.runs.writer import Continuation, RunDescription, RunWriter
from stratafl.simulation.simulation import Simulation

Table = Mapping[str, Any]
REPRODUCIBILITY_KEYS = ("stratafl", "commit", "torch", "numpy", "processor", "gpu")
"""Entries of the environment that must be equal to continue to the same bits."""
OTHER_DATA = "the data, or how it is split,"


class ResumeHints(NamedTuple):
    """Texts that tell a user how to continue a run."""

    option: str
    """Option for the path of the run."""
    by_force: str
    """Instruction for changed inputs."""
    without_state: str
    """Instruction for a finished run without a checkpoint."""


class RestoredRun(NamedTuple):
    """Run after it was restored, with what has changed since."""

    simulation: Simulation
    counts: LabelCounts
    checkpoints: Checkpoints | None
    """Checkpoints of the run; None on ranks other than the first."""
    has_other_data: bool
    extended: list[str]
    """Differences in the length of the run."""
    was_done: bool

    @property
    def progress(self) -> Progress:
        """Completed global rounds, and the clients' synchronisations in the next one."""
        return Progress(len(self.simulation.history), self.simulation.meetings)


class FinishedContents(NamedTuple):
    """What the folder of every finished run has, also without a checkpoint."""

    history: list[RoundResult]
    model: dict[str, Tensor]
    """State dict of the root's model."""
    totals: dict[int, Total]
    """Messages between each level and its parents."""
    bytes_per_client: float


@dataclass(frozen=True, eq=False)
class ResumeSession:
    """Run folder that is being resumed. The first rank has its lock."""

    path: Path
    described: dict[str, Any]
    """Contents of run.json."""
    lock: RunLock | None
    ranks: Communicator
    say: MessageCallback
    force: bool
    """Whether to continue with changed inputs, and record them."""
    hints: ResumeHints

    def rejection(self, reason: str) -> InvalidInput:
        return InvalidInput(self.hints.option, self.path, reason)

    def restore(self, config: Table, make: Callable[[], tuple[Simulation, LabelCounts]]) -> RestoredRun:
        """Restore the run from its newest valid checkpoint. make: sets it up."""
        checkpoints = Checkpoints(self.path, self.described["id"]) if self.lock is not None else None
        was_done = bool(self.ranks.broadcast_first(checkpoints is not None and is_done(self.path)))
        extended: list[str] = []
        with self.ranks.raise_together():
            if checkpoints is not None:
                self._check_unchanged(config, checkpoints)
                extended = extensions(self._recorded_provenance(checkpoints, checkpoints.newest_first()).config, config)
                if was_done and not checkpoints.available:
                    raise self._without_state()
        self._restore_environment()
        with self.ranks.raise_together():
            simulation, counts = make()
            for note in self.described.get("notes", ()):
                if note not in simulation.notes:  # a note of the simulation was said before
                    self.say(str(note))
            has_other_data = self._check_data_and_engine(simulation, counts)
        for progress in self.ranks.broadcast_first(None if checkpoints is None else list(checkpoints.newest_first())):
            if self._try_restore(simulation, checkpoints, Progress(*progress)):
                break
        with self.ranks.raise_together():
            if was_done and not simulation.history:
                raise self._without_state()
            if extended and not self.force:
                self._check_extension(simulation)
        return RestoredRun(simulation, counts, checkpoints, has_other_data, extended, was_done)

    def restore_finished(self, config: Table, simulation: Simulation, counts: LabelCounts) -> bool:
        """Restore what every finished run keeps, its records and the root's model; return False for
        a run that has a state to restore.

        Raises if the simulation is not done with these records.
        """
        stored = None
        with self.ranks.raise_together():
            if self.lock is not None and is_done(self.path):
                checkpoints = Checkpoints(self.path, self.described["id"])
                if not checkpoints.available:
                    self._check_unchanged(config, checkpoints)
                    stored = self._read_finished()
        stored = self.ranks.broadcast_first(stored)
        if stored is None:
            return False
        with self.ranks.raise_together():
            self._check_data_and_engine(simulation, counts)
            simulation.restore_finished(*stored)
            if len(simulation.history) > simulation.rounds and not self.force:
                self._check_extension(simulation)
            if not simulation.done:
                raise self._without_state()
        return True

    def _read_finished(self) -> FinishedContents:
        """Contents of the folder of a finished run."""
        path = self.path / format.SUMMARY
        summary = files.read_json(path)
        format.check_fields(path, summary, {"bytes_per_client": (int, float), "communication": list})
        names = [f.name for f in fields(Total)]
        for total in summary["communication"]:
            format.check_fields(path, total, dict.fromkeys(("level", *names), int))
        return FinishedContents(
            [RoundResult.of(record) for record in read_rounds(self.path)],
            read_tensors(self.path / format.MODEL),
            {total["level"]: Total(*(total[name] for name in names)) for total in summary["communication"]},
            summary["bytes_per_client"],
        )

    def reopen(self, config: Table, restored: RestoredRun) -> RunWriter | NullRunFolder:
        """Open the folder, reset to the progress of the run."""
        simulation, counts, checkpoints, has_other_data, extended, _ = restored
        progress = restored.progress
        has_begun = progress > Progress(0)
        self.say(f"goes on after {progress}" if has_begun else "begins again: there is no checkpoint to go on from")
        folder: RunWriter | NullRunFolder = NullRunFolder()
        with self.ranks.raise_together():
            if checkpoints is not None and self.lock is not None:
                checkpoints.discard_newer_than(progress)
                changed = self._changes(config, checkpoints, [progress] if has_begun else [])
                changed += [f"{OTHER_DATA} was changed"] if has_other_data else []
                provenance = Provenance.of(config, self._initial_provenance)
                description = RunDescription.of(config, simulation, counts)
                folder = RunWriter.reset_to(
                    self.path,
                    self.lock,
                    checkpoints,
                    description,
                    provenance,
                    self.described,
                    simulation.history,
                    Continuation(progress, changed, extended),
                )
        return folder

    def _check_unchanged(self, config: Table, checkpoints: Checkpoints) -> None:
        changed = self._changes(config, checkpoints, checkpoints.newest_first(), self.say)
        if changed and not self.force:
            raise self.rejection(f"is no longer what this run began with: {shorten(changed)}; {self.hints.by_force}")
        for change in changed:
            self.say(f"goes on all the same: {change}")

    def _restore_environment(self) -> None:
        """Report differences of the environment, and use the recorded number of threads."""
        current, recorded = environment(), self.described["environment"]
        for name in REPRODUCIBILITY_KEYS:
            if recorded.get(name) != current[name]:
                self.say(
                    f"began with {name} {recorded.get(name)}, goes on with {current[name]}: the last bits may differ"
                )
        threads = recorded.get("threads")
        if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 4096:
            torch.set_num_threads(threads)  # sums are split over them

    def _check_data_and_engine(self, simulation: Simulation, counts: LabelCounts) -> bool:
        """Reject other data, another engine or another precision; returns whether the data have
        changed if that is allowed."""
        has_other_data = bool(counts.fingerprint != self.described["data"])
        if has_other_data and not self.force:
            raise self.rejection(f"{OTHER_DATA} is no longer what this run began with")
        if simulation.engine.name != self.described["engine"]:
            reason = f"its clients were trained by {self.described['engine']}; here: {simulation.engine.how}"
            raise self.rejection(reason)
        # missing in early versions
        precision = self.described.get("precision", simulation.engine.precision)
        if simulation.engine.precision != precision and not self.force:
            raise self.rejection(f"its products were computed in {precision}; here: {simulation.engine.precision}")
        return has_other_data

    def _without_state(self) -> InvalidInput:
        return self.rejection(f"this run is done, and was not to keep its state: {self.hints.without_state}")

    def _check_extension(self, simulation: Simulation) -> None:
        """Reject an extension with which completed rounds would have been different."""
        history, goals = simulation.history, simulation.objective.goals
        if len(history) > simulation.rounds:
            raise self.rejection(f"has {len(history)} rounds already, more than rounds = {simulation.rounds}")
        for record in history[:-1]:
            if record.reaches(goals):
                raise self.rejection(f"reached what it is to stop at in round {record.round} of {len(history)} already")
        for record in history:
            rate = float(simulation.client_update.lr(record.round - 1))
            if record.lr and rate != record.lr:
                reason = f"the learning rate of round {record.round} was {record.lr:g} and would have been {rate:g}"
                raise self.rejection(f"{reason} in a run of {simulation.rounds} rounds: begin another run")

    def _try_restore(self, simulation: Simulation, checkpoints: Checkpoints | None, progress: Progress) -> bool:
        """Try to restore a checkpoint; all ranks must call this."""
        state: StateDict = {}
        try:
            with self.ranks.raise_together():
                if checkpoints is not None:
                    state = checkpoints.read(progress)
            simulation.restore(state)
        except InvalidInput as problem:
            if problem.field == "state.engine":
                engine = self.described["engine"]
                reason = f"its checkpoint is of engine {problem.value!r}, and its run.json of {engine!r}"
                raise self.rejection(reason) from None
            self.say(f"the checkpoint of {progress} is not used: {problem}")
            return False
        return True

    def _changes(
        self, config: Table, checkpoints: Checkpoints, candidates: Iterable[Progress], say: MessageCallback = ignore
    ) -> list[str]:
        """Differences from the first valid one of these checkpoints, or else from the beginning of
        the run."""
        before = self._recorded_provenance(checkpoints, candidates)
        if before is not self._initial_provenance:
            return changes(before, config)
        if "inputs" not in self.described:
            say("it is not noted what config and files this run began with: whether they changed cannot be told")
            return []
        stored = format.read_description(self.path)
        was_edited = stored["inputs"]["config"] != config_digest(stored["config"])
        return [*(["the config was changed"] if was_edited else []), *changes(before, config)]

    @functools.cached_property
    def _initial_provenance(self) -> Provenance:
        return Provenance(self.described["config"], self.described.get("inputs", {}).get("files", {}))

    def _recorded_provenance(self, checkpoints: Checkpoints, candidates: Iterable[Progress]) -> Provenance:
        """Provenance of the first valid one of these checkpoints, or else of the beginning of the
        run."""
        for candidate in candidates:
            try:
                return checkpoints.provenance(candidate)
            except InvalidInput:
                continue  # reported when it is restored
        return self._initial_provenance


@contextmanager
def lock_for_resume(
    path: Path, ranks: Communicator, check: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield a run's description, and on the first rank its lock, which is released if the block
    fails.

    check: raises if the run cannot be resumed.
    """
    lock: RunLock | None = None
    try:
        described: dict[str, Any] = {}
        with ranks.raise_together():
            if ranks.is_first:
                # first, since its message is the clearest for a wrong path
                check(format.read_description(path))
                format.check_plain(path)
                lock = RunLock(path)
                described = format.with_moved_paths(format.read_description(path), path)
        yield ranks.broadcast_first(described), lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def is_done(path: Path) -> bool:
    """Whether a run is finished."""
    try:
        status = files.read_json(path / format.STATUS)
    except InvalidInput:
        # perhaps lost in a power failure; a finished run then only repeats its last rounds
        return False
    return isinstance(status, dict) and status.get("status") == format.DONE
