"""A run that goes on in its directory: with what it began with, from its last good checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stratafl.base import files
from stratafl.base.environment import environment
from stratafl.base.errors import InvalidInput
from stratafl.base.state_dict import StateDict
from stratafl.config.data import LabelCounts
from stratafl.distributed.communicator import Communicator
from stratafl.runs import format
from stratafl.runs.checkpoint import Checkpoints, Progress
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import Provenance, changes, config_digest, extensions, shorten
from stratafl.runs.recorder import MessageCallback, NullRunFolder, ignore
from stratafl.runs.writer import RunDescription, RunWriter
from stratafl.simulation.simulation import Simulation

Table = Mapping[str, Any]
SAME = ("stratafl", "commit", "torch", "numpy", "processor", "gpu")
"""What must be as it was for a run to go on to the same bits, besides what its directory holds."""
OTHER_DATA = "the data, or how it is split,"


class Ways(NamedTuple):
    """How a user goes on with a run, in words."""

    option: str
    """What the path is given as."""
    by_force: str
    """With something that was changed."""
    without_state: str
    """With one that is done and has nothing to go on from."""


class RestoredRun(NamedTuple):
    """A run where it stood."""

    simulation: Simulation
    counts: LabelCounts
    checkpoints: Checkpoints | None
    """The checkpoints of the run, which the first rank has."""
    has_other_data: bool
    extended: list[str]
    """What is different of how far it goes."""
    was_done: bool

    @property
    def place(self) -> Progress:
        return Progress(len(self.simulation.history), self.simulation.meetings)


@dataclass(frozen=True, eq=False)
class ResumeSession:
    """A run's directory, about to go on. Of several ranks the first one has its lock."""

    path: Path
    described: dict[str, Any]
    """What run.json says."""
    lock: RunLock | None
    ranks: Communicator
    say: MessageCallback
    force: bool
    """Whether to go on also where something is no longer what it was, and note that."""
    ways: Ways

    def refuse(self, told: str) -> InvalidInput:
        return InvalidInput(self.ways.option, self.path, told)

    def restored(self, config: Table, make: Callable[[], tuple[Simulation, LabelCounts]]) -> RestoredRun:
        """The run as it stood. make: sets it up anew."""
        checkpoints = Checkpoints(self.path, self.described["id"]) if self.lock is not None else None
        was_done, extended = bool(self.ranks.first(checkpoints is not None and is_done(self.path))), list[str]()
        with self.ranks.together():
            if checkpoints is not None:
                self._check_unchanged(config, checkpoints)
                extended = extensions(self._before(checkpoints, checkpoints.newest_first()).config, config)
                if was_done and not checkpoints.kept:
                    raise self._without_state()
        self._as_before()
        with self.ranks.together():
            simulation, counts = make()
            for note in self.described.get("notes", ()):
                if note not in simulation.notes:  # which says them itself
                    self.say(str(note))
            has_other_data = self._check_alike(simulation, counts)
        for place in self.ranks.first(None if checkpoints is None else list(checkpoints.newest_first())):
            if self._restored(simulation, checkpoints, Progress(*place)):
                break
        with self.ranks.together():
            if was_done and not simulation.history:
                raise self._without_state()
            if extended and not self.force:
                self._check_past(simulation)
        return RestoredRun(simulation, counts, checkpoints, has_other_data, extended, was_done)

    def reopened(self, config: Table, restored: RestoredRun) -> RunWriter | NullRunFolder:
        """The folder, set back to where the run stands."""
        simulation, counts, checkpoints, has_other_data, extended, _ = restored
        place = restored.place
        begun = place > Progress(0)
        self.say(f"goes on after {place}" if begun else "begins again: there is no checkpoint to go on from")
        folder: RunWriter | NullRunFolder = NullRunFolder()
        with self.ranks.together():
            if checkpoints is not None and self.lock is not None:
                checkpoints.believe(place)
                changed = self._changes(config, checkpoints, [place] if begun else [])
                changed += [f"{OTHER_DATA} was changed"] if has_other_data else []
                origins = Provenance.of(config, self._at_the_start)
                facts = RunDescription.of(config, simulation, counts)
                folder = RunWriter.reopen(
                    self.path,
                    self.lock,
                    checkpoints,
                    facts,
                    origins,
                    self.described,
                    simulation.history,
                    place,
                    changed,
                    extended,
                )
        return folder

    def _check_unchanged(self, config: Table, checkpoints: Checkpoints) -> None:
        changed = self._changes(config, checkpoints, checkpoints.newest_first(), self.say)
        if changed and not self.force:
            raise self.refuse(f"is no longer what this run began with: {shorten(changed)}; {self.ways.by_force}")
        for each in changed:
            self.say(f"goes on all the same: {each}")

    def _as_before(self) -> None:
        """Say what is different on this machine, and use as many threads."""
        now, then = environment(), self.described["environment"]
        for name in SAME:
            if then.get(name) != now[name]:
                self.say(f"began with {name} {then.get(name)}, goes on with {now[name]}: the last bits may differ")
        threads = then.get("threads")
        if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 4096:
            torch.set_num_threads(threads)  # sums are split over them

    def _check_alike(self, simulation: Simulation, counts: LabelCounts) -> bool:
        """Refuse other data or another engine; whether the data is another, where that may be."""
        has_other_data = bool(counts.fingerprint != self.described["data"])
        if has_other_data and not self.force:
            raise self.refuse(f"{OTHER_DATA} is no longer what this run began with")
        if simulation.engine.name != self.described["engine"]:
            told = f"its clients were trained by {self.described['engine']}; here: {simulation.engine.description}"
            raise self.refuse(told)
        # not noted by the first versions
        precision = self.described.get("precision", simulation.engine.precision)
        if simulation.engine.precision != precision and not self.force:
            raise self.refuse(f"its products were computed in {precision}; here: {simulation.engine.precision}")
        return has_other_data

    def _without_state(self) -> InvalidInput:
        return self.refuse(f"this run is done, and was not to keep its state: {self.ways.without_state}")

    def _check_past(self, simulation: Simulation) -> None:
        """Refuse to go on further than was asked for at first where the rounds that are done would
        have been others."""
        history, goals = simulation.history, simulation.objective.goals
        if len(history) > simulation.rounds:
            raise self.refuse(f"has {len(history)} rounds already, more than rounds = {simulation.rounds}")
        for record in history[:-1]:
            if record.reaches(goals):
                raise self.refuse(f"reached what it is to stop at in round {record.round} of {len(history)} already")
        for record in history:
            rate = float(simulation.leaf.lr(record.round - 1))
            if record.lr and rate != record.lr:
                told = f"the learning rate of round {record.round} was {record.lr:g} and would have been {rate:g}"
                raise self.refuse(f"{told} in a run of {simulation.rounds} rounds: begin another run")

    def _restored(self, simulation: Simulation, checkpoints: Checkpoints | None, place: Progress) -> bool:
        """Whether the run could be put where this checkpoint has it; all ranks must ask."""
        state: StateDict = {}
        try:
            with self.ranks.together():
                if checkpoints is not None:
                    state = checkpoints.read(place)
            simulation.restore(state)
        except InvalidInput as problem:
            if problem.field == "state.engine":
                engine = self.described["engine"]
                told = f"its checkpoint is of engine {problem.value!r}, and its run.json of {engine!r}"
                raise self.refuse(told) from None
            self.say(f"the checkpoint of {place} is not used: {problem}")
            return False
        return True

    def _changes(
        self, config: Table, checkpoints: Checkpoints, places: Iterable[Progress], say: MessageCallback = ignore
    ) -> list[str]:
        """What is no longer as it was when the first good one of these checkpoints was written, or
        else at the start."""
        before = self._before(checkpoints, places)
        if before is not self._at_the_start:
            return changes(before, config)
        if "inputs" not in self.described:
            say("it is not noted what config and files this run began with: whether they changed cannot be told")
            return []
        return [*self._edited(), *changes(before, config)]

    @functools.cached_property
    def _at_the_start(self) -> Provenance:
        return Provenance(self.described["config"], self.described.get("inputs", {}).get("files", {}))

    def _before(self, checkpoints: Checkpoints, places: Iterable[Progress]) -> Provenance:
        """The origins in the first good one of these checkpoints, or else those at the start."""
        for place in places:
            try:
                return checkpoints.origins(place)
            except InvalidInput:
                continue  # whoever wants to go on from it will be told
        return self._at_the_start

    def _edited(self) -> list[str]:
        """Whether the config that the run's folder has is the one that was written there."""
        written = format.read_description(self.path)
        is_same = written["inputs"]["config"] == config_digest(written["config"])
        return [] if is_same else ["the config was changed"]


@contextmanager
def lock_for_resume(
    path: Path, ranks: Communicator, check: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """A run's description, and on the first rank its lock, which is let go where the block fails.

    check: raises where this is no run to go on with.
    """
    lock: RunLock | None = None
    try:
        described: dict[str, Any] = {}
        with ranks.together():
            if ranks.is_first:
                # first, since it says best what is wrong with a wrong path
                check(format.read_description(path))
                format.check_plain(path)
                lock = RunLock(path)
                described = format.moved_along(format.read_description(path), path)
        yield ranks.first(described), lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def is_done(path: Path) -> bool:
    """Whether nothing is left to do of a run."""
    try:
        found = files.read_json(path / format.STATUS)
    except InvalidInput:
        # lost with the power, perhaps; a run that was done only does its last rounds again
        return False
    return isinstance(found, dict) and found.get("status") == format.DONE
