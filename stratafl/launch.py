"""A config's run, recorded in a run directory from its first round to its last."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.checks import first_line
from stratafl.config import Config
from stratafl.errors import InvalidInput
from stratafl.experiment import study
from stratafl.simulate import RoundResult, Simulation
from stratafl.store import layout
from stratafl.store.folder import RunFolder
from stratafl.store.signals import Interrupted, Stop

Watch = Callable[[RoundResult], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Launched:
    """A run that is done."""

    path: Path
    summary: dict[str, Any]


class Launch:
    """A run about to go on: what is wrong with its config or its folder was said before this exists."""

    def __init__(self, simulation: Simulation, folder: RunFolder):
        self.simulation, self.folder = simulation, folder

    @staticmethod
    def new(config: Config, name: str, parent: Path) -> Launch:
        layout.check_name(name)
        check_parent(parent)
        made = study(config)
        return Launch(made.simulation, RunFolder.create(parent, name, config, made))

    def run(self, watch: Watch = lambda record: None, say: Say = lambda text: None) -> Launched:
        """Do the rounds that are left."""
        try:
            with Stop(say) as stop:
                for record in self.simulation:
                    self.folder.add(record)
                    watch(record)
                    if stop.asked and len(self.simulation.history) < self.simulation.rounds:
                        raise Interrupted(stop.asked)
            return Launched(self.folder.path, self.folder.finish(self.simulation.result()))
        except Interrupted as stopped:
            self._end(layout.INTERRUPTED, "it was stopped")
            raise Interrupted(stopped.exit_code - 128, f"interrupted; it is in {self.folder.path}") from None
        except BaseException as problem:
            self._end(layout.FAILED, str(problem) if isinstance(problem, InvalidInput) else _reason(problem))
            raise
        finally:
            self.folder.close()

    def _end(self, status: str, reason: str) -> None:
        try:
            self.folder.end(status, len(self.simulation.history), reason)
        except InvalidInput:
            # what brought us here is what the user needs to know, not that it could not be noted down either
            return


def check_parent(parent: Path) -> None:
    """Refuse a place for runs before the work, not after."""
    there = parent.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InvalidInput("--runs", str(parent), f"cannot write in {there}")


def _reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"
