"""A run that goes on in its directory: with what it began with, from its last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stratafl.base import files
from stratafl.base.environment import environment
from stratafl.base.errors import InvalidInput
from stratafl.base.state import State
from stratafl.config.data import LabelCounts
from stratafl.ranks.collectives import Ranks
from stratafl.runs import layout
from stratafl.runs.checkpoint import Checkpoints, Place
from stratafl.runs.folder import RunFacts, RunFolder
from stratafl.runs.lock import Lock
from stratafl.runs.origins import Origins, changes, changes_since, in_short
from stratafl.runs.recorder import NullRunFolder, Say, silent
from stratafl.simulation.run import Simulation

Table = Mapping[str, Any]
SAME = ("stratafl", "commit", "torch", "numpy", "processor", "gpu")
"""What must be as it was for a run to go on to the same bits, besides what its directory holds."""
OTHER_DATA = "the data, or how it is split,"


class Restored(NamedTuple):
    """A run where it stood."""

    simulation: Simulation
    counts: LabelCounts
    checkpoints: Checkpoints | None
    """The checkpoints of the run, which the first rank has."""
    has_other_data: bool

    @property
    def place(self) -> Place:
        return Place(len(self.simulation.history), self.simulation.meetings)


@dataclass(frozen=True, eq=False)
class Reopening:
    """A run's directory, about to go on. Of several ranks the first one has its lock."""

    path: Path
    described: dict[str, Any]
    """What run.json says."""
    lock: Lock | None
    ranks: Ranks
    say: Say
    force: bool
    """Whether to go on also where something is no longer what it was, and note that."""
    option: str = "--resume"
    """What the user gave the path as."""
    normal: Callable[[Table], Table] = dict
    """A config as this version would write it, with defaults that are new."""

    def refuse(self, told: str) -> InvalidInput:
        return InvalidInput(self.option, self.path, told)

    def restored(self, config: Table, make: Callable[[], tuple[Simulation, LabelCounts]]) -> Restored:
        """The run as it stood. make: sets it up anew."""
        checkpoints = Checkpoints(self.path, self.described["id"]) if self.lock is not None else None
        with self.ranks.together():
            if checkpoints is not None:
                self._check_unchanged(config, checkpoints)
        self._as_before()
        with self.ranks.together():
            simulation, counts = make()
            for note in self.described.get("notes", ()):
                if note not in simulation.notes:  # which says them itself
                    self.say(str(note))
            has_other_data = self._check_alike(simulation, counts)
        for place in self.ranks.first(None if checkpoints is None else list(checkpoints.newest_first())):
            if self._restored(simulation, checkpoints, Place(*place)):
                break
        return Restored(simulation, counts, checkpoints, has_other_data)

    def reopened(self, config: Table, restored: Restored) -> RunFolder | NullRunFolder:
        """The folder, set back to where the run stands."""
        simulation, counts, checkpoints, has_other_data = restored
        place = restored.place
        begun = place > Place(0)
        self.say(f"goes on after {place}" if begun else "begins again: there is no checkpoint to go on from")
        folder: RunFolder | NullRunFolder = NullRunFolder()
        with self.ranks.together():
            if checkpoints is not None and self.lock is not None:
                checkpoints.believe(place)
                changed = self._changes(config, checkpoints, [place] if begun else [])
                changed += [f"{OTHER_DATA} was changed"] if has_other_data else []
                origins = Origins.of(config, self.described.get("inputs", {}).get("files"))
                facts = RunFacts.of(config, simulation, counts)
                folder = RunFolder.reopen(
                    self.path,
                    self.lock,
                    checkpoints,
                    facts,
                    origins,
                    self.described,
                    simulation.history,
                    place,
                    changed,
                )
        return folder

    def _check_unchanged(self, config: Table, checkpoints: Checkpoints) -> None:
        changed = self._changes(config, checkpoints, list(checkpoints.newest_first()), self.say)
        if changed and not self.force:
            how = "--force goes on all the same" if self.option == "--resume" else "force=True goes on all the same"
            raise self.refuse(f"is no longer what this run began with: {in_short(changed)}; {how}")
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
            told = f"its clients were trained by {self.described['engine']}; here: {simulation.engine.how}"
            raise self.refuse(told)
        return has_other_data

    def _restored(self, simulation: Simulation, checkpoints: Checkpoints | None, place: Place) -> bool:
        """Whether the run could be put where this checkpoint has it; all ranks must ask."""
        state: State = {}
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
        self, config: Table, checkpoints: Checkpoints, places: Sequence[Place], say: Say = silent
    ) -> list[str]:
        """What is no longer as it was when the first good one of these checkpoints was written, or
        else at the start."""
        for place in places:
            try:
                before = checkpoints.origins(place)
                then = before._replace(config=dict(self.normal(before.config)))
            except InvalidInput:
                continue  # whoever wants to go on from it will be told
            return changes(then, Origins.of(config, before.files))
        if "inputs" not in self.described:
            say("it is not noted what config and files this run began with: whether they changed cannot be told")
            return []
        # as it was written: what keys a config has besides is a matter of the version
        written = self.described["config"]
        now = written if self.normal(written) == config else config
        return changes_since(self.described["inputs"], Origins.of(now, self.described["inputs"]["files"]))


@contextmanager
def opened(path: Path, ranks: Ranks, check: Callable[[dict[str, Any]], None]) -> Iterator[tuple[dict[str, Any], Any]]:
    """A run's description, and on the first rank its lock, which is let go where the block fails.

    check: raises where this is no run to go on with.
    """
    lock: Lock | None = None
    try:
        described: dict[str, Any] = {}
        with ranks.together():
            if ranks.is_first:
                # first, since it says best what is wrong with a wrong path
                check(layout.read_description(path))
                layout.check_plain(path)
                lock = Lock(path)
                described = layout.read_description(path)
        yield ranks.first(described), lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def is_done(path: Path) -> bool:
    """Whether nothing is left to do of a run."""
    try:
        found = files.read_json(path / layout.STATUS)
    except InvalidInput:
        # lost with the power, perhaps; a run that was done only does its last rounds again
        return False
    return isinstance(found, dict) and found.get("status") == layout.DONE
