"""A config's run, recorded in a run directory from its first round to its last, in one go or several.

A run can be stopped after any round and goes on from there to the same bits. Between two rounds its state lies in one
place; inside a round it is spread over engine, federation and half-made sums. So a signal only asks: the round in
progress is finished, a checkpoint written, and then the run stops. A second signal stops at once, and the run goes on
from its last checkpoint, as after a power cut.

On several ranks each has a launch. The first one's keeps the directory; what it reads there it tells the others, who
need not see it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from stratafl.checks import first_line
from stratafl.config import Config
from stratafl.errors import InvalidInput
from stratafl.experiment import study
from stratafl.ranks.group import Ranks
from stratafl.ranks.lifeline import GONE
from stratafl.ranks.start import RUN
from stratafl.simulate import Result, RoundResult, Simulation
from stratafl.state import State
from stratafl.store import files, layout
from stratafl.store.checkpoint import Checkpoints
from stratafl.store.environment import environment
from stratafl.store.folder import RunFolder
from stratafl.store.inputs import Inputs, changes, changes_since, in_short
from stratafl.store.lock import Lock
from stratafl.store.signals import Interrupted, Stop

Watch = Callable[[RoundResult], None]
Say = Callable[[str], None]
SAME = ("stratafl", "commit", "torch", "numpy", "processor", "gpu")
"""What must be as it was for a run to go on to the same bits, besides what its directory holds."""


def _silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Launched:
    """A run that is done."""

    path: Path
    summary: dict[str, Any]


class Elsewhere:
    """A run directory that the first rank keeps, as the others see it."""

    path = Path()

    def add(self, record: RoundResult) -> None: ...

    def checkpoint(self, round: int, state: State) -> None: ...

    def finish(self, result: Result) -> dict[str, Any]:
        return {}

    def keep_only(self, *rounds: int) -> None: ...

    def end(self, status: str, round: int, reason: str = "") -> None: ...

    def close(self) -> None: ...


class Launch:
    """A run about to go on: what is wrong with its config or its folder was said before this exists."""

    def __init__(self, name: str, config: Config, simulation: Simulation, folder: RunFolder | Elsewhere):
        self.name, self.config, self.simulation, self.folder = name, config, simulation, folder
        self.ranks = simulation.ranks
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(RUN, str(folder.path))
        if self.ranks.lifeline is not None:
            self.ranks.lifeline.on_loss = self._lost

    @staticmethod
    def new(config: Config, name: str, parent: Path, ranks: Ranks | None = None) -> Launch:
        """From the beginning, in a new folder."""
        ranks = Ranks() if ranks is None else ranks
        with ranks.together():
            layout.check_name(name)
            if ranks.is_first:
                check_parent(parent)
            made = study(config, ranks)
        ranks.same("config", config.as_dict())
        ranks.same("data", made.holdings.fingerprint)
        folder: RunFolder | Elsewhere = Elsewhere()
        with ranks.together():
            if ranks.is_first:
                folder = RunFolder.create(parent, name, config, made)
        return Launch(name, config, made.simulation, folder)

    @staticmethod
    def resume(path: Path, say: Say = _silent, ranks: Ranks | None = None, force: bool = False) -> Launch:
        """From the last good checkpoint of a run that was interrupted or failed.

        force: go on also where its config, the user's files or its data are no longer what they were, and note that.
        """
        ranks = Ranks() if ranks is None else ranks
        lock: Lock | None = None
        try:
            described: dict[str, Any] = {}
            with ranks.together():
                if ranks.is_first:
                    layout.read_description(path)  # first, since it says best what is wrong with a wrong path
                    layout.check_plain(path)
                    lock = Lock(path)
                    described = layout.read_description(path)
                    if _is_done(path):
                        raise InvalidInput("--resume", path, "this run is done")
            return _resumed(path, lock, ranks.first(described), say, ranks, force)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def run(self, watch: Watch = lambda record: None, say: Say = _silent) -> Launched:
        """Do the rounds that are left."""
        every = self.config.run.checkpoint_every
        simulation, folder, together = self.simulation, self.folder, False
        try:
            with Stop(say) as stop:
                for record in simulation:
                    folder.add(record)
                    watch(record)
                    simulation.check()
                    if simulation.done:
                        break
                    asked = max(self.ranks.all(stop.asked))
                    if asked or (every and record.round % every == 0):
                        folder.checkpoint(record.round, simulation.state(history=False))
                    if asked:
                        together = True
                        raise Interrupted(asked)
                self._say_what_was_lost(say)
                return Launched(folder.path, self._finish())
        except SystemExit as ending:
            told = InvalidInput("run", self.name, f"something in the model or rule ended the process: {ending}")
            self._end(layout.FAILED, str(told))
            raise told from ending
        except Interrupted as stopped:
            self._end(layout.INTERRUPTED, "it was stopped")
            problem = Interrupted(stopped.number, f"interrupted; go on with: stratafl run --resume {folder.path}")
            self.ranks.agreed_on = problem if together else None
            raise problem from None
        except BaseException as problem:
            self._end(layout.FAILED, str(problem) if isinstance(problem, InvalidInput) else _reason(problem))
            raise
        finally:
            folder.close()

    def _say_what_was_lost(self, say: Say) -> None:
        """A model that is older than the run, or no result at all, is no success."""
        history = self.simulation.history
        lost = len(list(takewhile(lambda record: record.lost, reversed(history))))
        if lost == len(history):
            raise InvalidInput(
                "rounds", lost, "in all of them every update was refused, and the model is the first one"
            )
        if lost:
            say(f"every update of the last {lost} rounds was refused: the model is that of round {len(history) - lost}")

    def _finish(self) -> dict[str, Any]:
        done = len(self.simulation.history)
        if self.config.run.keep_state:
            self.folder.checkpoint(done, self.simulation.state(history=False))
        summary = self.folder.finish(self.simulation.result())
        self.folder.keep_only(*([done] if self.config.run.keep_state else []))
        return summary

    def _lost(self) -> str:
        """Another rank is gone: say so in the directory, and how to go on."""
        self._end(layout.FAILED, GONE)
        return f"; go on with: stratafl run --resume {self.folder.path}"

    def _end(self, status: str, reason: str) -> None:
        try:
            self.folder.end(status, len(self.simulation.history), reason)
        except InvalidInput:
            # what brought us here is what the user needs to know, not that it could not be noted down either
            return


def _resumed(path: Path, lock: Lock | None, described: dict[str, Any], say: Say, ranks: Ranks, force: bool) -> Launch:
    config = Config.of(described["config"])
    checkpoints = Checkpoints(path, described["id"]) if lock is not None else None
    with ranks.together():
        if checkpoints is not None:
            changed = _changes(described, config, checkpoints, list(checkpoints.newest_first()), say)
            if changed and not force:
                told = f"is no longer what this run began with: {in_short(changed)}; --force goes on all the same"
                raise InvalidInput("--resume", path, told)
            for each in changed:
                say(f"goes on all the same: {each}")
    now, then = environment(), described["environment"]
    for name in SAME:
        if then.get(name) != now[name]:
            say(f"began with {name} {then.get(name)}, goes on with {now[name]}: the last bits may differ")
    threads = then.get("threads")
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 4096:
        torch.set_num_threads(threads)  # sums are split over them
    with ranks.together():
        engine = dataclasses.replace(config.run, engine=described["engine"])
        made = study(dataclasses.replace(config, run=engine), ranks)
        has_other_data = made.holdings.fingerprint != described["data"]
        if has_other_data and not force:
            raise InvalidInput("--resume", path, "the data, or how it is split, is no longer what this run began with")
        if made.simulation.engine.name != described["engine"]:
            told = f"its clients were trained by {described['engine']}; here: {made.simulation.engine.how}"
            raise InvalidInput("--resume", path, told)
    simulation = made.simulation
    for round in ranks.first(None if checkpoints is None else list(checkpoints.newest_first())):
        state: State = {}
        try:
            with ranks.together():
                if checkpoints is not None:
                    state = checkpoints.read(round)
            simulation.restore(state)
        except InvalidInput as problem:
            if problem.field == "state.engine":
                told = f"its checkpoint is of engine {problem.value!r}, and its run.json of {described['engine']!r}"
                raise InvalidInput("--resume", path, told) from None
            say(f"the checkpoint of round {round} is not used: {problem}")
        else:
            break
    done = len(simulation.history)
    say(f"goes on after round {done}" if done else "begins again: there is no checkpoint to go on from")
    folder: RunFolder | Elsewhere = Elsewhere()
    with ranks.together():
        if checkpoints is not None and lock is not None:
            checkpoints.believe(done)
            changed = _changes(described, config, checkpoints, [done] if done else [])
            changed += ["the data, or how it is split, was changed"] if has_other_data else []
            inputs = Inputs.of(config.as_dict(), described.get("inputs", {}).get("files"))
            folder = RunFolder.reopen(path, lock, checkpoints, made, inputs, described, changed)
    return Launch(described["name"], config, simulation, folder)


def _changes(
    described: dict[str, Any], config: Config, checkpoints: Checkpoints, rounds: list[int], say: Say = _silent
) -> list[str]:
    """What is no longer as it was when the first good one of these checkpoints was written, or else at the start."""
    for round in rounds:
        try:
            before = checkpoints.inputs(round)
            then = before._replace(config=Config.of(before.config).as_dict())
        except InvalidInput:
            continue  # whoever wants to go on from it will be told
        return changes(then, Inputs.of(config.as_dict(), before.files))
    if "inputs" not in described:
        say("it is not noted what config and files this run began with: whether they changed cannot be told")
        return []
    return changes_since(described["inputs"], Inputs.of(config.as_dict(), described["inputs"]["files"]))


def _is_done(path: Path) -> bool:
    try:
        found = files.read_json(path / layout.STATUS)
    except InvalidInput:
        # lost with the power, perhaps; a run that was done only does its last rounds again
        return False
    return isinstance(found, dict) and found.get("status") == layout.DONE


def check_parent(parent: Path, option: str = "--runs") -> None:
    """Refuse a place for runs, or for what is made of them, before the work and not after."""
    there = parent.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InvalidInput(option, parent, f"cannot write in {there}")


def _reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"
