"""A config's run, recorded in a run directory from its first round to its last, in one go or several.

A run can be stopped after any round and goes on from there to the same bits. Between two rounds its state lies in one
place; inside a round it is spread over engine, federation and half-made sums. So a signal only asks: the round in
progress is finished, a checkpoint written, and then the run stops. A second signal stops at once, and the run goes on
from its last checkpoint, as after a power cut.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stratafl.checks import first_line
from stratafl.config import Config
from stratafl.errors import InvalidInput
from stratafl.experiment import study
from stratafl.simulate import RoundResult, Simulation
from stratafl.store import files, layout
from stratafl.store.checkpoint import Checkpoints
from stratafl.store.environment import environment
from stratafl.store.folder import RunFolder
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


class Launch:
    """A run about to go on: what is wrong with its config or its folder was said before this exists."""

    def __init__(self, name: str, config: Config, simulation: Simulation, folder: RunFolder):
        self.name, self.config, self.simulation, self.folder = name, config, simulation, folder

    @staticmethod
    def new(config: Config, name: str, parent: Path) -> Launch:
        """From the beginning, in a new folder."""
        layout.check_name(name)
        check_parent(parent)
        made = study(config)
        return Launch(name, config, made.simulation, RunFolder.create(parent, name, config, made))

    @staticmethod
    def resume(path: Path, say: Say = _silent) -> Launch:
        """From the last good checkpoint of a run that was interrupted or failed."""
        layout.read_description(path)  # first, since it says best what is wrong with a wrong path
        layout.check_plain(path)
        lock = Lock(path)
        try:
            return _resumed(path, lock, say)
        except BaseException:
            lock.release()
            raise

    def run(self, watch: Watch = lambda record: None, say: Say = _silent) -> Launched:
        """Do the rounds that are left."""
        every = self.config.run.checkpoint_every
        simulation, folder = self.simulation, self.folder
        try:
            with Stop(say) as stop:
                for record in simulation:
                    folder.add(record)
                    watch(record)
                    if simulation.done:
                        break
                    if stop.asked or (every and record.round % every == 0):
                        folder.checkpoints.write(record.round, simulation.state())
                    if stop.asked:
                        raise Interrupted(stop.asked)
                return Launched(folder.path, self._finish())
        except Interrupted as stopped:
            self._end(layout.INTERRUPTED, "it was stopped")
            raise Interrupted(stopped.number, f"interrupted; go on with: stratafl run --resume {folder.path}") from None
        except BaseException as problem:
            self._end(layout.FAILED, str(problem) if isinstance(problem, InvalidInput) else _reason(problem))
            raise
        finally:
            folder.close()

    def _finish(self) -> dict[str, Any]:
        checkpoints, history = self.folder.checkpoints, self.simulation.history
        if self.config.run.keep_state and len(history) not in checkpoints.kept:
            checkpoints.write(len(history), self.simulation.state())
        summary = self.folder.finish(self.simulation.result())
        checkpoints.keep_only(*([len(history)] if self.config.run.keep_state else []))
        return summary

    def _end(self, status: str, reason: str) -> None:
        try:
            self.folder.end(status, len(self.simulation.history), reason)
        except InvalidInput:
            # what brought us here is what the user needs to know, not that it could not be noted down either
            return


def _resumed(path: Path, lock: Lock, say: Say) -> Launch:
    described = layout.read_description(path)
    if _is_done(path):
        raise InvalidInput("--resume", path, "this run is done")
    config = Config.of(described["config"])
    now, then = environment(), described["environment"]
    for name in SAME:
        if then.get(name) != now[name]:
            say(f"began with {name} {then.get(name)}, goes on with {now[name]}: the last bits may differ")
    threads = then.get("threads")
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 4096:
        torch.set_num_threads(threads)  # sums are split over them
    made = study(dataclasses.replace(config, run=dataclasses.replace(config.run, engine=described["engine"])))
    if made.holdings.fingerprint != described["data"]:
        raise InvalidInput("--resume", path, "the data, or how it is split, is no longer what this run began with")
    checkpoints = Checkpoints(path, described["id"])
    for round in checkpoints.newest_first():
        try:
            made.simulation.restore(checkpoints.read(round))
        except InvalidInput as problem:
            say(f"the checkpoint of round {round} is not used: {problem}")
        else:
            break
    done = len(made.simulation.history)
    say(f"goes on after round {done}" if done else "begins again: there is no checkpoint to go on from")
    checkpoints.believe(done)
    folder = RunFolder.reopen(path, lock, checkpoints, made.simulation.history, config.run.rounds)
    return Launch(described["name"], config, made.simulation, folder)


def _is_done(path: Path) -> bool:
    try:
        found = files.read_json(path / layout.STATUS)
    except InvalidInput:
        # lost with the power, perhaps; a run that was done only does its last rounds again
        return False
    return isinstance(found, dict) and found.get("status") == layout.DONE


def check_parent(parent: Path) -> None:
    """Refuse a place for runs before the work, not after."""
    there = parent.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InvalidInput("--runs", parent, f"cannot write in {there}")


def _reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"
